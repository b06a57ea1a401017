"""Score a workflow on the validation problems after training: checkpoints, the base model, and Table 3's transfer.

An evaluation plays a cell's workflow with adapters from somewhere (`Evaluation.adapters`), `n_rollouts` episodes per problem,
and keeps every outcome, the solver role's own answers slot by slot included, for pass@k over the slots:

    results/<scale>/evaluations/<name>/<cell id>/
        config.json  provenance.json
        eval.parquet                    step x problem x rollout
        turns.parquet                   every turn of the first rollout of the first `N_READ` problems
        DONE                            sha256 of every file above: the evaluation is complete

Episode 0 of each problem samples with the seeds of the run's own validation, so that `own` repeats the accuracies that the
run recorded, token for token.
"""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from multirole.core.engine import Engine
from multirole.core.policy import adapter_names
from multirole.core.renderers import RENDERERS
from multirole.core.rollout import Rollout
from multirole.diagnostics.judging import grade, score_episodes
from multirole.diagnostics.remedies import load_adapters
from multirole.experiment.cell import Cell
from multirole.experiment.launch import ONE_PROCESS, Launch
from multirole.experiment.locks import claim
from multirole.experiment.record import (
    folder_of,
    is_done,
    make_folder,
    make_writable,
    provenance,
    turn_row,
    write_done,
)  # fmt: skip
from multirole.experiment.run import load_model, make_engine, preflight
from multirole.experiment.storage import write_table, write_text
from multirole.tasks import TASKS
from multirole.tasks.sources import forget_rows, sha256

logger = logging.getLogger(__name__)

NAMED = ("early", "best", "terminal")
CHECKPOINTS = {"own": ",".join(NAMED), "base": "0", "transfer": "best", "transfer_all": "best"}
"""What is evaluated of each kind of adapters where nothing else is asked for."""
SOLVERS = {"orch_workers": "worker"}
"""The generator-type role of a workflow, whose turns answer the problem themselves; "generator" where it is not named here."""
N_READ = 100  # problems per checkpoint whose turns are kept (paper A.3)


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated; bad values raise ValueError.

    Args:
        cell: the workflow, task, scale and sampling; its id names the folder.
        adapters: "own" takes the checkpoints of the cell's run; "base" none at all; "transfer" gives the single-agent run's
            adapter (same task, scale, seed and options) to the solver role and none to the others (paper Table 3);
            "transfer_all" gives it to every role.
        checkpoints: "all" saved ones, or a comma-separated list of steps (0 is the untrained model) and of
            "early" (the checkpoint nearest to half of best), "best" (highest validation accuracy; the earlier of equals)
            and "terminal" (the last one). None takes `CHECKPOINTS`; the base model has no other than 0.
        n_rollouts: episodes per problem.
    """

    cell: Cell
    adapters: str = "own"
    checkpoints: str | None = None
    n_rollouts: int = 1

    def __post_init__(self) -> None:
        if self.adapters not in CHECKPOINTS:
            raise ValueError(f"adapters={self.adapters!r} is not known. Write one of {list(CHECKPOINTS)}.")
        if self.checkpoints is None or self.adapters == "base":
            object.__setattr__(self, "checkpoints", CHECKPOINTS[self.adapters])
        if type(self.n_rollouts) is not int or self.n_rollouts < 1:
            raise ValueError(f"n_rollouts={self.n_rollouts!r} is no number of episodes. Write n_rollouts=1, say.")
        names = self.checkpoints.split(",")
        if self.checkpoints != "all" and not all(name in NAMED or name.isdecimal() for name in names):
            raise ValueError(
                f"checkpoints={self.checkpoints!r} names no checkpoints. Write 'all', or steps and names such as "
                f"'0,{','.join(NAMED)}'."
            )
        if self.adapters.startswith("transfer") and self.cell.workflow_name == "single":
            raise ValueError(
                f"adapters={self.adapters!r} gives the single-agent adapter to a workflow, and 'single' is where it comes "
                "from. Write adapters='own', or another workflow."
            )
        if (
            self.adapters != "own"
        ):  # whose adapters these are is no part of the cell, and equal evaluations share a folder
            object.__setattr__(self, "cell", replace(self.cell, policy="sp"))

    @classmethod
    def from_parameters(cls, parameters: dict[str, object]) -> "tuple[Evaluation, Launch]":
        """An evaluation and its launch options from a notebook's `globals()`; see `Cell.from_parameters`."""
        own = {name: parameters[name] for name in ("adapters", "checkpoints", "n_rollouts")}
        cell, launch = Cell.from_parameters({k: v for k, v in parameters.items() if k not in own})
        if launch.n_processes > 1:
            raise ValueError(
                f"n_processes={launch.n_processes} is for training: an evaluation runs in one process. Leave it out, or "
                "write vllm_tensor_parallel."
            )
        return cls(cell, **own), launch

    @property
    def source(self) -> Cell | None:
        """The trained cell whose adapters are evaluated; None for the base model."""
        if self.adapters == "base":
            return None
        return self.cell if self.adapters == "own" else self.cell.sibling("single", "sp")

    def needs(self) -> list[Cell]:
        """The trained cells whose runs must be finished first."""
        return [] if self.source is None else [self.source]

    @property
    def name(self) -> str:
        """The kind of adapters, then what is not its usual checkpoints and one rollout."""
        checkpoints = "" if self.checkpoints == CHECKPOINTS[self.adapters] else f"-{self.checkpoints.replace(',', '_')}"
        return self.adapters + checkpoints + (f"-n{self.n_rollouts}" if self.n_rollouts > 1 else "")

    def folder(self, results_dir: str | Path) -> Path:
        """Where the results go."""
        return Path(results_dir) / self.cell.scale / "evaluations" / self.name / self.cell.id

    def policy(self) -> dict[str, str | None]:
        """role -> adapter of the source, None for the base model."""
        if self.adapters == "base":
            return dict.fromkeys(self.cell.policy)
        if self.adapters == "own":
            return dict(self.cell.policy)
        (adapter,) = adapter_names(self.cell.policy)  # as the single-agent run calls it, too
        solver = solver_of(self.cell)
        return {r: adapter if r == solver or self.adapters == "transfer_all" else None for r in self.cell.policy}


