r"""Parse replies: the text outside thoughts, the `\boxed{...}` in it, and the plain words of a box.

Chat models wrap their answer in `\boxed{...}`, and style it in many ways: `\boxed{\text{Correct.}}`, `\fbox{**2**}`.
Every function runs in linear time, because a policy in training may write megabytes of braces. Only the standard library is imported:
`math_answers/replies.py` is a symbolic link to `multirole/chat/replies.py`, because each package is installed without the other.
"""

import re
import unicodedata
from typing import NamedTuple

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
)
"""The tags that open and close a thought: Qwen3, DeepSeek-R1 and others, then Seed-OSS, Magistral, Kimi, Sky-T1, Gemma 4."""

MAX_BOX_CHARACTERS = 400
"""Longest box or line that is read as words, in characters."""
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufe0f\ufeff]")
_LIST_MARK = re.compile(r"\s*(?:(?:[-+*•]|\d{1,3}[.)])\s+|#{1,6}\s+|>\s*)+(?=\S)")
_BOX = r"\\{1,2}(?:boxed|fbox|framebox)(?![A-Za-z])"  # also \\boxed, as in JSON
_BOX_TOKEN = re.compile(rf"(?P<box>{_BOX}\s*(?:\[[^\]\n]{{0,40}}\]\s*)?\{{)|\\.|[{{}}]", re.DOTALL)
_BARE_BOX = re.compile(rf"{_BOX}(?!\s*[\[{{])\s*[-+\d\\(]")  # \boxed 5 is a malformed box, "use \boxed" is a mention
_TICK = re.compile(r"\[([ xX✓✔])\]\s*")
_STRUCK = re.compile(r"~~[^~]*~~")
_COLOR = re.compile(r"\\(?:(?:text)?color|colorbox)\s*\{[^{}]*\}")
_STYLE = re.compile(
    r"\\(?:(?:text|math)[a-z]*|emph|underline|uline|operatorname\*?|boldsymbol|bm|bf|rm|it|sf|tt|bfseries|boxed|fbox|framebox"
    r"|mbox|hbox|displaystyle|left|right|tiny|small|large|Large|LARGE|huge|Huge|q?quad|checkmark)(?![A-Za-z])|\\[,;:!> ]"
)


class Box(NamedTuple):
    """One `\\boxed{...}`: `text[start:end]` is the command with its braces, `content` what is inside them."""

    start: int
    end: int
    content: str


def text_outside_thoughts(text: str, is_thinking: bool = False) -> str:
    """Return the text after the last closed thought and before a thought that is cut off.

    A reply that is one unfinished thought gives "", and a text without tags is returned as it is. `is_thinking` means that the
    prompt has already opened a thought.
    """
    outside, has_tag = text, False
    for opening, closing in THOUGHT_TAGS:
        if closing in outside:
            outside, has_tag, is_thinking = outside.rpartition(closing)[2], True, False
        if opening in outside:
            outside, has_tag = outside.partition(opening)[0], True
    if is_thinking:
        return ""
    return outside.strip() if has_tag else text


def opens_thought(text: str) -> bool:
    """Return whether a prompt ends with the tag that opens a thought, as templates of reasoning models do."""
    return text.rstrip().endswith(tuple(opening for opening, _ in THOUGHT_TAGS))


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the position of the brace that closes one opened just before `start`, or None. `\{` and `\}` do not count."""
    depth = 1
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    return None


def find_boxes(text: str) -> list[Box]:
    r"""Return the closed boxes (`\boxed`, `\fbox`, `\framebox`) that are inside no other closed box, from left to right."""
    opened: list[
        tuple[int, int] | None
    ] = []  # for each open brace: where its box and its content start, if it is a box
    closed: list[tuple[int, int, int]] = []  # where each closed box starts, its content starts, and the box ends
    for token in _BOX_TOKEN.finditer(text):
        if token["box"]:
            opened.append((token.start(), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            while closed and closed[-1][0] > box[0]:
                closed.pop()
            closed.append((*box, token.end()))
    return [Box(start, end, text[inside : end - 1].strip()) for start, inside, end in closed]


def ends_in_broken_box(text: str, after: int) -> bool:
    r"""Return whether a box follows that is truncated (`\boxed{4`) or has no braces (`\boxed 4`)."""
    return any(token["box"] for token in _BOX_TOKEN.finditer(text, after)) or bool(_BARE_BOX.search(text, after))


def plain_words(content: str) -> str:
    r"""Return the words of a box in lower case, without styles, Markdown, quotes, brackets and a trailing point.

    `\textbf{ Correct. }`, `**correct**` and `\text{Correct}` all give "correct". Signs, points between digits and commands
    that are no styles stay, so that -2, 1/2, 1.5 and `\sqrt{2}` are not taken for other numbers. Crosses stay as ✗, and struck text
    (`~~Correct~~`) is left out.
    """
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", content[:MAX_BOX_CHARACTERS]))
    text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # \\text, as in JSON
    text = _COLOR.sub(" ", _STRUCK.sub(" ", text)).replace(r"\#", "#").replace(r"\%", "%").replace(r"\_", "_")
    text = _STYLE.sub(" ", text)
    text = re.sub("[❌✗✘✖]", " ✗ ", text)
    text = re.sub(r"[*_`$~#\"'“”‘’()\[\]<>{}✓✔✅]|\\(?=[{}()\[\]])", " ", text)
    return re.sub(r"[\s.!;:]+(?=\s|$)|^[\s.!;:]+", " ", text).strip().lower()


def last_line(text: str) -> str:
    """Return the plain words of the last line without its list mark; a long line or a box gives "".

    Code fences and the unticked items of a list of tasks (`- [ ]`) are skipped.
    """
    for line in reversed(text.rstrip()[-20 * MAX_BOX_CHARACTERS :].splitlines()):
        item = _LIST_MARK.sub("", line[:MAX_BOX_CHARACTERS], count=1)
        tick = _TICK.match(item)
        if line.strip() and not line.strip().startswith(("```", "~~~")) and not (tick and tick[1] == " "):
            is_read = len(line) <= MAX_BOX_CHARACTERS and not ends_in_broken_box(line, 0)
            return plain_words(item[tick.end() :] if tick else item) if is_read else ""
    return ""
