r"""The final answer of a completion, and how texts of answers are compared.

This is the one reader of thoughts and boxes. Strangers write the texts: each function reads a
text from left to right, and its work grows with the text's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_THOUGHT: Final = re.compile(
    r"<(/?)(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning|reflection)\s*>"
    r"|\[(/?)THINK\]|◁(/?)think▷|<\|(START|END|begin_of|end_of)_(?:THINKING|thought)\|>",
    re.IGNORECASE,
)
"""Matches the begin or end of a thought, as DeepSeek, Qwen, Magistral, Kimi and Cohere spell
it.
"""
_ENDS: Final = frozenset({"/", "end", "end_of"})

_BARE: Final = re.compile(
    r"[-+]?(?:[\d.]|\\(?!boxed|fbox)[A-Za-z]|[A-Za-z](?![A-Za-z]))"
    r"[^\s${}]*(?:\{[^{}]*\}[^\s${}]*)*"
)
r"""Matches the content of a box without braces: ``\boxed 5``."""
_BRACE: Final = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))\s*\{?|\\.|[{}]", re.DOTALL)
"""Matches a box, an escaped character, or a brace."""
_FORMULA: Final = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SAID: Final = re.compile(r".*(?:\bis|\bare|[Aa]nswer|=|:)\s+(\S.*)")
_NUMBER: Final = re.compile(
    r"(?:^|(?<=[\s=:]))-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?=[.,;:!?]*(?:\s|$))"
)

_SENTENCE: Final = 400
"""Characters of a sentence without a box that are looked at: its end."""

_MARKS: Final = str.maketrans(
    {
        **dict.fromkeys("−–", "-"),
        **dict.fromkeys("·⋅", r"\cdot "),
        **dict.fromkeys("\u00a0\u202f\u2009", " "),
        **dict.fromkeys("“”", '"'),
        **{"×": r"\times ", "÷": r"\div ", "±": r"\pm ", "√": r"\sqrt ", "°": r"^\circ "},
        **{"π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "∅": r"\emptyset ", "∈": r"\in "},
        **{"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
        **{"²": "^{2}", "³": "^{3}", "£": r"\pounds ", "€": r"\euro ", "’": "'"},
    }
)
_SPELLINGS: Final = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?<!\\)\\[()\[\]]|(?<!\\)\$", " "),  # what formulas stand between
        (r"\\!", ""),
        (r"(\\\\)|\\[,;: ]|~|\\(?:q?quad|displaystyle|limits)(?![A-Za-z])", r"\1 "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\frac\s*([^\W_])\s*([^\W_])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([^\W_])\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*([^\W_])", r"\\sqrt{\1}"),
        (r"\\(?:leqslant|le)(?![A-Za-z])", r"\\leq"),
        (r"\\(?:geqslant|ge)(?![A-Za-z])", r"\\geq"),
        (r"\\ne(?![A-Za-z])", r"\\neq"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\{\s*,\s*\}", ","),
    )
)
_GROUPS: Final = re.compile(r"(?<![\d.,])(\d{1,3})((?:\s\d{3})+)(?![\d.,]*\d)")
"""Matches a number whose thousands stand apart: 10 000."""
_STYLE: Final = (
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*"
    r"\{([^{}]*)\}"
)
_STYLED: Final = re.compile(_STYLE)
_LETTERS: Final = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_PLAIN: Final = re.compile(r"([-+]?)\s*(\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(\.\d*)?")
_LONGEST: Final = 1000
"""Characters of a number whose value is compared."""

_WORDS: Final = (
    "mm|cm|dm|km|in|inch|inches|ft|foot|feet|yards?|miles?|met(?:er|re)s?|mph|km/h|kmh|kph|mg|kg"
    "|grams?|lbs?|pounds?|tons?|ml|lit(?:er|re)s?|sec|seconds?|mins?|minutes?|hrs?|hours?|days?"
    "|weeks?|months?|years?|deg|degrees?|rad|radians|percent|percentage|pct|dollars?|cents?"
    "|euros|units?|square|cubic|sq|am|pm|people|students"
)
"""Units that are written without a style. A single letter is a variable."""
_UNIT: Final = re.compile(
    rf"(?:\s*(?:{_STYLE}|\\?%|\^\s*\{{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}}?"
    rf"|\\degree(?![A-Za-z])|(?<![A-Za-z\\])(?:{_WORDS})(?![A-Za-z]))"
    r"(?:\s*\^\s*(?:\d|\{\s*\d\s*\}))?(?:\s*/(?=\s*(?:\\|[A-Za-z])))?)+\s*$"
)
_CURRENCY: Final = re.compile(r"\s*(-?)\s*(\\\$|\\pounds(?![A-Za-z])|\\euro(?![A-Za-z]))")
_UNITS: Final = {
    **dict.fromkeys(("percent", "percentage", "pct", r"\%"), "%"),
    **dict.fromkeys(("degree", "degrees", "deg", r"\degree", r"^\degree"), r"^\circ"),
    **dict.fromkeys(("dollar", "dollars"), r"\$"),
}
_NAMED: Final = re.compile(r"[A-Za-z]\s*=\s*([^=]+)")
_OPEN: Final = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|pm)(?![A-Za-z])|[-+*/^{}().\d\s]")


def spoken(text: str) -> str:
    """Return the text after the last thought; empty if a thought does not end."""
    start = 0
    for mark in _THOUGHT.finditer(text):
        start = mark.end() if _ends(mark) else len(text)
    return text[start:]


def open_thought(text: str) -> str:
    """Return the opening mark of a thought that the text does not end; empty if there is
    none."""
    last = ""
    for mark in _THOUGHT.finditer(text):
        last = "" if _ends(mark) else mark[0]
    return last


def _ends(mark: re.Match[str]) -> bool:
    return any((sign or "").lower() in _ENDS for sign in mark.groups())


def last_box(text: str) -> str | None:
    r"""Return the content of the last box of a text; None if there is no box.

    Boxes are ``\boxed{...}``, ``\fbox{...}`` and ``\boxed 5``. A box within a box is part of
    the outer box's content. A last box that does not end holds nothing, and no earlier box
    counts in its place.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    last = boxes[0]
    for box in boxes[1:]:
        if last.end is None or box.start > last.end:
            last = box
    return "" if last.end is None else unboxed(text[last.inside : last.end])


