"""What the math environment computes with: honest answers as before, no hostile ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import trio

from roles.envs.formulas import may_read, read_arithmetic
from roles.envs.questions import MathEnvironment
from roles.envs.text import Message, TextTask
from tests.counting import calls_at_most
from tests.sweeps import DEEP, swept

DATA = b"".join(
    json.dumps({"question": f"What is {number}?", "answer": "1"}).encode() + b"\n"
    for number in range(100)
)
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
    r"e^{x^2}": (r"e^{x\cdot x}",),
    r"2^{n+1}-1": (r"2\cdot 2^n-1",),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",),
    r"3": ("x=3", "3.0", r"\frac{9}{3}", r"\log_2 8", r"\sqrt{9}", "1+2"),
    r"50\%": ("50\\%",),
    r"1234567": ("1,234,567",),
    r"(1,2)": ("(1, 2)", r"(1, \frac{4}{2})"),
    r"\text{east}": (r"\text{east}",),
    r"\sin x": (r"\sin(x)",),
    r"x\geq 3": (r"3\leq x", r"x \ge 3"),
    r"y=2x+1": ("y = 1+2x",),
    r"2025^{2025}": (r"2025\cdot 2025^{2024}",),
    r"-7": ("-7", r"-\frac{14}{2}", "2-9"),
}
FORMS = (r"\boxed{%s}", "We find that\nit is\n$\\boxed{%s}$.", "So the answer is $%s$.")
WRONG = ("17", r"\frac{5}{7}", r"\sqrt{11}", r"\{4,5\}", "z+8", r"[5,6]")


@pytest.fixture(scope="module")
def environment() -> MathEnvironment:
    return MathEnvironment(DATA)


def paid(environment: MathEnvironment, answer: str, text: str) -> float:
    task = TextTask((Message("user", "?"),), "", answer)
    return trio.run(environment.reward, task, text, True)


@pytest.mark.parametrize("answer", swept(list(HONEST), 8))
def test_honest_answers_are_paid(answer: str, environment: MathEnvironment) -> None:
    for form, said in product(FORMS, HONEST[answer]):
        text = form.replace("%s", said)
        assert paid(environment, f"${answer}$", text) == 1.0, text
    for form, said in product(FORMS, WRONG):
        assert paid(environment, f"${answer}$", form.replace("%s", said)) == 0.0, said


def test_the_last_box_is_judged(environment: MathEnvironment) -> None:
    assert paid(environment, "5", "\\boxed{4}\nno:\n\\boxed{5}, as I said.\nThank you, 6.") == 1
    assert paid(environment, r"$\{1,2\}$", "\\boxed{2} or \\boxed{1}") == 0.0
    assert paid(environment, "5", r"$\sum_{n=1}^{10^9} n \neq \boxed{5}$") == 1.0
    assert paid(environment, "5", "long " * 900 + "the answer is 5") == 1.0


HOSTILE = (
    r"9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9**9",
    "9**99999999",
    "-(9**99999999)",
    "9!!!!!",
    "(((9!)!)!)!",
    "10000000!",
    r"\sum_{n=1}^{10^{9}} n",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n^2+1}",
    r"\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n}",
    r"\prod_{n=1}^{10^{7}} n",
    r"\int_0^1 e^{x^2} \sin(x^3) dx",
    r"\int \frac{x^5+1}{x^7+x+1} dx",
    r"\lim_{x\to 0}\frac{\sin(\sin(\sin(x)))-x}{x^{9}}",
    r"\frac{d^{50}}{dx^{50}} \tan(x)",
    r"\frac{1}{" * 60 + "1" + "}" * 60,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    r"\frac1" * 20 + "2",
    "9" * 1000,
    "9" * 1_000_000,
    "0." + "9" * 1000,
    "1e999999999",
    "٩" * 50,
    r"\binom{10^9}{10^8}",
    r"\binom{1000000}{500000}",
    r"\binom{\binom{99}{9}}{\binom{99}{9}}",
    r"\gcd(10^{1000000},7)",
    r"\operatorname{lcm}(10^{1000000},7)",
    r"0.\overline{123456789}",
    "0." + "1" * 300 + r"\overline{" + "7" * 400 + "}",
    r"\begin{pmatrix}" + r"\\".join("&".join(["1"] * 30) for _ in range(30)) + r"\end{pmatrix}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}",
    r"\sqrt[100000000]{2}",
    r"\sqrt{" + "7" * 600 + "}",
    r"\sqrt[3]{123456789123456789123456789123456789}",
    r"\log_{2}{3^{3^{3^{3}}}}",
    r"\sin(10^{10^{10}})",
    r"2^{1000000000}",
    r"2^{999\cdot 999\cdot 999}",
    r"2^{\frac{9}{0.0000001}}",
    r"((9^{99})^{99})^{99}",
    r"(1+x)^{100000}",
    r"(x+y+z+1)^{300}",
    r"(a+b+c+d)^9(e+f+g+h)^9",
    r"(x+1)^9" * 12,
    r"x^{100}+x^{99}+3=0",
    r"x^5-x-1=0",
    r"\sqrt{2+\sqrt{3+\sqrt{5+\sqrt{7+\sqrt{11}}}}}",
    r"\{" + ",".join(map(str, range(300))) + r"\}",
    r"\{" + ",".join(map(str, range(30))) + r"\}",
    "(" + ",".join(["1/3"] * 25) + ")",
    r"[8,2^{99999999999}]",
    r"(8,7^{\binom{351}{347}})",
    r"[8,\sin(9^{9^{9}})]",
    r"(8,e^{9^{9^9}})",
    r"\{8,9\}\cup\{2^{99999999999}\}",
    r"\{8,9\}\cap\{2^{99999999999}\}",
    "x" * 500,
    "x" * 100,
    "+".join(f"x_{{{number}}}" for number in range(14)),
    r"\sin x \cos y \tan z" * 5,
    r"[1,2]\cup" * 10 + "[1,2]",
    r"\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13}",
    r"\frac{\sqrt{2}+\sqrt{3}}{\sqrt{5}+\sqrt{7}+\sqrt{11}}",
    r"10^{10^{10}} \mod 7",
    "|" * 100,
    "{" * 400 + "}" * 400,
    r"\left(" * 100 + "1" + r"\right)" * 100,
    "(" * 6 + "2" + ")" * 6,
    "-" * 100 + "1",
    "1" + "+1" * 55,
    "1" + "*9" * 55,
    "1/" * 55 + "1",
    r"e^{e^{e^{e^{e}}}}",
    r"i^{i^{i^{i}}}",
    r"\lfloor 10^{10^{5}}/3 \rfloor",
    r"\arctan(\arctan(\arctan(2^{99999})))",
    r"(-1)^{1/999999937}",
    r"\tan^{25}(x)+\sin^{25}(x)+\cos^{25}(y)",
    r"\boxed{" * 20 + "1" + "}" * 20,
    "$" * 200,
    "the answer is " * 500,
)
RIGHT = (r"$\frac{3}{2}$", "$y=2x+1$")
BARE_FORMS = (r"\boxed{%s}", "$%s$", "%s")
MOST_CALLS = 5_000_000
"""Calls for an answer. The worst below makes 1.6 million; one that computes has no end."""


@pytest.mark.parametrize("number", swept(range(len(HOSTILE)), 20))
def test_no_answer_costs_much(number: int, environment: MathEnvironment) -> None:
    """A tower of four nines took 5 s, until the process was ended."""
    said, cases = HOSTILE[number], list(product(BARE_FORMS, RIGHT))
    for form, answer in cases if DEEP else [cases[number % len(cases)]]:
        with calls_at_most(MOST_CALLS):
            assert paid(environment, answer, form.replace("%s", said)) == 0.0


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


def test_what_is_read_is_short_and_plain() -> None:
    assert may_read(r"\frac{1}{2}")
    for text in ("1" * 41, "x+" * 61, r"\input{a}", "(" * 7, "|" * 7, "\x00", r"\binom{n}{k}"):
        assert not may_read(text)


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
