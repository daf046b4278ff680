"""Limits in a run file that cost the nodes of the run more than their owner."""

from __future__ import annotations

from typing import Any

import pytest

from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.wire import pack
from roles.contract.core import file
from roles.contract.core.file import EnvironmentPin, Terms, decode_run_untrusted, sign_run
from roles.envs.base import environment_digest
from roles.rl.recipes import NETWORK, SORTING

OWNER = KeyPair(b"o" * 32)
NAN, INF = float("nan"), float("inf")


def signed(limits: dict[str, Any]) -> bytes:
    """A run whose owner signs any limits."""
    terms = Terms(
        name="r",
        expiry=2**32,
        environments=(EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        trainers=(KeyPair(b"t" * 32).peer_id,),
        validators=(KeyPair(b"v" * 32).peer_id,),
        sampling=NETWORK.sampling,
        model=SORTING,
    )
    table = terms.to_table()
    table["limits"] = {**table["limits"], **limits}  # type: ignore[dict-item]
    body = pack(file._sorted(table))
    signature = OWNER.sign(file.DOMAIN, file._signed(OWNER.peer_id, body))
    return pack([file.FORMAT, OWNER.peer_id.digest, body, signature])


@pytest.mark.parametrize(
    "limits",
    [
        {"off": [[0.05, 1e9]]},
        {"off": [[0.05, 1.0000001]]},
        {"off": [[0.05, NAN]]},
        {"off": [[NAN, 0.1]]},
        {"off": [[0.05, INF]]},
        {"off": [[0.05, -0.0001]]},
        {"off": [[0.05]]},
        {"off": [0.05, 0.1]},
        {"gap_mean": INF},
        {"gap_scale": -1.0},
        {"surprise": NAN},
        {"exponent_mismatches": 2.5},
        {"exponent_mismatches": 2**63},
    ],
)
def test_limits_that_limit_nothing_are_no_run(limits: dict[str, Any]) -> None:
    """A share of 1e9 kept each validator for minutes with the limit of one group."""
    with pytest.raises(BadMessage):
        decode_run_untrusted(signed(limits))


def test_steps_in_any_order_or_none_are_a_run() -> None:
    for off in ([], [[0.4, 0.1], [0.05, 0.2]], [[0.05, 1.0]]):
        run = decode_run_untrusted(signed({"off": off}))
        assert sign_run(run.terms, OWNER).document == run.document
        assert run.terms.limits.off_limits(8192, 1e-6).keys() == {step for step, _ in off}
