"""Decide pairs whose texts determine the verdict: equal texts, words, choices, dates, numerals, units and plain numbers.

Everything here is text; nothing is evaluated. `compare` decides the rest in the sandbox.
"""

import re
from fractions import Fraction

from math_answers.dates import read_date
from math_answers.letters import settle_letters
from math_answers.replies import closing_brace
from math_answers.text import is_prose, normalize, words_of
from math_answers.units import inner_units_removed, split_unit

MAX_CHARACTERS = 1000
"""The largest length of an answer or a reference."""
LONGEST_NORMALIZED = 4 * MAX_CHARACTERS
"""The largest length of an answer in normal form, in which a cent sign has 12 characters."""
_RATIONAL = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?|\d+/0*[1-9]\d*)", re.ASCII)
_SPACED = re.compile(r"[+-]?[\d.,]*\d \d")
_BASE = re.compile(
    r"([+-]?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)_(?:\{(?:\\text\{)?\s*(?:base\s*\}?\s*)?(\d+|[a-z]{3,})\s*\}?\}|(\d))",
    re.ASCII,
)
_BASE_SPELLINGS = (
    (re.compile(r"\(?([0-9A-Za-z.]+)\)?\s*(?:\\text\{)?\s*\(?\s*base\s*(\w+)\s*\)?\s*\}?"), r"\1_{\2}"),
    (re.compile(r"(?:\(|\\text\{|\\overline\{)([0-9A-Za-z.]+)[)}](_.*)"), r"\1\2"),
    (re.compile(r"0[xX]([0-9A-Fa-f]+)"), r"0\1_{16}"),
    (re.compile(r"0[bB]([01]+)"), r"\1_{2}"),
    (re.compile(r"0[oO]([0-7]+)"), r"\1_{8}"),
    (re.compile(r"([+-]?\d{1,4}(?:[, ]\d{3,4})+)(_.*)"), lambda number: re.sub("[, ]", "", number[1]) + number[2]),
)
"""Other spellings of digits in a base: 52 (base 8), (52)_8, 0x2A, 10,101_2."""
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_CHOICE = re.compile(
    r"(?:\\text\{)?\s*(?:(?i:option|choice|answer)\s*:?\s*)?(?:\((?P<round>[A-Za-j])\)|(?P<bare>[A-Z])(?P<mark>[).:]?))(?P<rest>.*)",
    re.DOTALL,
)
_CHOICE_WORD = re.compile(r"\\text|option|choice|answer", re.IGNORECASE)
_OPTION = re.compile(
    r"\$?(?:\\(?:text|math)(?:bf|rm|it|sf)?\s*\{)*\s*(?:(?i:option|choice|answer)\s*:?\s*)?(?:\((?P<round>[A-Ja-j])\)|(?P<bare>[A-J])[).:])\}?"
    r"(?:\s|\\[,;: ]|~|\\q?quad(?![A-Za-z])|\})+(?![+*/=^<>]|-\s|\\(?:cup|cap|times|cdot|setminus|in|pm)(?![A-Za-z])|(?:and|or)(?![A-Za-z]))"
    r"(?P<text>[^\s{}](?:(?!\([A-J]\)|(?<![A-Za-z(])[A-J]\)).)*?)\}?\$?",
    re.DOTALL,
)
"""Matches a choice with its text: "(D) aspirin", \\textbf{(D)}\\ 42, "D. Paris"; no second letter follows."""
_PLAIN_WORDS = re.compile(r"^[A-Za-z][A-Za-z' -]+$")
_MORE_ROUND = re.compile(r"(?:[\s,;&.]|\\cdot)*+(?:and|or)?+[\s,;]*+\([A-J]\)(?![A-Za-z])")
_MORE_BARE = re.compile(
    r"[\s,;&.]*+(?:and|or)\s++[A-J](?![A-Za-z])|\s*+[,;&]\s*+[A-J](?![A-Za-z])|(?:\s++[A-J](?![A-Za-z]))++\s*+$"
)
_MARKED_CHOICE = re.compile(r"(?<![A-Za-z(])[A-J]\)")
"""More letters behind (A), behind A, and behind A): "and (B)", "and B", "5 B) 6"."""
_OPERATOR = re.compile(
    r"\\(?:cup|cap|setminus|times|cdot|div|circ|oplus|pm|mp|lor|land|wedge|vee|(?:not)?in|sub|sup|n?eq?|n?[lg]|equiv|approx|sim|cong"
    r"|to|(?:long)?(?:left)?rightarrow|mapsto|implies|iff|perp|parallel|mid|prime)(?:seteq|set|eq|t|e|slant|q)*(?![A-Za-z])",
    re.IGNORECASE,
)
"""Matches an operator, behind which a letter is no choice: A\\cup B."""
_REJECTED = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:is|are|was)(?:n't| not| wrong| false| incorrect)(?![A-Za-z])", re.IGNORECASE
)
"""Matches the words behind a letter that is no choice: A is wrong."""
# possessive, as the patterns of `units`: "1 to 1 to 1 ..." would take exponential time
_RATIO = re.compile(r"\d++(?:/\d++)?+(?:(?::|\s*+(?:\\text\{)?+\s*+to\s*+\}?+\s*+)\d++(?:/\d++)?+)++", re.ASCII)
_DECIMAL_COMMA = re.compile(r"[+-]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))", re.ASCII)
"""Matches 3,14, which is also a list; 3,141 is a number of thousands."""
_ELLIPSIS = re.compile(r"[+-]?[\d.]+\\ldots")
_NOTHING = frozenset(f"no{kind} solution{end}" for kind in ("", " real") for end in ("", "s")) | {
    "none",
    "empty set",
    "empty",
}
_EVERYTHING = frozenset(f"all real{end}" for end in ("s", " numbers", " number", " x", " values"))
_FORMULA = re.compile(r"[\[\](){}|!'\\]|(?<![A-Za-z])[A-Za-z]?-")
"""Matches a sign that makes letters a formula: (a,b) is not [a,b], and |abc| not abc."""
_DATE = re.compile(r"\\text\{[A-Za-z]{3}[\w ,.:]*\}")
"""Matches a word with numbers behind it, such as a date in `\\text{}`."""
_SYNONYMS = {"dne": "does not exist", "no solutions": "no solution", "no real solutions": "no real solution"}
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)|(?=\D*[AaPp]))\s*(?:\\text\{)?\s*(?:([AaPp])\.?\s?[Mm]\.?)?\s*\}?", re.ASCII)
_MODULUS = re.compile(
    r"(?:\\cdot)?\(?(?:\\text\{)?\(?(?<![A-Za-z\\])mod(?:ulo)?(?:\\cdot)?\}?(?:\\text\{)?(\d+)(?:\)|\}|\\cdot)*"
)
"""Matches a modulus in words: "(mod 7)", also inside of `\\text{}`."""
_RESIDUE = re.compile(
    r"(?:[a-z]\\equiv)?(-?\d+)(?:\\pmod|\\bmod|\\mod|\(\\bmod|\(\\mod|\\text\{mod\}|\(?mod)\s*\{?(\d+)\}?\)?"
)

