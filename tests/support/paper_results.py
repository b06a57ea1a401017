"""Make up a small finished grid from a fixed seed: the files that `record` and `run` write, without any training.

`make_results(folder)` returns `<folder>/tiny-r`, with the folders of the runs and their packed tables. It takes seconds, so the
fixture `grid_results` makes it once for all tests. Voting-IP on math rises until step 10 and then collapses: its generator's chi2
climbs and its texts lose their box. Every other cell rises and stays. No number here describes a real model.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from multirole.policy import adapter_names
from multirole.roles.skill import frame_of, role_skills
from multirole.types import Answer, Episode, Problem, Reward, Turn, structure_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation, solver_of, steps_of
from multirole_study.experiment.record import turn_row
from multirole_study.experiment.run_folder import folder_of, write_done
from multirole_study.experiment.storage import write_table, write_text
from multirole_study.paper import pack as packed
from multirole_study.paper.grid import Grid
from multirole_study.paper.results import Results, Run
from multirole_study.signatures import Reply, of_role

ROOT = Path(__file__).parents[2]
ITERATIONS, EVAL_EVERY, N_PROBLEMS, N_EPISODES = 20, 5, 16, 8
COLLAPSING = ("voting", "generator", "aggregator", "math")
START = {"math": 0.45, "code": 0.25}
GAIN = {"eval_opt": 0.2, "voting": 0.3, "orch_workers": 0.25, "single": 0.15}
ANSWER = {"math": "=7+4-2\n=11-2\n\\boxed{9}", "code": "```python\ndef f(x):\n    y = x + 1\n    return y\n```"}


def make_results(folder: Path) -> Path:
    """Write runs and evaluations of every cell for three seeds, with DONE, and pack them; every call writes the same files."""
    parameters = {
        "max_steps": ITERATIONS,
        "eval_steps": EVAL_EVERY,
        "save_steps": EVAL_EVERY,
        "n_validation": N_PROBLEMS,
    }
    grid = Grid("tiny-r", [0, 1, 2], parameters, base_rollouts=2)
    grid.write(folder)
    for cell in grid.cells():
        make_run(cell, folder)
    for evaluation in grid.evaluations():
        make_evaluation(evaluation, folder)
    packed.pack(folder / "tiny-r")
    return folder / "tiny-r"


def recorded(path: Path) -> pd.DataFrame:
    """Read a table of a run's folder, with measurements rounded to the 16 bits that packing keeps."""
    table = pd.read_parquet(path)
    for name in table.select_dtypes("float").columns.difference(["reward", "lr"]):
        bits = table[name].to_numpy(np.float32).view(np.int32)
        table[name] = ((bits + 128) & ~255).view(np.float32).astype(float)
    return table


