r"""Rewrite a mathematical answer as plain LaTeX that math-verify's parser reads, and split off its unit.

`normalize` removes variations of notation: styles, spaces, Unicode characters, thousands separators, `\frac12`, `sqrt(2)`,
mixed numbers, repeating decimals. `split_unit` (in `math_units`) removes the unit. Everything here is text; nothing is
evaluated.
"""

import re
import unicodedata
from math import prod

from multirole.core.replies import closing_brace

_UNICODE = {
    "–": "-", "—": "-", "−": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
    "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ",
    "℃": r"^\circ \text{C}", "℉": r"^\circ \text{F}", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "ⅇ": "e", "ⅈ": "i", "…": r"\ldots ", "⋯": r"\ldots ", "∖": r"\setminus ",
    "≈": r"\approx ", "≡": r"\equiv ", "∠": r"\angle ", "△": r"\triangle ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "¢": r"\text{ cents}",
    "或": " or ", "和": " and ", "、": ",", "€": r"\text{€}", "£": r"\text{£}", "¥": r"\text{¥}", "₹": r"\text{₹}",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_VULGAR = re.compile(r"(\d*)\s*([¼-¾⅐-⅞])")

_SWITCH = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|scriptscriptstyle|limits|nolimits|[mM]?left|[mM]?right|middle|[bB]igg?[lrm]?"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|sf|tt|bfseries|boldmath|unboldmath|cal|nonumber|notag)"
    r"(?![A-Za-z])\.?"
)
_WRAPPER = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|mathnormal|pmb|underline|uline|boxed|fbox|framebox|ensuremath|phantom"
    r"|smash|mathord|mathop|mathbin|mathrel|displaylines|tag\*?)(?![A-Za-z])\s*(?=\{)"
)
_COLOR = re.compile(r"\\(?:(?:text)?color|colorbox)\s*\{[^{}]*\}|\\(?:fcolorbox)\s*\{[^{}]*\}\s*\{[^{}]*\}")
_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|up|sc|sl|md|normal)?|emph|mbox|hbox|mathrm|operatorname\*?|unit|si)(?![A-Za-z])\s*\{"
)
_ROMAN = re.compile(r"\{\s*\\rm(?![A-Za-z])\s*([^{}]*)\}|\\rm(?![A-Za-z])\s*([A-Za-z]+)")
_SPACE = re.compile(
    r"(?:(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick|en)space(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}|\s)+"
)
_QUANTITY = re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{\\?([^{}]*)\}")
_FUNCTIONS = [
    "arcsin",
    "arccos",
    "arctan",
    "arccot",
    "arcsec",
    "arccsc",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "gcd",
    "lcm",
    "max",
    "min",
    "det",
    "deg",
]
_GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "theta",
    "lambda",
    "mu",
    "omega",
    "phi",
    "psi",
    "rho",
    "sigma",
    "tau",
]
_BARE = re.compile(rf"(?<![\\A-Za-z])(pi|sqrt|infty|infinity|oo|{'|'.join([*_FUNCTIONS, *_GREEK])})(?![A-Za-z])")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|text\{\s*cis\s*\})(?![A-Za-z])")
_GAP = r"(?:\\[,;: ]|~|\{,\}|\\!,|,\s*\\!\s*)"
_THOUSANDS_GAP = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?![\d])", re.ASCII)
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:([, ])\d{3})(?:\3\d{3})*)((?:\.\d+)?)", re.ASCII)
_THOUSANDS_FACTOR = re.compile(r"(?<![\d.,{(\[])(\d{1,3}(?:,\d{3})+)(?=(?:\.\d+)?(?:\\[a-zA-Z%]|[a-zA-Z^%]|\s*$))")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overbar)\s*\{(\d+)\}(?:\\dot\s*\{(\d)\})?|\((\d+)\))(?![\d.])", re.ASCII
)
_MIXED = re.compile(r"(?<![\d.A-Za-z}^_)\]\\/])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}(?!\s*[\^!])", re.ASCII)
_MIXED_PLAIN = re.compile(r"(?<![\d.A-Za-z}^_)\]/*])(?<!\d )(\d+) (\d+)/(\d+)(?![\d./]| \d)", re.ASCII)
_POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])", re.ASCII)
_SIGNS = ((re.compile(r"\+\s*-|-\s*\+"), "-"), (re.compile(r"^\s*-\s*-"), ""))
LIMIT_OF_DOUBLE_FACTORIAL = 300


