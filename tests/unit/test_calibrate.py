"""Calibration: what it measures, what it concludes, what it writes."""

from __future__ import annotations

import json
import tomllib
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from p2p.errors import ConfigError
from p2p.node.tables import read_table, write_table
from proofs.checks import FALSE_REJECTIONS, LADDER, LARGEST, Evidence, Limits
from proofs.sampling import DrawRule
from roles.calibrate.command import main
from roles.calibrate.limits import (
    MIN_GROUPS,
    MIN_TOKENS,
    RESAMPLED,
    binomial_bound,
    check_enough,
    extrapolate,
    fit,
    loosest,
    poisson_bound,
    record_to_toml,
    rejected_groups,
    rejected_pools,
    resampled,
    to_toml,
)
from roles.calibrate.weights import low_rank, one_step_away, rewrite, to_fp8, to_int4, to_int8
from roles.contract import sign_run
from roles.contract.core.file import Calibration, EnvironmentPin, decode_run_untrusted
from roles.contract.core.shape import Dtype
from roles.envs.base import environment_digest
from roles.own.draft import check_calibrated, read_draft
from roles.own.init import make
from roles.own.layout import RunFolder
from roles.rl.learner import FILE, write_learner
from roles.rl.recipes import SORTING
from tests.support.packages import needs_gym
from tests.support.runs import DRAFT, OWNER, TERMS
from tests.support.toys import QUICK, sorting_learner, sorting_sampling


def noisy(rng: np.random.Generator, scale: float = 1.0) -> Evidence:
    """A group in bfloat16: 1.7 % of its tokens are off, with an exponential tail of 0.08, and
    its mantissas as in docs/protocols/toploc.md."""
    gaps = scale * rng.exponential(0.08, int(rng.poisson(300 * 0.017 * scale)))
    mean = float(scale * rng.normal(1.4, 0.12))
    return Evidence(
        tokens=300, malformed="", exponent_mismatches=int(rng.poisson(3)), mantissa_mean=mean,
        mantissa_median=1.0, draw_distance=0.0,
        off=tuple(int((gaps > step).sum()) for step in LADDER),
        gap_mean=float(gaps.sum() / 300), gap_max=float(gaps.max(initial=0.0)),
        end_probability=1.0, surprise=float(rng.normal()),
        mantissa_worst=mean + float(rng.exponential(0.2)), chunks=8.0,
        largest=tuple(sorted(gaps.tolist(), reverse=True)[:LARGEST]),
    )  # fmt: skip


def test_limits_leave_honest_noise_in_and_what_is_twice_as_far_out() -> None:
    """The largest gap of 77,000 tokens is less than one submission in 10,000 shows."""
    rng = np.random.default_rng(0)
    limits = fit([noisy(rng) for _ in range(256)], DrawRule.GUMBEL, 8)
    held_out = [noisy(rng) for _ in range(4000)]
    assert rejected_groups(held_out, limits).rejected == 0
    assert rejected_pools(held_out, limits, 8).rejected == 0
    assert resampled(held_out, limits, 8).rejected == 0
    assert rejected_pools([noisy(rng, 2.0) for _ in range(64)], limits).share == 1
    shares = dict(limits.off)
    assert 0.016 < shares[1e-5] < 0.021
    assert 1.6 < limits.pooled_mantissa_mean < 1.8
    # 0.08 ln(share / chance): the chance of a token is one in 300 million
    assert 1.2 < limits.gap_max < 2.5
    assert 0.07 < limits.gap_scale < 0.11


def test_a_tail_is_read_off_at_the_chance_that_is_promised() -> None:
    rng = np.random.default_rng(1)
    values = rng.exponential(0.09, 100_000)
    truth = 0.09 * np.log(1 / 1e-8)
    assert truth < extrapolate(values, 100_000, 1e-8, 256) < 1.5 * truth
    heavy = 0.09 / 0.2 * (rng.uniform(size=100_000) ** -0.2 - 1)
    assert extrapolate(heavy, 100_000, 1e-8, 256) > 0.6 * 0.09 / 0.2 * (1e-8**-0.2 - 1)
    assert extrapolate([], 1000, 1e-8, 256) == 0
    assert extrapolate([0.5] * 300, 1000, 1e-8, 256) == 0.5


