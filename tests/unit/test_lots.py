"""The beacon and the lot: nobody predicts, chooses or grinds what everybody computes alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage
from p2p.identity import PeerId, verify
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core import beacon
from roles.protocol.core.beacon import (
    LINKS,
    SILENT_PERIODS,
    Chain,
    HeardLinks,
    Pledge,
    Reveal,
    decode_reveal_untrusted,
)
from roles.protocol.core.lots import (
    DELAY,
    MAX_COMMITMENT,
    MAX_WINDOW,
    UNIT,
    Lot,
    SignedWindow,
    StandingNote,
    Window,
    WitnessedWindow,
    decode_note_untrusted,
    decode_witnessed_untrusted,
    is_early,
    is_late,
    lot_of,
    parts_of,
)
from sim.kernel.keys import KeyRing

KEYS = KeyRing(1, hashed=False)
TRAINER, WORKER, WITNESS = (KEYS.signer(name) for name in ("trainer", "worker", "witness"))
RUN = b"r" * 32
PERIOD = 4.0
CHAIN = Chain(b"secret" * 5 + b"ok")
PLEDGE = Pledge(RUN, TRAINER.peer_id, 1_000, CHAIN.end).signed(TRAINER)
VALIDATORS = [KEYS.signer(f"validator-{number}").peer_id for number in range(7)]


def reveal(number: int) -> Reveal:
    return Reveal(PLEDGE, number, CHAIN.link(number))


def heard_up_to(number: int, now: float = 0.0) -> HeardLinks:
    heard = HeardLinks(RUN, TRAINER.peer_id, PERIOD)
    assert heard.hear(reveal(number), now)
    return heard


def window(**changes: Any) -> Window:
    contents = tuple(bytes([place]) * 32 for place in range(MAX_WINDOW))
    plain = Window(
        *(RUN, WORKER.peer_id, PolicyVersion(3), b"p" * 32, 32, contents),
        *(0b1010, b"e" * 32, PLEDGE.chain, 5, 4),
    )
    return replace(plain, **changes)


# The beacon.


@given(st.lists(st.integers(1, 600), min_size=1, max_size=12), st.integers(1, 600))
@settings(max_examples=30)
def test_whoever_hears_which_links_knows_the_same(numbers: list[int], late: int) -> None:
    """Some are lost, some come twice or late, and one node joins with the last alone."""
    heard, joined = HeardLinks(RUN, TRAINER.peer_id, PERIOD), heard_up_to(max(numbers))
    for number in numbers:
        heard.hear(reveal(number), 0.0)
    assert heard.newest == joined.newest == (PLEDGE.chain, max(numbers))
    assert heard.link(PLEDGE.chain, late) == joined.link(PLEDGE.chain, late)
    is_out = late <= max(numbers)
    assert joined.link(PLEDGE.chain, late) == (CHAIN.link(late) if is_out else None)


def test_a_forged_link_is_refused_after_bounded_hashing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger's number could make every node hash for as long as it liked."""
    hashed = []
    plain = beacon.hash_back
    monkeypatch.setattr(
        beacon, "hash_back", lambda link, times=1: (hashed.append(times), plain(link, times))[1]
    )
    heard = heard_up_to(10)
    hashed.clear()
    for forged in (
        replace(reveal(11), link=b"x" * 32),
        replace(reveal(LINKS), number=LINKS - 1),
    ):
        with pytest.raises(BadMessage, match="does not hash"):
            heard.hear(forged, 0.0)
    assert sum(hashed) < 2 * LINKS
    with pytest.raises(BadMessage, match="a chain has links"):
        decode_reveal_untrusted(replace(reveal(9), number=LINKS + 1).to_bytes(), verify)
    stranger = Pledge(RUN, WORKER.peer_id, 1_000, CHAIN.end).signed(WORKER)
    with pytest.raises(BadMessage, match="another run or trainer"):
        heard.hear(Reveal(stranger, 11, CHAIN.link(11)), 0.0)
    assert heard.newest == (PLEDGE.chain, 10)


def test_two_pledges_for_one_chain_are_proof_and_end_all_lots() -> None:
    heard, other = heard_up_to(3), Chain(b"o" * 32)
    rival = Pledge(RUN, TRAINER.peer_id, PLEDGE.chain, other.end).signed(TRAINER)
    assert heard.is_live(0.0)
    assert not heard.hear(Reveal(rival, 4, other.link(4)), 0.0)
    assert heard.forked == (PLEDGE, rival)
    assert not heard.is_live(0.0)


def test_a_chain_follows_one_that_ends_and_none_goes_back() -> None:
    heard, after = heard_up_to(LINKS), Chain(b"n" * 32)
    later = Pledge(RUN, TRAINER.peer_id, PLEDGE.chain + 1, after.end).signed(TRAINER)
    assert heard.hear(Reveal(later, 1, after.link(1)), 0.0)
    assert heard.newest == (later.chain, 1)
    assert heard.link(PLEDGE.chain, LINKS) == CHAIN.link(LINKS)
    assert not heard.hear(reveal(LINKS), 0.0)