def normalize(text: str) -> str:
    """Return the answer in normal form; answers that differ only in style mostly have the same form."""
    text = _unicode(text).strip()
    text = re.sub(r"^(\*\*|__|`)(?=\S)(.*\S)\1$", r"\2", text, flags=re.DOTALL)
    text = re.sub(r"^(-?)(?:\\\$|\$(?=[\d.][^$]*$))\s*(?=-?[\d.\\])", r"\1\\text{USD} ", text)
    text = re.sub(r"\\\$|\$|\\(?:\(|\)|\[|\])(?![\d.]*\s*(?:pt|em|ex|cm|mm)\])", "", text)
    text = _THOUSANDS_GAP.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text).replace(r"\!", "")
    text = re.sub(r"(?<=\d)[ \t]*[\r\n]+[ \t]*(?=\d)", r"\\newline ", text)
    text = _SPACE.sub(" ", _SWITCH.sub("", _COLOR.sub("", text)))
    text = re.sub(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = _WRAPPER.sub("", _QUANTITY.sub(r"\1\\text{\2}", text))
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![A-Za-z])", r"\\binom", text)
    text = _ROMAN.sub(lambda match: rf"\text{{{match[1] or match[2]}}}", text)
    text = re.sub(r"\\(?:mathrm|text(?:rm)?) ([A-Za-z])(?![A-Za-z])", r"\\text{\1}", text)
    text = re.sub(r"\\imath(?![A-Za-z])", "i", text)
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", _texts(text)).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = re.sub(r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset", text)
    text = re.sub(r"\\langle(?![A-Za-z])", "(", re.sub(r"\\rangle(?![A-Za-z])", ")", text))
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    text = re.sub(r"\\(?:dots|cdots|ldots|dotsc|dotsb)(?![A-Za-z])", r"\\ldots", text)
    text = re.sub(r"\\(?:bigcup|cup)(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])", r"\\cup", text)
    text = re.sub(r"\\leqslant|\\leqq|\\leq(?![A-Za-z])|<=", r"\\le ", text)
    text = re.sub(r"\\geqslant|\\geqq|\\geq(?![A-Za-z])|>=", r"\\ge ", text)
    text = _ascii(text)
    text = _arguments(text)
    text = _numbers(text)
    if _ANGLE.search(text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)", r"{\\frac{\1\\pi}{180}}", text)
    text = _cis(text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])\s?", r"^{\\circ}", text)
    text = re.sub(r"(?<![A-Za-z0-9\\]) +| +(?![A-Za-z0-9\\])", "", text)
    return re.sub(r"^(?:\{\}|[,;:])+|(?:[,;:]|(?<!\.)\.)+$", "", text).strip()


def _unicode(text: str) -> str:
    def fraction(match: re.Match[str]) -> str:
        top, _, bottom = unicodedata.normalize("NFKC", match[2]).partition("⁄")
        return rf"{match[1]}\frac{{{top}}}{{{bottom}}}"

    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", _VULGAR.sub(fraction, text))
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = "".join(_UNICODE.get(character, character) for character in text)
    return unicodedata.normalize("NFKC", text)


def _texts(text: str) -> str:
    r"""Write every kind of `\text{}` as `\text{}`; functions and the constants e and i lose it, "and" and "or" are commas."""
    parts, position = [], 0
    for command in _TEXT.finditer(text):
        if command.start() < position:
            continue
        end = closing_brace(text, command.end())
        if end is None:
            break
        content = _texts(text[command.end() : end])
        parts += [text[position : command.start()], _upright(content)]
        position = end + 1
    return "".join(parts) + text[position:]


def _upright(content: str) -> str:
    content = re.sub(r"\^\s*\{([+-]?\d)\}", r"^\1", content)
    words = content.strip()
    if words in {"percent", "percentage", "pct", r"\%", "%"}:
        return r"\%"
    if words in {"e", "i", r"\pi", r"\imath"}:
        return {r"\imath": "i"}.get(words, words)
    if words in _FUNCTIONS or words in {"lg", "arg", "Re", "Im"}:
        return rf"\{words} "
    if re.fullmatch(r",?\s*(?:and|or)\s*,?", words):
        return ","
    if re.fullmatch(r"\\text\{[^{}]*\}", words):
        return words
    if words.startswith("^") or re.fullmatch(r"[\d.,+\-*/^()\s]*", words):
        return content
    return rf"\text{{{content}}}"


def _ascii(text: str) -> str:
    """Write what calculators and programs write (`sqrt(2)`, `pi/2`, `x**2`) in LaTeX; leave `\text{}` alone."""
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    for index in range(0, len(parts), 2):
        part = parts[index].replace("**", "^")
        part = re.sub(r",?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?", ",", part)
        part = re.sub(r"\s*(?<![A-Za-z])(?:percent(?:age)?|pct)(?![A-Za-z])", r"\\%", part)
        part = _BARE.sub(lambda word: "\\" + {"oo": "infty", "infinity": "infty"}.get(word[1], word[1]) + " ", part)
        part = re.sub(r"\\inf(?![A-Za-z])", r"\\infty", part)
        parts[index] = re.sub(r"(\\[A-Za-z]+) (?=[^A-Za-z])", r"\1", part)
    return "".join(parts)


