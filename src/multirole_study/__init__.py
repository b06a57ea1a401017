"""The study of the paper: its tasks, cells, runs, tables and figures, on the public API of `multirole`.

The names below are imported at their first use.
"""

# ruff: noqa: F401, PLE0604
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multirole.extras import needed_by

if TYPE_CHECKING:  # the same names again, because type checkers do not read strings
    from multirole_study.embedded import embedded_model
    from multirole_study.experiment.cell import Cell
    from multirole_study.experiment.run import run_cell
    from multirole_study.tasks import Task

_MODULE_OF = {
    "Cell": "multirole_study.experiment.cell",
    "Task": "multirole_study.tasks",
    "embedded_model": "multirole_study.embedded",
    "run_cell": "multirole_study.experiment.run",
}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'multirole_study' has no attribute {name!r}")
    with needed_by(f"`{name}`"):
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