def solver_of(cell: Cell) -> str:
    """The role whose turns are answers to the problem; for a workflow of one's own, the one with the most slots."""
    slots = cell.make_workflow().roles
    named = SOLVERS.get(cell.workflow_name, "generator")
    return named if named in slots else max(slots, key=slots.get)


def named_steps(accuracy: pd.Series) -> dict[str, int]:
    """early, best and terminal among the evaluated steps that index a run's validation accuracy."""
    steps = [step for step in accuracy.index if step > 0]
    best = max(steps, key=lambda step: (accuracy[step], -step))
    middle = (steps[0] + best) / 2
    return {"early": min(steps, key=lambda step: abs(step - middle)), "best": best, "terminal": steps[-1]}


def saved_steps(folder: Path) -> list[int]:
    """The steps whose adapters a run has saved."""
    return sorted(int(path.name.split("_")[1]) for path in folder.glob("adapters/step_*"))


def steps_of(evaluation: Evaluation, results_dir: str | Path) -> list[int]:
    """The steps to evaluate, ascending; ValueError where their adapters are not there."""
    if evaluation.source is None:
        return [0]
    run = folder_of(evaluation.source, results_dir)
    saved = saved_steps(run)
    if not is_done(run) or not saved:
        raise ValueError(
            f"adapters={evaluation.adapters!r} needs the adapters of the finished run {run}, and "
            f"{'it has none left' if is_done(run) else 'it is not finished'}. Train it first: notebooks/train_cell.ipynb with the "
            "same parameters."
        )
    if evaluation.checkpoints == "all":
        return saved
    named = named_steps(pd.read_parquet(run / "eval.parquet").groupby("step")["correct"].mean())
    steps = sorted({named[n] if n in named else int(n) for n in evaluation.checkpoints.split(",")})
    if missing := [step for step in steps if step not in saved and step != 0]:
        raise ValueError(f"{run} has no adapters of steps {missing}. Write checkpoints from {saved}.")
    return steps


