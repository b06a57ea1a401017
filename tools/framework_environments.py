"""Build the environments of the agent frameworks, and train the examples of examples/frameworks in each. Those of TextArena and verifiers have tests of their own.

    python tools/framework_environments.py                    # all of them: `make frameworks`
    python tools/framework_environments.py crewai             # one; then: .venv-frameworks/crewai/bin/python examples/frameworks/crewai_crew.py
    python tools/framework_environments.py --resolve crewai   # write its lock again, from the first line of the lock

The environment .venv-frameworks/NAME has the packages of examples/frameworks/requirements/NAME.lock and borrows all others from the
environment of the Python that runs this. Frameworks ask for other versions of packages that both have; theirs win there.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "examples" / "frameworks" / "requirements"
ASKS = "# asks for: "
TESTS = {
    "textarena": "tests/library/test_games_are_workflows.py",
    "verifiers": "tests/library/test_environments_of_verifiers.py",
}
"""Environment -> its tests, where they are not the examples."""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def build(name: str, folder: Path, is_resolved: bool) -> Path:
    """Build the environment, unless it has its lock's packages, and return its Python; `is_resolved` writes the lock from what it asks for."""
    python, lock, installed = folder / "bin" / "python", LOCKS / f"{name}.lock", folder / "installed.lock"
    if installed.exists() and installed.read_text() == lock.read_text() and not is_resolved:
        return python
    venv.create(folder, clear=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = sysconfig.get_path("purelib")
    (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
    if is_resolved:
        first = lock.read_text().splitlines()[0]
        pip("--python", str(python), "install", "--quiet", *first.removeprefix(ASKS).split())
        freeze = ["--python", str(python), "freeze", "--path", str(packages)]
        frozen = subprocess.run(
            [sys.executable, "-m", "pip", *freeze], check=True, capture_output=True, text=True
        ).stdout
        lock.write_text(f"{first}\n{frozen}")
    else:
        pip("--python", str(python), "install", "--quiet", "--no-deps", "-r", str(lock))
    shutil.copy(lock, installed)
    return python


def main() -> int:
    names = sorted(path.stem for path in LOCKS.glob("*.lock"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-frameworks", help="where the environments are")
    parser.add_argument("--resolve", action="store_true", help="write the locks again")
    parser.add_argument("--no-test", action="store_true", help="build only")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"there is no environment {sorted(unknown)}. Environments are: {', '.join(names)}")
    failed = []
    for name in options.names or names:
        print(f"{name}: {options.folder / name}", flush=True)
        python = build(name, options.folder / name, options.resolve)
        tests = [python, "-m", "pytest", "-m", "slow or not slow", "-rs", TESTS[name]] if name in TESTS else [
            python, "-m", "pytest", "-m", "slow", "-rs", "tests/study/test_framework_examples.py"
        ]  # fmt: skip
        if not options.no_test and subprocess.run(tests, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"The examples failed in: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
