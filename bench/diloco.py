"""DiLoCo's losses and traffic beside data parallel's, and the errors and costs of encodings.

``python -m bench diloco [--json FILE] [--steps 2000] [--seeds 3] [--only NAME] [--quick]``

Four members in one process, by the product's own inner steps, quantisers, sums and outer
step, on Python's own library as bytes: one layer, 65,760 weights, 4 windows of 64 bytes a
member and step. Data parallel takes the same tokens in one batch; "by rounds" it is the
product's own, gradients and all, and must find the same. Traffic is what a member
sends, in times less than float32 gradients at every step. Quantisers: the relative error of an
encode and decode on normal and heavy-tailed values, beside PRIME's, and megabytes of float32 in
a CPU second. ``--quick`` leaves the training out. ``--demo`` trains what ``shoal demo
--diloco`` does, with three members, beside data parallel at equal tokens.

The whole table is 20 to 30 minutes of one core. With ``--results FILE`` each course is added to
that file as a line of JSON when it ends, and what stands there is not computed again: so
``--minutes 9`` pieces add up, and two processes may share the file if ``--only`` parts the
work. Exchanges on shaped lines, beside gloo: ``python -m bench allreduce``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from bench.prime import prime_decode, prime_encode
from bench.report import Report
from p2p.identity import KeyPair
from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.demo.pretraining import DEMO_TERMS
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.pieces import shares, total_norm
from roles.diloco.core.quant import Values, decode_untrusted, encode, encoded_bytes
from roles.diloco.core.windows import windows
from roles.diloco.corpus import Windows, open_corpora
from roles.diloco.pretrain import Pretrainer
from roles.engines.config import EngineConfig
from roles.own.pretraining import SHAPE

MEMBERS: Final = 4
DEMO_MEMBERS: Final = 3
"""Members in most rounds of the demo."""
VALUES: Final = 1 << 22
"""Values of the quantisers' test vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table."""

    name: str
    inner_steps: int
    codec: Codec
    outer_rate: float = 0.9
    outer_momentum: float = 0.5
    outer: Outer = Outer.NESTEROV
    fragments: int = 1

    @property
    def factor(self) -> float:
        """Times less traffic than float32 gradients at every step."""
        steps = self.inner_steps * self.fragments
        return steps * 4 * VALUES / encoded_bytes(self.codec, VALUES)

    def terms(self, common: DilocoTerms) -> DilocoTerms:
        """Return the terms of its run, with the same inner steps in all."""
        return replace(
            common, inner_steps=self.inner_steps, codec=self.codec, outer=self.outer,
            outer_steps=common.total_steps // self.inner_steps, fragments=self.fragments,
            outer_rate=self.outer_rate, outer_momentum=self.outer_momentum,
        )  # fmt: skip


PARALLEL: Final = Case(name="data parallel", inner_steps=1, codec=Codec.FP32)
CASES: Final = (
    *(
        Case(name=f"H {steps}, {codec.value}", inner_steps=steps, codec=codec)
        for steps in (50, 100, 500)
        for codec in (Codec.FP32, Codec.INT8, Codec.INT4)
    ),
    Case(
        name="H 100, fp32, PRIME's outer", inner_steps=100, codec=Codec.FP32,
        outer_rate=0.7, outer_momentum=0.9,
    ),
    Case(name="H 100, int4, 4 fragments", inner_steps=25, codec=Codec.INT4, fragments=4),
    Case(
        name="data parallel, by rounds", inner_steps=1, codec=Codec.FP32, outer=Outer.PARALLEL
    ),
)  # fmt: skip


