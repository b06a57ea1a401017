r"""Split the unit off a mathematical answer: `3\sqrt{2}\text{ cm}` is `3\sqrt{2}` and the unit 1/100 m.

A unit is the content of `\text{...}` after the answer, or one of the units below in plain letters after a number. Unknown
words are separate units ("12 apples"), except those that change the meaning of the answer ("5 or more").
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple

_BASES = {
    "m": ("1", "m meter metre 米"), "nm": ("1/1000000000", "nm nanometer"), "μm": ("1/1000000", "μm um micrometer micron"), "mm": ("1/1000", "mm millimeter millimetre"), "cm": ("1/100", "cm centimeter centimetre 厘米"),
    "dm": ("1/10", "dm decimeter decimetre"), "km": ("1000", "km kilometer kilometre 千米 公里"),
    "inch": ("127/5000", "in inch inches"), "foot": ("381/1250", "ft foot feet"), "yard": ("1143/1250", "yd yard"),
    "mile": ("201168/125", "mi mile"),
}  # fmt: skip
_PLAIN = {
    "s": ("1", "s sec second 秒"), "ms": ("1/1000", "ms millisecond"), "μs": ("1/1000000", "μs us microsecond"),
    "minute": ("60", "min minute 分钟"), "hour": ("3600", "h hr hour 小时"), "day": ("86400", "day 天"),
    "week": ("604800", "week wk"),
}  # fmt: skip
_MASS = {
    "g": ("1", "g gram gm 克"),
    "kg": ("1000", "kg kilogram 千克 公斤"),
    "mg": ("1/1000", "mg milligram"),
    "t": ("1000000", "tonne"),
}
_POUND = {"pound": ("1", "lb pound"), "ounce": ("1/16", "oz ounce")}
_DOLLAR = {"dollar": ("1", "dollar usd"), "cent": ("1/100", "cent ¢")}
_NEWTON = {"N": ("1", "N newton"), "kN": ("1000", "kn")}
_JOULE = {"J": ("1", "J joule"), "kJ": ("1000", "kj"), "kWh": ("3600000", "kwh")}
_WATT = {"W": ("1", "W watt"), "kW": ("1000", "kw kilowatt"), "MW": ("1000000", "mw")}
_HERTZ = {"Hz": ("1", "hz hertz"), "kHz": ("1000", "khz"), "MHz": ("1000000", "mhz"), "GHz": ("1000000000", "ghz")}
_PASCAL = {"Pa": ("1", "pa pascal"), "kPa": ("1000", "kpa")}
_CUP = {"cup": ("1", "cup"), "pint": ("2", "pint pt"), "quart": ("4", "quart qt"), "gallon": ("16", "gal gallon")}
_MONTH = {"month": ("1", "month"), "year": ("12", "yr year")}
_OTHERS = (
    "unit=unit,u degree=deg,degree,度 yuan=yuan,元,rmb euro=€,euro,eur gbp=£,gbp yen=¥,yen,jpy rupee=₹,rupee,rs,inr radian=rad,radian "
    "V=V,volt A=A,ampere,amp,amps rpm dB=db eV=ev atm psi bpm knot mol=mol,mole K=kelvin "
    "student people=people,person,人 child=child,children man=man,men woman=woman,women ohm=ohm,Ω byte bit acre hectare=hectare,ha "
    "KB=kb MB=mb GB=gb TB=tb "
    "degC=celsius degF=fahrenheit"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "lakh": 10**5, "lac": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9, "bn": 10**9,
    "trillion": 10**12, "quadrillion": 10**15, "quintillion": 10**18, "sextillion": 10**21, "septillion": 10**24, "octillion": 10**27,
    "nonillion": 10**30, "decillion": 10**33, "mln": 10**6, "mio": 10**6, "milliard": 10**9, "mrd": 10**9,
    "十": 10, "百": 100, "千": 1000, "万": 10**4, "十万": 10**5, "百万": 10**6, "千万": 10**7, "亿": 10**8, "十亿": 10**9, "百亿": 10**10, "千亿": 10**11, "万亿": 10**12,
}  # fmt: skip
_CHINESE_SCALE = re.compile("[十百千万亿]*[万亿]|[十百千]+(?![米克瓦焦帕赫伏卡分牛升斤兆])")
"""Matches the number word of 万元 and 百人; 千米 is a kilometer."""
_COUNTED = frozenset(["solution", "solutions", "integer", "integers", "number", "numbers", "times"])
"""Words that are no units, except as the last one: 8 solutions."""
_ADJECTIVES = frozenset(["real", "positive", "negative", "even", "odd", "prime", "integer", "distinct"])
"""Words that are no units, except before a noun: 8 positive integers."""
_SHORT_WORDS = frozenset(
    [
        "of",
        "by",
        "on",
        "am",
        "pm",
        "ns",
        "us",
        "µs",
        "μs",
        "ps",
        "fs",
        "dl",
        "cl",
        "hl",
        "hm",
        "dm",
        "nm",
        "lx",
        "lm",
        "cd",
        "ly",
        "au",
        "gy",
        "sv",
        "bq",
        "wb",
        "wh",
        "mo",
        "px",
        "kr",
        "zł",
        "rm",
        "hk",
        "kω",
        "mω",
    ]
)
_SHORT_UNIT = re.compile("[pnumcdhkμµ][AVWJNFHLBTKC]|[MGT][gmWVJ]")
"""Matches units of two letters, such as mA and kV; other words of two letters may be products of variables."""
_NEEDS_GAP = frozenset(["bn", "lac", "gb", "kb", "mb", "tb", "ha", "pt", "qt"])
"""Units that are products of variables where they stand directly behind a number: 2gb."""
_NO_UNIT = frozenset(
    [
        "or",
        "and",
        "more",
        "less",
        "least",
        "most",
        "than",
        "not",
        "no",
        "none",
        "if",
        "when",
        "where",
        "for",
        "approximately",
        "approx",
        "about",
        "around",
        "roughly",
        "nearly",
        "is",
        "are",
        "be",
        "was",
        "the",
        "answer",
        "because",
        "since",
        "plus",
        "minus",
        "times",
        "half",
        "third",
        "quarter",
        "mod",
        "modulo",
        "base",
        "over",
        "under",
        "above",
        "below",
        "to",
        "from",
        "between",
        "at",
        "any",
        "all",
        "every",
        "some",
        "solution",
        "solutions",
        "infinitely",
        "many",
        "undefined",
        "except",
        "unless",
        "only",
        "integer",
        "integers",
        "real",
        "number",
        "numbers",
        "positive",
        "negative",
        "even",
        "odd",
        "prime",
        "true",
        "false",
        "yes",
        "otherwise",
        "with",
        "such",
        "that",
        "remainder",
        "rem",
        "choose",
        "factorial",
        "squared",
        "cubed",
        "halves",
        "thirds",
        "fourth",
        "fourths",
        "fifth",
        "fifths",
        "sixth",
        "sixths",
        "seventh",
        "sevenths",
        "eighth",
        "eighths",
        "ninth",
        "ninths",
        "tenth",
        "tenths",
        "hundredth",
        "hundredths",
        "thousandth",
        "thousandths",
        "millionth",
        "millionths",
        "divided",
        "root",
        "reciprocal",
        "inverse",
        "negated",
        "score",
        "gross",
        "tens",
        "myriad",
        "permyriad",
        "kilo",
        "mega",
        "giga",
        "tera",
        "deca",
        "deka",
        "hecto",
        "deci",
        "centi",
        "milli",
        "micro",
        "nano",
        "pico",
        "googol",
        "googols",
        "thou",
        "bil",
        "mill",
        "permil",
        "permill",
        "bps",
        "est",
        "estimated",
        "rounded",
        "circa",
        "almost",
        "unknown",
        "unsure",
        "guess",
        "probably",
        "possibly",
        "perhaps",
        "maybe",
        "zillion",
        "mil",
        "double",
        "triple",
        "quadruple",
        "doubled",
        "tripled",
        "halved",
        "twice",
        "thrice",
        "twelfth",
        "twelfths",
        "permille",
        "mille",
        "ppm",
        "basis",
        "reciprocals",
        "complement",
        "sqrt",
        "wrong",
        "incorrect",
        "invalid",
        "excluded",
        "rejected",
        "extraneous",
        "impossible",
        "fail",
        "fails",
        "成",
        "折",
        "半",
        "个半",
        "多",
        "以上",
        "以下",
        "以内",
        "左右",
    ]
)
_FRACTION = re.compile(
    "(?:eleven|[a-z]+(?:teen|tie|illion))ths?|(?:two|three|four|five|six|ten|hundred|thousand|million|billion)fold"
)
"""Matches words that change a number by a factor: fifteenths, billionths, tenfold."""
_CASED = {"m": frozenset(["mw", "mpa", "mj", "mn", "mv"]), "M": frozenset(["mm", "mg", "ml"])}
"""First letter -> units in lower case whose prefix it would change by a factor of a million or more: mW is not MW, and Mg not mg."""
DEGREE = r"\^\{\\circ\}"
_TEXTS = r"\\text\{[^{}]*\}"
_POWER = r"(?:\^(?:\{[+-]?\d\}|\d))?"
_FACTOR = rf"(?:{_TEXTS}|\\frac\{{{_TEXTS}{_POWER}\}}\{{{_TEXTS}{_POWER}\}}){_POWER}"
_BEHIND = re.compile(
    rf"(?P<core>.*?[\w)}}\]!|.])\s*+(?P<unit>(?:{DEGREE}\s*+)?+(?:/\s*+)?+{_FACTOR}(?:\s*+(?:(?:/|\\cdot|\*)\s*+)?+{_FACTOR})*+)",
    re.DOTALL,
)
_INSIDE = re.compile(
    r"\\text\{\s*(?P<core>[+-]?[\d.,]*\d(?:/\d+)?|[+-]?\d+ \d+/\d+)\s*(?P<unit>[A-Za-z°%$€£][A-Za-z0-9 ./^²³°-]*)\}(?P<power>\^(?:\d|\{\d\}))?"
)
_LETTERS = re.compile(
    r"(?P<core>.*[\d)}])(?P<gap> ?)(?P<unit>[A-Za-z]+(?:(?:[ /]|\^\{?[23]\}?)[A-Za-z]*)*?\.?)(?:\^\{?(?P<power>[23])\}?)?",
    re.DOTALL,
)
_BEFORE = re.compile(rf"(?P<unit>{_TEXTS}|(?:USD|EUR|GBP|Rs\.?) ?)\s*(?P<core>(?!\\text)[+-]?[\d.\\(].*)", re.DOTALL)
_TOKEN = re.compile(r"\\frac\{(?P<top>[^{}]*\{[^{}]*\}[^{}]*)\}\{(?P<bottom>[^{}]*\{[^{}]*\}[^{}]*)\}|(?P<over>/|\bper\b|\ba(?=\s))|(?P<power>\^\{?(?P<exponent>[+-]?\d)\}?)|(?P<square>\b(?:square|sq\.?)(?![a-z]))|(?P<cubic>\b(?:cubic|cu\.?)(?![a-z]))|(?P<word>[^\W\d_]+|[€£¥₹¢%])|(?P<digit>[23])")  # fmt: skip


# possessive: a reply may be long, and backtracking over its spaces and words would take exponential time
_PART = r"(\d++(?:\.\d++)?+)\s*+(?:\\text\{\s*+([A-Za-z]++)\.?\s*+(?:,|and)?\s*+\}|([A-Za-z]++)\.?+)"
_PARTS = re.compile(rf"{_PART}(?>\s*+(?:(?:,|and|\\text\{{\s*+and\s*+\}})\s*+)?+{_PART})+", re.ASCII)


class Unit(NamedTuple):
    """`factor` times a product of base units, written ((base, exponent), ...) in order; `kind` is "%" or "degree" if special."""

    factor: Fraction
    bases: tuple[tuple[str, int], ...]

    @property
    def kind(self) -> str:
        """The base of a unit with a single base of exponent 1, such as "%" or "degree"; else ""."""
        return self.bases[0][0] if len(self.bases) == 1 and self.bases[0][1] == 1 else ""


PERCENT = Unit(Fraction(1), (("%", 1),))
DEGREES = Unit(Fraction(1), (("degree", 1),))


def _table() -> dict[str, tuple[Fraction, str, int]]:
    names: dict[str, tuple[Fraction, str, int]] = {}
    tables = {
        "m": _BASES, "s": _PLAIN, "g": _MASS, "pound": _POUND, "dollar": _DOLLAR, "N": _NEWTON, "J": _JOULE, "W": _WATT, "Hz": _HERTZ,
        "Pa": _PASCAL, "cup": _CUP, "month": _MONTH,
    }  # fmt: skip
    for base, table in tables.items():
        for factor, aliases in table.values():
            names |= {alias: (Fraction(factor), base, 1) for alias in aliases.split()}
    for prefix, factor in (("l", "1/1000"), ("ml", "1/1000000"), ("cl", "1/100000")):
        names[prefix] = (Fraction(factor), "m", 3)
    for name, factor in (
        ("liter", "1/1000"),
        ("litre", "1/1000"),
        ("milliliter", "1/1000000"),
        ("millilitre", "1/1000000"),
        ("cc", "1/1000000"),
    ):
        names[name] = (Fraction(factor), "m", 3)
    for entry in _OTHERS.split():
        base, _, aliases = entry.partition("=")
        names |= {alias: (Fraction(1), base, 1) for alias in (aliases or base).split(",")}
    return names


_NAMES = _table()
_COMPOUNDS = {
    "mph": "mile/hour",
    "kmh": "km/hour",
    "kph": "km/hour",
    "kmph": "km/hour",
    "fps": "foot/s",
    "sqft": "square ft",
    "sqm": "square m",
}
_PLAIN_WORDS = {*_SCALES, *_COMPOUNDS, "per", "square", "sq", "cubic", "cu"}
_ORDINAL = re.compile(r"(?<=[\dn])(?:\^\{?)?(?:\\text\{\s*(?:th|st|nd|rd)\s*\}|(?<=\d)(?:th|st|nd|rd)$)\}?")


def split_unit(text: str, has_letters: bool = True) -> tuple[str, Unit | None]:
    """Split a normalized answer into value and unit. With `has_letters`, letters may be variables."""
    text = re.sub(r" old$| old(?=\}$)", "", _ORDINAL.sub("", text))
    if inside := _INSIDE.fullmatch(text):
        text = inside["core"].replace(",", "") + rf"\text{{ {inside['unit']}}}" + (inside["power"] or "")
    if _PARTS.fullmatch(text) and (total := _sum_of_parts(text)):
        return total
    if text.endswith("%"):
        return re.sub(r"\s*\\?%$", "", text), PERCENT
    if money := re.fullmatch(r"(-?)\\text\{([€£¥₹])\}(.+)", text):
        return money[1] + money[3], _parse(money[2])
    behind = _BEHIND.fullmatch(text)
    if behind and r"\text" not in behind["core"] and (unit := _parse(behind["unit"])):
        return _with_scale(behind["core"], unit)
    if degrees := re.fullmatch(rf"(.+?){DEGREE}(?P<scale>\s*[CF])?", text, re.DOTALL):
        if degrees["scale"]:
            return degrees[1], Unit(Fraction(1), ((f"deg{degrees['scale'].strip()}", 1),))
        return degrees[1], DEGREES
    before = _BEFORE.fullmatch(text)
    if before and (unit := _parse(before["unit"])) and unit.kind in {"dollar", "euro", "gbp", "rupee", "yen"}:
        core, inner = split_unit(before["core"], has_letters)
        return (core, unit) if inner is None or inner.bases == unit.bases else (before["core"], unit)
    letters = None if has_letters else _LETTERS.fullmatch(text)
    if letters and re.fullmatch(r"[-+]?[\d.,/ ]+|.*[\d)}]", letters["core"], re.DOTALL):
        words = re.findall(r"[A-Za-z]+", letters["unit"])
        is_written = (
            letters["gap"]
            or re.search(r"\\(?:cdot|times)10\^\{?[+-]?\d+\}?$", letters["core"])
            or (letters["power"] and letters["unit"] == "m")
        )
        if len(letters["unit"]) == 1 and not (is_written and letters["unit"] in "mgshLNJWVKA"):
            return text, None
        known = [
            word
            for word in words
            if (letters["gap"] or word.lower() not in _NEEDS_GAP)
            and (_known(word) or word in _PLAIN_WORDS or _is_noun(word, letters["gap"]))
        ]
        if len(known) == len(words) and (
            unit := _parse(letters["unit"] + (f"^{letters['power']}" if letters["power"] else ""))
        ):
            return _with_scale(letters["core"], unit)
    return text, None


def _sum_of_parts(text: str) -> tuple[str, Unit] | None:
    """Return "2 hours 30 minutes" as 2.5 hours: each part has a smaller unit of the same kind."""
    total = Fraction(0)
    units: list[Any] = []
    for number, upright, plain in re.findall(_PART, text, re.ASCII):
        known = _known(upright or plain)
        if known is None or (units and (known[1:] != units[-1][1:] or known[0] >= units[-1][0])):
            return None
        units.append(known)
        total += Fraction(number) * known[0] / units[0][0]
    factor, base, power = units[0]
    value = str(total) if total.denominator == 1 else rf"\frac{{{total.numerator}}}{{{total.denominator}}}"
    return value, Unit(factor, ((base, power),))


def inner_units_removed(text: str) -> str:
    r"""Return a list or tuple without the units of its members: `(3\text{ cm},4\text{ cm})` is `(3,4)`."""

    def strip(match: re.Match[str]) -> str:
        unit = _parse(match[0])
        return "" if unit and not any(base in _SCALES for base, _ in unit.bases) else match[0]

    text = re.sub(rf"(?<=[\d)}}])(?:{DEGREE}|\\?%)(?=[,;)\]}}\\]|$)", "", text)
    return re.sub(rf"(?<=[\d)}}])\s*{_FACTOR}(?=[,;)\]]|\\\}}|$)", strip, text)


def _with_scale(core: str, unit: Unit) -> tuple[str, Unit | None]:
    """Multiply the answer by number words in its unit: 5 million is 5000000."""
    bases = tuple(base for base in unit.bases if base[0] not in _SCALES)
    for word, exponent in unit.bases:
        if word in _SCALES and exponent == 1:
            core = rf"({core})\cdot{_SCALES[word]}"
    if bases == (("radian", 1),):
        bases = ()
    return core, Unit(unit.factor, bases) if bases else None


def _is_noun(word: str, gap: str) -> bool:
    """Return whether a word after a space looks like a counted noun and not like a product of variables."""
    # `_parse` decides about the others by their place
    is_refused = _changes_meaning(word) and word.lower() not in _COUNTED | _ADJECTIVES
    return (
        bool(gap) and (len(word) >= 4 or word == "odd") and not is_refused and bool(re.search("[aeiouy]", word.lower()))
    )


def _changes_meaning(word: str) -> bool:
    """Return whether a word is no unit: it changes the number, or says something else about it."""
    return word.lower() in _NO_UNIT or _FRACTION.fullmatch(word.lower()) is not None


def _known(word: str) -> tuple[Fraction, str, int] | None:
    lowered = word.lower() if len(word) > 1 or word in "L" else word
    if word == "mHz" or lowered in _CASED.get(word[0], ()) and not word.isupper():  # mhz is rather MHz
        return None
    for candidate in (lowered, lowered.removesuffix("s"), lowered.removesuffix("es")):
        if candidate in _NAMES and (len(word) > 1 or word in "mgshLlNJWVKAC€£¥₹" or not word.isascii()):
            return _NAMES[candidate]
    return None


def _is_unit_word(word: str) -> bool:
    """Return whether a word can be a unit or a counted noun; one or two unknown letters are rather a product of variables."""
    if _changes_meaning(word):
        return False
    if _known(word) or word in {"C", "F", "%"} or word.lower() in _SCALES:
        return True
    is_short = word.lower() in _SHORT_WORDS or _SHORT_UNIT.fullmatch(word) is not None
    return is_short or "\u4e00" <= word[0] <= "\u9fff" or len(word) > 2


def _parse(text: str) -> Unit | None:
    """Return the unit that a text such as `\\text{km}/\\text{h}` or " square units" denotes; None if it is not a unit."""
    if re.search(r"\bimaginary\s+units?\b", text):
        return None
    text = re.sub(DEGREE, " degree ", text.replace(r"\cdot", " "))
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", re.sub(r"\^\\text\{(\d)\}", r"^\1", text))
    text = text.replace("²", "^2").replace("³", "^3").replace("°", " degree ").replace("**", "^")
    text = _CHINESE_SCALE.sub(r" \g<0> ", text)
    for compound, meaning in _COMPOUNDS.items():
        text = re.sub(rf"(?<![A-Za-z]){compound}(?![A-Za-z])", meaning, text)
    fraction = re.fullmatch(r"\s*\\frac\{(.*)\}\{(.*)\}\s*", text)
    if fraction:
        text = f"{fraction[1]}/{fraction[2]}"
    factor, sign, pending, last = Fraction(1), 1, 1, ""
    powers: dict[Any, Any] = {}
    left = text
    tokens = list(_TOKEN.finditer(text))
    for token in tokens:
        left = left.replace(token[0], "", 1)
        if token["over"]:
            sign = -1
        elif token["square"] or token["cubic"]:
            pending = 2 if token["square"] else 3
        elif token["power"] or token["digit"]:
            exponent = int(token["exponent"] or token["digit"])
            if not last:
                return None
            factor, powers = _raised(factor, powers, last, sign * (exponent - 1))
        elif token["word"]:
            is_end = token is tokens[-1]
            if token["word"].lower() in _ADJECTIVES and not is_end:
                continue
            last = token["word"]
            if not _is_unit_word(last) and not (last.lower() in _COUNTED and is_end):
                return None
            factor, powers = _raised(factor, powers, last, sign * pending)
            pending = 1
        else:
            return None
    if "degree" in powers and {"C", "F"} & set(powers):
        scale = "C" if "C" in powers else "F"
        powers = {f"deg{scale}": 1}
    if not powers or len(powers) > 5 or re.sub(r"[\s.\-\\{}*]|cdot", "", left):
        return None
    return Unit(factor, tuple(sorted((base, power) for base, power in powers.items() if power)))


def _raised(factor: Fraction, powers: dict[str, int], word: str, exponent: int) -> tuple[Fraction, dict[str, int]]:
    is_cased = any(word.lower() in units for units in _CASED.values())
    singular = word[0] + word[1:].lower() if is_cased else word.lower().removesuffix("s") if len(word) > 2 else word
    scale, base, power = _known(word) or (Fraction(1), "%" if word == "%" else singular, 1)
    return factor * scale**exponent, powers | {base: powers.get(base, 0) + power * exponent}
