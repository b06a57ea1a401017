"""The program in a reply: the fenced blocks of Markdown, as models write them.

What is read:
  * fences of three or more backticks or tildes, indented, in lists and in quotes; CRLF; attributes behind the language;
  * a fence inside a string or a comment of the program (backticks in text, examples in docstrings) does not close it;
  * a block may close at the end of a line of code, by the opening of the next block, or at the end of the reply;
  * a program whose opening fence is missing, because the prompt was taken to hold it, or with both fences on one line.

Which block counts: the last closed one that is marked as Python. An unmarked block behind it counts if it defines,
imports or reads something, so that a sample output does not. A block of another language (text, bash) counts only where
there is nothing else, and one that never closes only where no other program is closed. The released code and
LiveCodeBench take the last block, whichever it is; LiveCodeBench/LiveCodeBench#118 shows what that loses.

No text is parsed as Python here: in the trainer's process a reply is data.
"""

import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<before>(?:(?!```|~~~)[^\n])*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$", re.MULTILINE)
_MARKERS = re.compile(r"[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*)*")
_QUOTE = re.compile(r"^[ \t]*(?:>[ \t]?)+", re.MULTILINE)
_PYTHON = re.compile(
    r"[^a-z0-9\n]*(?:lang(?:uage)?[^\w\n]+)?(?:[ic]?python|pypy|py)[\d.]*(?!\w|-(?:repl|console))[^\w\n]*|[\w/-]+\.py\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"(?:import|from|def|class|async|for|while|if|try|with|print)\b(?=[^:=]*[\w(:])|@\w|#|\w+\(")
_ASSIGNMENT = re.compile(r"\w[\w, ]*=[^=]")
_DEFINES_OR_READS = re.compile(r"^[ \t]*(?:def|class|import|from)[ \t]+\w|\binput\(|\bstdin\b|\bopen\(0", re.MULTILINE)
_PRINTS = re.compile(r"\bprint\(")
_STRING_OR_COMMENT = (
    r'"""(?:\\.|[^\\])*?"""|' + r"'''(?:\\.|[^\\])*?'''|" + r'"(?:\\.|[^"\\\n])*"?|' + r"'(?:\\.|[^'\\\n])*'?|#[^\n]*"
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its text without the fence's indentation, its language ("python", "" or another word), its end."""

    text: str
    language: str
    is_closed: bool


def extract_program(text: str) -> str | None:
    """Return the program in a reply, or None where there is none; see the module for which block counts."""
    blocks = [block for block in fenced_blocks(text) if block.text.strip()]
    if not blocks:
        return _without_opening(text) or _on_one_line(text)
    programs = _programs(blocks)
    return ([block for block in programs if block.is_closed] or programs)[-1].text


def _programs(blocks: list[Block]) -> list[Block]:
    """The blocks that may be the program: marked as Python or looking like it, else unmarked, else all."""
    if any(block.language == "python" for block in blocks):
        return [
            one
            for one in blocks
            if one.language == "python" or (not one.language and _DEFINES_OR_READS.search(one.text))
        ]
    unmarked = [block for block in blocks if not block.language]
    acting = [one for one in unmarked if _DEFINES_OR_READS.search(one.text) or _PRINTS.search(one.text)]
    return acting or unmarked or blocks


def fenced_blocks(text: str) -> list[Block]:
    """Return every fenced block of a reply in order, the last one also if it is not closed."""
    blocks, at = list[Block](), 0
    while at < len(text):
        opening = _FENCE.match(text, at)
        if opening is None or not _is_opening(opening):
            at = text.find("\n", at) + 1 or len(text)
            continue
        language, first_line = _read_info(opening["info"])
        start = min(opening.end() + 1, len(text))
        end, at = _find_closing(text, start, opening["fence"], language)
        body = _without_indentation(text[start:end], opening["before"])
        first = re.search(r"^[ \t]*\S", body, re.MULTILINE)
        if not first_line and first and first[0][0] in " \t":
            body = textwrap.dedent(body)
        blocks.append(Block(first_line + body, language, is_closed=end < len(text)))
    return blocks


def _is_opening(fence: re.Match[str]) -> bool:
    """Whether a fence opens a block: at the start of a line or item, or behind prose if it is marked as Python."""
    is_first = _MARKERS.fullmatch(fence["before"]) is not None
    return is_first or (fence["fence"][0] == "`" and _PYTHON.fullmatch(fence["info"]) is not None)


def _read_info(info: str) -> tuple[str, str]:
    """The language behind an opening fence ("python", "" or another word), and code that begins on the same line."""
    info = info.strip()
    if python := _PYTHON.match(info):
        rest = info[python.end() :]
        return "python", f"{rest}\n" if _STATEMENT.match(rest) else ""
    if _STATEMENT.match(info) and not info.startswith("#"):
        return "", f"{info}\n"
    word = re.search(r"\w[\w+#.-]*", info)
    return (word[0].lower() if word else ""), ""


def _find_closing(text: str, start: int, fence: str, language: str) -> tuple[int, int]:
    """Where a block's text ends, and where reading goes on; both are the end of the text where no fence closes it."""
    run = rf"{re.escape(fence[0])}{{{len(fence)},}}"
    python_opens = rf"^[ \t>]*(?:`{{3,}}|~{{3,}})(?={_PYTHON.pattern})"  # inside a block that is not Python itself
    if language not in ("", "python"):  # whose strings mean nothing
        pattern = rf"(?P<run>^[ \t>]*{run}[ \t]*\r?$|{python_opens})"
    else:
        closes = run if fence[0] == "`" else rf"^[ \t>]*{run}"  # Python has an operator of tildes
        pattern = rf"{_STRING_OR_COMMENT}|(?P<run>{closes}{'' if language else '|' + python_opens})"
    tokens = re.compile(pattern, re.DOTALL | re.MULTILINE | re.IGNORECASE).finditer(text, start)
    closing = next((token for token in tokens if token["run"] is not None), None)
    if closing is None:
        return len(text), len(text)
    at = closing.start()
    line = text.rfind("\n", start, at) + 1 or start
    if text[line:at].strip(" \t>"):  # at the end of a line of code
        return at, closing.end()
    opening = _FENCE.match(text, line)
    info = opening["info"].strip() if opening else ""
    is_next = _PYTHON.match(info) or re.fullmatch(r"\w\S*", info)  # it opens the next block as well
    return line, (line if is_next else closing.end())


def _without_indentation(body: str, before: str) -> str:
    """Take from each line of a block what stood before its opening fence: a quote's marks, or so much white space."""
    if not _MARKERS.fullmatch(before):
        return body
    if ">" in before:
        return _QUOTE.sub("", body)
    return re.sub(rf"^[ \t]{{1,{len(before)}}}", "", body, flags=re.MULTILINE) if before else body


def _without_opening(text: str) -> str | None:
    """The program of a reply that only closes a fence: all before it, if it begins like one."""
    closing = re.search(r"^[ \t]*`{3,}[ \t]*\r?$", text, re.MULTILINE)
    is_program = closing and (_STATEMENT.match(text.lstrip()) or _ASSIGNMENT.match(text.lstrip()))
    return text[: closing.start()] if closing and is_program else None


def _on_one_line(text: str) -> str | None:
    """The last program that stands with both of its fences on one line, which Markdown takes for code in a sentence."""
    spans = re.findall(r"```(?:python|py)[\d.]*[ \t]+([^`\n]+)```", text, re.IGNORECASE)
    return spans[-1] if spans else None
