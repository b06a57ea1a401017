"""What a refusal must say: what was given, why it cannot work, what to write instead; and a look at a folder's files."""

import re
from pathlib import Path

INSTRUCTION = re.compile(
    r"[.;,:?)'] (?:or )?(?:Write|Pass|Put|Rename|Install|Use|Leave|Make|Train|Continue|write|put|fetch|rename|install|mend)\b"
)


def assert_in_three_parts(message: str, given: str, why: str, instead: str) -> None:
    """The given value and a reason, and after a reason of at least three words the instruction."""
    assert given in message and why in message and instead in message, message
    found = INSTRUCTION.search(message)
    assert found and len(message[: found.start()].replace(given, "").split()) >= 3, message


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
