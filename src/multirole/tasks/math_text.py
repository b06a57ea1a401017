"""Texts of mathematical answers: one spelling, units, exact fractions, and the comparisons that need no more than that.

Everything here is a bounded number of passes over a text of bounded length, and nothing is evaluated. What cannot be
decided from the text is left to math-verify (`math_answer.py`).
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 1000
"""Of an answer, and of a reference."""
Comparison = tuple[tuple[str, ...], str]
"""Whether any of these texts equals the reference."""

_Rewrite = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_NUMERAL = r"\d+(?:\.\d*)?|\.\d+"
_UNICODE = str.maketrans(
    {
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "±": r"\pm ", "…": r"\ldots ", "≈": r"\approx ", "′": "'",
    }
    | {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}  # full width
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63", "-")
    | {  # NFKC of one half is 1, fraction slash, 2
        symbol: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", symbol).split("\u2044"))
        for symbol in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SPELLING: list[_Rewrite] = [  # (pattern, replacement), in this order
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}"),
    (re.compile(r"√\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile("√"), r"\\sqrt"),
    (re.compile(r"\\?\$|[€£¥₹]|\\!|\\(?:displaystyle|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])"), ""),  # "2 1/2" keeps its space
    (re.compile(r"(?<!\.)\.$"), ""),
]
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|underline|mbox|boxed|fbox)\s*\{|\{"
)


def _repeating(found: re.Match[str]) -> str:
    """Write 0.1\\overline{6} as (16 - 1) / 90."""
    once = found[2] + found[3]
    bottom = (10 ** len(found[4]) - 1) * 10 ** len(found[3])
    return rf"{found[1]}\frac{{{int(once + found[4]) - int(once or 0)}}}{{{bottom}}}"


_NUMBERS: list[_Rewrite] = [  # whole texts only: (pattern, replacement), in this order
    (re.compile(r"\(?([A-Za-z])[).:]?\.?"), r"\1"),  # a choice such as (B)
    (
        re.compile(r"([+-]?\d{1,3})(?=(,|\{,\}| )\d{3})((?:\2\d{3})+)(\.\d+)?", re.ASCII),  # thousands
        lambda found: found[1] + found[3].replace(found[2], "") + (found[4] or ""),
    ),
    (re.compile(r"([+-]?\d+)\{,\}(\d+)", re.ASCII), r"\1.\2"),  # a decimal comma
    (re.compile(rf"([+-]?(?:{_NUMERAL}))[eE]([+-]?\d+)", re.ASCII), r"\1\\times 10^{\2}"),
    (re.compile(r"([+-]?\d+) (\d+)/(\d+)", re.ASCII), r"\1\\frac{\2}{\3}"),
    (re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|dot)\{(\d+)\}", re.ASCII), _repeating),
]
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES_INSIDE = re.compile(rf"({_NUMERAL})\^(?:\\circ|\{{\\circ\}})", re.ASCII)
_DEGREE = re.compile(r"\^(?:\\circ|\{\\circ\})[CF]?$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]+")
_UNIT = re.compile(
    r"(?: ?\\(?:text|mathrm|textrm|textnormal|mbox|operatorname)\{ ?([A-Za-z][A-Za-z ./^0-9*-]*(?:\^\{-?\d\})?) ?\}"
    r"| (mm|cm|dm|km|ft|feet|foot|inch(?:es)?|yards?|miles?|met(?:er|re)s?|mg|kg|grams?|lbs?|pounds?|mph|km/h|m/s"
    r"|units?|square units|degrees?|dollars?|cents?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|percent))"
    r"(\^\{?[23]\}?)?$"
)
_NO_UNIT = re.compile(
    r"[ied]|or|and|not?|if|than|more|less|fewer|at|least|most|about|approximately|is|are|mod|to|other|only|per"
)


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes one opened just before `start`, or None."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


def _normalize(text: str) -> tuple[str, bool]:
    """Return the text in one spelling without its outer wrappers, and whether one of them was for words (`\\text`)."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    is_text = False
    for _ in range(8):  # wrappers in wrappers; the bound keeps the number of passes fixed
        if (opening := _WRAPPER.match(text)) and closing_brace(text, opening.end()) == len(text) - 1:
            text = text[opening.end() : -1].strip()
            is_text = is_text or opening[0].startswith(("\\text", "\\mbox"))
        elif text.startswith((r"\(", r"\[")) and text.endswith((r"\)", r"\]")):
            text = text[2:-2].strip()
        else:
            break
    for pattern, replacement in _NUMBERS:
        if found := pattern.fullmatch(text):
            text = replacement(found) if callable(replacement) else found.expand(replacement)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES_INSIDE.sub(r"(\\frac{\1\\pi}{180})", text)
    return text, is_text