def test_too_little_noisy_work_says_how_much_it_takes() -> None:
    rng = np.random.default_rng(2)
    few = [noisy(rng) for _ in range(40)]
    with pytest.raises(
        ConfigError, match=f"12,000 honest tokens in 40 .* {MIN_TOKENS:,} tokens"
    ):
        check_enough(few)
    check_enough([replace(few[0], tokens=-(-MIN_TOKENS // MIN_GROUPS))] * MIN_GROUPS)
    with pytest.raises(ConfigError, match="times as many --sequences"):
        check_enough([replace(few[0], tokens=MIN_TOKENS)] * (MIN_GROUPS - 1))
    check_enough([replace(few[0], off=(0,) * len(LADDER))])  # no tail to fit


def test_limits_of_exact_numerics_are_those_of_float32() -> None:
    rng = np.random.default_rng(0)
    exact = replace(
        noisy(rng), exponent_mismatches=0, mantissa_mean=0.0, mantissa_median=0.0, gap_mean=0.0,
        mantissa_worst=0.0, gap_max=0.0, draw_distance=1.3e-6, surprise=0.0,
        off=(0,) * len(LADDER), largest=(),
    )  # fmt: skip
    assert fit([exact] * 200, DrawRule.CDF, 8) == Limits.fp32()
    assert fit([exact] * 20, DrawRule.CDF, 8) == Limits.fp32()
    far = replace(exact, off=(1, 0, 0, 0, 0), largest=(0.04,))
    assert fit([far] * 300, DrawRule.CDF, 8).draw_distance == pytest.approx(0.04)


def test_limits_of_several_pairs_let_in_what_each_lets_in() -> None:
    wide, narrow = Limits.bf16(), replace(Limits.fp32(), end_probability=1e-13, surprise=30.0)
    both = loosest([wide, narrow])
    assert both == loosest([narrow, wide])
    assert both == replace(
        wide, end_probability=1e-13, surprise=30.0, off=((1e-5, dict(wide.off)[1e-5]),)
    )
    assert loosest([wide]) == wide
    other = replace(wide, off=((1e-5, 0.03), (0.4, 1e-4)))
    assert loosest([wide, other]).off == ((1e-5, 0.03), (0.4, 2e-4))


def test_bounds_are_those_of_the_books() -> None:
    """Clopper and Pearson at 95 %, one-sided; Poisson at 98 %."""
    assert binomial_bound(0, 100) == pytest.approx(1 - 0.05**0.01, rel=1e-6)
    assert binomial_bound(5, 100) == pytest.approx(0.1023, abs=1e-4)
    assert binomial_bound(400, 4096) == pytest.approx(0.1056, abs=1e-4)
    assert binomial_bound(7, 7) == binomial_bound(0, 0) == 1.0
    assert poisson_bound(0) == pytest.approx(3.912, abs=1e-3)
    assert poisson_bound(10, 0.95) == pytest.approx(16.96, abs=0.01)


def test_a_draft_reads_what_is_written_and_no_limit_is_lower_for_its_digits() -> None:
    rng = np.random.default_rng(3)
    limits = fit([noisy(rng) for _ in range(64)], DrawRule.GUMBEL, 8)
    table = tomllib.loads("# note\n" + to_toml(limits))["limits"]
    draft = {**DRAFT, "limits": table}
    read = asdict(read_draft(draft, "draft.toml", 0.0).limits)
    pairs = zip(limits.off, read.pop("off"), strict=True)
    for (step, share), (same, more) in pairs:
        assert step == same
        assert share <= more <= 1.01 * share
    for name, value in read.items():
        assert getattr(limits, name) <= value <= 1.01 * getattr(limits, name)


def test_other_weights_differ_as_much_as_they_should(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 30)).astype(np.float32)
    norm = np.ones(30, dtype=np.float32)
    save_file({"w": values, "norm": norm}, tmp_path / "policy.safetensors")
    source = tmp_path / "policy.safetensors"
    moved = load_file(rewrite(source, tmp_path / "moved.safetensors", one_step_away(1e-3)))
    assert np.abs(moved["w"] - values) == pytest.approx(1e-3, rel=1e-3)
    assert (moved["norm"] == norm).all()
    rounded = load_file(rewrite(source, tmp_path / "int8.safetensors", to_int8))["w"]
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(rounded - values) <= 0.501 * steps).all()
    assert all(len(np.unique(row)) <= 255 for row in rounded)
    rounded = load_file(rewrite(source, tmp_path / "int4.safetensors", to_int4))["w"]
    assert all(len(np.unique(row)) <= 15 for row in rounded)
    adapted = load_file(rewrite(source, tmp_path / "adapted.safetensors", low_rank(1e-3, 4)))
    change = adapted["w"].astype(np.float64) - values
    assert np.linalg.norm(change) == pytest.approx(1e-3 * np.linalg.norm(values), rel=1e-3)
    sizes = np.linalg.svd(change, compute_uv=False)
    assert sizes[3] > 100 * sizes[4]
    assert (low_rank(1e-3, 4)(values) == adapted["w"]).all()


def test_floats_of_eight_bits_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32) ** 5
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    scaled = torch.from_numpy(values / scale).to(torch.float8_e4m3fn).float().numpy()
    assert to_fp8(values) == pytest.approx(scaled * scale, rel=1e-6, abs=0)
    assert not to_fp8(np.zeros((2, 3), dtype=np.float32)).any()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pin = EnvironmentPin(name="sort", digest=environment_digest("sort"))
    sampling = sorting_sampling(group_size=4)
    path = tmp_path_factory.mktemp("run") / "run.shoal"
    path.write_bytes(
        sign_run(replace(TERMS, environments=(pin,), sampling=sampling), OWNER).document
    )
    path.with_name(FILE).write_text(write_learner(sorting_learner(warm_up=QUICK)))
    return path


def test_the_command_finds_every_cheat_and_no_honest_group(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "limits.toml"
    learner = run_file.with_name(FILE)
    asked = [
        "--run", str(run_file), "--learner", str(learner), "--sequences", "256", "--json",
        "--out", str(out),
    ]  # fmt: skip
    assert main(asked) == 0
    table = json.loads(capsys.readouterr().out)
    honest, *cheats = table["ways"]
    assert (honest["way"], honest["groups_rejected"]) == ("honest, held out", 0)
    said = table["submissions"]
    assert said["apart"] == {"rejected": 0, "of": 4}
    assert said["rejected_at_most"] == pytest.approx(1 - 0.05 ** (1 / 4))
    assert said["drawn_again"] == {"rejected": 0, "of": RESAMPLED}
    assert said["promised"] == FALSE_REJECTIONS
    found = {row["way"]: row["pools_rejected"] for row in cheats}
    assert found == {
        "temperature 0.9": 1, "greedy": 1, "other seed": 1, "other prompt": 1, "best of 4": 1,
        "one step of 0.0008": 1, "int8 weights": 1, "fp8 weights": 1, "int4 weights": 1,
    }  # fmt: skip
    written = tomllib.loads(out.read_text())
    assert written["limits"]["mantissa_mean"] == pytest.approx(
        table["limits"]["mantissa_mean"], rel=0.01
    )
    run = decode_run_untrusted(run_file.read_bytes())
    record = written["calibration"]
    assert (record["model"], record["tokens"]) == (
        run.terms.model.digest.hex(), table["tokens"],
    )  # fmt: skip
    assert (record["generators"], record["environments"]) == (["torch"], {"sort": 1.0})
    again = replace(
        run.terms,
        calibration=read_table(
            Calibration, {**record, "model": bytes.fromhex(record["model"])}, "record"
        ),
    )
    assert sign_run(again, OWNER).terms.calibration == again.calibration


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--run", "nowhere.shoal"], "nowhere.shoal"),
        (["--run", "RUN"], "no --learner"),
        (
            ["--run", "RUN", "--learner", "LEARNER", "--generator", "abacus"],
            "no engine 'abacus'",
        ),
        (["--run", "RUN", "--policy", "nowhere"], "--policy nowhere is not there"),
    ],
)
def test_what_cannot_be_calibrated_is_one_sentence(
    arguments: list[str], match: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"RUN": str(run_file), "LEARNER": str(run_file.with_name(FILE))}
    asked = [files.get(one, one) for one in arguments]
    assert main(asked) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert match in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "kinds", "reason"),
    [
        ("arithmetic", {"addition": 1.0, "adition": 1.0}, "no kind 'adition'; it has addition"),
        pytest.param("reasoning-gym", {"chess": 1.0}, "no family 'chess'", marks=needs_gym),
        pytest.param("reasoning-gym", {"chain_sum": 1.0, "countdown": 1.0},
                     "'countdown' of reasoning-gym runs answers as code", marks=needs_gym),
        ("sort", {"long": 1.0}, "'sort' cannot be made with kinds"),
    ],
)  # fmt: skip
def test_kinds_that_an_environment_lacks_are_not_signed(
    environment: str, kinds: dict[str, float], reason: str
) -> None:
    """The run was signed, and each node of it refused to start."""
    table = {**DRAFT, "environments": [{"name": environment, "kinds": kinds}]}
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
        model=model.digest, dtype=model.dtype, draw=model.draw, generators=("torch",),
        validators=("torch",), environments={environment: 1.0}, tokens=131_072,
        submissions=64, rejected=0, date="2026-11-24",
    )  # fmt: skip
    table = {
        **DRAFT,
        "model": {"shape": write_table(SORTING.shape), "dtype": "bfloat16", "draw": "gumbel"},
        "sampling": {"steps": 1, "group_size": 8, "max_new_tokens": 8},
        **tomllib.loads(limits + record_to_toml(record)),
    }
    raises = pytest.raises(ConfigError, match=reason) if reason else nullcontext()
    with raises:
        check_calibrated(read_draft(table, "draft.toml", now=0.0))


def draft(*files: Path) -> str:
    tables = (
        f'[[environments]]\nname = "questions"\ndata = {json.dumps(str(file))}\n'
        for file in files
    )
    return 'name = "run"\nepoch = 1\ndays = 30\n' + "".join(tables)


@pytest.mark.parametrize("name", ["a\nb", "a\x1bb", "a\udcffb"])
def test_a_folder_whose_name_cannot_be_written_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no line of a file"):
        make(RunFolder(tmp_path / name), draft(), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_files_that_no_run_can_have_are_a_sentence(tmp_path: Path) -> None:
    """Of two files of one name both environments got the second; a device has no end."""
    files = [tmp_path / folder / "questions.jsonl" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(str(file))
    for wrong, said in ((files, "have one name"), ([Path("/dev/null")], "no regular file")):
        with pytest.raises(ConfigError, match=said):
            make(RunFolder(tmp_path / "run"), draft(*wrong), tmp_path, 1)
