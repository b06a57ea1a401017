"""The library's tests, and the support that they import, import nothing of the study."""

import re
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
"""Also inside functions, and in code that a test gives to another process."""
EXCEPT = "test_library_stands_alone.py"
"""Compares what the packages import with what each distribution declares."""


def test_no_file_imports_the_study():
    pending = [path for path in HERE.glob("*.py") if path.name != EXCEPT]
    seen: dict[Path, set[str]] = {}
    while pending:
        path = pending.pop()
        seen[path] = set(IMPORT.findall(path.read_text(encoding="utf-8")))
        support = (SUPPORT / f"{name}.py" for name in seen[path])
        pending += [other for other in support if other.exists() and other not in seen]
    assert {"conftest.py", "trainers.py", "toy_qwen3.py"} <= {path.name for path in seen}
    users = {path.name for path, names in seen.items() if any(name.startswith("multirole_study") for name in names)}
    assert users == set()
