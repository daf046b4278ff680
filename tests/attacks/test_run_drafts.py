"""What an owner would sign by mistake, and no node could open."""

from __future__ import annotations

import importlib.util

import pytest

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from roles.run.draft import read_draft

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


@pytest.mark.parametrize(
    ("environment", "kinds", "reason"),
    [
        ("arithmetic", {"addition": 1.0, "adition": 1.0}, "no kind 'adition'; it has addition"),
        pytest.param("reasoning-gym", {"chess": 1.0}, "no family 'chess'", marks=needs_gym),
        pytest.param(
            "reasoning-gym",
            {"chain_sum": 1.0, "countdown": 1.0},
            "the family 'countdown' of reasoning-gym runs answers as code",
            marks=needs_gym,
        ),
        ("sort", {"long": 1.0}, "'sort' cannot be made with kinds"),
    ],
)
def test_kinds_that_an_environment_lacks_are_not_signed(
    environment: str, kinds: dict[str, float], reason: str
) -> None:
    """The run was signed, and each node of it refused to start."""
    table = {
        "name": "r",
        "trainers": [str(KeyPair(b"t" * 32).peer_id)],
        "validators": [str(KeyPair(b"v" * 32).peer_id)],
        "environments": [{"name": environment, "kinds": kinds}],
    }
    with pytest.raises(ConfigError, match=reason):
        read_draft(table, "draft.toml", now=0.0)
