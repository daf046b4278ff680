"""The run file: one canonical signed form, strict reading, and who may do what."""

from __future__ import annotations

import hashlib
import json
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
from p2p.node.admission import Capability
from p2p.node.tables import write_table, write_toml
from p2p.sandbox.confinement import Mechanism
from p2p.sandbox.launch import find_containment
from p2p.wire import unpack_untrusted
from proofs.checks import Limits
from proofs.sampling import DrawRule
from roles.contract.core.file import (
    MAX_RUN,
    AdmissionMode,
    AdmissionRules,
    Calibration,
    EnvironmentPin,
    decode_run_untrusted,
    open_run,
    sign_run,
)
from roles.contract.core.pin import FilePin
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import MAX_CONTEXT, Dtype
from roles.engines.config import EngineConfig, MachineLimits, engine_of, memory_needed
from roles.envs.base import check_pins, environment_digest, make_environment
from roles.envs.client import open_environment_of, setup_of
from roles.own.__main__ import main
from roles.own.draft import read_draft
from roles.rl.recipes import NETWORK, SORTER
from tests import run_file
from tests.model_folders import make_folder
from tests.support.packages import install_shady
from tests.support.runs import (
    DRAFT,
    MODEL,
    OWNER,
    RUN,
    SAMPLING,
    SORTING_TABLES,
    STRANGER,
    TERMS,
    TRAINER,
    VALIDATOR,
    sign_table,
    with_value,
)


def test_what_was_signed_is_what_is_read() -> None:
    read = open_run(RUN.document)
    assert read == RUN
    assert read.terms == TERMS
    assert read.owner == OWNER.peer_id
    assert (len(read.id), read.epoch, read.name) == (32, 1, "sorting")
    assert len(RUN.document) < MAX_RUN / 64
    # its id depends on owner and name only
    assert sign_run(replace(TERMS, epoch=2), OWNER).id == RUN.id
    assert sign_run(replace(TERMS, name="other"), OWNER).id != RUN.id
    assert sign_run(TERMS, STRANGER).id != RUN.id


def test_every_flipped_byte_is_noticed() -> None:
    for position in range(len(RUN.document)):
        data = bytearray(RUN.document)
        data[position] ^= 1
        with pytest.raises(BadMessage):
            decode_run_untrusted(bytes(data))


def _table() -> dict[str, object]:
    document = unpack_untrusted(RUN.document)
    assert isinstance(document, list)
    table = unpack_untrusted(document[2], max_items=1024)
    assert isinstance(table, dict)
    return table


def test_an_honest_owner_with_a_wrong_table_is_refused_with_the_reason() -> None:
    assert decode_run_untrusted(sign_table(_table())) == RUN
    changes: list[tuple[dict[str, object], str]] = [
        ({"epoc": 1}, "there is no key 'epoc'; did you mean 'epoch'"),
        ({"epoch": 0}, "epoch must be from 1"),
        ({"epoch": "1"}, "must be a whole number"),
        ({"trainers": []}, "at least one environment and one trainer"),
        ({"trainers": [str(TRAINER.peer_id)] * 2}, "each once"),
        ({"name": "two\nlines"}, "printable"),
        ({"sampling": {**write_table(NETWORK.sampling), "temperature": 1}}, "canonical"),
        ({"delivery": {"chunk_bytes": 1}}, "chunk_bytes must be 0, or from 4 KiB"),
        ({"delivery": {"chunk_bytes": 0, "adapters": False}}, "canonical"),
        ({"delivery": {"chunk_bytes": 0, "adapters": True}}, "they need a base"),
    ]
    for change, reason in changes:
        with pytest.raises(BadMessage, match=reason):
            decode_run_untrusted(sign_table({**_table(), **change}))


