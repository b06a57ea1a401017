"""Train and record a cell, or evaluate a trained cell, until its folder is complete (DONE).

An evaluation runs a cell's workflow with the adapters that `Evaluation.adapters` names, `num_generations_eval` episodes per problem.
It keeps every outcome, including the correctness of each solver slot's answer:

    results/<scale>/evaluations/<name>/<cell id>/
        config.json  provenance.json
        eval.parquet                    step x problem x rollout
        turns.parquet                   every turn of the first rollout of the first `N_READ` problems
        DONE                            sha256 of every file above: the evaluation is complete

Episode 0 of each problem uses the sampling seeds of the run's validation, so that `own` reproduces the recorded accuracies:
token for token on a CPU, and up to rounding of differently composed batches with vLLM.
"""

import json
import logging
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoTokenizer, TrainerCallback

from multirole.chat.templates import StartClock
from multirole.credit.turn_grading import grade_answers
from multirole.engines.protocol import EngineError
from multirole.metrics.episodes import n_failed
from multirole.policy import is_partner
from multirole.update.processes import gather_objects, processes
from multirole.update.threads import use_fitting_threads
from multirole_study.experiment.announce import announced, say
from multirole_study.experiment.base_models import check_base_of_run, locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import load_adapters, make_trainer
from multirole_study.experiment.evaluation import Evaluation, solver_of, steps_by_name, steps_of
from multirole_study.experiment.launch import ONE_PROCESS, Launch, is_launched, spawn
from multirole_study.experiment.preflight import load_problems, preflight
from multirole_study.experiment.presets import is_tiny
from multirole_study.experiment.progress import Progress, conclude, evaluation_line, introduce
from multirole_study.experiment.record import (
    Recorder,
    add_kernels,
    add_session,
    frozen_checksums,
    outcome_row,
    provenance,
    turn_row,
)
from multirole_study.experiment.run_folder import (
    adapters_folder,
    folder_of,
    is_done,
    newest_intact,
    open_folder,
    read_provenance,
    recorded_kernels,
    recorded_start,
    staging,
    write_done,
)
from multirole_study.experiment.settings import UnfinishedRun, UserError, user_errors
from multirole_study.experiment.stop_signals import Stop, handle_signals
from multirole_study.experiment.storage import checksums_of, write_table, write_text

logger = logging.getLogger(__name__)

N_READ = 100  # problems per checkpoint whose turns are kept (paper A.3)


def run_cell(
    cell: Cell, launch: Launch | str | Path = ONE_PROCESS, callbacks: list[TrainerCallback] | None = None
) -> Path:
    """Train and evaluate a cell; return its results folder (see `record`). A path for `launch` is its `results_dir`.

    A finished cell is not trained again. An interrupted cell continues from its newest intact checkpoint, with the same result
    as an uninterrupted run. Raises ValueError if another process runs it, and `Stopped` after a signal (`stop_signals`).

    `callbacks` are for this process, and for those that a launcher started. The processes that `launch.n_processes` starts train the cell as
    `multirole train` does, so they have only those that it adds (`added_by_train`).
    """
    launch = launch if isinstance(launch, Launch) else Launch(results_dir=str(launch))
    folder, is_main = folder_of(cell, launch.results_dir), processes().is_main_process
    with handle_signals() as stop, ExitStack() as stack:
        with user_errors():
            if is_main:
                stack.enter_context(open_folder(folder, cell.to_dict()))
            processes().wait_for_everyone()
            if gather_objects(is_main and is_done(folder))[0]:  # other nodes may see its files later
                if is_main:
                    check_inputs(folder, cell)
                    conclude(folder, "is already finished")
                return folder
            if is_launched():
                launch = launch.by_launcher(processes().num_processes)
            launch.check(cell)
            spawns = launch.n_processes > 1 and not is_launched()
            if lost := [
                type(c).__name__ for c in callbacks or [] if spawns and not getattr(c, "added_by_train", False)
            ]:
                raise ValueError(
                    f"`callbacks` are objects of this process and cannot be sent to the {launch.n_processes} that `n_processes` starts, got {lost}. Leave "
                    "them out, or start your script under torchrun with n_processes=1."
                )
            preflight(cell, launch)
        if spawns:
            stack.close()  # the first of the new processes claims the folder
            try:
                spawn(cell.parameters(), launch, stop.run)
            except subprocess.CalledProcessError as error:
                raise UserError(
                    f"A process of the run has failed, and its message is above. The same command continues from the newest checkpoint in {folder}, if "
                    "there is one."
                ) from error
        else:
            _train(cell, launch, folder, stop, callbacks or [])
    return folder


