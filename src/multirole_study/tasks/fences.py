"""Extract the program from a reply: the fenced Markdown blocks that models write.

Supported:
  * fences of three or more backticks or tildes, indented, in lists and in quotes; CRLF; attributes after the language;
  * a fence inside a string or a comment of the program (backticks in text, examples in docstrings) does not close it;
  * a block may close at the end of a line of code, by the opening of the next block, or at the end of the reply;
  * a program without an opening fence (as if the prompt held it), or with both fences on one line.

The last closed block marked as Python is the program. A later unmarked block is preferred if it defines, imports or reads
something (a sample output does not). A block of another language (text, bash) is used only if there is no other, and an
unclosed block only if no program is closed. A block of comments, `...` or `pass` alone is no program if there is another. The released code and LiveCodeBench always take the last block;
LiveCodeBench/LiveCodeBench#118 shows programs that this loses.

Nothing is parsed as Python here, because replies are untrusted.
"""

import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<before>(?:(?!```|~~~)[^\n])*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$", re.MULTILINE)
_MARKERS = re.compile(r"[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*)*")
_QUOTE = re.compile(r"^[ \t]*(?:>[ \t]?)+", re.MULTILINE)
_PYTHON = re.compile(
    r"[^a-z0-9\n]*+(?:lang(?:uage)?[^\w\n]+)?(?:[ic]?python|pypy|py)[\d.]*(?!\w|-(?:repl|console))[^\w\n]*|[\w/-]+\.py\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"(?:import|from|def|class|async|for|while|if|try|with|print)\b(?=[^:=]*[\w(:])|@\w|#|\w+\(")
_ASSIGNMENT = re.compile(r"\w[\w, ]*=[^=]")
_DEFINES_OR_READS = re.compile(r"^[ \t]*(?:def|class|import|from)[ \t]+\w|\binput\(|\bstdin\b|\bopen\(0", re.MULTILINE)
_PRINTS = re.compile(r"\bprint\(")
_PLACEHOLDER = re.compile(r"(?:\s++|#[^\n]*+|\.\.\.|pass\b)*+")
_STRING_OR_COMMENT = (
    r'"""(?:\\.|[^\\])*?"""|' + r"'''(?:\\.|[^\\])*?'''|" + r'"(?:\\.|[^"\\\n])*"?|' + r"'(?:\\.|[^'\\\n])*'?|#[^\n]*"
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its text without the fence's indentation, its language ("python", "" or another word)."""

    text: str
    language: str
    is_closed: bool


def extract_program(text: str) -> str | None:
    """Return the program in a reply, or None; the module docstring says which block is chosen."""
    blocks = [block for block in fenced_blocks(text) if block.text.strip()]
    if not blocks:
        return _without_opening(text) or _on_one_line(text)
    programs = _programs([block for block in blocks if not _PLACEHOLDER.fullmatch(block.text)] or blocks)
    return ([block for block in programs if block.is_closed] or programs)[-1].text


def _programs(blocks: list[Block]) -> list[Block]:
    """Return the candidate blocks: marked as Python or similar to it, else unmarked, else all."""
    if any(block.language == "python" for block in blocks):
        return [
            block
            for block in blocks
            if block.language == "python" or (not block.language and _DEFINES_OR_READS.search(block.text))
        ]
    unmarked = [block for block in blocks if not block.language]
    acting = [block for block in unmarked if _DEFINES_OR_READS.search(block.text) or _PRINTS.search(block.text)]
    return acting or unmarked or blocks


def fenced_blocks(text: str) -> list[Block]:
    """Return every fenced block of a reply in order, including an unclosed last block."""
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
    """Return whether a fence opens a block: at the start of a line or item, or after prose if marked as Python."""
    is_first = _MARKERS.fullmatch(fence["before"]) is not None
    return is_first or (fence["fence"][0] == "`" and _PYTHON.fullmatch(fence["info"]) is not None)


def _read_info(info: str) -> tuple[str, str]:
    """Return the language after an opening fence ("python", "" or another word) and code on the same line."""
    info = info.strip()
    if python := _PYTHON.match(info):
        rest = info[python.end() :]
        return "python", f"{rest}\n" if _STATEMENT.match(rest) else ""
    if _STATEMENT.match(info) and not info.startswith("#"):
        return "", f"{info}\n"
    word = re.search(r"\w[\w+#.-]*", info)
    return (word[0].lower() if word else ""), ""


def _find_closing(text: str, start: int, fence: str, language: str) -> tuple[int, int]:
    """Return where a block's text ends and where reading continues; both are the end of the text if unclosed."""
    run = rf"{re.escape(fence[0])}{{{len(fence)},}}"
    python_opens = rf"^[ \t>]*(?:`{{3,}}+|~{{3,}}+)(?={_PYTHON.pattern})"  # inside a block that is not Python itself
    if language not in ("", "python"):  # its strings have no special meaning
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
    """Remove the prefix of the opening fence (quote marks or white space) from each line of a block."""
    if not _MARKERS.fullmatch(before):
        return body
    if ">" in before:
        return _QUOTE.sub("", body)
    return re.sub(rf"^[ \t]{{1,{len(before)}}}", "", body, flags=re.MULTILINE) if before else body


def _without_opening(text: str) -> str | None:
    """Return the text before a closing fence without an opening fence, if it starts like a program."""
    closing = re.search(r"^[ \t]*`{3,}[ \t]*\r?$", text, re.MULTILINE)
    is_program = closing and (_STATEMENT.match(text.lstrip()) or _ASSIGNMENT.match(text.lstrip()))
    return text[: closing.start()] if closing and is_program else None


def _on_one_line(text: str) -> str | None:
    """Return the last program with both fences on one line, which Markdown parses as inline code."""
    spans = re.findall(r"```(?:python|py)[\d.]*+[ \t]++([^`\n]++)```", text, re.IGNORECASE)
    return spans[-1] if spans else None
