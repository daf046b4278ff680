"""What an owner would sign by mistake, and no node could open."""

from __future__ import annotations

import importlib.util
import tomllib
from contextlib import nullcontext
from dataclasses import replace

import pytest

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.node.tables import write_table
from proofs.checks import Limits
from proofs.sampling import DrawRule
from roles.calibrate.limits import record_to_toml, to_toml
from roles.contract.core.file import Calibration
from roles.contract.core.shape import Dtype
from roles.own.draft import check_calibrated, read_draft
from roles.rl.recipes import SORTING

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


NUMBERS = to_toml(Limits.bf16())


@pytest.mark.parametrize(
    ("limits", "environment", "reason"),
    [
        (NUMBERS, "sort", ""),
        ("", "sort", "would be the preset's"),
        ('[limits]\npreset = "bf16"\n', "sort", "would be the preset's"),
        (NUMBERS.replace("gap_mean", "# gap_mean"), "sort", "gap_mean would be the preset's"),
        (NUMBERS, "arithmetic", "were not measured on sort"),
    ],
)
def test_no_preset_and_no_other_environment_passes_for_calibrated(
    limits: str, environment: str, reason: str
) -> None:
    """A draft with the record alone was signed, and shown as calibrated, with the preset."""
    model = replace(SORTING, dtype=Dtype.BFLOAT16, draw=DrawRule.GUMBEL)
    record = Calibration(
        model=model.digest,
        dtype=model.dtype,
        draw=model.draw,
        generators=("torch",),
        validators=("torch",),
        environments={environment: 1.0},
        tokens=131_072,
        submissions=64,
        rejected=0,
        date="2026-11-24",
    )
    table = {
        "name": "r",
        "trainers": [str(KeyPair(b"t" * 32).peer_id)],
        "validators": [str(KeyPair(b"v" * 32).peer_id)],
        "model": {"shape": write_table(SORTING.shape), "dtype": "bfloat16", "draw": "gumbel"},
        "sampling": {"steps": 1, "group_size": 8, "max_new_tokens": 8},
        "environments": ["sort"],
        **tomllib.loads(limits + record_to_toml(record)),
    }
    raises = pytest.raises(ConfigError, match=reason) if reason else nullcontext()
    with raises:
        check_calibrated(read_draft(table, "draft.toml", now=0.0))
