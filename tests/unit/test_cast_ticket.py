"""Tickets: what one says is read back, and a stranger's text raises one error."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.cast.ticket import (
    MAX_TICKET,
    PREFIX,
    admission_of,
    decode_ticket_untrusted,
    is_name,
    run_of,
)
from p2p.errors import BadMessage
from p2p.identity import KeyPair
from tests.support.tickets import PUSHER, ticket

PULLER = KeyPair(b"\2" * 32).peer_id


def test_a_ticket_is_read_back_also_when_a_terminal_has_wrapped_it() -> None:
    text = str(ticket())
    assert decode_ticket_untrusted(text) == ticket()
    wrapped = "\n  ".join(text[at : at + 80] for at in range(0, len(text), 80))
    assert decode_ticket_untrusted(wrapped) == ticket()
    assert len(text) < 250


@given(st.integers(0, 200), st.characters(codec="ascii", categories=["L", "N"]))
def test_one_wrong_character_is_noticed(place: int, other: str) -> None:
    text = str(ticket())
    place = len(PREFIX) + place % (len(text) - len(PREFIX))
    wrong = text[:place] + other + text[place + 1 :]
    if wrong != text:
        with pytest.raises(BadMessage):
            decode_ticket_untrusted(wrong)


@given(st.text(max_size=100))
def test_any_text_is_a_ticket_or_one_error(text: str) -> None:
    for said in (text, PREFIX + text):
        with pytest.raises(BadMessage):
            decode_ticket_untrusted(said)


@pytest.mark.parametrize("text", ["", PREFIX, PREFIX + "1", PREFIX + "z" * MAX_TICKET])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        decode_ticket_untrusted(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".ssh", "-rf", "a/b", "a\\b", "a:b", "x\n", "x" * 256, "\u202eexe"]
)
def test_a_name_that_could_be_another_place_is_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="names no file"):
        ticket(name=name)


def test_a_hostile_name_inside_a_well_made_ticket_is_refused() -> None:
    good = ticket()
    object.__setattr__(good, "name", "../../.ssh")
    with pytest.raises(BadMessage, match="names no file"):
        decode_ticket_untrusted(str(good))


def test_who_has_no_secret_can_neither_name_the_push_nor_get_in() -> None:
    assert run_of(PUSHER, b"s" * 16) != run_of(PUSHER, b"t" * 16)
    assert run_of(PUSHER, b"s" * 16) != run_of(PULLER, b"s" * 16)
    assert admission_of(b"s" * 16, PULLER) != admission_of(b"t" * 16, PULLER)
    assert admission_of(b"s" * 16, PULLER) != admission_of(b"s" * 16, PUSHER)
    assert ticket().admission(PULLER) == admission_of(b"s" * 16, PULLER)
    assert "ssss" not in repr(ticket())
