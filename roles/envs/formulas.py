"""Which formulas may be computed with: a bound on what a stranger's answer costs.

Theory of operation
-------------------
math-verify reads LaTeX into sympy's trees, and then compares two trees by simplifying,
expanding and evaluating them: a tower of four nines, the factorial of a factorial or a sum of
10^9 summands takes until the process is ended. What it costs can be bounded beforehand. The
text is short, says nothing but what final answers consist of, and is nested a few times: so it
is read within a tenth of a second. The tree then is measured: how many digits its numbers, how
many terms and which degree its polynomials would have, were they multiplied out. Beyond a bound
an answer is right only if it is written as the right one is. Reading computes nothing but
intervals and sets, whose parts are compared as they are made: so parts are measured as they are
read (`measure_parts`).

No path leads from an answer to Python's ``eval``. latex2sympy2 reads with a grammar of its own,
but both it and math-verify make numbers of texts by ``sympify``, and math-verify reads what
stands outside of LaTeX, digits and operators only, by ``parse_expr``: both end in sympy's
``parse_expr``, which evaluates Python. In the environment's process `read_arithmetic` takes its
place.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable
from typing import Any, Final

MAX_LENGTH: Final = 100
"""Characters of a formula: reading takes one to two milliseconds for each. Of the right answers
of collections in use one in hundreds is longer."""
MAX_DEPTH: Final = 6
"""Brackets within brackets. A box of a fraction of roots of fractions has
four; from nine on the grammar's time doubles with each."""
MAX_BARS: Final = 6
"""Bars, which open or close: three of them nested. Each more doubles what the grammar tries."""
MAX_DIGITS: Final = 10_000
"""Digits of a number, were it written out: 2025^2025 has 6,700, and takes milliseconds."""
MAX_TERMS: Final = 100
"""Terms, were it multiplied out."""
MAX_DEGREE: Final = 30
"""Of a polynomial. Equations of a higher one are solved in seconds."""
MAX_NODES: Final = 120
"""Numbers, names and operations."""
MAX_ENTRIES: Final = 25
"""Of a matrix."""
MAX_FACTORIAL: Final = 999
"""The largest number whose factorial is taken, or which is drawn from: 2,600 digits."""

WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "frac dfrac tfrac sqrt pi theta alpha beta gamma delta lambda mu sigma phi omega"
        " boxed text textbf mathrm mathbf mathbb mbox left right cdot times div pm mp infty"
        " cup cap in le leq ge geq lt gt ne neq leqslant geqslant sin cos tan cot sec csc"
        " arcsin arccos arctan ln log exp circ degree begin end quad qquad overline approx"
        " emptyset varnothing setminus mid displaystyle lfloor rfloor lceil rceil binom dbinom"
        " tbinom dots ldots cdots vec angle triangle lvert rvert vert",
    )
)
"""Commands of LaTeX that final answers consist of; sums, integrals and limits are questions."""

_WORD: Final = re.compile(r"\\([A-Za-z]+)")
_OTHER: Final = re.compile(r"[^\x20-\x7e\n×÷°π∞≤≥≠±√∪∩∈−·]")
_LONG: Final = re.compile(r"[\d.,_]{41}")
_CHOICE: Final = re.compile(r"binom(?!\s*\{\s*\d{1,3}\s*\}\s*\{\s*\d{1,3}\s*\})")

_CHEAP: Final = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc asin acos atan acot asec acsc log Abs floor ceiling Tuple"
        " FiniteSet Interval Union Intersection Complement Equality Unequality"
        " StrictLessThan LessThan StrictGreaterThan GreaterThan And UnevaluatedExpr EmptySet"
        " Reals Naturals Integers BooleanTrue BooleanFalse Rationals Symbol Dummy"
        " Infinity NegativeInfinity Pi Exp1 ImaginaryUnit Str",
    )
)
"""Classes of sympy that cost what their parts do."""


def may_read(text: str) -> bool:
    """Whether a text is short and plain enough to be read as a formula."""
    if len(text) > MAX_LENGTH or _OTHER.search(text) or _LONG.search(text):
        return False
    if not WORDS.issuperset(_WORD.findall(text)) or _CHOICE.search(text):
        return False
    if text.count("|") > MAX_BARS:
        return False
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            return False
    return True


def may_compute(tree: Any) -> bool:
    """Whether a formula that was read may be computed with. ``tree`` is sympy's, or a text."""
    try:
        return isinstance(tree, str) or bool(_Measure().size(tree))
    except _TooCostly:
        return False


def measure_parts(reader: Any) -> None:
    """Have ``reader``, a class of latex2sympy2, refuse a formula at its first part that may not
    be computed with."""
    convert = reader.convert_expr

    def convert_measured(self: Any, part: Any) -> Any:
        tree = convert(self, part)
        if hasattr(tree, "free_symbols") and not may_compute(tree):
            raise _TooCostly
        return tree

    if getattr(convert, "__name__", "") != convert_measured.__name__:
        reader.convert_expr = convert_measured