def _split_unit(text: str) -> tuple[str, str]:
    """Split `5\\text{ cm}` into ("5", "cm"); the unit is "" where nothing is certainly one, and "%" for percent."""
    if text.endswith("%"):
        return re.sub(r"\\?%$", "", text).rstrip(), "%"
    if (found := _DEGREE.search(text)) and not _TRIGONOMETRY.search(text):
        return text[: found.start()], "degree"
    if not (found := _UNIT.search(text)):
        return text, ""
    value, words = text[: found.start()], (found[1] or found[2]).lower().split()
    has_value = re.search(r"\d|\\pi", value) and re.search(r"[A-Za-z0-9)}]$", value)
    if not has_value or any(map(_NO_UNIT.fullmatch, words)) or len(words) > 3:
        return text, ""
    unit = "".join(words).rstrip(".")
    unit = {"percent": "%", "percentage": "%", "deg": "degree"}.get(unit, unit)
    unit = unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit
    return value, unit + (found[3] or "").replace("{", "").replace("}", "")


def _as_rational(text: str) -> Fraction | None:
    """Return the number that a plain integer, decimal or fraction stands for, None for anything else."""
    if re.fullmatch(rf"[+-]?(?:{_NUMERAL})", text, re.ASCII):
        return Fraction(text)
    parts = re.fullmatch(r"([+-]?)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/(\d+)", text, re.ASCII)
    if parts is None or not (bottom := int(parts[3] or parts[5])):
        return None
    return Fraction(int(parts[2] or parts[4]), bottom) * (-1 if parts[1] == "-" else 1)


def decide(answer: str, reference: str) -> str | Comparison:
    """Return the verdict where text and exact fractions give one, else what math-verify must compare."""
    if len(answer) > MAX_CHARACTERS:
        return "too_long"
    (ours, ours_is_text), (gold, gold_is_text) = _normalize(answer), _normalize(reference)
    if not ours or closing_brace(ours + "}", 0) != len(ours):
        return "unparsable"
    if ours == gold:
        return "correct"
    if (ours_is_text or gold_is_text) and _WORDS.fullmatch(ours) and _WORDS.fullmatch(gold):
        return "correct" if ours.casefold() == gold.casefold() else "wrong"
    (ours, unit), (gold, gold_unit) = _split_unit(ours), _split_unit(gold)
    if unit and gold_unit and unit != gold_unit:
        return "wrong"
    alternatives, factors = [ours], {Fraction(1)}
    if "%" in (unit, gold_unit) and unit != gold_unit:  # the sign is on one side only: 50% for 50, or for 0.5
        alternatives.append(rf"\frac{{{ours}}}{{100}}" if unit else rf"100\cdot({ours})")
        factors.add(Fraction(1, 100) if unit else Fraction(100))
    if gold in alternatives:
        return "correct"
    number, gold_number = _as_rational(ours), _as_rational(gold)
    if number is not None and gold_number is not None:
        return "correct" if any(number * factor == gold_number for factor in factors) else "wrong"
    return tuple(alternatives), gold