def test_trainers_publish_validators_judge_and_the_rest_goes_by_admission() -> None:
    assert RUN.may(TRAINER.peer_id, Capability.PUBLISH)
    assert not RUN.may(VALIDATOR.peer_id, Capability.PUBLISH)
    assert RUN.may(VALIDATOR.peer_id, Capability.VALIDATE)
    assert not RUN.may(OWNER.peer_id, Capability.VALIDATE)
    assert RUN.may(STRANGER.peer_id, Capability.GENERATE)
    rules = AdmissionRules(mode=AdmissionMode.ALLOW)
    closed = sign_run(replace(TERMS, admission=rules), OWNER)
    assert not closed.may(STRANGER.peer_id, Capability.GOSSIP)
    for peer in (OWNER, TRAINER, VALIDATOR):
        assert closed.may(peer.peer_id, Capability.GOSSIP)
    invited = sign_run(
        replace(TERMS, admission=replace(rules, allowed=(STRANGER.peer_id,))), OWNER
    )
    assert invited.may(STRANGER.peer_id, Capability.GENERATE)
    assert decode_run_untrusted(invited.document) == invited


def test_engine_and_environment_come_from_the_run() -> None:
    config = engine_of(RUN, threads=2)
    assert (config.kind, config.environment, config.threads) == ("torch", "sort", 2)
    assert config.sampling == NETWORK.sampling
    check_pins(RUN)
    pin = EnvironmentPin(name="sort", digest=bytes(32))
    other = sign_run(replace(TERMS, environments=(pin,)), OWNER)
    with pytest.raises(ConfigError, match="differs from the one of run 'sorting'"):
        check_pins(other)


def test_a_draft_fills_in_the_rest() -> None:
    table = {**DRAFT, "days": 1, "limits": {"preset": "bf16", "surprise": 9}}
    terms = read_draft(table, "draft.toml", now=1000.0)
    assert (terms.expiry, terms.sampling.steps) == (1000 + 86_400, 7)
    assert (terms.limits.surprise, terms.limits.mantissa_mean) == (9.0, 5.0)
    assert read_draft({**table, "limits": {}}, "", 0.0).limits == Limits.fp32()
    in_bf16 = {**table, "limits": {}, "model": {**MODEL, "dtype": "bfloat16", "draw": "gumbel"}}
    assert read_draft(in_bf16, "", 0.0).limits == Limits.bf16()
    changes: list[tuple[dict[str, object], str]] = [
        ({"limits": {"preset": "fp8"}}, "draft.toml: limits: preset must be one of fp32, bf16"),
        ({"trainers": ["12D3"]}, r"draft.toml: trainers\[0\]"),
        (
            {"sampling": {"stepps": 3}},
            "draft.toml: sampling: there is no key 'stepps'; did you mean 'steps'",
        ),
        ({"environments": ["chess"]}, "no environment 'chess'"),
        ({"name": ""}, "draft.toml: a run's name"),
    ]
    for change, reason in changes:
        with pytest.raises(ConfigError, match=reason):
            read_draft({**table, **change}, "draft.toml", now=0.0)


