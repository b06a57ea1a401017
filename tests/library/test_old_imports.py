"""Code that imports from the modules of 0.3 gets the same objects, with a warning."""

import importlib
import sys
from pathlib import Path

import pytest

from multirole.old_names.moved import MOVED


@pytest.mark.parametrize("package", sorted({old.rpartition(".")[0] for old in MOVED}))
def test_old_modules_are_the_new_ones(package, monkeypatch):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(DeprecationWarning, match="have moved"):
        importlib.import_module(package)
    for old, new in MOVED.items():
        if old.startswith(f"{package}."):
            assert importlib.import_module(old) is importlib.import_module(new)


def test_the_changelog_lists_them():
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [f"{old} -> {new}" for old, new in MOVED.items() if f"| `{old}` | `{new}` |" not in text] == []