def without(results: Path, keys: list[tuple], folder: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Write the packed tables of a grid of these seeds, without the runs `keys`, as if they were unfinished."""
    grid = replace(Grid.read(results), seeds=list(seeds))
    grid.write(folder)
    for path in results.glob("*.parquet"):
        shutil.copy(path, folder / "tiny-r")
    runs = packed.index(results)
    runs[~runs["run"].isin([grid.cell(*key).id for key in keys])].to_parquet(folder / "tiny-r" / "runs.parquet")
    return folder / "tiny-r"


def without_iterations(results: Path, folder: Path, *key: object) -> Run:
    """Write the packed tables of a grid in which the run `key` diverged in its first iteration, and return this run."""
    shutil.copytree(
        results, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*-*", "evaluations", "*.json.tmp")
    )
    cell = Grid.read(results).cell(*key)
    for name in ("eval", "skills", "turns", "metrics", "roles", "ledger", "steps", "cosines"):
        table = pd.read_parquet(folder / f"{name}.parquet")
        is_kept = table["run"] != cell.id
        (table[is_kept | (table["step"] == 0)] if name in ("eval", "skills", "turns") else table[is_kept]).to_parquet(
            folder / f"{name}.parquet"
        )
    return Run(cell, folder)


def made_up_results(monkeypatch, made_up: Callable[[Cell], object], run: Callable[..., Run]) -> Results:
    """Return results whose run of a cell is `run(cell, made_up(cell))`, or missing where `made_up` returns None."""

    def find(self: Results, cell: Cell) -> Run | None:
        values = made_up(cell)
        return None if values is None else run(cell, values)

    monkeypatch.setattr(Results, "find", find)
    return Results(ROOT / "results/tiny-r")


def coordinates(cell: Cell) -> tuple[str, ...]:
    """Return what the made-up curves depend on besides the seed: workflow, adapters, task."""
    return cell.workflow, *cell.policy.values(), cell.task


def rng_of(*names: object) -> np.random.Generator:
    """Return a random generator that depends only on these names."""
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def drift(cell: Cell, step: int) -> float:
    """Return the fraction of bad texts, which rises to nearly 1 in the collapsing cell."""
    return max(0.0, 0.09 * (step - 10)) if coordinates(cell) == COLLAPSING else 0.01 * step


def accuracy(cell: Cell, step: int) -> float:
    """Return the probability that an answer is right."""
    bonus = 0.1 * ("shared" not in cell.policy.values()) + GAIN[cell.workflow]
    start = START[cell.task] + 0.05 * (cell.workflow == "voting")
    return max(0.05, start + bonus * min(1.0, step / 10) - 0.9 * drift(cell, step))


def problems(cell: Cell) -> list[Problem]:
    return [Problem(f"tiny_{cell.task}/{i:02d}", f"tiny_{cell.task}", f"{i}+4-2", None) for i in range(N_PROBLEMS)]


def is_right(cell: Cell, chance: float, problem: int, *names: object) -> bool:
    """Draw whether a problem is solved. Problems differ in difficulty; the draw depends on seed and problem only, so that untrained IP equals SP."""
    draw = rng_of(cell.workflow, cell.task, cell.seed, problem, *names).random()
    return bool(0.5 * draw + 0.5 * (problem + 0.5) / N_PROBLEMS < chance)


def turn(cell: Cell, role: str, slot: int, round: int, is_lost: bool, n: int) -> Turn:
    """Return a canned text of the role. `n` varies it; `is_lost` removes its box or verdict, or makes it long."""
    answer = f"{n % 7}+" + ANSWER[cell.task]
    text, outcome = {
        "generator": (answer, "answered"),
        "worker": (answer, "answered"),
        "synthesizer": (answer, "answered"),
        "evaluator": ("\\boxed{Correct}", "correct") if n % 3 else ("\\boxed{Incorrect}", "incorrect"),
        "aggregator": (f"\\boxed{{{n % 3 + 1}}}", str(n % 3 + 1)),
        "orchestrator": ("STRATEGY 1: left first\nSTRATEGY 2: group terms\nSTRATEGY 3: check twice", "strategies"),
    }[role]
    if is_lost and role == "evaluator" and cell.task == "code":
        text, outcome = ANSWER["code"], "unparsed"
    elif is_lost:
        text, outcome = f"wait {n} is {n % 5} and so on and so on and so on", "unparsed"
    n_tokens = cell.max_completion_length if is_lost else 3 + len(text) // 2
    tokens = list(range(1, n_tokens + 1))
    logprobs = [-0.1 - 0.01 * (i % 5) for i in tokens]
    return Turn(role, slot, round, [1] * (12 + n % 9), tokens, logprobs, text, "length" if is_lost else "stop", outcome)


def episode(cell: Cell, index: int, problem: Problem, chance: float, lost: float, *names: object) -> Episode:
    """Return one attempt at a problem; Eval-Opt takes one or two rounds."""
    at = int(problem.id.rpartition("/")[2])
    rng = rng_of(coordinates(cell), cell.seed, index, problem.id, *names)
    right = is_right(cell, chance, at, index, *names)
    played = Episode(problem, index, answer=Answer(ANSWER[cell.task] if right else "0"))
    for round in range(1 + (at % 2) * (cell.workflow == "eval_opt")):
        for role, slots in cell.make_workflow().roles.items():
            for slot in range(slots):
                played.turns.append(turn(cell, role, slot, round, rng.random() < lost, int(rng.integers(100))))
    good, bad = ("correct", "wrong") if cell.task == "math" else ("passed", "wrong_answer")
    played.reward = Reward(float(right), good if right else bad, right)
    return played


def eval_row(step: int, e: Episode) -> dict[str, object]:
    outcome = {"step": step, "problem": e.problem.id, "correct": e.reward.is_correct, "reward": e.reward.value}
    return outcome | {"reason": e.reward.reason, "turns": len(e.turns), "answer": e.answer.text}


def iteration_tables(cell: Cell, iteration: int) -> dict[str, list[dict]]:
    """Return the rows of one iteration: metrics, roles, ledger, steps, cosines."""
    rng = rng_of("iteration", coordinates(cell), cell.seed, iteration)
    roles, is_ip = cell.make_workflow().roles, "shared" not in cell.policy.values()
    tables: dict[str, list[dict]] = {name: [] for name in ("metrics", "roles", "ledger", "steps", "cosines")}
    n_episodes = N_PROBLEMS * N_EPISODES
    lost = drift(cell, iteration)
    for role, slots in roles.items():
        adapter = cell.policy[role]
        n_steps = slots if is_ip else sum(roles.values())
        said = [
            turn(cell, role, slot, 0, rng.random() < lost, int(rng.integers(100)))
            for _ in range(4)
            for slot in range(slots)
        ]
        replies = [
            Reply(i // slots, role, t.slot, 0, len(t.completion_ids), t.finish_reason, t.text)
            for i, t in enumerate(said)
        ]
        moved = 1e-4 * iteration * (n_steps - 1) * (1 + 200 * lost**2 * (slots > 1)) * (1 + 0.1 * rng.random())
        tokens = int(n_episodes * slots * of_role(replies)["length_mean"])
        measured = {
            "perplexity": 1.3 + 0.2 * rng.random() + 5 * lost**2 * (slots > 1), "entropy": 0.3 / (1 + 0.05 * iteration),
            "chi2": moved, "kl": moved / 4, "k3_kl": moved / 2, "clip_fraction": min(1.0, moved),
            "max_logprob_gap": 1e-5 + moved, "grad_norm": 0.05 + 0.02 * rng.random() + lost**2,
        }  # fmt: skip
        share = slots / sum(roles.values())
        coherence = 0.4 + 0.1 * rng.random() if slots > 1 else np.nan
        tables["roles"].append(
            {"iteration": iteration, "role": role, "rows": n_episodes * slots, "tokens": tokens, "reward": 0.5,
             "advantage_mean": 0.0, "advantage_abs": 0.8, "unparsed_rate": lost}
            | of_role(replies) | measured
            | {"optimizer_steps": n_steps, "chi2_after": 2e-3 * (1 + moved),
               "token_mass": 1.0 if is_ip else share,
               "grad_share": 1.0 if is_ip else share, "coherence": coherence}
        )  # fmt: skip
        for step in range(n_steps):
            part = {"rows": n_episodes * slots // n_steps, "tokens": tokens // n_steps}
            where = {"iteration": iteration, "adapter": adapter, "step": step}
            now = measured | {
                "chi2": 2 * moved * step / max(1, n_steps - 1),
                "grad_norm": measured["grad_norm"] / (1 + step),
            }
            tables["steps"].append(where | {"role": role} | part | now)
    for adapter in adapter_names(cell.policy):
        held = [row for row in tables["steps"] if row["adapter"] == adapter]
        for step in sorted({row["step"] for row in held}):
            mine = [row for row in held if row["step"] == step]
            sums = {name: sum(row[name] for row in mine) for name in ("rows", "tokens")}
            norm = sum(row["grad_norm"] ** 2 for row in mine) ** 0.5
            where = {"iteration": iteration, "adapter": adapter, "step": step}
            tables["ledger"].append(where | sums | {"lr": cell.learning_rate, "grad_norm": norm})
    names = list(roles)
    if not is_ip:
        tables["cosines"] = [
            {"iteration": iteration, "adapter": "shared", "role": a, "other": b, "cosine": rng.uniform(-0.2, 0.2)}
            for i, a in enumerate(names) for b in names[i + 1 :]
        ]  # fmt: skip
    tokens = sum(row["tokens"] for row in tables["roles"])
    right = round(n_episodes * accuracy(cell, iteration)) / n_episodes
    tables["metrics"] = [
        {"iteration": iteration, "reward": right, "accuracy": right, "episodes": n_episodes,
         "turns": sum(row["rows"] for row in tables["roles"]), "prompt_tokens": 2 * tokens, "completion_tokens": tokens,
         "zero_variance_groups": 0.1, "optimizer_steps": len(tables["ledger"]), "rollout_seconds": 1.0 + rng.random(),
         "update_seconds": 2.0 + rng.random(), "grading_seconds": 0.5 * (cell.task == "code"),
         "cpu_seconds": 3.0}
    ]  # fmt: skip
    return tables


def about(cell: Cell) -> str:
    return json.dumps({"git_sha": "0" * 40, "git_dirty": False, "platform": "Linux x86_64", "device": "cpu", "processes": 1,
                       "torch_threads": 1, "seed": cell.seed, "versions": {}, "argv": [],
                       "model": {"name": cell.scale, "sha256": {"model.safetensors": "0" * 64}}}, indent=2)  # fmt: skip


def make_run(cell: Cell, results_dir: Path) -> Path:
    """Write a run's folder, without adapter weights."""
    folder = folder_of(cell, results_dir)
    (folder / "turns").mkdir(parents=True)
    write_text(folder / "config.json", json.dumps(cell.to_dict(), indent=2))
    write_text(folder / "provenance.json", about(cell))
    tables: dict[str, list[dict]] = {}
    for iteration in range(1, ITERATIONS + 1):
        for name, rows in iteration_tables(cell, iteration).items():
            tables.setdefault(name, []).extend(rows)
    tables["eval"] = []
    for step in range(0, ITERATIONS + 1, EVAL_EVERY):
        (folder / "adapters" / f"step_{step:05d}").mkdir(parents=True)
        played = [episode(cell, 0, p, accuracy(cell, step), drift(cell, step), step) for p in problems(cell)]
        tables["eval"] += [eval_row(step, e) for e in played]
        turns = [
            turn_row(step, e, t) | {"tokens": ["a"] * len(t.completion_ids), "logprobs": np.float32(t.logprobs),
                                    "base_logprobs": np.float32(t.logprobs)}
            for e in played[:4] for t in e.turns
        ]  # fmt: skip
        write_table(folder / "turns" / f"step_{step:05d}.parquet", turns)
        for e in played:
            for t in e.turns:
                t.is_right = e.reward.is_correct and t.slot != 1
        tables.setdefault("skills", []).extend(
            {"step": step} | row for row in role_skills(frame_of(played), structure_of(cell.make_workflow()))
        )
    for name, rows in tables.items():
        if rows:
            write_table(folder / f"{name}.parquet", rows)
    write_done(folder)
    return folder


def make_evaluation(evaluation: Evaluation, results_dir: Path) -> Path:
    """Write an evaluation's folder; the accuracies of a run's own checkpoints equal those of the run."""
    cell, folder = evaluation.cell, evaluation.folder(results_dir)
    folder.mkdir(parents=True)
    options = {
        "adapters": evaluation.adapters,
        "checkpoints": evaluation.checkpoints,
        "num_generations_eval": evaluation.num_generations_eval,
    }
    write_text(folder / "config.json", json.dumps(options | {"cell": cell.to_dict()}, indent=2))
    write_text(folder / "provenance.json", about(cell))
    rows, turns = [], []
    bonus = {"transfer": 0.05, "transfer_all": 0.1}.get(evaluation.adapters, 0.0)
    for step in steps_of(evaluation, results_dir):
        chance = accuracy(cell, step) if evaluation.adapters == "own" else accuracy(cell, 0) + bonus
        for problem in problems(cell):
            for index in range(evaluation.num_generations_eval):
                e = episode(cell, index, problem, chance, drift(cell, step), step)
                solved = {id(t): e.reward.is_correct and t.slot != 1 for t in e.turns if t.role == solver_of(cell)}
                counted = {"rollout": index, "prompt_tokens": sum(len(t.prompt_ids) for t in e.turns),
                           "completion_tokens": sum(len(t.completion_ids) for t in e.turns)}  # fmt: skip
                rows.append(eval_row(step, e) | counted | {"slots_correct": list(solved.values())})
                if index == 0:
                    turns += [turn_row(step, e, t) | {"turn_correct": solved.get(id(t))} for t in e.turns]
    write_table(folder / "eval.parquet", rows)
    write_table(folder / "turns.parquet", turns)
    write_done(folder)
    return folder