Undecided = tuple[tuple[str, ...], str, str, str]
"""The answer with its letters named in each possible way, the reference, the allowed factors of the answer, and the letter of any integer."""


def decide(answer: str, reference: str) -> str | Undecided:
    """Return the verdict if the texts determine it, else what `compare.judge` compares."""
    if len(answer) > MAX_CHARACTERS:
        return "too_long"
    ours, gold = normalize(answer), normalize(reference)
    if len(ours) > LONGEST_NORMALIZED:
        return "too_long"
    if not ours or closing_brace(ours + "}", 0) != len(ours):
        return "unparsable"
    if ours == gold or answer.strip() == reference.strip():
        return "correct"
    if verdict := _decide_dates(answer, ours, reference, gold):
        return verdict
    if option := _OPTION.fullmatch(reference.strip()):
        return _decide_option(answer, ours, option)
    answers, gold, integer = settle_letters(ours, gold)
    results = [_decide_texts(answer, ours, reference, gold) for ours in answers]
    undecided = [result for result in results if not isinstance(result, str)]
    if "correct" in results or not undecided:
        return "correct" if "correct" in results else str(results[0])
    return tuple(ours for ours, _, _ in undecided), *undecided[0][1:], integer


def _decide_texts(answer: str, ours: str, reference: str, gold: str) -> str | tuple[str, str, str]:
    """Return the verdict if the texts determine it, else both texts and the allowed factors of the answer."""
    if ours == gold:
        return "correct"
    if verdict := _decide_words(answer, ours, reference, gold):
        return verdict
    if verdict := _decide_notation(ours, gold):
        return verdict
    ours, gold, scales = _without_units(ours, gold)
    if scales is None:
        return "wrong"
    ours = re.sub(r"(?<=\d) (?=\d{3})", "", ours) if re.fullmatch(r"[+-]?\d{1,3}(?: \d{3})+", ours) else ours
    if _SPACED.match(ours):  # the parser would read it as a product
        return "correct" if ours == gold else "unparsable"
    if _SPACED.match(gold) or (_ELLIPSIS.fullmatch(ours) or _ELLIPSIS.fullmatch(gold)):
        return "wrong"
    if _DECIMAL_COMMA.fullmatch(ours) and re.fullmatch(r"[+-]?\d*\.\d+", gold, re.ASCII):
        return "correct" if Fraction(ours.replace(",", ".")) == Fraction(gold) else "wrong"
    if _RATIONAL.fullmatch(ours) and _RATIONAL.fullmatch(gold) and not re.search("pi", scales):
        equal = any(Fraction(ours) * Fraction(scale) == Fraction(gold) for scale in scales.split(";"))
        return "correct" if equal else "wrong"
    if ours == gold and "1" in scales.split(";"):
        return "correct"
    return _powers_of_ten(ours), _powers_of_ten(gold), scales