def check_inputs(folder: Path, cell: Cell) -> None:
    """Raise ValueError if a finished run had another base model, other rows or other frozen adapters, whose folders or files have the same name."""
    check_files(folder, cell)
    if cell.model is not None:
        check_base_of_run(folder, cell)


def check_adapters(folder: Path, run: Path) -> None:
    """Raise ValueError if a finished evaluation played other adapters than the run now has at the same steps."""
    recorded = read_provenance(folder).get("adapters_sha256", {})
    present = checksums_of(run / "adapters", *recorded)
    if differing := [name for name in present if present[name] != recorded[name]]:
        raise ValueError(
            f"{folder} evaluated other adapters than {run} has now: {', '.join(differing)} was trained again since. Move the evaluation's folder away to "
            "repeat it, or write to another `results_dir`."
        )


def check_files(folder: Path, cell: Cell) -> None:
    """Raise ValueError if a run had other rows or other frozen adapters, whose folders or files have the same name."""
    if (frozen := frozen_checksums(cell)) and read_provenance(folder).get("frozen", frozen) != frozen:
        raise ValueError(
            f"{folder} was trained beside other frozen adapters in folders with the same names. Rename the folders, or write to another `results_dir`."
        )
    if cell.data is not None:
        recorded = read_provenance(folder)["dataset"]
        if recorded != json.loads(json.dumps(cell.make_task().describe())):
            raise ValueError(
                f"{folder} was trained on other rows of a file with the same name. Rename the file, or write to another `results_dir`."
            )


def _train(cell: Cell, launch: Launch, folder: Path, stop: Stop, callbacks: list[TrainerCallback]) -> None:
    """Train in a claimed folder until DONE; runs on each process."""
    is_main, recorder, outcome = processes().is_main_process, Recorder(folder), None
    if not torch.cuda.is_available():
        use_fitting_threads(shape_of(cell).parameters)
    with user_errors():
        checkpoint = gather_objects(newest_intact(folder) if is_main else None)[0]
        started = gather_objects((recorded_start(folder) if checkpoint else None) or StartClock().started)[0]
        # before loading the model, because the rows may be invalid
        train, validation, counts = load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)), started)
        if is_main:
            recorder.rewind(checkpoint)
            add_session(folder, cell, launch, checkpoint, counts, started)
            introduce(cell, launch.n_processes, folder, counts, checkpoint)
            callbacks = [Progress(), *callbacks]
            # the default would be deleted with the staged checkpoint
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
        is_verbose = is_main and not is_tiny(cell.scale)
        with announced("loading the model and the rollout engine", is_verbose):
            trainer = make_trainer(
                cell, str(staging(folder)), launch, [stop, *callbacks], recorder if is_main else None,
                problems=(train, validation), started=started,
            )  # fmt: skip
    if is_main and checkpoint is None:
        add_kernels(folder, trainer.run_state.kernels)
    try:
        processes().wait_for_everyone()
        trainer.args.eval_on_start = checkpoint is None  # inside train(), where FSDP2 has sharded and placed the model
        if is_verbose and checkpoint is None:
            say(f"  validating on {len(validation)} problems before the first iteration ...")
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            processes().wait_for_everyone()  # a launcher ends the first as soon as another has stopped
            stop.end()
            if not gather_objects(any(row["step"] == trainer.state.global_step for row in recorder.tables["eval"]))[0]:
                trainer.evaluate()
        except FloatingPointError as error:  # a result, not a failure: a resumed run would diverge again
            outcome = {"state": "diverged", "iteration": trainer.state.global_step + 1, "reason": str(error)}
            logger.warning("%s The run ends as diverged.", error)
        if is_main:
            recorder.finish(outcome)
    except (EngineError, torch.OutOfMemoryError) as error:
        raise UnfinishedRun(error) from error
    finally:
        trainer.engine.close()  # last, since an allocator may crash in it
    if is_main:
        conclude(folder, f"diverged in iteration {outcome['iteration']}" if outcome else "is finished")
    processes().wait_for_everyone()


