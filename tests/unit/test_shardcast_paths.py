"""Which deltas a trainer makes, and which way a receiver goes."""

from __future__ import annotations

from itertools import combinations
from math import ceil, log2

import pytest
from hypothesis import given, settings, strategies as st

from p2p.identity import KeyPair
from p2p.shardcast.codec import ANCHOR, PATCH
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import (
    NO_POLICY,
    Encoding,
    Manifest,
    ManifestBody,
    PolicyVersion,
)
from p2p.shardcast.paths import HOP_BYTES, MAX_SKIP, cheapest_path, delta_bases, servable

KEY = KeyPair(digest_of(b"trainer"))
POLICY = 1_000_000_000
ANCHOR_WIRE = POLICY * 2 // 3
SHARES = {1: 0.0074, 2: 0.0121, 4: 0.0191, 8: 0.03, 16: 0.0457, 32: 0.065, 64: 0.09}
"""Of the policy, by versions behind: `python -m bench delta`, by exponent; the last two are
guessed from the note's."""


def v(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def manifest(version: int, bases: list[int]) -> Manifest:
    encodings = [Encoding(ANCHOR, NO_POLICY, 100, ANCHOR_WIRE)]
    for base in bases:
        wire = int(SHARES[version - base] * POLICY)
        encodings.append(Encoding(PATCH, v(base), 10, wire, digest_of(b"delta")))
    body = ManifestBody(
        b"run", v(version), v(version - 1), digest_of(b"before") if version else b"",
        digest_of(b"weights"), POLICY, tuple(encodings),
    )  # fmt: skip
    return body.sign(KEY)


def published(last: int) -> list[Manifest]:
    """What a trainer that keeps everything publishes."""
    return [
        manifest(number, list(delta_bases(v(number), v(number - 1), range(number))))
        for number in range(last + 1)
    ]


ALL = published(100)


def test_a_trainer_makes_the_delta_from_the_version_before_and_skips() -> None:
    everything = range(200)
    assert delta_bases(v(7), v(6), everything) == [6]
    assert delta_bases(v(8), v(7), everything) == [7, 6, 4, 0]
    assert delta_bases(v(96), v(95), everything) == [95, 94, 92, 88, 80, 64]
    assert delta_bases(v(128), v(127), everything)[-1] == 128 - 2**MAX_SKIP
    assert delta_bases(v(0), NO_POLICY, everything) == []


def test_a_trainer_makes_deltas_only_from_what_it_has() -> None:
    assert delta_bases(v(8), v(7), {7, 4}) == [7, 4]
    assert delta_bases(v(8), v(7), set()) == []
    assert delta_bases(v(8), v(3), {3}) == [3], "versions may be left out"


def test_all_skips_together_cost_one_more_delta_per_version() -> None:
    made = sum(len(delta_bases(v(n), v(n - 1), range(n))) for n in range(1_024, 2_048))
    assert made == pytest.approx(1_024 * 2, rel=0.02)


def test_a_receiver_far_behind_skips() -> None:
    assert [hop.version for hop in cheapest_path(ALL[32], ALL, {v(16): 0}).hops] == [32]
    path = cheapest_path(ALL[32], ALL, {v(13): 0})
    assert [(hop.encoding.base, hop.version) for hop in path.hops] == [
        (13, 14),
        (14, 16),
        (16, 32),
    ]
    assert path.wire == sum(hop.encoding.wire for hop in path.hops)
    assert path.wire < 0.07 * POLICY


@pytest.mark.parametrize("behind", [1, 2, 3, 7, 16, 31, 33, 50])
def test_a_path_has_at_most_two_hops_per_doubling(behind: int) -> None:
    for last in range(behind, 101):
        path = cheapest_path(ALL[last], ALL, {v(last - behind): 0})
        assert path.start == last - behind
        assert len(path.hops) <= 2 * ceil(log2(behind)) + 1


def test_a_joiner_takes_the_anchor_of_what_it_wants() -> None:
    path = cheapest_path(ALL[50], ALL, {})
    assert (path.start, path.wire) == (NO_POLICY, ANCHOR_WIRE)
    assert [(hop.encoding.name, hop.version) for hop in path.hops] == [(ANCHOR, 50)]


def test_a_joiner_finishes_its_anchor_when_the_next_version_comes() -> None:
    """In all it takes 1.02 anchors, of the one that it began and a delta."""
    left = ANCHOR_WIRE // 4
    path = cheapest_path(ALL[50], ALL, {v(49): left})
    assert (path.start, [hop.version for hop in path.hops]) == (49, [50])
    taken = ANCHOR_WIRE - left + path.wire
    assert taken <= 1.02 * ANCHOR_WIRE


def test_an_anchor_is_taken_where_deltas_are_no_cheaper() -> None:
    """Deltas after a change of the learning rate: a third of the policy each."""
    big = [Encoding(PATCH, v(base), 10, POLICY // 3, digest_of(b"d")) for base in range(1, 4)]
    chain = []
    for number, one in enumerate(big, 2):
        anchor = Encoding(ANCHOR, NO_POLICY, 100, ANCHOR_WIRE)
        body = ManifestBody(
            b"run", v(number), v(number - 1), digest_of(b""), digest_of(b"w"), POLICY,
            (anchor, one),
        )  # fmt: skip
        chain.append(body.sign(KEY))
    assert cheapest_path(chain[-1], chain, {v(3): 0}).start == 3
    assert cheapest_path(chain[-1], chain, {v(1): 0}).start == NO_POLICY


def test_what_is_here_needs_nothing() -> None:
    path = cheapest_path(ALL[9], ALL, {v(9): 0, v(8): 0})
    assert (path.start, path.hops, path.wire) == (9, (), 0)


def test_small_deltas_are_not_chained_for_a_few_bytes() -> None:
    tiny = HOP_BYTES // 4
    direct = Encoding(PATCH, v(1), 1, 3 * tiny, digest_of(b"d"))
    single = Encoding(PATCH, v(2), 1, tiny, digest_of(b"d"))
    anchor = Encoding(ANCHOR, NO_POLICY, 100, ANCHOR_WIRE)

    def signed(number: int, *encodings: Encoding) -> Manifest:
        body = ManifestBody(
            b"run", v(number), v(number - 1), digest_of(b""), digest_of(b"w"), POLICY,
            (anchor, *encodings),
        )  # fmt: skip
        return body.sign(KEY)

    second = signed(2, Encoding(PATCH, v(1), 1, tiny, digest_of(b"d")))
    third = signed(3, single, direct)
    assert len(cheapest_path(third, [second], {v(1): 0}).hops) == 1


@settings(max_examples=100, deadline=None)
@given(
    held=st.dictionaries(st.integers(0, 20), st.integers(0, POLICY // 10), max_size=4),
    known=st.sets(st.integers(0, 20)),
    target=st.integers(0, 20),
)
def test_no_path_is_cheaper(held: dict[int, int], known: set[int], target: int) -> None:
    """Against all paths of up to five hops, tried one by one."""
    manifests = {n: ALL[n] for n in known | {target}}
    ours = cheapest_path(
        ALL[target], manifests.values(), {v(n): left for n, left in held.items()}
    )

    def price(wire: int, hops: int, left: int) -> int:
        return wire + HOP_BYTES * (hops + (left > 0))

    found = [price(held[target], 0, held[target])] if target in held else []
    for start, left in {NO_POLICY: 0, **held}.items():
        between = [n for n in manifests if n not in (start, target)]
        for count in range(5):
            for middle in combinations(sorted(between), count):
                wire, at = left, start
                for number in (*middle, target):
                    offer = [
                        e for e in manifests[number].body.encodings if e.base == at
                    ]  # fmt: skip
                    if not offer:
                        break
                    wire, at = wire + offer[0].wire, number
                else:
                    found.append(price(wire, count + 1, left))
    left = held.get(ours.start, 0)
    assert price(ours.wire, len(ours.hops), left) <= min(found)


def test_every_holder_serves_the_anchor_and_the_deltas_between_what_it_holds() -> None:
    bases = [encoding.base for encoding in servable(ALL[16], {16, 15, 8})]
    assert bases == [NO_POLICY, 15, 8]
    assert servable(ALL[16], {15}) == []
    assert [one.name for one in servable(ALL[16], {16})] == [ANCHOR]
