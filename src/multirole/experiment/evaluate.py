"""Score a workflow on the validation problems after training.

An evaluation plays a cell's workflow with adapters from somewhere (`Evaluation.adapters`), `n_rollouts` episodes per problem,
and keeps every outcome, the solver role's own answers slot by slot included, for pass@k over the slots:

    results/<scale>/evaluations/<name>/<cell id>/
        config.json  provenance.json
        eval.parquet                    step x problem x rollout
        turns.parquet                   every turn of the first rollout of the first `N_READ` problems
        DONE                            sha256 of every file above: the evaluation is complete

Episode 0 of each problem samples with the seeds of the run's own validation, so that `own` repeats the accuracies that the
run recorded: token for token on a CPU, and up to the rounding of other batches through vLLM.
"""

import json
from contextlib import ExitStack
from pathlib import Path

from multirole.core.engine import Sampling
from multirole.core.rollout import Rollout
from multirole.diagnostics.judging import grade
from multirole.experiment.evaluation import Evaluation, solver_of, steps_of
from multirole.experiment.folders import folder_of, is_done, open_folder, write_done
from multirole.experiment.launch import ONE_PROCESS, Launch
from multirole.experiment.progress import interval, say
from multirole.experiment.provenance import provenance
from multirole.experiment.record import outcome_row, turn_row
from multirole.experiment.released_code import RENDERERS
from multirole.experiment.run import TaskReward, load_adapters, load_model, make_engine, preflight
from multirole.experiment.settings import refusing
from multirole.experiment.storage import sums_of, write_table, write_text

N_READ = 100  # problems per checkpoint whose turns are kept (paper A.3)


def run_evaluation(evaluation: Evaluation, launch: Launch | str | Path = ONE_PROCESS) -> Path:
    """Evaluate; returns the results folder. A finished one is not played again, an interrupted one starts afresh.

    Raises ValueError where another process is at it.
    """
    launch = launch if isinstance(launch, Launch) else Launch(results_dir=str(launch))
    folder = evaluation.folder(launch.results_dir)
    with ExitStack() as held:
        with refusing():
            config = {name: value for name, value in evaluation if name != "cell"} | {"cell": evaluation.cell.to_dict()}
            held.enter_context(open_folder(folder, launch.results_dir, config))
            if is_done(folder):
                say(f"{folder} was finished before.")
                return folder
            steps = steps_of(evaluation, launch.results_dir)
            preflight(evaluation.cell, launch.model_copy(update={"n_processes": 1}))
        _play(evaluation, launch, folder, steps)
        say(f"{folder} is finished.")
    return folder


def _play(evaluation: Evaluation, launch: Launch, folder: Path, steps: list[int]) -> None:
    """Play every checkpoint and write the results."""
    cell, source, task = evaluation.cell, evaluation.source, evaluation.cell.make_task()
    problems = task.problems("validation", cell.n_validation)
    reward = TaskReward(task, problems)
    say(
        f"{cell.id}\n  adapters    {evaluation.adapters}, at iterations {', '.join(map(str, steps))}\n  folder      {folder}"
    )
    attempts = [(problem, index) for problem in problems for index in range(evaluation.n_rollouts)]
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, model, tokenizer, launch)
    outcomes: list[dict] = []
    turns: list[dict] = []
    sums: dict[str, str] = {}
    try:
        for version, step in enumerate(steps):
            if step and source is not None:
                at = folder_of(source, launch.results_dir) / "adapters" / f"step_{step:05d}"
                load_adapters(model, at)
                sums |= sums_of(at.parent, f"{at.name}/**/*.safetensors")
            engine.publish(model, version)
            rollout = Rollout(
                cell.make_workflow(), engine, tokenizer, evaluation.policy() if step else dict.fromkeys(cell.policy),
                lambda text: task.extract(text) is not None, cell.seed, cell.max_prompt_tokens, RENDERERS[cell.renderer],
            )  # fmt: skip
            episodes = rollout.run(attempts, -1, Sampling(cell.max_response_tokens, cell.temperature))
            reward([], [], episodes)
            grade(episodes, [solver_of(cell)], reward)
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
            say(
                f"evaluation at iteration {step}   accuracy {interval(sum(bool(row['correct']) for row in rows), len(rows))}"
            )
            read = {problem.id for problem in problems[:N_READ]}
            outcomes += rows
            turns += [
                turn_row(step, episode, turn) | {"turn_correct": turn.is_right}
                for episode in episodes
                if episode.index == 0 and episode.problem.id in read
                for turn in episode.turns
            ]
    finally:
        engine.close()
    about = provenance(cell, {"validation": len(problems)}) | {"adapters_sha256": sums}
    write_text(folder / "provenance.json", json.dumps(about, indent=2))
    write_table(folder / "eval.parquet", outcomes)
    write_table(folder / "turns.parquet", turns)
    write_done(folder)