def test_a_run_has_several_environments_by_weight(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_bytes(b"content")
    table = {
        **DRAFT,
        "environments": [
            {"name": "arithmetic", "weight": 3, "kinds": {"addition": 2, "stories": 0.5}},
            {"name": "math-exact", "data": str(questions)},
            "sort",
        ],
    }
    terms = read_draft(table, "draft.toml", now=0.0)
    digest = hashlib.sha256(b"content").digest()
    first, second, third = terms.environments
    assert (first.weight, first.kinds) == (3.0, {"addition": 2.0, "stories": 0.5})
    assert second.data == FilePin(name="q.jsonl", size=7, digest=digest)
    assert (third.weight, third.kinds, third.data) == (1.0, {}, None)
    run = sign_run(terms, OWNER)
    assert decode_run_untrusted(run.document) == run
    setup = setup_of(run, MachineLimits(environment_data="here"))
    assert [part.name for part in setup.parts] == ["arithmetic", "math-exact", "sort"]
    assert (setup.folder, setup.model, setup.parts[1].data) == ("here", None, second.data)
    for change, reason in (
        ({"weight": 0}, r"environments\[0\]: weight must be from 1e-06|weight must be from"),
        ({"kinds": {"addition": -1}}, "a weight from 1e-06"),
        ({"kinds": {"addition": float("nan")}}, "is not a number"),
        ({"kinds": {"os:abort": 1.0}}, "a kind of tasks has a name"),
        ({"kinds": {f"k{number}": 1.0 for number in range(300)}}, "at most 256 kinds"),
        ({"data": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"wight": 1}, r"environments\[0\]: there is no key 'wight'; did you mean 'weight'"),
        ({"name": "sort"}, "names each environment once"),
        ({"length_targets": [8]}, "length_targets and length_penalty are set together"),
        ({"length_penalty": 0.5}, "length_targets and length_penalty are set together"),
        ({"length_targets": [0], "length_penalty": 0.5}, "from 1 to"),
        ({"length_targets": [999], "length_penalty": 0.5}, "lower it, or raise max_new_tokens"),
        ({"length_targets": [2], "length_penalty": 0.5}, "need a model with a base"),
    ):
        environments = [{"name": "arithmetic", **change}, {"name": "sort"}]
        with pytest.raises(ConfigError, match=reason):
            read_draft({**table, "environments": environments}, "draft.toml", now=0.0)


PINS = tuple(
    FilePin(name=name, size=1, digest=bytes(32)) for name in ("config.json", "tokenizer.json")
)


def test_a_run_of_text_needs_the_folder_of_its_base() -> None:
    model = replace(TERMS.model, base=PINS, context=100, end_tokens=(2, 5))
    run = sign_run(replace(TERMS, model=model), OWNER)
    with pytest.raises(ConfigError, match="speaks text: its environments need the folder"):
        setup_of(run, MachineLimits())
    text = setup_of(run, MachineLimits(), "model").model
    assert text is not None
    assert (text.folder, text.end_tokens, text.vocabulary) == ("model", (2, 5), 50)
    assert (text.context, text.max_new_tokens) == (100, NETWORK.sampling.max_new_tokens)
    assert engine_of(run).environment is None


def test_the_command_line_signs_and_shows_a_run_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "small")
    questions = tmp_path / "q.jsonl"
    lines = (json.dumps({"question": str(n), "answer": "1"}) for n in range(64))
    questions.write_text("\n".join(lines))
    draft, key, out = (tmp_path / name for name in ("draft.toml", "key", "run.shoal"))
    draft.write_text(
        f'name = "mine"\ntrainers = ["{TRAINER.peer_id}"]\n'
        f'validators = ["{VALIDATOR.peer_id}"]\n'
        f'[model]\nbase = "{folder}"\ndraw = "gumbel"\ndtype = "bfloat16"\n'
        f'[[environments]]\nname = "math-exact"\ndata = "{questions}"\n'
        f"{write_toml({'sampling': SAMPLING})}"
    )
    create = ["create", str(draft), "--key", str(key), "--out", str(out)]
    assert main(create) == 2
    error = capsys.readouterr().err
    assert "computes in bfloat16, and its limits were measured on no model" in error
    assert "shoal calibrate" in error
    assert error.count("\n") == 1
    assert not out.exists()
    assert main([*create, "--uncalibrated"]) == 0
    written = capsys.readouterr().out
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out == written
    assert "base        config.json, model.safetensors, tokenizer.json" in written
    assert "limits      uncalibrated: the bf16 preset" in written
    assert main(["show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    base = {pin["name"]: pin["digest"] for pin in shown["model"]["base"]}
    weights = (folder / "model.safetensors").read_bytes()
    assert base["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    (environment,) = shown["environments"]
    assert environment["data"]["digest"] == hashlib.sha256(questions.read_bytes()).hexdigest()


RECORD = Calibration(
    model=TERMS.model.digest, dtype=Dtype.FLOAT32, draw=DrawRule.CDF, validators=("torch",),
    generators=("torch", "vllm"), environments={"sort": 1.0}, tokens=131_072, submissions=64,
    rejected=0, date="2026-11-24",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": bytes(32)}, "the calibration is of another model .000000000000, this run"),
        (
            {"dtype": Dtype.BFLOAT16},
            "the calibration is of bfloat16 and the rule cdf, this run",
        ),
        ({"draw": DrawRule.GUMBEL}, "the calibration is of float32 and the rule gumbel, this"),
    ],
)
def test_a_calibration_of_something_else_is_refused(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(TERMS, calibration=replace(RECORD, **change))


def test_the_digest_of_a_model_names_its_base_or_its_seed() -> None:
    model = TERMS.model
    assert replace(model, seed=1).digest != model.digest
    based = replace(model, base=PINS)
    assert replace(based, seed=1, context=100).digest == based.digest != model.digest
    other = (PINS[0], replace(PINS[1], digest=bytes(31) + b"1"))
    assert replace(model, base=other).digest != based.digest


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"max_new_tokens": 4096}, r"lower submission in \[sampling\] to at most 21"),
        ({"max_new_tokens": 100_000}, r"lower group_size in \[sampling\] to at most 14"),
        ({"max_new_tokens": 200_000}, r"at most 131072 of max_new_tokens"),
        ({"group_size": 2000, "submission": 1}, r"at most 1024 of group_size"),
    ],
)
def test_a_recipe_whose_submissions_no_message_carries_is_not_signed(
    change: dict[str, int], remedy: str
) -> None:
    """An oversized submission locked its worker out for ever. Nor is it read."""
    sampling = replace(NETWORK.sampling, submission=64)
    with pytest.raises(ValueError, match=remedy):
        replace(TERMS, sampling=replace(sampling, **change))
    table = {**DRAFT, "sampling": {**SAMPLING, "submission": 64, **change}}
    with pytest.raises(ConfigError, match=remedy):
        read_draft(table, "run.toml", 0.0)


