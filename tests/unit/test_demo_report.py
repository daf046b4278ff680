"""What the demo says at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roles.demo.command import by_kind, complaints
from roles.demo.shows import SORTING
from roles.rl.gate import ARITHMETIC_PROMISE

SHOW = replace(
    SORTING, environment="arithmetic", promise=ARITHMETIC_PROMISE,
    kinds={"addition": 6.0, "tables": 1.0}, judged="addition", keeps=0.1,
)  # fmt: skip
FIGURES: dict[str, Any] = {
    "kinds_start": {
        "arithmetic/addition": (0.188, 0.113),
        "arithmetic/three_digits": (0.078, 0.04),
        "arithmetic/tables": (0.9, 0.8),
    },
    "kinds_end": {
        "arithmetic/addition": (0.734, 0.7),
        "arithmetic/three_digits": (0.453, 0.3),
        "arithmetic/tables": (0.85, 0.8),
    },
    "cheater_submitted": 20, "cheater_accepted": 0, "honest_rejected": 0,
}  # fmt: skip


def test_the_kinds_are_listed_and_which_were_not_trained() -> None:
    _, addition, digits, tables = by_kind(FIGURES, SHOW)
    assert " ".join(addition.split()) == "addition 0.188 → 0.734 0.113 → 0.700"
    gains = "0.078 → 0.453 0.040 → 0.300"
    assert " ".join(digits.split()) == f"three_digits {gains} not trained"
    assert tables.endswith("0.800")


def test_one_kind_alone_is_not_listed() -> None:
    one = {"sort/lists": (0.1, 0.1)}
    assert list(by_kind({**FIGURES, "kinds_start": one, "kinds_end": one}, SHOW)) == []


def test_a_kind_that_is_lost_is_complained_of_by_name() -> None:
    assert list(complaints(FIGURES, SHOW)) == []
    end = {**FIGURES["kinds_end"], "arithmetic/tables": (0.7, 0.7)}
    (said,) = complaints({**FIGURES, "kinds_end": end}, SHOW)
    assert said.startswith("arithmetic/tables fell from 0.900 to 0.700")
    (said,) = complaints({**FIGURES, "honest_rejected": 3}, SHOW)
    assert said.startswith("3 submissions of honest nodes")
