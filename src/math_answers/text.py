r"""Rewrite a mathematical answer as plain LaTeX that math-verify's parser reads, and split off its unit.

`normalize` removes variations of notation: styles, spaces, Unicode characters, thousands separators, `\frac12`, `sqrt(2)`,
mixed numbers, repeating decimals. `split_unit` (in `units`) removes the unit. Everything here is text; nothing is
evaluated.
"""

import re
import unicodedata
from fractions import Fraction
from math import prod

from math_answers.replies import INVISIBLE, closing_brace

_UNICODE = {
    "–": "-", "—": "-", "−": "-", "‐": "-", "‑": "-", "‒": "-", "―": "-", "。": ".", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
    "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ",
    "℃": r"^\circ \text{C}", "℉": r"^\circ \text{F}", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "ⅇ": "e", "ⅈ": "i", "…": r"\ldots ", "⋯": r"\ldots ", "∖": r"\setminus ",
    "≈": r"\approx ", "≡": r"\equiv ", "∠": r"\angle ", "△": r"\triangle ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "¢": r"\text{ cents}",
    "⁄": "/", "′": "'", "″": "''", "∧": r"\land ", "∨": r"\lor ",
    "或": " or ", "和": " and ", "、": ",", "€": r"\text{€}", "£": r"\text{£}", "¥": r"\text{¥}", "₹": r"\text{₹}",
}  # fmt: skip
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_VULGAR = re.compile(r"(\d*)\s*([¼-¾⅐-⅞])")