def diloco_draft(**diloco: object) -> dict[str, object]:
    return {
        "name": "text", "algorithm": "diloco", "trainers": [str(TRAINER.peer_id)],
        "diloco": diloco, "model": MODEL,
    }  # fmt: skip


def test_a_run_that_pre_trains_has_trainers_only() -> None:
    draft = diloco_draft(inner_steps=500, anchor=str(TRAINER.peer_id), codec="int8")
    run = sign_run(read_draft(draft, "draft", 0.0), OWNER)
    again = decode_run_untrusted(run.document)
    assert again == run
    assert again.terms.environments == again.terms.validators == ()
    assert again.terms.diloco.anchor == TRAINER.peer_id
    again.check_job(TRAINER.peer_id, "trainer")
    with pytest.raises(ConfigError, match="no validator"):
        again.check_job(VALIDATOR.peer_id, "validator")
    with pytest.raises(ConfigError, match="is no trainer"):
        again.check_job(VALIDATOR.peer_id, "trainer")
    admitted = sign_run(read_draft(diloco_draft(joining="admitted"), "draft", 0.0), OWNER)
    admitted.check_job(VALIDATOR.peer_id, "trainer")


def test_a_run_of_many_trainers_that_learn_from_rewards_names_environments() -> None:
    terms = read_draft({**diloco_draft(goal="reward"), **SORTING_TABLES}, "draft", 0.0)
    assert [pin.name for pin in terms.environments] == ["sort"]
    run = decode_run_untrusted(sign_run(terms, OWNER).document)
    assert engine_of(run).environment == "sort"
    with pytest.raises(ValueError, match="at least one environment"):
        replace(terms, environments=())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"algoritm": "diloco"}, "did you mean 'algorithm'"),
        ({"algorithm": "sgd"}, "one of grpo, diloco"),
        ({"diloco": {"codec": "int2"}}, "one of fp32, int8, int4"),
        ({"diloco": {"corpora": {"a": 0.0}}}, "leave out"),
        ({"diloco": {"corpora": {}}}, "1 to 64 corpora"),
        ({"diloco": {"grace": 90.0}}, "outlast"),
        ({"diloco": {"inner_steps": 0}}, "inner_steps"),
        (
            {"algorithm": "grpo", "environments": [], "sampling": SAMPLING},
            "at least one environment",
        ),
    ],
)
def test_a_draft_of_a_run_that_pre_trains_is_checked(
    table: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_draft({**diloco_draft(), **table}, "draft", 0.0)


def test_a_store_too_small_for_the_runs_lag_is_named() -> None:
    run = sign_run(replace(TERMS, sampling=replace(TERMS.sampling, lag=4)), OWNER)
    run.check_store(5, 2**40)
    with pytest.raises(ConfigError, match=r"keep_versions in .shardcast. to at least 5"):
        run.check_store(4, 2**40)
    size = 4 * run.terms.model.shape.parameters
    run.check_store(5, 5 * size)
    with pytest.raises(ConfigError, match=r"disk in \[share\]"):
        run.check_store(5, 5 * size - 1)


def test_the_reference_of_run_files_is_what_the_code_says() -> None:
    assert run_file.PAGE.read_text(encoding="utf-8") == run_file.page(), (
        "python -m tests.run_file --write"
    )


# A good signature and a hostile owner: what a run file can make a volunteer's machine do


INF, NAN = math.inf, math.nan
HOSTILE = (
    0, 1, -1, 2, 10**9, 10**12, 2**63, -(2**63), 0.0, -1.0, 1e-300, 1e308, INF, -INF, NAN,
)  # fmt: skip


def numbers(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
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
    """key_heads = 0 raised ZeroDivisionError in every node."""
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
    "os:abort", "os:fork", "http.server:test", "roles.envs.sort:SortEnvironment", "../x", "",
)  # fmt: skip


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
    run, other = (
        sign_run(
            replace(TERMS, environments=(EnvironmentPin(name="shady", digest=one),)), OWNER
        )
        for one in (digest, bytes(32))
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
    """A template of 60 bytes makes a prompt of a million tokens: 128 GiB of keys."""
    wide = replace(SORTER, vocabulary=320, width=32, layers=1, head_width=4096, key_heads=4)
    model = replace(TERMS.model, shape=wide, context=MAX_CONTEXT)
    greedy = sign_run(replace(TERMS, model=model), OWNER)
    with pytest.raises(ConfigError, match=r"memory = 20\d,\d{3},"):
        engine_of(greedy)
    usual = replace(model, context=4096)
    assert engine_of(sign_run(replace(TERMS, model=usual), OWNER)).context == 4096


def test_answers_leave_room_for_a_prompt() -> None:
    sampling = replace(TERMS.sampling, max_new_tokens=64)
    with pytest.raises(ValueError, match="max_new_tokens = 64 leave no room for a prompt"):
        replace(TERMS, sampling=sampling, model=replace(TERMS.model, context=64))
    assert replace(TERMS, sampling=sampling, model=replace(TERMS.model, context=65))


def test_what_pretends_has_no_tokenizer() -> None:
    """The owner's template and tokenizer would run in the node's process."""
    base = (*PINS, FilePin(name="model.safetensors", size=1, digest=bytes(32)))
    with pytest.raises(ValueError, match="takes no base"):
        replace(TERMS.model, engine="fake", base=base)
    hostile: Any = replace(TERMS, model=replace(TERMS.model, base=base)).to_table()
    hostile["model"]["engine"] = "fake"
    with pytest.raises(BadMessage, match="takes no base"):
        decode_run_untrusted(sign_table(hostile))
