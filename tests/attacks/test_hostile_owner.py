"""A run file with a good signature and a hostile owner: what it can make a volunteer's machine
do."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import BadMessage, ConfigError
from p2p.machine import open_world
from p2p.sandbox.confinement import Mechanism
from p2p.sandbox.launch import find_containment
from roles.contract.core.file import EnvironmentPin, decode_run_untrusted, sign_run
from roles.contract.core.pin import FilePin
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import MAX_CONTEXT
from roles.engines.config import EngineConfig, MachineLimits, engine_of, memory_needed
from roles.envs.base import environment_digest, make_environment
from roles.envs.client import open_environment_of
from roles.rl.recipes import NETWORK, SORTER
from tests.support.packages import install_shady
from tests.support.runs import OWNER, TERMS, sign_table, with_value

INF, NAN = math.inf, math.nan
HOSTILE = (
    0, 1, -1, 2, 10**9, 10**12, 2**63, -(2**63), 0.0, -1.0, 1e-300, 1e308, INF, -INF, NAN,
)  # fmt: skip


def numbers(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every number in the table."""
    if isinstance(table, dict):
        for key, value in table.items():
            yield from numbers(value, (*path, key))
    elif isinstance(table, list):
        for place, value in enumerate(table):
            yield from numbers(value, (*path, place))
    elif isinstance(table, int | float) and not isinstance(table, bool):
        yield path


TABLE: Any = TERMS.to_table()
PATHS = list(numbers(TABLE))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_no_number_that_an_owner_signs_does_more_than_void_the_document(
    path: tuple[Any, ...],
) -> None:
    """key_heads = 0 raised ZeroDivisionError in every node; a
    temperature of -1 and a width of 10**12 passed."""
    voided = 0
    for value in HOSTILE:
        try:
            run = decode_run_untrusted(sign_table(with_value(TABLE, path, value)))
        except BadMessage:
            voided += 1
            continue
        sampling, model = run.terms.sampling, run.terms.model
        assert memory_needed(model.shape, sampling, model.context) < 2**70
        with suppress(ConfigError):  # more than this machine allows
            assert isinstance(engine_of(run), EngineConfig)
    assert voided >= 3, "inf, -inf and NaN at least"


@pytest.mark.parametrize(
    "limits",
    [
        {"off": [[0.05, 1e9]]}, {"off": [[0.05, 1.0000001]]}, {"off": [[0.05, NAN]]},
        {"off": [[NAN, 0.1]]}, {"off": [[0.05, INF]]}, {"off": [[0.05, -0.0001]]},
        {"off": [[0.05]]}, {"off": [0.05, 0.1]}, {"gap_mean": INF}, {"gap_scale": -1.0},
        {"surprise": NAN}, {"exponent_mismatches": 2.5}, {"exponent_mismatches": 2**63},
    ],
)  # fmt: skip
def test_limits_that_limit_nothing_are_no_run(limits: dict[str, Any]) -> None:
    """A share of 1e9 kept each validator for minutes with the limit of one group."""
    with pytest.raises(BadMessage):
        decode_run_untrusted(sign_table({**TABLE, "limits": {**TABLE["limits"], **limits}}))


def test_steps_in_any_order_or_none_are_a_run() -> None:
    for off in ([], [[0.4, 0.1], [0.05, 0.2]], [[0.05, 1.0]]):
        run = decode_run_untrusted(sign_table(with_value(TABLE, ("limits", "off"), off)))
        assert sign_run(run.terms, OWNER).document == run.document
        assert run.terms.limits.off_limits(8192, 1e-6).keys() == {step for step, _ in off}


NAMES = (
    "os:abort",
    "os:fork",
    "http.server:test",
    "roles.envs.sort:SortEnvironment",
    "../x",
    "",
)


@pytest.mark.parametrize("name", NAMES)
def test_an_owner_cannot_name_a_callable(name: str) -> None:
    """``os:abort`` was imported and called before its digest was compared."""
    with pytest.raises(ValueError, match="entry point"):
        EnvironmentPin(name=name, digest=bytes(32))
    table = deepcopy(TABLE)
    table["environments"][0]["name"] = name  # type: ignore[index]
    with pytest.raises(BadMessage, match="entry point"):
        decode_run_untrusted(sign_table(table))
    for find in (make_environment, environment_digest):
        with pytest.raises(ConfigError, match="there is no environment"):
            find(name)


