"""Give setuptools the extras of pyproject.toml, in which packages of this repository are folders of the clone.

So `pip install '.[study]'` works in a clone, without an index that has them. A source distribution holds the library and the study alone, and
names the other packages with their versions; build wheels for others from it: `python -m build`.
"""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def in_clone(requirement: str) -> str:
    """Return the requirement of a package of this repository as the URL of its folder, where that is present; else unchanged."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    folder = ROOT / "src" / name.replace("-", "_")
    is_here = (folder / "pyproject.toml").is_file() and "sdist" not in sys.argv
    return f"{name} @ {folder.as_uri()}" if is_here else requirement


extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["multirole"]["extras"]
setup(extras_require={extra: [in_clone(text) for text in texts] for extra, texts in extras.items()})