def play(evaluation: Evaluation, engine: Engine, rollout: Rollout, step: int) -> tuple[list[dict], list[dict]]:
    """Rows of `eval.parquet` and of `turns.parquet` at one checkpoint, which the engine serves already."""
    cell, task = evaluation.cell, TASKS[evaluation.cell.task_name]
    problems = task.problems("validation", cell.n_validation, **cell.data_options)
    attempts = [(problem, rollout_index) for problem in problems for rollout_index in range(evaluation.n_rollouts)]
    episodes = rollout.run(attempts, -1, cell.sampling(is_evaluation=True))
    grade(episodes, [solver_of(cell)], cell)
    score_episodes(episodes, cell)
    rows = [
        {
            "step": step,
            "problem": e.problem.id,
            "rollout": e.index,
            "correct": e.reward.is_correct,
            "reward": e.reward.value,
            "reason": e.reward.reason,
            "answer": e.answer.text,
            "turns": len(e.turns),
            "prompt_tokens": sum(len(turn.prompt_ids) for turn in e.turns),
            "completion_tokens": sum(len(turn.completion_ids) for turn in e.turns),
            "slots_correct": [turn.is_right for turn in e.turns if turn.is_right is not None],
        }
        for e in episodes
    ]
    read = {problem.id for problem in problems[:N_READ]}
    turns = [
        turn_row(step, e, turn) | {"turn_correct": turn.is_right}
        for e in episodes
        if e.index == 0 and e.problem.id in read
        for turn in e.turns
    ]
    return rows, turns


def run_evaluation(evaluation: Evaluation, launch: Launch | str | Path = ONE_PROCESS) -> Path:
    """Evaluate; returns the results folder. A finished one is not played again, an interrupted one starts afresh.

    Raises ValueError where another process is at it.
    """
    launch = launch if isinstance(launch, Launch) else Launch(results_dir=str(launch))
    folder = evaluation.folder(launch.results_dir)
    make_writable(folder, launch.results_dir)
    with claim(folder):
        return _run(evaluation, launch, folder)


def _run(evaluation: Evaluation, launch: Launch, folder: Path) -> Path:
    cell, source = evaluation.cell, evaluation.source
    config = {
        "adapters": evaluation.adapters,
        "checkpoints": evaluation.checkpoints,
        "n_rollouts": evaluation.n_rollouts,
    }
    make_folder(folder, launch.results_dir, config | {"cell": cell.to_dict()})
    if is_done(folder):
        logger.info("%s is done already", folder)
        return folder
    steps = steps_of(evaluation, launch.results_dir)
    preflight(cell, launch)
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, tokenizer, launch)
    sums: dict[str, str] = {}
    try:
        task = TASKS[cell.task_name]
        rows, turns = [], []
        for version, step in enumerate(steps):
            if step:
                at = folder_of(source, launch.results_dir) / "adapters" / f"step_{step:05d}"
                load_adapters(model, at)
                sums |= {str(path.relative_to(at.parent)): sha256(path) for path in sorted(at.glob("**/*.safetensors"))}
            engine.publish(model, version)
            rollout = Rollout(
                cell.make_workflow(), engine, tokenizer, evaluation.policy() if step else dict.fromkeys(cell.policy),
                lambda text: task.extract(text) is not None, cell.seed, cell.max_prompt_tokens, RENDERERS[cell.renderer],
            )  # fmt: skip
            outcomes, said = play(evaluation, engine, rollout, step)
            rows, turns = rows + outcomes, turns + said
            logger.info("step %d: accuracy %.3f", step, sum(row["correct"] for row in outcomes) / len(outcomes))
        about = provenance(
            cell, {"validation": len({row["problem"] for row in rows})}, task.describe(**cell.data_options)
        )
        forget_rows()
    finally:
        engine.close()
    write_text(folder / "provenance.json", json.dumps(about | {"adapters_sha256": sums}, indent=2))
    write_table(folder / "eval.parquet", rows)
    write_table(folder / "turns.parquet", turns)
    write_done(folder)
    return folder