def run(args: list[str]) -> int:
    """Run the bench; 1 if 4 bits cost more than two standard errors beside float32."""
    parser = argparse.ArgumentParser(prog="python -m bench diloco")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4, help="of a member's inner step")
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--results", type=Path, help="courses found, a JSON line each")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no course later")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--demo", action="store_true", help="the demo's model and terms")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    report, console = Report("diloco"), Console(file=sys.stdout)
    quantisers(report)
    failures: list[str] = []
    if not options.quick:
        setting = DEMO if options.demo else plain(options.steps, options.windows)
        terms = setting.terms
        corpus = open_corpora(
            terms.corpora, {}, str.encode, end=0, vocabulary=256, window=terms.window,
            held_out=terms.held_out,
        )  # fmt: skip
        wanted = options.only or (DEMO_CASES if options.demo else ())
        cases = [one for one in (PARALLEL, *CASES) if not wanted or one.name in wanted]
        results = Results(options.results, setting, console)
        results.fill(corpus, cases, options.seeds, options.minutes)
        failures = results.tell(report, cases)
    console.print(str(report), highlight=False, soft_wrap=True)
    report.write(options.json)
    for failure in failures:
        console.print(failure)
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class Setting:
    """The training that all rows share."""

    terms: DilocoTerms
    members: int = MEMBERS
    layers: int = 1

    def config(self, seed: int) -> EngineConfig:
        """Return the configuration of the model."""
        shape = replace(SHAPE, layers=self.layers)
        return EngineConfig(shape=shape, environment=None, seed=seed)

    @property
    def key(self) -> dict[str, int]:
        """Key of a stored result, beside its case and seed."""
        terms = self.terms
        return {
            "steps": terms.total_steps, "windows": terms.sequences, "members": self.members,
            "layers": self.layers,
        }  # fmt: skip


def plain(steps: int, windows: int) -> Setting:
    """Return the setting of the table."""
    terms = DilocoTerms(
        outer_steps=steps // 100, inner_steps=100, warmup=200, sequences=windows
    )
    return Setting(terms)


DEMO: Final = Setting(DEMO_TERMS, DEMO_MEMBERS, SHAPE.layers)
DEMO_CASES: Final = ("data parallel", "H 100, int4")


class Results:
    """Held-out losses by case and seed, kept in a file if there is one."""

    def __init__(self, path: Path | None, setting: Setting, console: Console) -> None:
        self._path, self._setting, self._console = path, setting, console
        self._losses: dict[tuple[str, int], float] = {}
        kept = path.read_text("utf-8") if path is not None and path.exists() else ""
        for row in map(json.loads, kept.splitlines()):
            if {"members": MEMBERS, "layers": 1, **row}.items() >= setting.key.items():
                self._losses[row["case"], row["seed"]] = row["loss"]

    def fill(self, corpus: Windows, cases: list[Case], seeds: int, minutes: float) -> None:
        """Train every case with every seed, as far as the time allows."""
        began = time.perf_counter()
        for seed in range(seeds):
            for case in cases:
                if (case.name, seed) in self._losses:
                    continue
                if time.perf_counter() - began > 60 * minutes:
                    return
                course = parallel if case is PARALLEL else diloco
                self._keep(case, seed, course(corpus, self._setting, case, seed))

    def _keep(self, case: Case, seed: int, loss: float) -> None:
        self._losses[case.name, seed] = loss
        self._console.print(f"seed {seed}  {case.name:28} {loss:.4f}", highlight=False)
        if self._path is not None:
            row = {"case": case.name, "seed": seed, "loss": loss, **self._setting.key}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def of(self, case: Case) -> dict[int, float]:
        """Return results by seed."""
        return {seed: loss for (name, seed), loss in self._losses.items() if name == case.name}

    def tell(self, report: Report, cases: list[Case]) -> list[str]:
        """Print losses, the lead of data parallel, and traffic. Return the goals that were
        missed."""
        known = [case for case in cases if self.of(case)]
        parallel = self.of(PARALLEL)
        for case in known:
            losses = self.of(case)
            report.add(
                "pre-training", case.name, "held-out loss", "nats a byte", [*losses.values()]
            )
            gaps = [losses[seed] - parallel[seed] for seed in losses if seed in parallel]
            if gaps:
                mean = float(np.mean(gaps))
                report.add("pre-training", case.name, "above parallel", "nats a byte", [mean])
            report.add("pre-training", case.name, "traffic", "times less", [case.factor])
        return list(_complaints(known, {case.name: self.of(case) for case in known}))


