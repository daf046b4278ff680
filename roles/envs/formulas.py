"""Comparison of formulas, with a bound on the cost of a stranger's answer.

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
import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

from roles.envs.answers import number, spelled, split_unit
from roles.envs.contained import EnvironmentFailed, call_contained

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
"""Largest degree of a polynomial. Equations of a higher degree are solved in seconds."""
MAX_NODES: Final = 120
"""Most numbers, names and operations of a formula."""
MAX_ENTRIES: Final = 25
"""Most entries of a matrix."""
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
    """Return True if a text is short and plain enough to be read as a formula."""
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
    """Return True if a formula that was read may be computed with. ``tree`` is sympy's, or a
    text.
    """
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


_UNREAD: Final = re.compile(
    r"\\(?:approx|l?dots|cdots)(?![A-Za-z])|\\(?:\$|pounds|euro)|['\"@#~`?]|!="
    r"|(?<![\\A-Za-z])[A-Za-z]{5,}|(?<![_^\d.])\d[\d.]*\s+[\d.]"
)
r"""What makes a text no formula. latex2sympy2 leaves it out (of ``1,\ldots,9`` it reads 1
and 9, of f' it reads f), makes a product of a word's letters, and the sum of 1 and 2 of 1 2."""
_WORDS: Final = re.compile(
    r"\\(?:text|math|begin|end)(?:bf|it|rm|normal)?\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_SCIENTIFIC: Final = re.compile(r"(-?[\d.]+)[eE]([+-]?\d{1,5})")
_THOUSANDS: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
KEPT: Final = 64
"""Right answers whose trees are kept between calls."""
_CLOSE: Final = 1e-4
"""Largest relative difference of two numbers that count as equal, beside being equal when
rounded to six decimals."""


class Formulas:
    """Equality of formulas, by math-verify. Formulas that may be costly are not read."""

    name = "math"

    def __init__(self) -> None:
        grader: Any = importlib.import_module("math_verify.grader")
        reader: Any = importlib.import_module("latex2sympy2_extended.latex2sympy2")
        # sympy imports it late, and it reads formulas of its own with what is replaced below.
        importlib.import_module("sympy.physics.units")
        # The two names by which a text, if of digits, comes to Python's `eval`.
        for name in ("math_verify.parser", "sympy.parsing.sympy_parser"):
            parser: Any = importlib.import_module(name)
            parser.parse_expr = read_arithmetic
        measure_parts(reader._Latex2Sympy)
        grader.sympy_numeric_eq = _closer(grader.sympy_numeric_eq)
        # It warns at each start that a caller without its time limit needs one: there is one.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._sympy: Any = importlib.import_module("sympy")
        self._relations = (
            self._sympy.core.relational.Relational,
            importlib.import_module("latex2sympy2_extended.logic").And,
        )
        self._convert: Callable[..., Any] = reader.latex2sympy
        self._normalize: Callable[..., str] = reader.normalize_latex
        self._style = reader.NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
        )
        self._is_complex: Callable[[str], bool] = grader.should_treat_as_complex
        self._verify: Callable[..., bool] = partial(grader.verify, timeout_seconds=None)
        # Each completion of a group is compared with the same right answer.
        self._read_right = lru_cache(KEPT)(self.read)

    def equal(self, right: str, said: str) -> bool:
        """Return True if ``said`` has the value of ``right``, and its unit if it has one.

        Without math-verify's own time limit: it is an alarm signal, which the process needs
        for the limit on all of it (`roles.envs.ration`).
        """
        if max(len(right), len(said)) > 2 * MAX_LENGTH:
            return False
        right, unit = split_unit(spelled(right))
        said, other = split_unit(spelled(said))
        if unit == "%" != other:
            return not other and self._same(rf"\frac{{{right}}}{{100}}", said)
        if other == "%" != unit:
            hundredth = rf"\frac{{{said}}}{{100}}"
            return not unit and (self._same(right, said) or self._same(right, hundredth))
        return unit in ("", other) and self._same(right, said)

    def _same(self, right: str, said: str) -> bool:
        """Return True if two formulas without units have one value."""
        value, other = number(right), number(said)
        if value is not None and other is not None:
            return value == other
        tree = self._read_right(right)
        if tree is None:
            return False
        answer = self.read(said)
        return (
            answer is not None and self._is_whole(tree, answer) and self._verify(tree, answer)
        )

    def read(self, text: str) -> Any:
        """Return the tree of a whole spelled formula; None if it cannot be read."""
        if scientific := _SCIENTIFIC.fullmatch(text):
            text = rf"{scientific[1]}\cdot 10^{{{scientific[2]}}}"
        if not re.search(r"[(\[{]", text):
            text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
        if not may_read(text) or _UNREAD.search(_WORDS.sub(_without_words, text)):
            return None
        normal = self._normalize(text, config=self._style)
        convert = partial(
            self._convert, normal, is_real=not self._is_complex(normal),
            convert_degrees=False, normalization_config=None,
        )  # fmt: skip
        try:
            tree = call_contained(self, "formula", convert)  # the grammar raises anything
        except EnvironmentFailed:
            try:
                tree = read_arithmetic(text.replace("^", "**"))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        return tree if may_compute(tree) else None

    def _is_whole(self, right: Any, said: Any) -> bool:
        """Return True if math-verify would compare all of ``right`` with all of ``said``.

        It takes the right side of an equation for the equation, an element for its set, and
        equations without variables for equal.
        """
        sympy = self._sympy
        if isinstance(said, self._relations) and not said.free_symbols:
            return isinstance(right, self._relations) or self._is_true(said)
        if isinstance(right, self._relations):
            if isinstance(said, sympy.Set):
                return not isinstance(right, (sympy.Eq, self._relations[1]))
            return isinstance(said, self._relations) and right.free_symbols == said.free_symbols
        if isinstance(right, sympy.FiniteSet):
            return isinstance(said, (sympy.Set, sympy.Tuple))
        if isinstance(right, (sympy.Set, sympy.Tuple)):
            is_list = isinstance(said, sympy.FiniteSet)
            return isinstance(said, (sympy.Set, sympy.Tuple)) and not is_list
        return True

    def _is_true(self, relation: Any) -> bool:
        """Return True if an equation of numbers holds."""
        parts = getattr(relation, "_unsorted_args", (relation,))
        return all(self._verify(part.lhs, part.rhs) for part in parts)


def _without_words(found: re.Match[str]) -> str:
    r"""Replacement of a match: empty for a styled word; a command that `_UNREAD` knows
    stays."""
    return found[0] if _UNREAD.match(found[0]) else ";"


def _closer(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Return math-verify's comparison of numbers with a bound on their relative difference. By
    itself it rounds to six decimals, where all small numbers are equal."""

    def is_close(one: Any, other: Any, *precision: int) -> bool:
        if not compare(one, other, *precision):
            return False
        try:
            first, second = complex(one.doit()), complex(other.doit())
        except (TypeError, ValueError, AttributeError, OverflowError):
            return True  # matrices, variables, and numbers that are too large to be rounded
        return abs(first - second) <= _CLOSE * max(abs(first), abs(second))

    return compare if compare.__name__ == is_close.__name__ else is_close


class _TooCostly(Exception):
    """A formula is beyond a bound."""


class _Measure:
    """Digits, terms and degree of a tree, bottom up, without computing it."""

    def __init__(self) -> None:
        self._nodes = 0
        self._numbers = importlib.import_module("sympy").Number
        self._matrices = importlib.import_module("sympy").MatrixBase

    def size(self, tree: Any) -> tuple[float, float, float]:
        """Return bounds of the tree's digits, terms and degree.

        Raises:
            _TooCostly: A bound is exceeded.
        """
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
        """Return the bounds of several trees that stand beside each other."""
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
        """Return the digits of a number's numerator and denominator.

        A tree that is no number has 1 digit if it has free symbols, else infinitely many.
        """
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
    """Read a formula of numbers and operators as sympy's ``parse_expr`` does without
    evaluation: by Python's grammar, but without compiling or running code.

    Raises SyntaxError for other text.
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