@pytest.mark.skipif(
    find_containment("/nowhere").mechanism is not Mechanism.BUBBLEWRAP,
    reason="bubblewrap contains nothing here",
)
async def test_what_is_installed_is_compared_before_it_is_imported_and_never_by_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest of the package's files comes first, of helper modules and data too."""
    install_shady(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    digest = environment_digest("shady")
    other = sign_run(
        replace(TERMS, environments=(EnvironmentPin(name="shady", digest=bytes(32)),)), OWNER
    )
    run = sign_run(
        replace(TERMS, environments=(EnvironmentPin(name="shady", digest=digest),)), OWNER
    )
    async with open_world(tmp_path / "node") as world:
        with pytest.raises(ConfigError, match="differs from the one of run"):
            async with open_environment_of(world, other, MachineLimits()):
                pass
        assert "imported" not in caplog.text
        caplog.set_level(logging.INFO)
        async with open_environment_of(world, run, MachineLimits()) as environment:
            assert len(await environment.tasks([bytes(32)])) == 1
    assert "prints: imported, and" in caplog.text
    assert not (tmp_path / "imported").exists()
    assert "shady_env" not in sys.modules
    (tmp_path / "shady_env" / "helper.py").write_text("x = 1\n")
    assert environment_digest("shady") != digest


def test_a_machine_has_limits_of_its_own() -> None:
    """No run, however well signed, makes a machine allocate more than its owner allows."""
    shape = replace(
        SORTER, width=4096, layers=40, query_heads=32, head_width=128, feed_forward=16384
    )
    large = sign_run(replace(TERMS, model=replace(TERMS.model, shape=shape)), OWNER)
    assert large.terms.model.shape.parameters > 9e9
    with pytest.raises(ConfigError, match=r"memory = .* this machine allows 17,179,869,184"):
        engine_of(large)
    assert engine_of(large, MachineLimits(memory=1 << 40)).shape == shape
    wide = SamplingTerms(steps=1, max_new_tokens=100_000, submission=1, group_size=4)
    model = replace(TERMS.model, context=MAX_CONTEXT)
    long = sign_run(replace(TERMS, sampling=wide, model=model), OWNER)
    with pytest.raises(ConfigError, match="max_new_tokens = 100,000"):
        engine_of(long)
    assert memory_needed(SORTER, NETWORK.sampling, 4096) < 16 * 2**20
    pulled = replace(NETWORK.learner, options={"kl_reference": 0.01})
    more = memory_needed(SORTER, NETWORK.sampling, 4096, pulled)
    copy = 4 * SORTER.parameters
    assert more == memory_needed(SORTER, NETWORK.sampling, 4096) + copy


def test_a_prompt_as_long_as_the_context_is_counted() -> None:
    """A chat template of 60 bytes makes a prompt of a million tokens: the machine allowed 2 GiB
    that became 128, for keys and values of one completion."""
    wide = replace(SORTER, vocabulary=320, width=32, layers=1, head_width=4096, key_heads=4)
    model = replace(TERMS.model, shape=wide, context=MAX_CONTEXT)
    greedy = sign_run(replace(TERMS, model=model), OWNER)
    with pytest.raises(ConfigError, match=r"memory = 20\d,\d{3},"):
        engine_of(greedy)
    usual = replace(model, context=4096)
    assert engine_of(sign_run(replace(TERMS, model=usual), OWNER)).context == 4096


def test_answers_leave_room_for_a_prompt() -> None:
    """Else every task of the run fails, at every node."""
    sampling = replace(TERMS.sampling, max_new_tokens=64)
    with pytest.raises(ValueError, match="max_new_tokens = 64 leave no room for a prompt"):
        replace(TERMS, sampling=sampling, model=replace(TERMS.model, context=64))
    assert replace(TERMS, sampling=sampling, model=replace(TERMS.model, context=65))


def test_what_pretends_has_no_tokenizer() -> None:
    """Its environments run in the node's own process, and with them the owner's template and
    tokenizer would: the one hangs the node, the other ends it."""
    names = ("config.json", "tokenizer.json", "model.safetensors")
    base = tuple(FilePin(name=name, size=1, digest=bytes(32)) for name in names)
    with pytest.raises(ValueError, match="takes no base"):
        replace(TERMS.model, engine="fake", base=base)
    hostile: Any = replace(TERMS, model=replace(TERMS.model, base=base)).to_table()
    hostile["model"]["engine"] = "fake"
    with pytest.raises(BadMessage, match="takes no base"):
        decode_run_untrusted(sign_table(hostile))