_SWITCH = re.compile(
    r"\\(?:[mM]?left|[mM]?right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\.?"
    r"|\\(?:displaystyle|textstyle|scriptstyle|scriptscriptstyle|limits|nolimits|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|sf|tt|bfseries|boldmath|unboldmath|cal|nonumber|notag"
    r"|footnotesize|scriptsize|itshape|upshape|rmfamily|mathstrut|strut|rm(?=\s*[\d.+-]))"
    r"(?![A-Za-z])"
)
_WRAPPER = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|mathnormal|pmb|underline|uline|boxed|fbox|framebox|ensuremath"
    r"|smash|mathord|mathop|mathbin|mathrel|displaylines)(?![A-Za-z])\s*(?=\{)"
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
_UNITS_OR_FUNCTIONS = frozenset({"min", "sec", "deg"})
"""Names that are units behind a number, and functions before an argument."""
_UNIT_PLACE = re.compile(r"[\d)}]\s*\Z")
_ARGUMENT = re.compile(r"\s*(?:[A-Za-z({^]|\\(?![,;:! ]|text))")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|text\{\s*cis\s*\})(?![A-Za-z])")
_VALUES = re.compile(
    r"(?=.*\d)(?=.*(?:=|(?<![A-Za-z])(?:and|or)(?![A-Za-z])))(?:[\d.,+\-*/^()\s=]|(?<![A-Za-z])(?:[a-z]|and|or)(?![A-Za-z]))*+",
    re.DOTALL,
)
"""Matches values inside of `\\text{}`: "x = 3", "3 and 4"."""
_SYSTEM = re.compile(r"\\begin\{cases\}([^&]*?)\\end\{cases\}", re.DOTALL)
_LAYOUT = re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align\*?|equation\*?|gather(?:ed)?\*?|split|math|displaymath)\}")
_LEAD = re.compile(
    r"(?:\s|\\[,;:! ])*(?:\\text\s*\{\s*)?(?:####|(?i:(?:the )?(?:final )?answer(?: is)?)\s*[:=]?(?![A-Za-z]))\s*\}?(?=[^A-Za-z]*\S)"
    r"|\s*(?:=|\\(?:Rightarrow|Longrightarrow|implies|therefore|longrightarrow|checkmark|xrightarrow\s*\{\s*\}))(?![A-Za-z])(?=\s*\S)"
)
"""Text before an answer that is no part of it: "The answer is", "=", an arrow."""
_LEAD_IN_TEXT = re.compile(
    r"\\text(?:bf)?\s*\{\s*(?i:(?:the )?(?:final )?answer(?: is)?)\s*[:=]?(?P<answer>[^A-Za-z{}]*\d[^A-Za-z{}]*)\}"
)
_END_MARK = re.compile(
    r"(?:\s|\\[,;:! ]|\\q?quad)*\\(?:checkmark|blacksquare|square|Box|qed|qedsymbol)\s*$|(?:\s*\\\\)+\s*$"
)
_RELATION = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]eqslant|[lg]t)(?![A-Za-z])")
_OR = re.compile(
    r"(?:,\s*)?(?:\\(?:text(?:rm|bf)?|mathrm|mbox|operatorname)\s*\{(?:[\s,~]|\\[ ,;:])*or(?:[\s,~]|\\[ ,;:])*\}|\{\\rm\s+or\s*\}"
    r"|(?<![A-Za-z\\])or(?![A-Za-z]))(?:\s*,)?"
)
"""Matches the "or" between relations, which is a union and not a list."""
_SPELLINGS = (
    (re.compile(r"\\(?:nicefrac|sfrac|xfrac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\^\{?(\d+)\}?\s*/\s*_\{?(\d+)\}?"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:degree|textdegree|degrees)(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"(?<=\d)\s*\^\s*(?:o|\{\s*o\s*\})(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\\begin\{array\}\s*\{[clr|\s]*\}((?:(?!\\\\|&|\\end)[^&])*)\\end\{array\}"), r"\1"),
    (re.compile(r"\\(?:pounds|textsterling)(?![A-Za-z])\s*"), r"\\text{£}"),
    (re.compile(r"\\(?:euro|texteuro|EUR)(?![A-Za-z])\s*"), r"\\text{€}"),
    (re.compile(r"\\(?:yen|textyen)(?![A-Za-z])\s*"), r"\\text{¥}"),
    (re.compile(r"\\(?:tag\*?|label|[hv]?phantom)\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\bbox\s*\[[^\[\]]*\]|\\href\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:under|over)brace\s*\{([^{}]*)\}(?:\s*[_^]\s*\{[^{}]*\})?"), r"\1"),
    (re.compile(r"\\math(?:bb|cal|frak|scr)\s*\{(\d+)\}"), r"\1"),
    (re.compile(r"\\(?:mathrm|text)\s*\{d\}(?=\s*[A-Za-z\\])"), "d"),
    (re.compile(r"\\(dot|bar|overline)\s*(\d)"), r"\\\1{\2}"),
    (re.compile(r"\\mathbb\s*\{?R\}?\s*(?:\^\s*\{?\+\}?|_\s*\{?(?:\+|>\s*0)\}?)"), r"(0,\\infty)"),
    (re.compile(r"\\mathbb\s*\{?R\}?\s*_\s*\{\s*(?:\\geq?(?:slant)?|>=)\s*0\}"), r"[0,\\infty)"),
    (re.compile(r"\\mathbb\s*\{?R\}?\s*\^\s*\{?(?:\*|\\ast|\\times)\}?"), r"\\mathbb{R}\\setminus\\{0\\}"),
    (re.compile(r"\\(begin|end)\{Bmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"\\mu\s*(?=\\text\{\s*[msgLA]|\\mathrm\{\s*[msgLA])"), "μ"),
    (re.compile(r"μ\\(?:text|mathrm)\{\s*"), r"\\text{μ"),
    (re.compile(r"(?<=[\d}])((?:\s|\\[,;: ])*)(?:\\text\{\s*)?(?:\\Omega|\\ohm)(?![A-Za-z])\s*\}?"), r"\1\\text{ohm}"),
    (re.compile(r"(?<=[\d)}%])\s*([\u4e00-\u9fff]+)$"), r"\\text{\1}"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(r"\\surd(?![A-Za-z])"), r"\\sqrt "),
    (
        re.compile(r"\\(?:(?:operatorname|mathrm|text)\s*\{\s*)?(arc)?(c?)tg(?![A-Za-z])\s*\}?"),
        lambda name: rf"\{name[1] or ''}{'cot' if name[2] else 'tan'} ",
    ),
    (re.compile(r"\\log\s*_\s*(?:e|\{\s*(?:e|\\mathrm\{e\})\s*\})(?![A-Za-z])"), r"\\ln "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), " and "),
    (re.compile(r"\\backslash(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\mathbb\s*([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"(\\mathbb\s*\{[A-Z]\})\s*-\s*(?=\\\{)"), r"\1\\setminus "),
    (re.compile(r"(?<=[\d)])\s*\\colon\s*(?=[\d(])"), ":"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))"), r"\\times "),
    (re.compile(r"\^\s*-\s*(\d+|[a-z])(?![\d.])"), r"^{-\1}"),
    (re.compile(r"\\(max|min|gcd|lcm)\s*\\\{([^{}]*)\\\}"), r"\\\1(\2)"),
    (re.compile(r"\\(begin|end)\{smallmatrix\}"), r"\\\1{matrix}"),
    (re.compile(r"\\\\\s*\[\s*[\d.]+\s*(?:ex|em|pt|mm|cm)\s*\]"), r"\\\\"),
    (re.compile(r"(?:\{\})?[\^_]\{?(\d+)\}?\s*C_\{?(\d+)\}?"), r"\\binom{\1}{\2}"),
    (
        re.compile(r"(?<![A-Za-z}\d\\])C\((\d+),\s*(\d+)\)"),  # C(2,5) is a point
        lambda pair: rf"\binom{{{pair[1]}}}{{{pair[2]}}}" if int(pair[1]) >= int(pair[2]) else pair[0],
    ),
    (re.compile(r"(?<![A-Za-z}\d\\])C_\{?(\d+)\}?\^\{?(\d+)\}?"), r"\\binom{\1}{\2}"),
)
"""Other spellings of what the parser reads: (pattern, replacement)."""
_GAP = r"(?:\\[,;: ]|~|\{,\}|\\!,|,\s*\\!\s*)"
_THOUSANDS_GAP = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?![\d])", re.ASCII)
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:([, ])\d{3})(?:\3\d{3})*)((?:\.\d+)?)", re.ASCII)
_THOUSANDS_FACTOR = re.compile(
    r"(?<![\d.,{(\[])(?!0)(\d{1,3}(?:,\d{3})+)(?=(?:\.\d+)?(?:\\[a-zA-Z%]| ?[a-zA-Z^%]|\s*$))"
)
_THOUSANDS_IN_LIST = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?=,\s|\s*$|\s*[)\]\\])", re.ASCII)
"""Matches 1,000 in "1,000, 2,000", whose values are separated by a comma and a space."""
_UNDERSCORED = re.compile(r"[+-]?\d{1,3}(?:\\?_\d{3})+", re.ASCII)
"""Matches 1_000 and 1\\_000; no base has three digits."""
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overbar)\s*\{(\d+)\}(?:\\dot\s*\{(\d)\})?|\((\d+)\))(?![\d.])", re.ASCII
)
_DOTTED = re.compile(r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", re.ASCII)
_UNENDING = re.compile(
    r"(?<![\d.])(\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,9}?)\3+)(?:\\(?:c|l)?dots(?:c|b)?(?![A-Za-z])|\.{3})", re.ASCII
)
"""Matches 0.1666... and 0.1212...: a period that is written at least three times, or twice if it has several digits."""
_THOUSANDS_POINTS = re.compile(r"([+-]?)(\d{1,3}(?:\.\d{3})+)(?:,(\d+))?", re.ASCII)
_JUXTAPOSED = re.compile(
    r"(?<=\))\s*(?=[\d(]|\\frac|\\binom)|(\\binom\{[^{}]*\}\{[^{}]*\})\s*(?=[\d(]|\\frac|\\binom)"
    r"|(?:(\\[A-Za-z]+ ?)|(?<![\w.^}\\]))(\d+)\s*(?=[(\[]\s*[+-]?[\d\\(]|\\binom)",
    re.ASCII,
)
"""Matches between factors without a sign, (2)(3) or 2(3), which the parser would read as a mixed number and add."""
_MINUTES = re.compile(
    r"(\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*(\d+(?:\.\d+)?)\s*(?:'(?!')|\^\{?\\prime\}?)(?:\s*(\d+(?:\.\d+)?)\s*(?:''|\"|\^\{?\\prime\s*\\prime\}?))?"
)
_MIXED = re.compile(r"(?<![\d.A-Za-z}^_)\]\\/])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}(?!\s*[\^!])", re.ASCII)
_MIXED_PLAIN = re.compile(r"(?<![\d.A-Za-z}^_)\]/*])(?<!\d )(\d+) (\d+)/(\d+)(?![\d./]| \d)", re.ASCII)
_POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])", re.ASCII)
_SIGNS = ((re.compile(r"\+\s*-|-\s*\+"), "-"), (re.compile(r"^\s*-\s*-"), ""))
LIMIT_OF_DOUBLE_FACTORIAL = 300