def _powers_of_ten(text: str) -> str:
    """Rewrite 1e-6 for the parser, which reads e as a constant."""
    return re.sub(r"^([+-]?[\d.]+)[eE]([+-]?\d+)$", r"\1\\cdot10^{\2}", text)


def _decide_dates(answer: str, ours: str, reference: str, gold: str) -> str | None:
    """Return the verdict for two dates, and for a date and a number, which 2024-03-05 is not."""
    dates = read_date(answer), read_date(reference)
    if dates[0] and dates[1]:
        return "correct" if dates[0] == dates[1] else "wrong"
    for day, text, other in (dates[0], ours, gold), (dates[1], gold, ours):
        if day and text[0].isdigit() and _RATIONAL.fullmatch(other):
            return "wrong"
    return None


def _decide_option(answer: str, ours: str, option: re.Match[str]) -> str | Undecided:
    """Compare with the reference "(D) aspirin": D is right, and so is aspirin; (D) ibuprofen is not."""
    ours_option = _OPTION.fullmatch(answer.strip())
    letter = ours_option["round"] or ours_option["bare"] if ours_option else _choice(ours)
    due = _PLAIN_WORDS.sub(r"\\text{\g<0>}", option["text"])
    if letter is None:
        return decide(_PLAIN_WORDS.sub(r"\\text{\g<0>}", answer.strip()), due)
    if letter.upper() != (option["round"] or option["bare"]).upper():
        return "wrong"
    return decide(_PLAIN_WORDS.sub(r"\\text{\g<0>}", ours_option["text"]), due) if ours_option else "correct"


def _decide_words(answer: str, ours: str, reference: str, gold: str) -> str | None:
    """Return the verdict for words and multiple-choice letters, or None."""
    letters = [_choice(text) for text in (ours, gold)]
    if letters[1] and re.fullmatch(r"[^A-Za-z]*[A-Z][^A-Za-z]*", _CHOICE_WORD.sub("", gold)):
        if letters[0]:
            choice = letters[0].upper() if "(" in gold else letters[0]  # (d) is (D), not D
            return "correct" if choice == letters[1] else "wrong"
        return None
    ours_words, gold_words = (_SYNONYMS.get(words, words) for words in map(words_of, (answer, reference)))
    is_formula = _FORMULA.search(ours + gold) or not (gold_words == "no" or re.search("[A-Za-z]{3}", f"{gold} {ours}"))
    are_words = is_prose(ours) or is_prose(gold) or not is_formula
    if are_words and re.fullmatch(r"[a-z][a-z' -]+", gold_words) and ours_words == gold_words:
        return "correct"
    if ours_words == gold_words and (_DATE.fullmatch(ours) or _DATE.fullmatch(gold)):
        return "correct"
    for words, other in (ours_words, gold), (gold_words, ours):
        if (words in _NOTHING and other in {r"\emptyset", r"\{\}"}) or (
            words in _EVERYTHING and other in {r"\mathbb{R}", r"(-\infty,\infty)", r"(-\infty,+\infty)"}
        ):
            return "correct"
    return "wrong" if is_prose(gold) and is_prose(ours) else None


