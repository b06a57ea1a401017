"""Scores answers with reasoning-gym: what `gym.py` runs in the sandbox, a process for each answer.

Several of its `score_answer` methods evaluate the text of an answer as Python (`eval`, or sympy's `parse_expr`), so a text of the
model must never reach them in the trainer. The sandbox's workers import this file and call `preload` before they lock themselves in.
"""

import base64
import importlib
import pickle
import pkgutil
import sys
import types
from typing import Any

LATE = (
    "arc.arc_1d_tasks", "arc.rearc_utils.generators", "arc.rearc_utils.utils", "arithmetic.gsm_symbolic.generators_00_49",
    "arithmetic.gsm_symbolic.generators_50_99", "cognition.needle_data", "games.contrib.sokoban.src.game",
    "games.contrib.sokoban.src.generator", "games.contrib.sokoban.src.utils", "induction.list_functions.generators",
)  # fmt: skip
"""What the package imports inside functions."""
SYMPY = ("core", "parsing", "simplify", "polys", "functions")
NEEDS_PYCOSAT = "zebra_puzzles"
"""The one kind of problem that needs the package pycosat, which has to be compiled."""


def load_gym() -> Any:
    """Import the package reasoning_gym. Without pycosat everything works but `NEEDS_PYCOSAT`, although the package imports it at once."""
    try:
        importlib.import_module("pycosat")
    except ModuleNotFoundError:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
        try:
            return importlib.import_module("reasoning_gym")
        finally:
            del sys.modules["pycosat"]
    return importlib.import_module("reasoning_gym")


def preload() -> None:
    """Import what scoring may import late."""
    load_gym()
    for name in LATE:
        importlib.import_module(f"reasoning_gym.{name}")
    for name in SYMPY:
        module = importlib.import_module(f"sympy.{name}")
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            if not {"tests", "benchmarks", "autolev", "fortran", "latex", "c", "sym_expr"} & set(found.name.split(".")):
                importlib.import_module(found.name)


def encode(dataset: Any, entry: dict) -> str:
    """A generator and one of its entries as text; JSON would turn tuples into lists. A generator that cannot be pickled is left out."""
    try:
        pickled = pickle.dumps((dataset, entry))
    except (AttributeError, pickle.PicklingError):  # it holds a function
        pickled = pickle.dumps((None, entry))
    return base64.b64encode(pickled).decode()


def score(kind: str, options: dict, answer: str, encoded: str) -> float | str:
    """Score one answer to an encoded entry; "broken" where a module or a file is missing, which no answer can cause."""
    try:
        dataset, entry = pickle.loads(base64.b64decode(encoded))
        if dataset is None:
            dataset = load_gym().create_dataset(kind, seed=0, size=1, **options)
        return float(dataset.score_answer(answer, entry))
    except (ImportError, OSError) as error:
        return f"broken: {error!r}"
    except Exception:  # noqa: BLE001 (whatever a scorer says of a text that it cannot read)
        return 0.0