class _TooCostly(Exception):
    """A formula is beyond a bound."""


class _Measure:
    """Digits, terms and degree of a tree, bottom up, without computing it."""

    def __init__(self) -> None:
        self._nodes = 0
        self._numbers = importlib.import_module("sympy").Number
        self._matrices = importlib.import_module("sympy").MatrixBase

    def size(self, tree: Any) -> tuple[float, float, float]:
        """Bounds of its digits, terms and degree. Raises `_TooCostly`."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _TooCostly
        digits, terms, degree = self._size(tree)
        if digits > MAX_DIGITS or terms > MAX_TERMS or degree > MAX_DEGREE:
            raise _TooCostly
        return digits, terms, degree

    def _size(self, tree: Any) -> tuple[float, float, float]:
        kind = type(tree).__name__
        if isinstance(tree, self._matrices):
            if len(tree) > MAX_ENTRIES:
                raise _TooCostly
            return self._most(list(tree))
        if isinstance(tree, self._numbers):
            return self._digits(tree), 1, 0
        if kind == "Symbol":
            return 1, 1, 1
        if kind == "Add":
            parts = [self.size(part) for part in tree.args]
            digits, terms, degree = (list(column) for column in zip(*parts, strict=True))
            return max(digits) + len(parts), sum(terms), max(degree)
        if kind == "Mul":
            parts = [self.size(part) for part in tree.args]
            digits, terms, degree = (list(column) for column in zip(*parts, strict=True))
            return sum(digits), math.prod(terms), sum(degree)
        if kind in ("Pow", "exp"):
            base, exponent = (None, tree.args[0]) if kind == "exp" else tree.args
            return self._power((1, 1, 0) if base is None else self.size(base), exponent)
        if kind in ("factorial", "binomial"):
            for part in tree.args:
                if self._digits(part) > math.log10(MAX_FACTORIAL) + 1:
                    raise _TooCostly
                self.size(part)
            return 3.0 * MAX_FACTORIAL, 1, 1
        if kind in _CHEAP:
            return self._most(tree.args)
        raise _TooCostly

    def _most(self, parts: Any) -> tuple[float, float, float]:
        """Of several that stand beside each other."""
        sizes = [self.size(part) for part in parts] or [(1.0, 1.0, 0.0)]
        digits, terms, degree = (list(column) for column in zip(*sizes, strict=True))
        return max(digits), max(terms), max(degree)

    def _power(
        self, base: tuple[float, float, float], exponent: Any
    ) -> tuple[float, float, float]:
        digits, terms, degree = base
        most = self.size(exponent)[0]
        if exponent.free_symbols:
            return digits, terms, degree
        if most > math.log10(MAX_DIGITS) + 1:
            raise _TooCostly
        times = 10.0**most
        if isinstance(exponent, self._numbers) and exponent.is_finite:
            times = abs(float(exponent))
        if terms > 1:
            terms = terms ** min(max(times, 1), MAX_TERMS)
        return max(1.0, digits * times), terms, degree * max(times, 1)

    def _digits(self, tree: Any) -> float:
        """Of a number: numerator and denominator; of what is none, as many as there may be."""
        if not isinstance(tree, self._numbers):
            return 1.0 if tree.free_symbols else math.inf
        if tree.is_Rational:
            return (int(tree.p).bit_length() + int(tree.q).bit_length()) * math.log10(2)
        if not tree.is_finite:
            return 1.0
        return 1.0 + abs(float(importlib.import_module("sympy").log(abs(tree), 10).evalf(5)))


_OPERATORS: Final[dict[type, str]] = {
    ast.Add: "Add",
    ast.Sub: "Add",
    ast.Mult: "Mul",
    ast.Div: "Mul",
    ast.Pow: "Pow",
}


def read_arithmetic(text: str, **_: object) -> Any:
    """A formula of numbers and operators, as sympy's ``parse_expr`` reads it without computing:
    by Python's grammar, none of whose code is made or run.

    Raises SyntaxError for what is none, as that does.
    """
    text = text.strip()
    if not may_read(text):
        raise SyntaxError("a formula that is not read")
    return _read(ast.parse(text, mode="eval").body, text)


def _read(node: ast.expr, text: str) -> Any:
    sympy = importlib.import_module("sympy")
    match node:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.Constant(value=float(number)):
            return sympy.Float(text[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _read(operand, text)
            is_plain = isinstance(number, sympy.Number)
            return -number if is_plain else sympy.Mul(-1, number, evaluate=False)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _read(operand, text)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first, second = _read(left, text), _read(right, text)
            if isinstance(sign, ast.Sub):
                second = sympy.Mul(sympy.Integer(-1), second, evaluate=False)
            if isinstance(sign, ast.Div):
                second = sympy.Pow(second, sympy.Integer(-1), evaluate=False)
            make: Callable[..., Any] = getattr(sympy, _OPERATORS[type(sign)])
            return make(first, second, evaluate=False)
    raise SyntaxError("no formula of numbers and operators")
