"""Whatever is said in a round, signed by members or strangers, ends no member.

Messages are made by their structure, so that they reach the arithmetic behind the decoder: most
fields are what an honest member would send, a few are the most extreme that the wire carries.
One member lies, strangers sign whatever they like, honest statements are replayed, and every
few hundred events the member restarts from what it has stored.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.wire import MIB, pack
from roles.contract.core.diloco import Codec, RoundConfig
from roles.diloco.core import events as ev
from roles.diloco.core.messages import (
    DOMAIN,
    BadPart,
    BadSum,
    Beat,
    Chain,
    Doubled,
    Outcome,
    Plan,
    Promise,
    Propose,
    Ready,
    Record,
    RoundMessage,
    Sum,
    Unreadable,
    Vote,
    decode_message_untrusted,
    encode_message,
)
from roles.diloco.core.pieces import (
    MAX_NORM,
    PieceGrid,
    check_part,
    digest_of,
    norm_of,
    sum_piece,
)
from roles.diloco.core.round import RoundCore, genesis, owners_of, shares_of
from tests.support.pieces import encode_all
from tests.sweeps import DEEP
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN

MESSAGES = 145_000 if DEEP else 6_000
PEERS = sorted(peer_named(n) for n in range(5))
ME, LIAR = PEERS[1], PEERS[3]
HONEST = [peer for peer in PEERS if peer not in (ME, LIAR)]
STRANGERS = [peer_named(50 + n) for n in range(3)]
FLOATS = (0.0, -0.0, 5e-324, 1e-45, 1e-300, 1.0, 1e15, 1.1e15, 1e30, 3.4e38, 2.0**40, 1.7e308,
          -1.0, math.inf, -math.inf, math.nan)  # fmt: skip
INTS = (0, 1, 2, -1, 2**31, 2**40, 2**40 + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
SCALES = (1e-40, 1e-30, 1.0, 1e10, 1e14, 9.9e29)


class Fuzzer:
    """One life after the other of one member, and all that it hears."""

    def __init__(self, seed: int, codec: Codec) -> None:
        self.random = Random(seed)
        self.grid = PieceGrid.of(1024, codec)
        self.now = 0.0
        self.records: list[Record] = [genesis(RUN, PEERS)]
        self.kept: ev.Keep | None = None
        self.held = 0
        self.heard: list[RoundMessage] = []
        self.decoded = 0
        self.kinds: set[type] = set()
        self.proposed: dict[tuple[int, int, PeerId], Propose] = {}
        self.core = self.life()

    def life(self) -> RoundCore:
        return RoundCore(
            FakeSigner(ME), RoundConfig(max_tokens=10**6), self.grid, run=RUN,
            records=self.records, held=self.held, kept=self.kept, verify=fake_verify,
            may_join=lambda peer: True, anchor=None, now=self.now,
        )  # fmt: skip

    # Fields.

    def any(self, *usual: Any) -> Any:
        """One of what is usual, or what is as extreme as its type can be."""
        one = self.random.choice(usual)
        if self.random.random() > 0.04:
            return one
        match one:
            case float():
                return self.random.choice(FLOATS)
            case bool():
                return self.random.choice((True, False, 2))
            case int():
                return self.random.choice(INTS)
            case bytes():
                return self.random.choice((b"", one[:-1], one + b"\0", bytes(len(one))))
            case list():
                return self.random.choice(([], one[:-1], [*one, *one[-1:]], one[::-1], [one]))
        return one

    def author(self) -> PeerId:
        return self.random.choice((LIAR, LIAR, LIAR, *STRANGERS))

    def step(self) -> int:
        step = self.core.record.step
        return int(self.any(step + 1, step + 1, step + 1, max(1, step)))

    def view(self) -> int:
        this = self.core.round.view
        return int(self.any(0, this, this, this + 1))

    def some(self) -> bytes:
        return self.random.randbytes(32)

    def pieces(self) -> list[bytes]:
        """Those of a vector of any size that can be encoded."""
        scale = self.random.choice(SCALES)
        values = np.random.default_rng(self.random.getrandbits(32)).standard_normal(1024)
        if not self.random.randrange(3):
            values = np.sign(values)
        if not self.random.randrange(5):
            values = np.zeros(1024)
        with np.errstate(under="ignore"):
            return encode_all(self.grid, (values * scale).astype(np.float32))

    def norm(self, piece: bytes) -> float:
        """As it is signed; 1 for what cannot be decoded."""
        try:
            return float(np.float32(norm_of(self.grid.decode_untrusted(0, piece))))
        except BadMessage:
            return 1.0

    # Statements, as they are on the wire.

    def said(self, kind: int, step: int, view: int, body: list[Any], author: PeerId) -> Any:
        said = [kind, step, view, *body, author.digest]
        try:
            signature = FakeSigner(author).sign(DOMAIN, pack([RUN, *said]))
        except OverflowError:
            signature = bytes(64)
        return [*said, self.any(signature, signature, signature, signature)]

    def ready(self, author: PeerId | None = None, found: list[bytes] | None = None) -> Any:
        pieces = self.pieces() if found is None else found
        norms = [self.any(self.norm(one)) for one in pieces]
        told = array("f", [min(one, 3.4e38) for one in norms])
        return self.said(
            Ready.KIND, self.step(), self.any(0),
            [
                self.any(self.core.record.digest), self.any(100, 1000),
                self.any(0.0, 1e6, self.random.choice(FLOATS)), self.any(told.tobytes()),
                self.any(b"".join(map(digest_of, pieces))),
            ],
            author or self.author(),
        )  # fmt: skip

    def plan(self) -> list[Any]:
        readys = list(self.core.round.readys.values())
        pairs = [[one.author.digest, self.any(one.digest)] for one in readys] or [
            [LIAR.digest, self.some()]
        ]
        members = sorted({*PEERS, *self.random.sample(STRANGERS, self.random.randrange(3))})
        return [
            self.step(), self.any(self.core.record.digest), self.any(sorted(pairs)),
            self.any([one.digest for one in members]),
        ]  # fmt: skip

    def outcome(self) -> list[Any]:
        return [self.plan(), self.any(self.some()), self.any(self.some())]

    def vote(self) -> Any:
        outcome, author = self.outcome(), self.author()
        return self.said(Vote.KIND, outcome[0][0], self.view(), [outcome], author)

    def promise(self) -> Any:
        vote = self.any([], self.vote())
        suspects = self.any([], [HONEST[0].digest, STRANGERS[0].digest])
        body = [self.any(self.core.record.digest), vote, suspects]
        view = self.random.choice((self.view(), 65, 2**40))
        return self.said(Promise.KIND, self.step(), view, body, self.author())

    def propose(self) -> Any:
        plan, view = self.plan(), self.view()
        carried = self.any([], [plan, self.some(), self.some()])
        promises = [self.promise() for _ in range(self.random.randrange(4))]
        return self.said(Propose.KIND, plan[0], view, [plan, carried, promises], self.author())

    def sum(self, pieces: list[bytes] | None = None, plan: bytes | None = None) -> Any:
        found = pieces or self.pieces()
        first = self.any(0, self.random.randrange(self.grid.pieces))
        body = [self.any(plan or self.some()), first, self.any(b"".join(map(digest_of, found)))]
        return self.said(Sum.KIND, self.step(), self.view(), body, self.author())

    # Other messages.

    def record(self) -> Any:
        outcome = self.outcome()
        view = self.view()
        votes = [
            self.said(Vote.KIND, outcome[0][0], view, [outcome], peer)
            for peer in (LIAR, *STRANGERS)
        ]
        return [
            Record.KIND, view, outcome, self.any([[one[-2], one[-1]] for one in votes])
        ]  # fmt: skip

    def chain(self) -> Any:
        known = [one.to_wire() for one in self.records[1:]]
        return [Chain.KIND, self.any([*known[-3:], self.record()])]

    def beat(self) -> Any:
        newest = self.core.record
        one = self.random.choice(self.records)
        masks = [self.any(self.random.randbytes(8)) for _ in range(3)]
        fields = [
            Beat.KIND, self.any(newest.step, one.step), self.any(newest.digest, one.digest),
            self.any(newest.step, one.step, -1), self.view(), *masks, self.any(True, False),
            self.any(False, False, True), self.any(0, 3),
        ]  # fmt: skip
        decodes = Beat(1, self.some(), 1, 0).to_wire()[len(fields) :]
        return [*fields, *(self.any(self.any(one)) for one in decodes)]

    def doubled(self) -> Any:
        make = self.random.choice((self.vote, self.sum, self.ready, self.propose))
        return [Doubled.KIND, make(), make()]

    def bad_part(self) -> Any:
        pieces = self.pieces()
        at = self.any(0, self.random.randrange(len(pieces)))
        piece = self.any(pieces[at % len(pieces)], self.random.randbytes(len(pieces[0])))
        return [BadPart.KIND, self.ready(found=pieces), at, piece]

    def unreadable(self) -> Any:
        pieces = self.pieces()
        at = self.random.randrange(len(pieces))
        return [Unreadable.KIND, self.sum(pieces), self.any(at), self.any(pieces[at])]

    def bad_sum(self) -> Any:
        """Mostly well made, by as many keys as one likes: none, too."""
        authors = self.random.sample([LIAR, *STRANGERS], self.random.randrange(5))
        found = {peer: self.pieces() for peer in sorted(authors)}
        readys = [self.ready(peer, pieces) for peer, pieces in found.items()]
        decoded = []
        for one in readys:
            try:
                decoded.append(decode_message_untrusted(pack(one)))
            except (BadMessage, OverflowError):
                decoded.append(None)
        pairs = [
            [peer.digest, self.some() if one is None else one.digest]  # type: ignore[union-attr]
            for peer, one in zip(found, decoded, strict=True)
        ]
        plan = [self.step(), self.core.record.digest, pairs, [LIAR.digest]]
        try:
            name = Plan.from_wire_untrusted(plan).id
        except BadMessage:
            name = self.some()
        at = self.random.randrange(self.grid.pieces)
        told = self.said(
            Sum.KIND, self.step(), 0, [name, 0, b"".join(map(digest_of, self.pieces()))], LIAR
        )
        parts = self.any([pieces[at] for pieces in found.values()])
        return [BadSum.KIND, told, plan, readys, self.any(at), parts]

    def replay(self) -> Any:
        """What was heard before, in this life, in another, or in a step that is over."""
        return self.random.choice(self.heard).to_wire() if self.heard else self.beat()

    # What happens.

    def happen(self) -> None:
        make: Callable[[], Any] = self.random.choice((
            self.ready, self.vote, self.promise, self.propose, self.sum,
            self.record, self.chain, self.beat, self.doubled, self.bad_part, self.unreadable,
            self.bad_sum, self.replay,
        ))  # fmt: skip
        try:
            data = pack(make())
            message = decode_message_untrusted(data)
        except (BadMessage, OverflowError):  # OverflowError: no msgpack has such a number
            return
        assert decode_message_untrusted(encode_message(message)) == message
        self.decoded += 1
        self.kinds.add(type(message))
        self.feed(ev.Received(self.random.choice((LIAR, LIAR, *HONEST, *STRANGERS)), message))

    def feed(self, event: ev.Event) -> None:
        try:
            effects = self.core.handle(event, self.now)
        except BadMessage:
            assert isinstance(event, ev.Received)
            return
        sent = 0
        for effect in effects:
            match effect:
                case ev.Send(_, message):
                    data = encode_message(message)
                    sent = max(sent, len(data))
                    assert decode_message_untrusted(data) == message
                    self.heard = [*self.heard[-300:], message]
                case ev.Keep():
                    self.kept = effect
                case ev.Reduce() if effect.carried is None:
                    self.compute(effect)
                case ev.Commit(records):
                    self.records = [*self.records, *records]
                    self.held = records[-1].step
                    self.feed(ev.Held(self.held))
        assert sent <= MIB
        assert not {ME, *HONEST} & {*self.core.convicted}

    def compute(self, request: ev.Reduce) -> None:
        """What an exchange makes of the numbers that were signed."""
        readys = request.readys
        assert len(owners_of(self.grid, readys)) == self.grid.pieces
        shares = shares_of(readys)
        assert all(0 <= one <= 1 for one in shares.values())
        pieces = [self.pieces()[0] for _ in readys]
        try:
            values = [
                check_part(self.grid, 0, one, min(MAX_NORM, self.norm(one))) for one in pieces
            ]
        except BadMessage:  # no owner sums such pieces
            self.feed(ev.ReduceFailed(request.view, (LIAR,)))
            return
        self.grid.decode_untrusted(0, sum_piece(self.grid, 0, values, shares.values()))
        self.feed(ev.Reduced(request.view, Outcome(request.plan, self.some(), self.some())))

    def honest_turn(self) -> None:
        """What those that do not lie go on with, whatever is said beside it."""
        self.now += self.random.choice((0.1, 1.0, 5.0))
        self.feed(ev.Tick())
        newest = self.core.record
        members = newest.members
        reports = sum(1 << at for at, one in enumerate(members) if one not in STRANGERS)
        view = self.core.round.view
        heard = Beat(newest.step, newest.digest, newest.step, view, heard=reports)
        self.feed(ev.Received(LIAR, heard))
        for peer in HONEST:
            self.feed(ev.Received(peer, heard))
            if self.random.random() < 0.3:
                self.hear(self.honest_ready(peer))
            if self.core.round.view:
                self.feed(ev.Received(peer, self.honest_promise(peer)))
            if self.random.random() < 0.3:
                self.honest_propose(peer)
            if (own := self.core.round.vote) is not None:
                vote = Vote(own.step, own.view, own.outcome, author=peer)
                self.hear(self.signed(vote))
        self.feed(ev.Trained(self.honest_ready(ME)))

    def honest_propose(self, author: PeerId) -> None:
        this, newest = self.core.round, self.core.record
        slot = (newest.step, this.view, author)
        if slot in self.proposed:
            self.hear(self.proposed[slot])
        elif len(this.readys) >= 3:
            self.proposed[slot] = self.proposal(author)
            self.hear(self.proposed[slot])

    def proposal(self, author: PeerId) -> Propose:
        this, newest = self.core.round, self.core.record
        promises = tuple(map(self.honest_promise, HONEST if this.view else []))
        pairs = tuple((peer, one.digest) for peer, one in sorted(this.readys.items()))
        members = tuple(sorted(self.core.live(self.now)))
        plan = Plan(newest.step + 1, newest.digest, pairs, members)
        return self.signed(Propose(plan.step, this.view, plan, None, promises, author=author))

    def honest_promise(self, peer: PeerId) -> Promise:
        newest, view = self.core.record, self.core.round.view
        return self.signed(Promise(newest.step + 1, view, newest.digest, None, author=peer))

    def hear(self, said: Any) -> None:
        self.heard.append(said)
        self.feed(ev.Received(said.author, said))

    def honest_ready(self, peer: PeerId) -> Ready:
        count = self.grid.pieces
        digests = tuple(digest_of(bytes([at]) + peer.digest) for at in range(count))
        made = Ready(
            self.core.record.step + 1, 0, self.core.record.digest, 100, 1e6, (1.0,) * count,
            digests, author=peer,
        )  # fmt: skip
        return self.signed(made)

    def signed(self, said: Any) -> Any:
        return said.signed(RUN, FakeSigner(said.author))

    def restart(self) -> None:
        """From what was stored, in bytes."""
        self.records = [
            self.records[0],
            *(decode_message_untrusted(encode_message(one)) for one in self.records[1:]),
        ]  # type: ignore[list-item]
        self.core = self.life()


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP32])
def test_no_message_ends_a_member(codec: Codec) -> None:
    """Evidence of a sum without contributors divided by none, and a rate of 1.7e308 overflowed
    in who sums what: 743 bytes from any key ended every member, again after each restart."""
    fuzzer = Fuzzer(1, codec)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for number in itertools.count():
            fuzzer.happen()
            if number % 5 == 0:
                fuzzer.honest_turn()
            if number % 200 == 199:
                fuzzer.restart()
            if number >= MESSAGES / 2:
                break
    assert len(fuzzer.kinds) == 12
    assert fuzzer.decoded > MESSAGES / 6
    assert fuzzer.core.record.step > MESSAGES / 2000