def _arguments(text: str) -> str:
    r"""Give `\frac`, `\binom` and `\sqrt` their braces, and `\sqrt(2)` and `^(2)` as well."""
    for name, count in ((r"\frac", 2), (r"\binom", 2), (r"\sqrt", 1)):
        parts = re.split(rf"\{name}(?![A-Za-z])", text)
        text = parts[0]
        for part in parts[1:]:
            option = re.match(r"\s*\[[^\[\]]*\]", part) if count == 1 else None
            head, rest = (option[0].strip(), part[option.end() :]) if option else ("", part)
            arguments = []
            for _ in range(count):
                argument, rest = _argument(rest)
                arguments.append(argument)
            text += name + head + "".join(f"{{{argument}}}" for argument in arguments if argument) + rest
    text = re.sub(r"\^\s*\(", "^(", text)
    return re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)


def _cis(text: str) -> str:
    r"""Write the polar form `2\text{cis}\theta` with sine and cosine."""
    head, *parts = re.split(r"\\text\{\s*cis\s*\}|\\cis(?![A-Za-z])", text)
    for part in parts:
        number = re.match(r"\s*(\d+(?:\.\d+)?)", part)
        angle, rest = (number[1], part[number.end() :]) if number else _argument(part)
        head += rf"(\cos{{{angle}}}+i\sin{{{angle}}}){rest}"
    return head


def _argument(text: str) -> tuple[str, str]:
    """Split a text into its first TeX argument, without braces, and the rest."""
    text = text.lstrip()
    if text.startswith("{"):
        end = closing_brace(text, 1)
        return ("", text) if end is None else (text[1:end].strip(), text[end + 1 :])
    if text.startswith("("):
        depth = 0
        for index, character in enumerate(text):
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                return text[1:index], text[index + 1 :]
    command = re.match(r"\\[A-Za-z]+|[A-Za-z0-9]", text)
    return (command[0], text[command.end() :]) if command else ("", text)


def _numbers(text: str) -> str:
    """Rewrite thousands, repeating decimals, mixed numbers, double factorials and signs."""
    text = _REPEATING.sub(_fraction_of_repeating, text)
    whole = _THOUSANDS.fullmatch(text.strip())
    if whole:
        text = whole[1] + re.sub(r"\D", "", whole[2]) + whole[4]
    elif not re.search(r",\s|[(\[]", text):
        text = _THOUSANDS_FACTOR.sub(lambda number: number[1].replace(",", ""), text)
    text = re.sub(r"(?<![\d.])(\d{1,3}) (\d{3})(?= \d+/\d|\\frac)", r"\1\2", text)
    text = _MIXED_PLAIN.sub(_mixed, _MIXED.sub(_mixed, text))
    if not _POWER_OF_TEN.fullmatch(text.strip()):
        text = _POWER_OF_TEN.sub(r"\1\\cdot10^{\2}", text)
    text = re.sub(r"(?<![\d!])(\d{1,3})!!(?!!)", _double_factorial, text)
    for pattern, replacement in _SIGNS:
        text = pattern.sub(replacement, text)
    return text


def _mixed(match: re.Match[str]) -> str:
    """Convert the mixed number 2 1/2 to 5/2; before an improper fraction a number is not mixed."""
    whole, top, bottom = (int(part) for part in match.groups())
    if "frac" not in match[0] and not top < bottom:
        return match[0]
    return (
        rf"\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else match[0].replace("\\frac", r"\cdot\frac")
    )


def _fraction_of_repeating(match: re.Match[str]) -> str:
    before, fixed, period = match[1] or "0", match[2], "".join(part or "" for part in match.groups()[2:])
    bottom = (10 ** len(period) - 1) * 10 ** len(fixed)
    top = int(before + fixed + period) - int(before + fixed or "0")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _double_factorial(match: re.Match[str]) -> str:
    n = int(match[1])
    return str(prod(range(n, 0, -2))) if n <= LIMIT_OF_DOUBLE_FACTORIAL else match[0]


def words_of(text: str) -> str:
    r"""Return the letters and digits of an answer in words ("\text{No solution.}"), in lower case, without articles."""
    text = _TEXT.sub("{", _SWITCH.sub("", _COLOR.sub("", _SPACE.sub(" ", _unicode(text)))))
    text = re.sub(r"[^\w\s+\-*/^=<>\\]", " ", _WRAPPER.sub("", text).replace("$", " "))
    words = [word for word in text.lower().split() if word not in {"the", "a", "an"}]
    return " ".join(words)


def is_prose(text: str) -> bool:
    r"""Return whether an answer is words: a `\text{}` of at least two letters, or several plain words, and no mathematics."""
    if re.fullmatch(r"\\text\{[^{}\d]*[A-Za-z]{2}[^{}\d]*\}", text):
        return True
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z'.-]+(?: [A-Za-z'.-]+)+", text)) and bool(re.search(r"[A-Za-z]{3}", text))
