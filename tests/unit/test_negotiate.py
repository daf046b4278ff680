"""multistream-select, both sides."""

from __future__ import annotations

import pytest

from p2p.errors import BadMessage, ProtocolNotSupported, RemoteProtocolError
from p2p.identity import ProtocolId
from p2p.transport.core.negotiate import (
    HEADER,
    MAX_LINE,
    NOT_AVAILABLE,
    Chooser,
    Proposer,
    line,
)

A, B, C = (ProtocolId(f"/test/{name}") for name in "abc")


def carry(one: Proposer, other: Chooser, step: int = 1000) -> None:
    while data := one.data_to_send():
        for start in range(0, len(data), step):
            other.receive_data(data[start : start + step])
        answer = other.data_to_send()
        for start in range(0, len(answer), step):
            one.receive_data(answer[start : start + step])


def test_a_line_is_length_text_newline() -> None:
    assert line(HEADER) == b"\x13/multistream/1.0.0\n"
    assert line(NOT_AVAILABLE) == b"\x03na\n"


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_both_sides_agree_on_what_is_served(step: int) -> None:
    one, other = Proposer(A), Chooser({A, B}.__contains__)
    carry(one, other, step)
    assert one.chosen == other.chosen == A


@pytest.mark.parametrize(("served", "chosen"), [({A}, A), ({B}, B), ({A, B}, A), ({C}, C)])
def test_the_first_proposal_that_is_served_is_chosen(served, chosen) -> None:
    other = Chooser(served.__contains__)
    other.receive_data(line(HEADER) + line(A) + line(B) + line(C))
    assert other.chosen == chosen


def test_the_proposer_pipelines_header_and_proposal() -> None:
    assert Proposer(A).data_to_send() == line(HEADER) + line(A)


def test_data_behind_the_proposal_belongs_to_the_protocol() -> None:
    one, other = Proposer(A), Chooser({A}.__contains__)
    other.receive_data(one.data_to_send() + b"early data")
    assert other.chosen == A
    assert other.leftover == b"early data"
    one.receive_data(other.data_to_send() + b"early answer")
    assert one.leftover == b"early answer"


def test_nothing_in_common() -> None:
    one, other = Proposer(A), Chooser({C}.__contains__)
    with pytest.raises(ProtocolNotSupported, match="/test/a"):
        carry(one, other)
    assert other.chosen is None


def test_proposing_without_end_is_cut_off() -> None:
    other = Chooser({A}.__contains__)
    other.receive_data(line(HEADER) + line(B) * 32)
    with pytest.raises(RemoteProtocolError):
        other.receive_data(line(B))


@pytest.mark.parametrize(
    "data",
    [
        line("/multistream/2.0.0"),
        b"\x00",
        line("x" * MAX_LINE),
        b"\x02ab",
        b"\x03\xff\xfe\n",
        b"\xff" * 9,
        b"GET / HTTP/1.1\r\n\r\n" * 9,
    ],
)
def test_what_is_no_negotiation_is_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        Chooser({A}.__contains__).receive_data(data)


def test_an_answer_to_something_else_breaks_the_protocol() -> None:
    one = Proposer(A)
    with pytest.raises(RemoteProtocolError, match="/test/b"):
        one.receive_data(line(HEADER) + line(B))