@dataclass(slots=True)
class _Box:
    start: int
    inside: int
    end: int | None = None
    """End of the box's content; None if the box does not end."""
    has_brace: bool = True


def _boxes(text: str) -> list[_Box]:
    """Return all boxes in the order of their beginnings, read once."""
    boxes: list[_Box] = []
    opened: list[_Box | None] = []
    place = 0
    while mark := _BRACE.search(text, place):
        place = mark.end()
        if mark[0] == "}":
            if opened and (box := opened.pop()):
                box.end = mark.start()
        elif mark[0] == "{":
            opened.append(None)
        elif mark["box"] and mark[0].endswith("{"):
            boxes.append(_Box(mark.start(), mark.end()))
            opened.append(boxes[-1])
        elif mark["box"] and (bare := _BARE.match(text, place)):
            place += len(bare[0].rstrip(".,;:!?"))
            boxes.append(_Box(mark.start(), mark.end(), place, has_brace=False))
    return boxes


def unboxed(text: str) -> str:
    """Return a text with what its boxes hold in their places."""
    cut = set()
    for box in _boxes(text):
        if box.end is not None:
            cut |= {(box.start, box.inside), (box.end, box.end + box.has_brace)}
    kept, place = [], 0
    for start, end in sorted(cut):
        kept.append(text[place:start])
        place = max(place, end)
    return "".join([*kept, text[place:]])


def final_answer(text: str) -> str:
    """Return the content of the last box of the spoken text, or else the last line."""
    said = spoken(text)
    boxed = last_box(said)
    return (said.strip().splitlines() or [""])[-1] if boxed is None else boxed


def final_answers(text: str) -> list[str]:
    """Return `final_answer`, and the formula or the number that ends it if it is a sentence."""
    last = final_answer(text)
    if last_box(spoken(text)) is not None:
        return [last]
    sentence = last[-_SENTENCE:]
    if formulas := _FORMULA.findall(sentence):
        return [last, "".join(formulas[-1])]
    said = _SAID.fullmatch(sentence)
    numbers = [] if "\\" in sentence else _NUMBER.findall(sentence)
    return [last, *([said[1]] if said else []), *numbers[-1:]]


def reads_back(answer: str) -> bool:
    """Return True if a model that writes an answer into a box is read as saying it."""
    return bool(key(answer)) and final_answer(rf"\boxed{{{answer}}}") == unboxed(answer)


def spelled(text: str) -> str:
    """Return a formula in one spelling of marks, blanks, brackets, fractions and numbers."""
    text = text.translate(_MARKS)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _GROUPS.sub(lambda found: found[1] + re.sub(r"\s", ",", found[2]), text)
    return text.strip().rstrip(".,;").rstrip()


def key(text: str) -> str:
    """Return a key that is equal for texts that differ only in spelling, blanks, style and
    capitals."""
    text = _STYLED.sub(r"\1", spelled(unboxed(text)))
    text = re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))
    text = re.sub(r"([\^_])\{(\w|\\[A-Za-z]+)\}", r"\1\2", text)
    return _LETTERS.sub(
        lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), text
    )


def number(text: str) -> Decimal | None:
    """Return the value of an integer or a decimal; None for any other text."""
    found = _PLAIN.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if found is None:
        return None
    return Decimal("".join(found.groups("")).replace(",", "").rstrip("."))


def split_unit(text: str) -> tuple[str, str]:
    """Return the value of a spelled formula and its unit, which is empty if there is none."""
    if money := _CURRENCY.match(text):
        return money[1] + text[money.end() :].strip(), money[2]
    found = _UNIT.search(text)
    value = text[: found.start()].strip() if found else ""
    if found is None or not value or value[-1] in "=<>+-*/,(^_":
        return text, ""
    unit = key(found[0])
    return value, _UNITS.get(unit, unit)


def value_of(answer: str) -> str:
    """Return the number alone of ``x = 5`` and of ``5 cm``; any other answer as it is.

    What is asked for is the number. An answer may have the name and the unit, or not.
    """
    if len(answer) > _LONGEST:
        return answer
    value, unit = split_unit(spelled(unboxed(answer)))
    named = _NAMED.fullmatch(value)
    value = named[1].strip() if named else value
    is_changed = bool(named) or unit not in ("", "%")
    return value if is_changed and unit != "%" and not _OPEN.sub("", value) else answer


def are_alike(one: str, other: str) -> bool:
    """Return True if two texts have one `key`, and it is not empty."""
    shorter, longer = sorted((len(one), len(other)))
    return longer <= 4 * shorter + _LONGEST and key(one) == key(other) != ""


def is_fragment(part: str, whole: str) -> bool:
    """Return True if a text is a part of another that says less.

    2 is a fragment of 2x. 13 is not one of 13.0, and A is not one of (A).
    """
    if len(part) > len(whole) + _LONGEST:
        return False
    part, whole = key(part), key(whole)
    if part not in whole or part == whole:
        return False
    value, other = number(part), number(whole)
    if value is not None and other is not None:
        return value != other
    return whole != (rf"\{{{part}\}}" if "," in part else f"({part})")
