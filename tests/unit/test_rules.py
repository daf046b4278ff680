"""Each rule of the network has a row in bench/rules.md, which says what it is worth."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ablate import TABLE, in_a_child, read_table, write_table
from bench.rules import SERVICES
from bench.rules.rule import Rule, carrier, switch_off
from sim.run.scenario import scenario_names
from tests.transcripts import transcripts

LIMITERS = {"KeyedQuotas", "RateLimit", "TokenBucket"}


def limits_of(service: str) -> Iterator[str]:
    """Yield what limits in a service: limiters that an instance gets, fields of ``*Limits``,
    and constants that are called ``MAX_*``."""
    for file in sorted(Path("p2p", service).rglob("*.py")):
        module = ".".join(file.with_suffix("").parts)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and re.match(
                r"_?MAX_", ast.unparse(node.target)
            ):
                yield f"{module}:{ast.unparse(node.target)}"
        for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            for node in ast.walk(owner):
                if not isinstance(node, ast.Assign | ast.AnnAssign):
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                name = ast.unparse(targets[0]).removeprefix("self.")
                is_field = owner.name.endswith("Limits") and node in owner.body
                if is_field or (
                    name != ast.unparse(targets[0])
                    and any(
                        isinstance(part, ast.Call) and ast.unparse(part.func) in LIMITERS
                        for part in ast.walk(node)
                    )
                ):
                    yield f"{module}:{owner.name}().{name}"


@pytest.mark.parametrize("name", SERVICES)
def test_every_limit_is_a_rule_or_the_size_of_a_format(name: str) -> None:
    service = SERVICES[name]
    if not service.rules:
        pytest.skip("its rules are not listed yet")
    replaced = {place for rule in service.rules.values() for place in rule.off}
    formats = {f"p2p.{name}.{each}" for each in service.formats}
    limits = set(limits_of(name))
    for place in formats:
        assert place in limits or any(each.startswith(f"{place}:") for each in limits), (
            f"{place} limits nothing any more"
        )
    left = {
        each for each in limits - replaced - formats if each.partition(":")[0] not in formats
    }
    assert not left, f"{sorted(left)}: no rule in bench/rules/{name}.py"


def test_every_row_is_a_rule_and_every_rule_has_an_effect_in_the_table() -> None:
    text = TABLE.read_text(encoding="utf-8")
    table = read_table(text)
    assert write_table(table) == text
    for name, service in SERVICES.items():
        rows = table.get(name, {})
        assert {rule: law for rule, (law, _) in rows.items()} == {
            rule: service.rules[rule].law for rule in rows
        }
        shown = [rule for rule, (_, effect) in rows.items() if effect != "none"]
        hidden = sorted(set(service.rules) - set(shown))
        assert not hidden, f"python -m bench ablate {name} --write: {hidden}"
        assert set(service.scenarios) <= set(scenario_names())
        for rule in service.rules.values():
            assert set(rule.scenarios) <= set(service.scenarios)
            for place in rule.off:
                carrier(place)


@pytest.mark.parametrize("name", SERVICES)
def test_the_tests_that_examine_a_rule_exist(name: str) -> None:
    """A word that is in no test's name makes ``ablate`` fail, or examine less than it says."""
    service = SERVICES[name]
    tests = {
        f"{Path(file).stem}: {test}"
        for file in service.tests
        for test in re.findall(r"def (test_\w+)", Path(file).read_text(encoding="utf-8"))
    }
    names = tests | {path.stem for path in transcripts()}
    for rule, (_, effect) in read_table(TABLE.read_text(encoding="utf-8"))[name].items():
        shown = set(re.findall(r"test_\w+: test_\w+", effect))
        assert shown <= tests, f"{rule}: python -m bench ablate {name} --write"
    for rule, each in service.rules.items():
        for word in filter(None, each.tests.split(" or ")):
            assert any(word in test for test in names), f"{rule}: no test is named {word!r}"


def test_a_rule_that_is_gone_is_not_ablated_in_silence() -> None:
    with pytest.raises(AttributeError, match="carries no rule"):
        switch_off(Rule("a law", {"p2p.shardcast.core.handout:NO_SUCH": 1}))


def test_an_interrupted_exam_ends_with_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def exam() -> None:
        process = subprocess.Popen(["sleep", "600"])
        noted.write_text(str(process.pid))
        os.kill(os.getppid(), signal.SIGINT)
        process.wait()

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_a_child(exam)
    finally:
        signal.signal(signal.SIGINT, usual)
    # It was killed, and may take a moment to die.
    with contextlib.suppress(OSError):
        for _ in range(10_000):
            if Path("/proc", noted.read_text(), "stat").read_text().split()[2] == "Z":
                return
            os.sched_yield()
        pytest.fail("it lives on")
