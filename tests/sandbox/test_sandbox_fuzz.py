"""Random texts never make grading raise, and never cost a worker of the sandbox."""

import os
import pkgutil
import random
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import multirole_sandbox as sandbox
from multirole_sandbox import Limits

LIMITS = Limits(test_seconds=0.5, full_timeouts=1, memory_bytes=512 << 20, output_bytes=1 << 16)
TESTS = [{"input": "1 2\n", "output": "3", "testtype": "stdin"}]
FUNCTION = [{"input": "1", "output": "3", "testtype": "functional", "metadata": {"func_name": "main"}}]
PIECES = (
    "import trace\n", "from zoneinfo import ZoneInfo\n", "0x" + "f" * 4000, "('a' * 4096,) * 256, ", "\\N{BELL}", "\0", "\ud800",
    "\ufeff", "# reconstruct the answer from trace\n", "'''", "lambda: ", "(" * 99, "import os\n", "__import__('test')", "\x0c",
    "async def f(): yield\n", "f'{x!r:{y}}'", "match x:\n case _: pass\n", "del __builtins__\n", "1" * 5000, "é", "\t\t x", "\r",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_worker_is_lost(caplog) -> Iterator[None]:
    yield
    assert "A sandbox worker was replaced" not in caplog.text


def library_files() -> list[Path]:
    """The Python files of the standard library and of site-packages, in a fixed order."""
    folders = [Path(os.__file__).parent, *map(Path, site.getsitepackages())]
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


def grade(programs: list[str]) -> None:
    verdicts = sandbox.grade_batch(
        programs, [TESTS if i % 3 else FUNCTION for i in range(len(programs))], limits=LIMITS
    )
    assert len(verdicts) == len(programs)
    assert sandbox.grade("print(3)", TESTS).reward == 1.0


def mutations(count: int, seed: int) -> list[str]:
    """Yield random bytes, random mixtures of pieces, and library files with pieces inserted."""
    rng = random.Random(seed)
    files = library_files()
    mutated = []
    for index in range(count):
        if index % 3 == 0:
            mutated.append(rng.randbytes(rng.randint(1, 3000)).decode(rng.choice(["latin-1", "utf-8"]), "replace"))
        elif index % 3 == 1:
            mutated.append("".join(rng.choices(PIECES, k=rng.randint(1, 30))))
        else:
            text = rng.choice(files).read_text(encoding="utf-8", errors="replace")[:20_000]
            at = rng.randrange(len(text) + 1)
            mutated.append(text[:at] + rng.choice(PIECES) + text[at + rng.randrange(9) :])
    return mutated


def library_modules() -> list[str]:
    """Return all modules of the standard library, submodules included, except its tests."""
    names = sorted(sys.stdlib_module_names)
    for package in pkgutil.iter_modules([str(Path(os.__file__).parent)]):
        if package.ispkg and package.name in sys.stdlib_module_names - {"test"}:
            folder = Path(os.__file__).parent / package.name
            names += [module.name for module in pkgutil.walk_packages([str(folder)], package.name + ".", onerror=str)]
    return [name for name in names if ".test" not in name and "__main__" not in name]


def import_each(modules: list[str]) -> None:
    programs = [f"try: import {module}\nexcept BaseException: pass\nprint(3)" for module in modules]
    verdicts = sandbox.grade_batch(programs, [TESTS] * len(programs), limits=Limits(full_timeouts=1))
    assert {name: v.reason for name, v in zip(modules, verdicts, strict=True) if v.reward < 1.0} == {}


def test_a_few_modules_of_the_library_can_be_imported() -> None:
    import_each(["antigravity", "idlelib.idle", "sysconfig", "this", "tkinter", "trace", "turtle", "zoneinfo"])


@pytest.mark.slow
def test_every_module_of_the_library_can_be_imported() -> None:
    modules = library_modules()
    assert len(modules) > 600
    import_each(modules)


def test_thirty_random_texts() -> None:
    grade(mutations(30, seed=0))


@pytest.mark.slow
def test_a_thousand_files_of_the_library() -> None:
    files = random.Random(0).sample(library_files(), 1000)
    grade([path.read_text(encoding="utf-8", errors="replace") for path in files])


@pytest.mark.slow
def test_a_thousand_random_texts() -> None:
    grade(mutations(1000, seed=1))