def normalize(text: str) -> str:
    """Return the answer in normal form; answers that differ only in style mostly have the same form."""
    text = _SYSTEM.sub(_system, _unicode(INVISIBLE.sub("", text)).strip())
    if _LAYOUT.search(text):
        text = _lines(_LAYOUT.sub("", text))
    if whole := _LEAD_IN_TEXT.fullmatch(text):
        text = whole["answer"]
    text = _END_MARK.sub("", text[lead.end() :] if (lead := _LEAD.match(text)) else text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if _RELATION.search(text):
        text = _OR.sub(r"\\lor ", text)
    text = re.sub(r"^\*\*([^*]+)\*\*(?=\s)", r"\1", text)
    text = re.sub(r"^(\*\*|__|`|\*)(?=\S)(.*\S)\1$", r"\2", text, flags=re.DOTALL)
    text = re.sub(r"^(-?)(?:\\\$|\$(?=[\d.][^$]*$))\s*(?=-?[\d.\\])", r"\\text{USD} \1", text)
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
    text = (
        re.sub(r"^\{([^{}]*)\}$", lambda braces: rf"\{{{braces[1]}\}}" if "," in braces[1] else braces[1], _texts(text))
        .replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
    )
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

    text = re.sub(
        r"([√∛∜])\s*(\d+(?:\.\d+)?)", lambda root: f"{_ROOTS[root[1]]}{{{root[2]}}}", _VULGAR.sub(fraction, text)
    )
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = re.sub("(?:\\d\u0305)+", lambda digits: rf"\overline{{{digits[0].replace(chr(0x305), '')}}}", text)
    text = "".join(_UNICODE.get(character, character) for character in text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    return re.sub(r"[^\W\D_]", lambda digit: str(unicodedata.digit(digit[0])), text)


def _system(match: re.Match[str]) -> str:
    """Write a system of equations as a list."""
    rows = [row.strip(" ,.;") for row in match[1].split(r"\\") if row.strip()]
    return ", ".join(rows) if rows and all("=" in row for row in rows) else match[0]


def _lines(text: str) -> str:
    """Join the lines of an aligned formula with commas, unless a matrix has lines of its own."""
    if r"\begin" in text:
        return text
    return ", ".join(line.strip() for line in text.replace("&", "").split(r"\\") if line.strip())


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
        is_unit = _UNIT_PLACE.search(text, 0, command.start()) and not _ARGUMENT.match(text, end + 1)
        is_unit = bool(is_unit) and content.strip() in _UNITS_OR_FUNCTIONS
        parts += [text[position : command.start()], rf"\text{{{content}}}" if is_unit else _upright(content)]
        position = end + 1
    return "".join(parts) + text[position:]


def _upright(content: str) -> str:
    content = re.sub(r"\^\s*\{([+-]?\d)\}", r"^\1", content)
    words = content.strip()
    if words in {"percent", "percentage", "pct", r"\%", "%"}:
        return r"\%"
    if words.lower() in {"infinity", "infinite"}:
        return r"\infty "
    if words in {"e", "i", r"\pi", r"\imath"}:
        return {r"\imath": "i"}.get(words, words)
    if words in _FUNCTIONS or (words in _GREEK and words != "psi") or words in {"pi", "lg", "arg", "Re", "Im"}:
        return rf"\{words} "
    if re.fullmatch(r",?\s*(?:and|or)\s*,?", words):
        return ", "
    if re.fullmatch(r"\\text\{[^{}]*\}", words):
        return words
    if words.startswith("^") or re.fullmatch(r"[\d.,+\-*/^()\s]*", words) or _VALUES.fullmatch(words):
        return content
    return rf"\text{{{content}}}"


def _ascii(text: str) -> str:
    """Write what calculators and programs write (`sqrt(2)`, `pi/2`, `x**2`) in LaTeX; leave `\text{}` alone."""
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    for index in range(0, len(parts), 2):
        part = parts[index].replace("**", "^")
        part = re.sub(r",?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?", ", ", part)
        part = re.sub(r"\s*(?<![A-Za-z])(?:percent(?:age)?|pct)(?![A-Za-z])", r"\\%", part)
        part = _BARE.sub(_with_backslash, part)
        part = re.sub(r"\\inf(?![A-Za-z])", r"\\infty", part)
        parts[index] = re.sub(r"(\\[A-Za-z]+) (?=[^A-Za-z])", r"\1", part)
    return "".join(parts)


def _with_backslash(word: re.Match[str]) -> str:
    is_unit = _UNIT_PLACE.search(word.string, 0, word.start()) and not _ARGUMENT.match(word.string, word.end())
    if is_unit and word[1] in _UNITS_OR_FUNCTIONS:
        return word[0]
    return "\\" + {"oo": "infty", "infinity": "infty"}.get(word[1], word[1]) + " "


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
    command = re.match(r"\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]", text)
    return (command[0], text[command.end() :]) if command else ("", text)


def _numbers(text: str) -> str:
    """Rewrite thousands, repeating decimals, mixed numbers, double factorials and signs."""
    text = _UNENDING.sub(lambda match: rf"{match[1]}\overline{{{match[2] or match[3]}}}", text)
    text = _REPEATING.sub(_fraction_of_repeating, _DOTTED.sub(r"\\overline{\1\2\3}", text))
    text = _MINUTES.sub(_degrees, text)
    points = _THOUSANDS_POINTS.fullmatch(text.strip())
    if points and (points[3] or points[2].count(".") > 1):
        text = points[1] + points[2].replace(".", "") + (f".{points[3]}" if points[3] else "")
    if _UNDERSCORED.fullmatch(text.strip()):
        text = re.sub(r"[\\_]", "", text)
    whole = _THOUSANDS.fullmatch(text.strip())
    if whole and not re.match(r"0+,", whole[2]):
        text = whole[1] + re.sub(r"\D", "", whole[2]) + whole[4]
    elif re.search(r",\s", text):
        text = _THOUSANDS_IN_LIST.sub(lambda number: number[0].replace(",", ""), text)
    elif not re.search(r"[(\[]", text):
        text = _THOUSANDS_FACTOR.sub(lambda number: number[1].replace(",", ""), text)
    text = re.sub(r"(?<![\d.])(\d{1,3}) (\d{3})(?= \d+/\d|\\frac)", r"\1\2", text)
    text = _MIXED_PLAIN.sub(_mixed, _MIXED.sub(_mixed, text))
    if not _POWER_OF_TEN.fullmatch(text.strip()):
        text = _POWER_OF_TEN.sub(r"\1\\cdot10^{\2}", text)
    text = re.sub(r"(?<![\d!])(\d{1,3})!!(?!!)", _double_factorial, text)
    for pattern, replacement in _SIGNS:
        text = pattern.sub(replacement, text)
    return _JUXTAPOSED.sub(lambda match: "".join(part or "" for part in match.groups()) + r"\cdot", text)


def _degrees(match: re.Match[str]) -> str:
    """Convert degrees, minutes and seconds to degrees."""
    value = Fraction(match[1]) + Fraction(match[2]) / 60 + Fraction(match[3] or 0) / 3600
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}^\circ"


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
