"""What counts as an answer: thoughts, boxes, and right answers that are more than a number."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
import trio

from roles.envs.answers import final_answer, last_box, reads_back, spoken, value_of
from roles.envs.arithmetic import ArithmeticEnvironment
from roles.envs.check import fragments
from roles.envs.questions import ExactEnvironment, MathEnvironment
from roles.envs.text import Message, TextEnvironment, TextTask

DATA = b"".join(b'{"question": "%d?", "answer": "1"}\n' % number for number in range(64))
EXACT = ExactEnvironment(DATA)


@functools.cache
def math() -> MathEnvironment:
    return MathEnvironment(DATA)


COLLECTION = Path(__file__).parents[3] / "shared" / "data" / "golds.jsonl"
"""Right answers of public collections, where they lie beside the checkout."""
GOLDS = (
    *(
        "A",
        "0",
        "50,625",
        r"10{,}000",
        "13.0",
        "37.50",
        "-49",
        "- 1",
        r"\frac { 1 } { 4 }",
        "4t",
    ),
    *(
        r"1\frac{9}{10}",
        r"$6\frac23$",
        r"7\pi",
        "4a-2",
        "y = 2",
        "x = - 3",
        "m < 3",
        "b > a > c",
    ),
    *(r"x \ge - \frac { 3 } { 2 }", "$y=2 x-11$", "$1 / 2$", "$B=C$", "converges", "1:58 am"),
    *(
        "They are the same.",
        r"concave up on $(0, \infty)$",
        r"$25 @ \$ 18$",
        "40, 200",
        "$8$,$4$",
    ),
    *(r"12 and $36 \mathrm{~min}$", r"$1.715 \times 10^{14}$", r"$10 / 49$ meters", "$x-4$"),
    *(r"$i^{117}=\left(i^{4}\right)^{29} \cdot i=1 \cdot i=i$", "$(-3,20,19)$", "2500,7500"),
    *(r"$\left[0, \frac{\pi}{2}\right) \cup\left(\frac{11 \pi}{6}, 2 \pi\right]$", r"$\{1\}$"),
    *(r"$y=e^{4 x}\left(c_{1}+c_{2} x\right)$", r"$\frac{1}{2} \ln (z)-\ln (x)-\ln (y)$"),
    *(r"$20 \cos \left(\frac{\pi}{6}\right) 200=3464.1$", r"$\{x|-2\leq x < 1\}$", "$t(0,4]$"),
    *("$22.1cm^{2}$", r"$576\pi\;m^{2}$", r"$36\sqrt{7}cm^{3}$", r"$90^{\circ}$,$60^{\circ}$"),
    *(r"$\{0,2,4,6,8\}$", r"$\frac{1}{3},-2,5$", "$(1,1), (3,2)$", r"$18.8^{\circ}$", "7,4"),
    *(r"$\left\lfloor\log _{2} n\right\rfloor+1$", "$145$solution:", "$g(x)=x^2-2x+2$"),
    *(r"2\pi", "3x-y+13=0", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"50\%", r"\$18.90"),
    *(r"12 \text{ cm}^2", r"\text{(A)}", r"x=1 \text{ or } x=2", r"10,000\pi", "0.0000001"),
    *(
        "3.14159265",
        r"1,2,\ldots,9",
        r"\sqrt{2}\approx 1.41",
        "f'(x)=2x",
        "[1,2)",
        r"2\pm\sqrt{3}",
    ),
    *(r"\boxed{7}", "12π", "x ≤ 5", "½", r"60^\circ 30'", r"5\text{ hours }20\text{ minutes}"),
)
FORMS = (r"\boxed{%s}", r"$$\boxed{ %s }$$ it is.", r"<think>\boxed{3}</think>so \fbox {%s}")


def paid(environment: TextEnvironment, answer: str, text: str) -> float:
    return trio.run(
        environment.reward, TextTask((Message("user", "?"),), "", answer), text, True
    )


def golds() -> list[str]:
    lines = COLLECTION.read_text().splitlines() if COLLECTION.exists() else []
    return [
        *GOLDS,
        *filter(str.strip, dict.fromkeys(json.loads(line)["gold"] for line in lines)),
    ]


def test_every_gold_earns_itself_and_no_fragment_of_it_anything() -> None:
    """Of 340 public ones 5 to 61 in a hundred, by collection, did not earn themselves."""
    tried = 0
    for gold in golds():
        assert reads_back(gold), gold
        for environment in (EXACT, math()):
            for form in FORMS:
                assert paid(environment, gold, form.replace("%s", gold)) == 1.0, (gold, form)
            for part in fragments(gold):
                tried += 1
                assert paid(environment, gold, rf"\boxed{{{part}}}") == 0.0, (gold, part)
    assert tried > 300


FRAGMENTS = {
    r"2\pi": ("2", r"\pi"),
    "4t": ("4", "t"),
    "3x-y+13=0": ("x=0", "13", "0", "3x", "1=2", "3x-y=0"),
    "x=5": ("5",),
    "y = 2x+1": ("2x+1", "1"),
    "(1,2)": ("1", "2", "1,2", "[1,2]"),
    r"\{1,2\}": ("1", "2", r"\{1\}"),
    r"\{1\}": ("1",),
    "40, 200": ("40", "200", "40200"),
    r"12\text{ cm}": ("12", "cm", r"12\text{ m}", r"12\text{ cm}^2"),
    r"90^\circ": ("90",),
    r"50\%": ("50",),
    r"\$18": ("18",),
    "0.0000001": ("0", "0.0", "0.000000"),
    "3.14159265": ("3.1415926", "3"),
    r"1\frac{1}{2}": ("1", r"\frac{1}{2}", "2"),
    r"1,2,\ldots,9": ("1,2,9", "1,9"),
    r"\sqrt{2}\approx 1.41": (r"\sqrt{2}", "1.41"),
    "f'(x)": ("f(x)", "f"),
    "12": ("1 2", r"12\pi", "12x"),
    "25": ("12 13",),
    "2": ("1=2",),
    r"\text{no real solution}": ("real", "solution"),
    r"10,000\pi": ("10,0", "10"),
}
EQUAL = {
    "0.5": (r"\frac12", "1/2", "0.50", ".5", r"\dfrac{1}{2}", r"50\%", "½"),
    "13.0": ("13", r"\frac{26}{2}"),
    r"1\frac{1}{2}": ("1.5", r"\frac32", "1 \\frac12"),
    r"50\%": ("0.5", "50%", r"50\text{ percent}", r"\frac12"),
    "50": (r"50\%", "x=50", r"50^\circ", r"50\text{ cm}", "50 cm"),
    r"12\text{ cm}": ("12 cm", r"12\,\mathrm{cm}", r"\frac{24}{2}\text{ cm}"),
    r"90^\circ": (r"90^{\circ}", r"90\text{ degrees}", "90°"),
    r"\$18": (r"\$18.00", "18 dollars"),
    "1,234": ("1234", "1{,}234", r"1\,234", "1 234"),
    "3x-y+13=0": ("y=3x+13", "6x-2y+26=0"),
    "x=3": ("x = 3", "3=x", "x=3.0"),
    "1,2": ("2,1", r"\{1,2\}", r"1 \text{ and } 2"),
    r"\{1,2,3\}": (r"\{3,2,1\}", "1,2,3"),
    r"\text{(A)}": ("A", "(A)", r"\textbf{(A)}"),
    "They are the same.": ("they are the same",),
    r"10,000\pi": (r"10000\pi",),
    r"\frac{1}{3}": ("0.333333",),
    r"\emptyset": (r"\varnothing",),
    "x^2+1": ("x² + 1", "1+x^2"),
    r"3\times 10^8": ("3e8", "300,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("answer", FRAGMENTS)
def test_what_says_less_than_the_answer_earns_nothing(answer: str) -> None:
    """``2`` was paid for ``2\\pi``, and any equation for ``3x-y+13=0``."""
    for said in FRAGMENTS[answer]:
        assert paid(math(), answer, rf"\boxed{{{said}}}") == 0.0, said


@pytest.mark.parametrize("answer", EQUAL)
def test_an_equal_value_in_another_form_is_paid(answer: str) -> None:
    for said in EQUAL[answer]:
        assert paid(math(), answer, rf"\boxed{{{said}}}") == 1.0, said


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"First \boxed{1}. No: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1}. No: \boxed{\frac{1}{2}", ""),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}, so 5", "4"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{x=\boxed{5}}", "x=5"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"}} {\boxed{6} {", "6"),
        (r"In a \boxed form: \boxed{7}, as \boxed asks", "7"),
        (r"\boxed{}", ""),
        (r"\boxedness{5}", None),
    ],
)
def test_the_last_box_counts_if_it_is_complete(text: str, held: str | None) -> None:
    """Two readers took the first of two boxes for the answer, or that before one cut off."""
    assert last_box(text) == held


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"<think>\boxed{5}</think> The answer is 7.", " The answer is 7."),
        (r"\boxed{5}</think>7", "7"),
        ("<think>5", ""),
        ("<think>5</think>7<think>8", ""),
        ("[THINK]5[/THINK]7", "7"),
        ("◁think▷5◁/think▷7", "7"),
        ("<seed:think>5</seed:think>7", "7"),
        ("I think 5", "I think 5"),
    ],
)
def test_what_stands_before_the_end_of_a_thought_never_counts(text: str, said: str) -> None:
    assert spoken(text) == said
    for environment in (EXACT, math(), ArithmeticEnvironment()):
        assert paid(environment, "5", text) == (
            1.0 if said == text and environment != EXACT else 0.0
        )


def test_a_named_value_and_a_unit_are_asked_without_name_and_unit() -> None:
    """``x=5`` says 5 to a question for x; whoever leaves the name away is right."""
    for answer, value in {
        "x=5": "5",
        r"$x=\frac{16}{15}$": r"\frac{16}{15}",
        "$22.1cm^{2}$": "22.1",
        r"\$18.90": "18.90",
        r"$18.8^{\circ}$": "18.8",
        r"x = 5\text{ cm}": "5",
    }.items():
        task = math().task_of("?", answer)
        assert task.answer == value
        for said in (answer.strip("$") if answer[1:2] != "1" else answer, value):
            assert paid(math(), task.answer, rf"\boxed{{{said}}}") == 1.0, said
    for answer in (
        "y=2x",
        "B=C",
        "x=1,y=2",
        r"50\%",
        r"\text{east}",
        "1:58 am",
        "12 and 36 min",
    ):
        assert value_of(answer) == answer


@pytest.mark.parametrize(
    "text",
    [r"\boxed{", r"\boxed{x}", r"\(", "is ", "1 000", "<think>", r"\text{", " ", "{", r"\frac"],
)
def test_reading_takes_time_in_proportion_to_the_text(text: str) -> None:
    def cost(length: int) -> float:
        said, best = text * (length // len(text)) + "x", float("inf")
        for _ in range(3):
            start = time.process_time()
            final_answer(said)
            paid(math(), "5", said)
            best = min(best, time.process_time() - start)
        return best

    assert cost(120_000) < 24 * cost(15_000) + 0.05