def run_evaluation(evaluation: Evaluation, launch: Launch | str | Path = ONE_PROCESS) -> Path:
    """Run an evaluation; return its results folder. A finished one is not repeated; an interrupted one starts over.

    Raises ValueError if another process runs it.
    """
    launch = launch if isinstance(launch, Launch) else Launch(results_dir=str(launch))
    folder = evaluation.folder(launch.results_dir)
    with ExitStack() as stack:
        with user_errors():
            config = {name: value for name, value in evaluation if name != "cell"} | {"cell": evaluation.cell.to_dict()}
            stack.enter_context(open_folder(folder, config))
            source = evaluation.source
            run = None if source is None else folder_of(source, launch.results_dir)
            if is_done(folder):
                check_inputs(folder, evaluation.cell)
                if run is not None:
                    check_adapters(folder, run)
                outcomes = pd.read_parquet(folder / "eval.parquet", columns=["step", "reward", "correct"])
                say("\n".join(evaluation_line(step, rows) for step, rows in outcomes.groupby("step")))
                say(f"{folder} is already finished.")
                return folder
            steps = steps_of(evaluation, launch.results_dir)
            if source is not None and run is not None:
                check_base_of_run(run, evaluation.cell)
                check_files(run, source)
            preflight(evaluation.cell, launch.replace(n_processes=1))
            write_text(folder / "config.json", json.dumps(config, indent=2))
        _play(evaluation, launch, folder, steps)
        say(f"{folder} is finished.")
    return folder


def _play(evaluation: Evaluation, launch: Launch, folder: Path, steps: list[int]) -> None:
    """Evaluate every checkpoint and write the results."""
    cell, source, task = evaluation.cell, evaluation.source, evaluation.cell.make_task()
    if not torch.cuda.is_available():
        use_fitting_threads(shape_of(cell).parameters)
    problems = task.problems("validation", cell.n_validation)
    names = steps_by_name(folder_of(source, launch.results_dir)) if source else {}
    named = [
        f"{step} ({', '.join(is_)})" if (is_ := [n for n in names if names[n] == step]) else str(step) for step in steps
    ]
    say(
        f"{cell.id}\n  adapters    {evaluation.adapters}, at iteration{'s' * (len(steps) > 1)} {', '.join(named)}\n"
        f"  folder      {folder}"
    )
    attempts = [(problem, index) for problem in problems for index in range(evaluation.num_generations_eval)]
    started = recorded_start(folder_of(source, launch.results_dir)) if source else None
    trainer = make_trainer(cell, str(folder), launch, problems=(problems, problems), started=started)
    if source:
        trainer.use_kernels(recorded_kernels(folder_of(source, launch.results_dir)))
    outcomes: list[dict] = []
    turns: list[dict] = []
    sums: dict[str, str] = {}
    try:
        untrained = {role: value if is_partner(value) else None for role, value in cell.policy.items()}
        for step in steps:
            if step and source is not None:
                at = adapters_folder(folder_of(source, launch.results_dir), step)
                load_adapters(trainer.peft_model, at)
                sums |= checksums_of(at.parent, f"{at.name}/**/*.safetensors")
            trainer.state.global_step = step  # tells `play` to publish the new weights
            episodes = trainer.play(attempts, -1, evaluation.policy() if step else untrained)
            if failed := n_failed(episodes):  # left out, as in validation
                say(f"evaluation at iteration {step}   {failed} episodes failed and are left out")
                episodes = [episode for episode in episodes if episode.failure is None]
            if not episodes:
                raise UserError(f"All episodes at iteration {step} failed, so that there is nothing to evaluate.")
            trainer.score(episodes)
            grade_answers(episodes, [solver_of(cell)], trainer.score)
            rows = [
                outcome_row(step, episode)
                | {
                    "rollout": episode.index,
                    "prompt_tokens": sum(len(turn.prompt_ids) for turn in episode.turns),
                    "completion_tokens": sum(len(turn.completion_ids) for turn in episode.turns),
                    "slots_correct": [turn.is_right for turn in episode.turns if turn.is_right is not None],
                }
                for episode in episodes
            ]
            say(evaluation_line(step, pd.DataFrame(rows)))
            read = {problem.id for problem in problems[:N_READ]}
            outcomes += rows
            turns += [
                turn_row(step, episode, turn)
                for episode in episodes
                if episode.index == 0 and episode.problem.id in read
                for turn in episode.turns
            ]
    except torch.OutOfMemoryError as error:
        raise UserError(str(error)) from error
    finally:
        trainer.engine.close()
    about = provenance(cell, launch, {"validation": len(problems)}) | {"adapters_sha256": sums}
    write_text(folder / "provenance.json", json.dumps(about, indent=2))
    write_table(folder / "eval.parquet", outcomes)
    write_table(folder / "turns.parquet", turns)
    write_done(folder)
