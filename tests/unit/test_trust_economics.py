"""What lying, selecting, grinding and minting are worth, by the rules of the product."""

from __future__ import annotations

from bench.trust import lines, swarm
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.core.bans import convicts
from roles.protocol.core.groups import Commitment, SignedVerdict
from roles.run.core.trust import TrustTerms, leak
from tests.unit.test_standing import ANNA, name


def test_no_cheat_pays_and_no_honest_worker_is_banned() -> None:
    """250 machines, 20 validators, six hours: every line of what trust promises."""
    one = swarm(TrustTerms(), seed=1)
    one.run(hours=6)
    assert [str(line) for line in lines(one) if not line.holds] == []
    assert sum(each.leaked for each in one.sums.values()) > 100, "turncoats lie, and some pass"
    assert sum(1 + each.names for each in one.machines if each.kind == "minting") > 250


def test_without_probation_more_leaks_than_is_stated() -> None:
    """Of a name that costs nothing there is always another one."""
    one = swarm(TrustTerms(probation=1), seed=1)
    one.run(hours=3)
    leaked = sum(each.leaked for each in one.sums.values())
    assert leaked / sum(each.learnt for each in one.sums.values()) > leak(TrustTerms(), 0.06)


def test_three_strikes_ban_under_three_policies_that_follow_on_each_other() -> None:
    """Who lies once in each window was never banned in bfloat16: its strikes were too far
    apart."""

    def strike(version: int) -> SignedVerdict:
        content = bytes([version]) * 32
        work = Commitment(b"r" * 32, ANNA, PolicyVersion(version), b"p" * 32, 0, content)
        reason = Reason.MANTISSA_MEAN.value
        return SignedVerdict(name(2), work, Verdict.REJECTED, reason, 7.0, 1.0, (), b"")

    assert convicts([strike(4), strike(5), strike(6)])
    assert not convicts([strike(4), strike(5), strike(7)])
    assert not convicts([strike(4), strike(6)])
