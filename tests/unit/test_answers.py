"""What counts as an answer: thoughts, boxes, and right answers that are more than a number."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import trio

from roles.envs.answers import final_answer, last_box, reads_back, spoken, value_of
from roles.envs.arithmetic import ArithmeticEnvironment
from roles.envs.check import fragments
from roles.envs.formulas import read_arithmetic
from roles.envs.questions import ExactEnvironment, MathEnvironment
from roles.envs.text import Message, TextEnvironment, TextTask
from tests.counting import calls_at_most
from tests.sweeps import DEEP, swept

DATA = b"".join(b'{"question": "%d?", "answer": "1"}\n' % number for number in range(64))
EXACT = ExactEnvironment(DATA)


@functools.cache
def math() -> MathEnvironment:
    return MathEnvironment(DATA)


COLLECTION = Path(__file__).parents[3] / "shared" / "data" / "golds.jsonl"
"""Right answers of public collections, where they lie beside the checkout."""
GOLDS = (
    "A", "0", "50,625", r"10{,}000", "13.0", "37.50", "-49", "- 1", r"\frac { 1 } { 4 }", "4t",
    r"1\frac{9}{10}", r"$6\frac23$", r"7\pi", "4a-2", "y = 2", "x = - 3", "m < 3", "b > a > c",
    r"x \ge - \frac { 3 } { 2 }", "$y=2 x-11$", "$1 / 2$", "$B=C$", "converges", "1:58 am",
    "They are the same.", r"concave up on $(0, \infty)$", r"$25 @ \$ 18$", "40, 200", "$8$,$4$",
    r"12 and $36 \mathrm{~min}$", r"$1.715 \times 10^{14}$", r"$10 / 49$ meters", "$x-4$",
    r"$i^{117}=\left(i^{4}\right)^{29} \cdot i=1 \cdot i=i$", "$(-3,20,19)$", "2500,7500",
    r"$\left[0, \frac{\pi}{2}\right) \cup\left(\frac{11 \pi}{6}, 2 \pi\right]$", r"$\{1\}$",
    r"$y=e^{4 x}\left(c_{1}+c_{2} x\right)$", r"$\frac{1}{2} \ln (z)-\ln (x)-\ln (y)$",
    r"$20 \cos \left(\frac{\pi}{6}\right) 200=3464.1$", r"$\{x|-2\leq x < 1\}$", "$t(0,4]$",
    "$22.1cm^{2}$", r"$576\pi\;m^{2}$", r"$36\sqrt{7}cm^{3}$", r"$90^{\circ}$,$60^{\circ}$",
    r"$\{0,2,4,6,8\}$", r"$\frac{1}{3},-2,5$", "$(1,1), (3,2)$", r"$18.8^{\circ}$", "7,4",
    r"$\left\lfloor\log _{2} n\right\rfloor+1$", "$145$solution:", "$g(x)=x^2-2x+2$", r"2\pi",
    "3x-y+13=0", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"50\%", r"\$18.90",
    r"12 \text{ cm}^2", r"\text{(A)}", r"x=1 \text{ or } x=2", r"10,000\pi", "0.0000001",
    "3.14159265", r"1,2,\ldots,9", r"\sqrt{2}\approx 1.41", "f'(x)=2x", "[1,2)",
    r"2\pm\sqrt{3}", r"\boxed{7}", "12π", "x ≤ 5", "½", r"60^\circ 30'",
    r"5\text{ hours }20\text{ minutes}",
)  # fmt: skip
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
    r"2\pi": ("2", r"\pi"), "4t": ("4", "t"),
    "3x-y+13=0": ("x=0", "13", "0", "3x", "1=2", "3x-y=0"), "x=5": ("5",),
    "y = 2x+1": ("2x+1", "1"), "(1,2)": ("1", "2", "1,2", "[1,2]"),
    r"\{1,2\}": ("1", "2", r"\{1\}"), r"\{1\}": ("1",), "40, 200": ("40", "200", "40200"),
    r"12\text{ cm}": ("12", "cm", r"12\text{ m}", r"12\text{ cm}^2"), r"90^\circ": ("90",),
    r"50\%": ("50",), r"\$18": ("18",), "0.0000001": ("0", "0.0", "0.000000"),
    "3.14159265": ("3.1415926", "3"), r"1\frac{1}{2}": ("1", r"\frac{1}{2}", "2"),
    r"1,2,\ldots,9": ("1,2,9", "1,9"), r"\sqrt{2}\approx 1.41": (r"\sqrt{2}", "1.41"),
    "f'(x)": ("f(x)", "f"), "12": ("1 2", r"12\pi", "12x"), "25": ("12 13",), "2": ("1=2",),
    r"\text{no real solution}": ("real", "solution"), r"10,000\pi": ("10,0", "10"),
}  # fmt: skip
EQUAL = {
    "0.5": (r"\frac12", "1/2", "0.50", ".5", r"\dfrac{1}{2}", r"50\%", "½"),
    "13.0": ("13", r"\frac{26}{2}"), r"1\frac{1}{2}": ("1.5", r"\frac32", "1 \\frac12"),
    r"50\%": ("0.5", "50%", r"50\text{ percent}", r"\frac12"),
    "50": (r"50\%", "x=50", r"50^\circ", r"50\text{ cm}", "50 cm"),
    r"12\text{ cm}": ("12 cm", r"12\,\mathrm{cm}", r"\frac{24}{2}\text{ cm}"),
    r"90^\circ": (r"90^{\circ}", r"90\text{ degrees}", "90°"),
    r"\$18": (r"\$18.00", "18 dollars"), "1,234": ("1234", "1{,}234", r"1\,234", "1 234"),
    "3x-y+13=0": ("y=3x+13", "6x-2y+26=0"), "x=3": ("x = 3", "3=x", "x=3.0"),
    "1,2": ("2,1", r"\{1,2\}", r"1 \text{ and } 2"), r"\{1,2,3\}": (r"\{3,2,1\}", "1,2,3"),
    r"\text{(A)}": ("A", "(A)", r"\textbf{(A)}"), "They are the same.": ("they are the same",),
    r"10,000\pi": (r"10000\pi",), r"\frac{1}{3}": ("0.333333",),
    r"\emptyset": (r"\varnothing",), "x^2+1": ("x² + 1", "1+x^2"),
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
        (r"\boxed{1}. No: \boxed{\frac{1}{2}", ""), (r"\fbox{3}", "3"),
        (r"\boxed {4}, so 5", "4"), (r"$\boxed 5$.", "5"),
        (r"\boxed\frac{1}{2}", r"\frac{1}{2}"), (r"\boxed{x=\boxed{5}}", "x=5"),
        (r"\boxed{\boxed{5}", "5"), (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"}} {\boxed{6} {", "6"), (r"In a \boxed form: \boxed{7}, as \boxed asks", "7"),
        (r"\boxed{}", ""), (r"\boxedness{5}", None),
    ],
)  # fmt: skip
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


# What the math environment computes with: honest answers, and no hostile ones


HONEST = {
    r"\frac{3}{4}": ("0.75", r"\frac{6}{8}", "3/4", r"\dfrac34"),
    r"\frac{\sqrt{3}}{2}": (r"\sqrt{\frac{3}{4}}", r"\frac{3}{2\sqrt{3}}", r"\frac12\sqrt3"),
    r"3+2\sqrt{2}": (r"(1+\sqrt{2})^2", r"2\sqrt{2}+3", r"\frac{1}{3-2\sqrt{2}}"),
    r"\{1,2,3\}": (r"\{3,2,1\}", r"\{1, 2, \frac{6}{2}\}"),
    r"[1,\infty)": (r"[1, \infty)", r"[\frac{2}{2},\infty)"),
    r"(-\infty,2]\cup[3,\infty)": (r"(-\infty, 2] \cup [3, \infty)",),
    r"\frac{\pi}{6}": (r"\pi/6", r"\frac{2\pi}{12}"),
    r"x^2+2x+1": ("(x+1)^2", "1+2x+x^2", "x(x+2)+1"),
    r"2^{100}": ("4^{50}", "1267650600228229401496703205376"),
    r"100": ("10^2", r"\frac{10^{12}}{10^{10}}", "100.0", r"4\cdot 25", r"\sqrt{10000}"),
    r"120": ("5!", r"\binom{10}{3}", "120"),
    r"\frac{1+\sqrt{5}}{2}": (r"\frac12+\frac{\sqrt5}{2}", r"\frac{\sqrt{5}+1}{2}"),
    r"e^{x^2}": (r"e^{x\cdot x}",), r"2^{n+1}-1": (r"2\cdot 2^n-1",),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",),
    r"3": ("x=3", "3.0", r"\frac{9}{3}", r"\log_2 8", r"\sqrt{9}", "1+2"), r"50\%": ("50\\%",),
    r"1234567": ("1,234,567",), r"(1,2)": ("(1, 2)", r"(1, \frac{4}{2})"),
    r"\text{east}": (r"\text{east}",), r"\sin x": (r"\sin(x)",),
    r"x\geq 3": (r"3\leq x", r"x \ge 3"), r"y=2x+1": ("y = 1+2x",),
    r"2025^{2025}": (r"2025\cdot 2025^{2024}",), r"-7": ("-7", r"-\frac{14}{2}", "2-9"),
}  # fmt: skip
HONEST_FORMS = (r"\boxed{%s}", "We find that\nit is\n$\\boxed{%s}$.", "So the answer is $%s$.")
WRONG = ("17", r"\frac{5}{7}", r"\sqrt{11}", r"\{4,5\}", "z+8", r"[5,6]")


@pytest.mark.parametrize("answer", swept(list(HONEST), 8))
def test_honest_answers_are_paid(answer: str) -> None:
    for form, said in product(HONEST_FORMS, HONEST[answer]):
        text = form.replace("%s", said)
        assert paid(math(), f"${answer}$", text) == 1.0, text
    for form, said in product(HONEST_FORMS, WRONG):
        assert paid(math(), f"${answer}$", form.replace("%s", said)) == 0.0, said


def test_the_last_box_is_judged() -> None:
    assert paid(math(), "5", "\\boxed{4}\nno:\n\\boxed{5}, as I said.\nThank you, 6.") == 1
    assert paid(math(), r"$\{1,2\}$", "\\boxed{2} or \\boxed{1}") == 0.0
    assert paid(math(), "5", r"$\sum_{n=1}^{10^9} n \neq \boxed{5}$") == 1.0
    assert paid(math(), "5", "long " * 900 + "the answer is 5") == 1.0


HOSTILE = (
    r"9^{9^{9^{9}}}", "9^9^9^9", "9**9**9**9", "9**99999999", "-(9**99999999)", "9!!!!!",
    "(((9!)!)!)!", "10000000!", r"\sum_{n=1}^{10^{9}} n",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n^2+1}", r"\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n}",
    r"\prod_{n=1}^{10^{7}} n", r"\int_0^1 e^{x^2} \sin(x^3) dx",
    r"\int \frac{x^5+1}{x^7+x+1} dx", r"\lim_{x\to 0}\frac{\sin(\sin(\sin(x)))-x}{x^{9}}",
    r"\frac{d^{50}}{dx^{50}} \tan(x)", r"\frac{1}{" * 60 + "1" + "}" * 60,
    r"\sqrt{" * 60 + "2" + "}" * 60, r"\frac1" * 20 + "2", "9" * 1000, "9" * 1_000_000,
    "0." + "9" * 1000, "1e999999999", "٩" * 50, r"\binom{10^9}{10^8}",
    r"\binom{1000000}{500000}", r"\binom{\binom{99}{9}}{\binom{99}{9}}",
    r"\gcd(10^{1000000},7)", r"\operatorname{lcm}(10^{1000000},7)", r"0.\overline{123456789}",
    "0." + "1" * 300 + r"\overline{" + "7" * 400 + "}",
    r"\begin{pmatrix}" + r"\\".join("&".join(["1"] * 30) for _ in range(30)) + r"\end{pmatrix}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}", r"\sqrt[100000000]{2}",
    r"\sqrt{" + "7" * 600 + "}", r"\sqrt[3]{123456789123456789123456789123456789}",
    r"\log_{2}{3^{3^{3^{3}}}}", r"\sin(10^{10^{10}})", r"2^{1000000000}",
    r"2^{999\cdot 999\cdot 999}", r"2^{\frac{9}{0.0000001}}", r"((9^{99})^{99})^{99}",
    r"(1+x)^{100000}", r"(x+y+z+1)^{300}", r"(a+b+c+d)^9(e+f+g+h)^9", r"(x+1)^9" * 12,
    r"x^{100}+x^{99}+3=0", r"x^5-x-1=0", r"\sqrt{2+\sqrt{3+\sqrt{5+\sqrt{7+\sqrt{11}}}}}",
    r"\{" + ",".join(map(str, range(300))) + r"\}",
    r"\{" + ",".join(map(str, range(30))) + r"\}", "(" + ",".join(["1/3"] * 25) + ")",
    r"[8,2^{99999999999}]", r"(8,7^{\binom{351}{347}})", r"[8,\sin(9^{9^{9}})]",
    r"(8,e^{9^{9^9}})", r"\{8,9\}\cup\{2^{99999999999}\}", r"\{8,9\}\cap\{2^{99999999999}\}",
    "x" * 500, "x" * 100, "+".join(f"x_{{{number}}}" for number in range(14)),
    r"\sin x \cos y \tan z" * 5, r"[1,2]\cup" * 10 + "[1,2]",
    r"\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13}",
    r"\frac{\sqrt{2}+\sqrt{3}}{\sqrt{5}+\sqrt{7}+\sqrt{11}}", r"10^{10^{10}} \mod 7",
    "|" * 100, "{" * 400 + "}" * 400, r"\left(" * 100 + "1" + r"\right)" * 100,
    "(" * 6 + "2" + ")" * 6, "-" * 100 + "1", "1" + "+1" * 55, "1" + "*9" * 55,
    "1/" * 55 + "1", r"e^{e^{e^{e^{e}}}}", r"i^{i^{i^{i}}}", r"\lfloor 10^{10^{5}}/3 \rfloor",
    r"\arctan(\arctan(\arctan(2^{99999})))", r"(-1)^{1/999999937}",
    r"\tan^{25}(x)+\sin^{25}(x)+\cos^{25}(y)", r"\boxed{" * 20 + "1" + "}" * 20, "$" * 200,
    "the answer is " * 500,
)  # fmt: skip
RIGHT = (r"$\frac{3}{2}$", "$y=2x+1$")
BARE_FORMS = (r"\boxed{%s}", "$%s$", "%s")
MOST_CALLS = 5_000_000
"""Calls for an answer. The worst below makes 1.6 million; one that computes has no end."""


@pytest.mark.parametrize("number", swept(range(len(HOSTILE)), 20))
def test_no_answer_costs_much(number: int) -> None:
    """A tower of four nines took 5 s, until the process was ended."""
    said, cases = HOSTILE[number], list(product(BARE_FORMS, RIGHT))
    for form, answer in cases if DEEP else [cases[number % len(cases)]]:
        with calls_at_most(MOST_CALLS):
            assert paid(math(), answer, form.replace("%s", said)) == 0.0


@pytest.mark.parametrize(
    "text", ["1/2", "-1/2", "2+3*4", "(1+2)/3", "2**10", "0.5+.25", "-(3)"]
)
def test_arithmetic_is_read_as_by_sympy(text: str) -> None:
    import sympy
    from sympy.parsing import parse_expr

    read = read_arithmetic(text)
    assert sympy.simplify(read - parse_expr(text, evaluate=False)) == 0


@pytest.mark.parametrize(
    "text",
    ["x", "f(1)", "(1)(2)", "'a'", "1 if 1 else 2", "[1]", "1//2", "1j", "9" * 50, "1;2"],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        read_arithmetic(text)


CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import trio
from roles.envs.questions import MathEnvironment
from roles.envs.text import Message, TextTask
data, texts = json.load(sys.stdin)
environment = MathEnvironment(data.encode())

def pay(texts):
    for answer in ("1", "$x+1$", "$y=2x$"):
        task = TextTask((Message("user", "?"),), "", answer)
        for text in texts:
            trio.run(environment.reward, task, text, True)

pay(["1/2", "$x^2$", "$y=x$", "$\\\\sqrt{2}$", "2*3"])  # imports what is imported late
seen = []

def watch(event, arguments):  # whatever is evaluated is compiled first
    if event == "compile":
        source, name = arguments[0], arguments[1]
        source = source.decode() if isinstance(source, bytes) else str(source)
        if name == "<unknown>" or not name.startswith("<"):
            return  # Python's grammar alone (ast.parse); a module that is imported late
        if source.startswith("def monomial_"):
            return  # sympy writes loops out, for a number of variables
        seen.append(source[:80])
    elif event in ("os.system", "subprocess.Popen"):
        seen.append(event)

sys.addaudithook(watch)
pay(texts)
print(json.dumps(seen))
"""


def test_no_answer_is_evaluated_as_python() -> None:
    """What stands outside of LaTeX was, if of digits and operators."""
    code = ("__import__('os').system('id')", "open('x','w')", r"\text{__import__('os')}")
    said = [
        *swept(HOSTILE, 12),
        "1/3",
        "2**8",
        "(1+2)*3",
        *swept([one for all in HONEST.values() for one in all], 8),
    ]
    texts = [form.replace("%s", one) for form in BARE_FORMS for one in code]
    texts += [BARE_FORMS[place % 3].replace("%s", one) for place, one in enumerate(said)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([DATA.decode(), texts]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-600:]
    assert json.loads(done.stdout) == []