def _choice(text: str) -> str | None:
    """Return the multiple-choice letter of an answer, alone or before its text."""
    match = _CHOICE.fullmatch(re.sub(r"^\{(.*)\}$", r"\1", text))
    if match is None:
        return None
    rest = match["rest"].strip(" }.")
    if _has_more_choices(match["rest"], is_round=bool(match["round"])) or _REJECTED.match(match["rest"]):
        return None
    if (
        match["bare"]
        and rest
        and (len(rest) == 1 or not match["mark"] and (match["rest"][:1] not in " }\\" or _OPERATOR.match(rest)))
    ):
        return None
    return match["round"] or match["bare"]


def _has_more_choices(rest: str, is_round: bool) -> bool:
    """Return whether the text behind a letter names a second letter, written as the first one; letters inside of brackets are mathematics."""
    rest = re.sub(r"\\text\s*\{|[{}]", " ", rest)
    if is_round:
        return _MORE_ROUND.match(rest) is not None
    marked = (rest[: letter.start()] for letter in _MARKED_CHOICE.finditer(rest))
    return _MORE_BARE.match(rest) is not None or any(before.count("(") <= before.count(")") for before in marked)


def _decide_notation(ours: str, gold: str) -> str | None:
    """Return the verdict for numbers in a base, ratios, times and residues, or None."""
    bases = [_BASE.fullmatch(_base_form(text)) for text in (ours, gold)]
    if any(bases):
        return _decide_bases(ours, bases[0], gold, bases[1])
    times = [_TIME.fullmatch(text) for text in (ours, gold)]
    if times[0] and times[1] and (times[0][3] or times[1][3]):
        return _decide_times(times[0], times[1])
    if _RATIO.fullmatch(ours) and _RATIO.fullmatch(gold):
        if any(re.search(r"/0+(?!\d)", text) for text in (ours, gold)):
            return None
        first, second = ([Fraction(part) for part in re.findall(r"[\d/]+", text)] for text in (ours, gold))
        if any(re.search(r":0\d", text) for text in (ours, gold)) or 0 in first + second:
            return "correct" if first == second else "wrong"
        is_equal = len(first) == len(second) and all(
            a * second[0] == b * first[0] for a, b in zip(first, second, strict=True)
        )
        return "correct" if is_equal else "wrong"
    residues = [_RESIDUE.fullmatch(_MODULUS.sub(r"\\pmod{\1}", text.replace(" ", ""))) for text in (ours, gold)]
    if residues[0] and residues[1]:
        (a, m), (b, n) = ((int(residue[1]), int(residue[2])) for residue in filter(None, residues))
        return "correct" if m == n and m and (a - b) % m == 0 else "wrong"
    for residue, other, is_reference in (residues[0], gold, False), (residues[1], ours, True):
        if residue and _RATIONAL.fullmatch(other):
            return _decide_residue(int(residue[1]), int(residue[2]), Fraction(other), is_reference)
    return None


def _decide_times(ours: re.Match[str], gold: re.Match[str]) -> str:
    """Compare two times of day: 3:00 PM is 15:00, and 3:00 if that is written without a half of the day."""
    hours = [
        {int(time[1]), int(time[1]) % 12 + 12 * (time[3] in "pP")} if time[3] else {int(time[1])}
        for time in (ours, gold)
    ]
    if ours[3] and gold[3]:
        is_equal = int(ours[1]) == int(gold[1]) and ours[3].lower() == gold[3].lower()
    else:
        is_equal = bool(hours[0] & hours[1])
    return "correct" if is_equal and (ours[2] or "00") == (gold[2] or "00") else "wrong"