def _complaints(cases: list[Case], losses: dict[str, dict[int, float]]) -> Iterator[str]:
    for case in cases:
        plain = losses.get(case.name.replace(case.codec.value, Codec.FP32.value), {})
        found = losses[case.name]
        both = [found[seed] - plain[seed] for seed in found if seed in plain]
        if case.codec is Codec.INT4 and len(both) > 1:
            error = float(np.std(both, ddof=1) / np.sqrt(len(both)))
            if np.mean(both) > 2 * error:
                yield f"{case.name} is {np.mean(both):.4f} nats above float32"


def parallel(corpus: Windows, setting: Setting, case: Case, seed: int) -> float:
    """Return the held-out loss of data parallel: one batch of all members' windows a step."""
    terms = setting.terms
    trainer = Pretrainer(terms, None, None, setting.config(seed))
    rows = terms.sequences * setting.members
    for step in range(terms.total_steps):
        trainer.train([batch(corpus, seed, step * rows, rows)], step)
    trainer.load(trainer.vector())
    return trainer.loss(held_out(corpus))


def diloco(corpus: Windows, setting: Setting, case: Case, seed: int) -> float:
    """Return the held-out loss of members that average their updates every
    ``case.inner_steps``.
    """
    terms, count = case.terms(setting.terms), setting.members
    members = [Pretrainer(terms, None, None, setting.config(seed)) for _ in range(count)]
    peers = sorted(KeyPair(bytes([one]) * 32).peer_id for one in range(count))
    arithmetic = Arithmetic(terms, members[0].size)
    state, span = arithmetic.begun(members[0].vector()), slice(0, members[0].size)
    for outer in range(terms.outer_steps):
        parts, norms = [], []
        for rank, member in enumerate(members):
            member.load(state[0].copy(), span.start, span.stop)
            first = (outer * count + rank) * terms.phase_windows
            for inner in range(terms.inner_steps):
                rows = batch(corpus, seed, first + inner * terms.sequences, terms.sequences)
                member.train([rows], outer * terms.inner_steps + inner)
            found = arithmetic.encoded(member.update(), outer + 1)
            parts.append(found[0])
            norms.append(found[1])
        lengths = dict(zip(peers, map(total_norm, norms), strict=True))
        by = shares(dict.fromkeys(peers, terms.phase_tokens), lengths)
        mean = arithmetic.summed(0, parts, norms, list(by.values()))
        arithmetic.advance(state, b"".join(mean), outer + 1)
        span = arithmetic.fragments.span(outer + 1)
    members[0].load(state[0])
    return members[0].loss(held_out(corpus))


def batch(corpus: Windows, seed: int, first: int, count: int) -> NDArray[np.int64]:
    return corpus.read(corpus.starts[windows(seed, first, count, corpus.starts.size)])


def held_out(corpus: Windows) -> list[NDArray[np.int64]]:
    return [corpus.read(part) for part in np.array_split(corpus.held_out, 8)]


def quantisers(report: Report) -> None:
    """Measure the quantisers' errors and rates."""
    rng = np.random.default_rng(0)
    vectors = {
        "normal": rng.standard_normal(VALUES).astype(np.float32),
        "t, 3 degrees": rng.standard_t(3, VALUES).astype(np.float32),
    }
    for case, values in vectors.items():
        for codec in Codec:
            data = encode(codec, values)
            lost = error(values, decode_untrusted(codec, data, VALUES))
            report.add(case, codec.value, "relative error", "", [lost])
        lost = error(values, prime_decode(*prime_encode(values)))
        report.add(case, "PRIME's int8", "relative error", "", [lost])
    values = vectors["normal"]
    for codec in Codec:
        data = encode(codec, values)
        works: dict[str, Callable[[], object]] = {
            "encode": partial(encode, codec, values),
            "decode": partial(decode_untrusted, codec, data, VALUES),
        }
        for name, work in works.items():
            found = [rate(work) for _ in range(5)]
            report.add("rates", codec.value, name, "MB a CPU second", found)


def error(values: Values, back: Values) -> float:
    return float(np.linalg.norm(values - back) / np.linalg.norm(values))


def rate(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 4 * VALUES / 1e6 / max(1e-9, time.process_time() - began)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