def test_silence_ends_lots_until_the_next_link() -> None:
    heard = heard_up_to(3, now=100.0)
    assert heard.is_live(100 + SILENT_PERIODS * PERIOD - 1)
    assert not heard.is_live(100 + SILENT_PERIODS * PERIOD)
    heard.hear(reveal(4), 1_000.0)
    assert heard.is_live(1_001.0)


# The lot.


def test_nobody_commits_when_the_lot_may_be_known() -> None:
    """By what a witness has heard, and by its clock: a worker may hear links before it."""
    heard = heard_up_to(5, now=100.0)
    assert lot_of(window(), heard) is None
    assert not is_late(window(link=5), heard, 100.0)
    assert not is_late(window(link=5), heard, 100 + DELAY * PERIOD - 0.1)
    assert is_late(window(link=5), heard, 100 + DELAY * PERIOD)
    assert is_late(window(link=3), heard, 100.0)
    assert is_late(window(chain=PLEDGE.chain - 1), heard, 100.0)
    assert is_late(window(link=LINKS - 1), heard_up_to(LINKS - 1), 0.0), "it would never fall"
    assert is_early(window(link=7), heard)
    assert not is_early(window(link=6), heard)


@given(st.integers(1, LINKS), st.floats(0, 1), st.floats(0, 1), st.integers(1, 7))
@settings(max_examples=60)
def test_the_lot_is_the_same_everywhere_nested_and_of_distinct_judges(
    link: int, low: float, high: float, count: int
) -> None:
    low, high = sorted((low, high))
    lots = [Lot(window(), link.to_bytes(32, "big")) for _ in range(2)]
    drawn = [lot.drawn(parts_of(high)) for lot in lots]
    assert drawn[0] == drawn[1]
    assert set(lots[0].drawn(parts_of(low))) <= set(drawn[0]) <= set(window().places)
    assert lots[0].drawn(UNIT) == list(window().places)
    for place in window().places:
        judges = lots[0].judges(place, [*VALIDATORS, WORKER.peer_id], count)
        assert judges == lots[1].judges(place, [WORKER.peer_id, *VALIDATORS[::-1]], count)
        assert len(set(judges)) == count
        assert WORKER.peer_id not in judges
        fewer = [one for one in VALIDATORS if one != judges[0]]
        assert lots[0].judges(place, fewer, count)[: count - 1] == judges[1:]
        spared = lots[0].judges(place, VALIDATORS, count, never=VALIDATORS[:3])
        assert not set(spared) & set(VALIDATORS[:3])


def test_shares_come_out_as_they_are_said() -> None:
    """Of 3,200 places; judges get alike many. Whoever changes a bit draws anew."""
    lots = [Lot(window(), number.to_bytes(32, "big")) for number in range(200)]
    for share in (0.1, 0.25, 0.5):
        drawn = sum(len(lot.drawn(parts_of(share))) for lot in lots) / (200 * MAX_WINDOW)
        assert abs(drawn - share) < 0.025
    judged: dict[PeerId, int] = dict.fromkeys(VALIDATORS, 0)
    for lot in lots:
        for place in window().places:
            for judge in lot.judges(place, VALIDATORS, 2):
                judged[judge] += 1
    mean = 200 * MAX_WINDOW * 2 / len(VALIDATORS)
    assert all(0.85 * mean < count < 1.15 * mean for count in judged.values())
    others = [Lot(window(teaching=number), b"l" * 32).drawn(UNIT // 2) for number in range(99)]
    assert len({tuple(drawn) for drawn in others}) > 90


# What is signed.


def test_a_commitment_to_sixteen_places_fits_a_kilobyte_and_binds_all() -> None:
    signed = SignedWindow.sign(window(), WORKER)
    witnessed = WitnessedWindow.sign(signed, 0.25, WITNESS)
    assert len(signed.to_bytes()) < MAX_COMMITMENT
    assert len(witnessed.to_bytes()) < 1_024
    read = decode_witnessed_untrusted(witnessed.to_bytes(), verify)
    assert read == witnessed
    assert read.share == UNIT // 4
    for at in range(0, len(witnessed.to_bytes()), 7):
        data = bytearray(witnessed.to_bytes())
        data[at] ^= 1
        with pytest.raises(BadMessage):
            decode_witnessed_untrusted(bytes(data), verify)


def test_a_note_is_for_its_worker_its_run_and_a_while() -> None:
    note = StandingNote(RUN, WORKER.peer_id, UNIT // 10, PLEDGE.chain, 20).signed(TRAINER)
    read = decode_note_untrusted(note.to_bytes(), TRAINER.peer_id, verify)
    assert read.share_at(window(link=20)) == UNIT // 10
    assert read.share_at(window(link=21)) == UNIT
    assert read.share_at(window(chain=PLEDGE.chain + 1)) == UNIT
    assert read.share_at(window(node=WITNESS.peer_id)) == UNIT
    assert read.share_at(window(run=b"s" * 32)) == UNIT
    with pytest.raises(BadMessage, match="not the trainer's"):
        decode_note_untrusted(note.to_bytes(), WORKER.peer_id, verify)