def _decide_residue(number: int, modulus: int, other: Fraction, is_reference: bool) -> str:
    """Compare a residue with a plain number: 142 mod 100 is 42, and -1 mod 7 is 6 or -1. A reference may be repeated as it is written."""
    is_written = other == number and (is_reference or abs(number) < modulus)
    return "correct" if modulus and (other == number % modulus or is_written) else "wrong"


def _base_form(text: str) -> str:
    """Rewrite digits in a base as `digits_{base}`."""
    for pattern, replacement in _BASE_SPELLINGS:
        if match := pattern.fullmatch(text):
            return match.expand(replacement) if isinstance(replacement, str) else replacement(match)
    return text


def _decide_bases(ours: str, our_base: re.Match[str] | None, gold: str, gold_base: re.Match[str] | None) -> str | None:
    values = [_based(base) for base in (our_base, gold_base)]
    for base, value in zip((our_base, gold_base), values, strict=True):
        if base and value is None and re.fullmatch(r"[+-]?[\d.]+", base[1]):
            return "wrong"  # 20_2 is no numeral; a_2 is a letter
    if our_base and gold_base:
        return None if None in values else "correct" if values[0] == values[1] else "wrong"
    base, value, plain = (our_base, values[0], gold) if our_base else (gold_base, values[1], ours)
    if base is None or value is None:
        return None
    is_same = base[1].lstrip("+0").upper() == plain.lstrip("+0").upper()
    if our_base and _RATIONAL.fullmatch(plain):  # the reference is in base ten
        is_numeral = base[1].lstrip("+-")[0].isdigit() or len(base[1]) > 1  # F_{16} is a letter with an index
        return "correct" if is_numeral and value == Fraction(plain) else "wrong"
    if is_same:
        return "correct"
    return "wrong" if re.fullmatch(r"[0-9A-Fa-f]+", plain) else None


def _based(match: re.Match[str] | None) -> Fraction | None:
    """Return the value of digits in a base; None if digits or base are invalid, as in a_n."""
    if match is None:
        return None
    word = match[2] or match[3]
    base = int(word) if word.isdecimal() else _BASE_WORDS.get(word, 0)
    whole, _, part = match[1].partition(".")
    digits = whole.lstrip("+-") + part
    if not 2 <= base <= 36 or not digits[0].isdigit() and base <= 10 or len(digits) > 200:
        return None
    try:
        return Fraction(int(digits, base), base ** len(part)) * (-1 if whole.startswith("-") else 1)
    except ValueError:
        return None


def _without_units(ours: str, gold: str) -> tuple[str, str, str | None]:
    """Return both answers without units, and the allowed factors of the answer; None if the units are incompatible."""
    cores = [split_unit(text, has_letters=False)[0] for text in (gold, ours)]
    has_letters = [bool(re.search(r"(?<![\\A-Za-z])[A-Za-z]", re.sub(r"\\text\{[^{}]*\}", "", core))) for core in cores]
    (ours, unit), (gold, due) = split_unit(ours, has_letters[0]), split_unit(gold, has_letters[1])
    ours, gold = (re.sub(r"^\((?=[^()]*\)$)(.*)\)$", r"\1", text) if "," not in text else text for text in (ours, gold))
    ours, gold = inner_units_removed(ours), inner_units_removed(gold)
    if unit == due:
        return ours, gold, "1"
    if unit and due:
        kinds = {unit.kind, due.kind}
        if "%" in kinds or unit.bases != due.bases:
            return ours, gold, None
        return ours, gold, str(unit.factor / due.factor)
    kind = unit.kind if unit else due.kind if due else ""
    if kind == "%":
        marked = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", ours if unit else gold)
        is_small = _RATIONAL.fullmatch(marked) and Fraction(marked).denominator > 1 and abs(Fraction(marked)) <= 1
        percent = "1/100" if unit else "100"
        return ours, gold, percent if is_small else f"1;{percent}"
    if kind == "degree":
        radians, marked = (r"\frac{\pi}{180}", gold) if unit else (r"\frac{180}{\pi}", ours)
        return ours, gold, f"1;{radians}" if re.search(r"\\pi|\\arc", marked) else "1"
    return ours, gold, "1"
