"""Train and tabulate a study that is one YAML file (`compare.study`): arms of a grid's cells, and questions about them."""

from pathlib import Path
from typing import ClassVar

import pandas as pd
from pydantic.dataclasses import dataclass

from multirole_study.compare.intervals import NO_UNITS
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.study import CompareStudy, check_roles
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.settings import CHECKED, looked_in
from multirole_study.labels import WORKFLOW_NAMES, task_name
from multirole_study.paper import pack
from multirole_study.paper.grid import ArmsStudy, as_fields, refuse_coordinates
from multirole_study.paper.output import MISSING, Table, interval_text, p_cell, verdict_cell
from multirole_study.paper.results import Results


@dataclass(frozen=True, config=CHECKED)
class ComparedStudy(CompareStudy, ArmsStudy):
    """The arms of the study, and nothing of the grid's cells besides them. Raises ValueError for values that cannot work."""

    RECORD: ClassVar[str] = "compare.json"
    command: ClassVar[str] = "compare"

    def __post_init__(self) -> None:
        CompareStudy.__post_init__(self)
        for about in self.arms.values():
            refuse_coordinates(about.parameters, "policy")
        self.cells_by_line()  # raises ValueError for invalid cells
        for question in self.questions:
            arms = ((arm, place) for pair in question.pairs for arm in pair if arm for place in self.places(*pair))
            check_roles(question.name, question.options, (self.cells_of(self.grid, *arm)[0] for arm in arms))

    def packed_elsewhere(self) -> set[str]:
        """Return the ids of the runs in `packed_in`. Raises ValueError for a folder that is not one of packed runs."""
        for folder in self.packed_in:
            if not (Path(folder) / "runs.parquet").is_file():
                raise ValueError(
                    f"`packed_in` must name folders of packed runs, such as results/tiny-r, got {folder!r}{looked_in(folder)}. It has no "
                    "runs.parquet: correct the name, or pack its runs first."
                )
        return {run for folder in self.packed_in for run in pack.index(Path(folder))["run"]}

    def runs(self) -> list[tuple[str, Cell]]:
        """List (arm, cell) of every run, in the order of training: a seed in all arms before the next seed."""
        runs = [
            (arm, cell)
            for arm, about in self.arms.items()
            for task in self.tasks
            for workflow in ([about.workflow] if about.workflow else self.workflows)
            for cell in self.cells_of(self.grid, arm, (workflow, task))
        ]
        return sorted(runs, key=lambda run: self.seeds.index(run[1].seed))

    def cells_by_line(self) -> list[dict[str, Cell]]:
        """Return id -> cell of all runs, which are one line."""
        return [{cell.id: cell for _, cell in self.runs()}]

    def parameters_of(self, cell: Cell) -> dict[str, object]:
        """Return the notebook parameters of a run."""
        arm = next(arm for arm, other in self.runs() if other == cell)
        return self.grid.parameters_of(cell) | as_fields(self.arms[arm].parameters)


def answer_table(results: Results, study: CompareStudy) -> Table:
    """Build the table of the study's answers."""
    shown, values = [], study.table(results)
    declared = {question.name: question for question in study.questions}
    for row in values.to_dict("records"):
        question = declared[row["question"]]
        measure = MEASURES[question.measure]
        is_level = question.minus is None and measure.has_margin
        unit = "rate" if question.kind == "share" else "accuracy" if is_level else measure.unit
        interval = NO_UNITS._replace(mean=row["value"], low=row["low"], high=row["high"])
        shown.append({
            "question": question.question,
            "cell": f"{WORKFLOW_NAMES.get(row['workflow'], row['workflow'])}, {task_name(row['task'])}",
            "arm": row["arm"],
            "minus": row["minus"] or MISSING,
            "n": str(row["seeds"]),
            "value": interval_text(interval, unit),
            "p": p_cell(row["p"]),
            "verdict": verdict_cell(row["verdict"]),
        })  # fmt: skip
    caption = f"Arms at {results.grid.scale}, paired by seed (n), with 95 % intervals over seeds."
    table = pd.DataFrame(shown)
    if not any(question.tested for question in study.questions):
        caption += " Nothing is tested."
        table = table.drop(columns=["p", "verdict"])
    else:
        caption += f" {_how_tested(study)}"
    return Table("compare", "Answers of the study", caption, table, values)


def _how_tested(study: CompareStudy) -> str:
    """Return the sentences of a caption that say when a line is read, and by which correction and margin."""
    looks = study.looks or [len(study.seeds)]
    levels = ", ".join(
        f"{look} (p < {looks[look]:g})" if isinstance(looks, dict) else f"{look} (p < {study.alpha:g})"
        for look in looks
    )
    corrected = (
        "after Holm's correction over the lines of a question" if study.correction == "holm" else "not corrected"
    )
    return f"A line is read at {levels} seeds; p is {corrected}. Equivalent: two one-sided tests within {100 * study.margin:g} points."
