"""Table 7, the hyper-parameters, and what a grid cost (the paper's A.8)."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pandas as pd

from multirole.experiment.cell import Cell
from multirole.experiment.presets import MODELS, TASKS, is_tiny
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.numbers import (
    MISSING,
    TASK_NAMES,
    WORKFLOW_NAMES,
    Form,
    fixed,
    listed,
    policy_label,
    significant,
    unfinished,
)  # fmt: skip
from multirole.paper.results import Key, Results
from multirole.paper.write import Table
from multirole.tasks import code, math

NOT_IN_TABLE = "not in Table 7"
PAPER = {  # Table 7 (A.5), typed from the paper's text, in its order
    "Optimizer": "AdamW",
    "Learning rate": "2e-5",
    "Warmup style": "cosine",
    "Warmup steps": "15",
    "Gradient clipping": "1.0",
    "PPO clip ratio (high)": "0.28",
    "LoRA rank": "64",
    "LoRA alpha": "32",
    "LoRA dropout": "0.0",
    "LoRA target modules": "all linear modules",
    "Algorithm": "GRPO (no explicit KL)",
    "Group size n": "8",
    "Advantage normalization": "group-relative",
    "PPO mini-batch size (problems)": "64",
    "PPO epochs per update": "1",
    "Loss aggregation": "sequence-mean, token-mean",
    "Train batch size (problems per step)": "64",
    "Validation batch size": "2048",
    "Rollout temperature": "0.7",
    "Eval-Opt, Math (prompt / response tokens)": "30720 / 5120",
    "Eval-Opt, Code (prompt / response tokens)": "10240 / 2048",
    "Voting, Math (prompt / response tokens)": "20480 / 5120",
    "Voting, Code (prompt / response tokens)": "10240 / 2048",
    "Orch-Workers, Math (prompt / response tokens)": "20480 / 5120",
    "Orch-Workers, Code (prompt / response tokens)": "10240 / 2048",
    "Eval-Opt rounds, Math": "3",
    "Eval-Opt rounds, Code": "2",
    "Voting candidates": "3",
    "Orch-Workers proposals": "3",
    "Training steps (iterations)": "500",
    "Validation interval": "10",
    "Checkpoint interval": "5",
    "Isolated-Policy": "one LoRA adapter per role type",
    "Shared-Policy": "one LoRA adapter for all roles",
}


def settings(make: Callable[[str, str, str], Cell]) -> dict[str, str]:
    """Every setting of a matrix as `Cell` and its translation to TRL hold it; `make(workflow, policy, task)` is a cell."""
    cells = {(w, t): make(w, "ip" if w in WORKFLOWS else "sp", t) for t in TASKS for w in (*WORKFLOWS, "single")}
    cell = cells["voting", "math"]
    args, is_lora = cell.grpo_config("unused"), cell.lora_rank > 0
    adapter = "LoRA adapter" if is_lora else "copy of all linear modules"
    return (
        {
            "Optimizer": f"AdamW ({args.optim.value})",
            "Learning rate": f"{cell.learning_rate:g}".replace("e-0", "e-"),
            "Warmup style": f"{cell.lr_schedule}, per {cell.lr_clock}",
            "Warmup steps": f"{cell.warmup_iterations}",
            "Gradient clipping": f"{args.max_grad_norm:g}",
            "PPO clip ratio (high)": f"{args.epsilon_high:g}",
            "LoRA rank": f"{cell.lora_rank}" if is_lora else "0: full-parameter training",
            "LoRA alpha": f"{cell.lora_alpha}" if is_lora else "unused",
            "LoRA dropout": "0" if is_lora else "unused",
            "LoRA target modules": "all linear modules" if is_lora else "all linear modules, trained whole",
            "Algorithm": f"GRPO, KL coefficient {args.beta:g}",
            "Group size n": f"{args.num_generations}",
            "Advantage normalization": f"relative to the n attempts, per {cell.advantage_group}",
            "PPO mini-batch size (problems)": f"{cell.n_problems}, {cell.n_problems * cell.n_episodes} rows",
            "PPO epochs per update": f"{args.num_iterations}",
            "Loss aggregation": f"sequence-mean of token-means (TRL's {args.loss_type})",
            "Train batch size (problems per step)": f"{cell.n_problems}",
            "Validation batch size": "all problems at once",
            "Rollout temperature": f"{args.temperature:g}",
        }
        | {_lengths(w, t): _tokens(cells[w, t]) for w in WORKFLOWS for t in TASKS}
        | {
            "Eval-Opt rounds, Math": f"{cells['eval_opt', 'math'].rounds}",
            "Eval-Opt rounds, Code": f"{cells['eval_opt', 'code'].rounds}",
            "Voting candidates": f"{cell.n_voters}",
            "Orch-Workers proposals": f"{cell.n_workers}",
            "Training steps (iterations)": f"{cell.iterations}",
            "Validation interval": f"{cell.eval_every}",
            "Checkpoint interval": f"{cell.save_every}",
            "Isolated-Policy": f"one {adapter} per role type",
            "Shared-Policy": f"one {adapter} for all roles",
            "PPO clip ratio (low)": f"{args.epsilon:g}",
            "Weight decay": f"{cell.weight_decay:g}",
            "Top-p; top-k": f"{args.top_p:g}; none",
            "Reward of a malformed answer, Math": f"{cell.malformed_reward:g}".replace("-", "−"),
            "pi_old of the PPO ratio": cell.old_logprobs,
            "Base model's number format": cell.dtype,
            _lengths("single", "math"): _tokens(cells["single", "math"]),
            _lengths("single", "code"): _tokens(cells["single", "code"]),
            "Problems, Math": _problems(cell),
            "Problems, Code": _problems(cells["voting", "code"]),
        }
    )  # fmt: skip


def _lengths(workflow: str, task: str) -> str:
    return f"{WORKFLOW_NAMES[workflow]}, {TASK_NAMES[task]} (prompt / response tokens)"


def _tokens(cell: Cell) -> str:
    return f"{cell.max_prompt_tokens} / {cell.max_response_tokens}"


def _problems(cell: Cell) -> str:
    """The sizes of both splits that a cell uses."""
    rows, n_test = {"math": (math.PIN.rows, math.n_test), "code": (code.DEEPCODER.rows, code.n_test)}[cell.task]
    train, validation = cell.n_train, cell.n_validation
    if not is_tiny(cell.scale):
        train, validation = train or rows - n_test(rows), validation or n_test(rows)
    return f"{train:,} training, {validation:,} validation"


def table_7(results: Results) -> Table:
    """Hyper-parameters: the paper's, this project's preset of them, and this grid's."""
    grid = results.grid
    ours = settings(lambda w, p, t: Cell(w, p, t, "1.7b"))
    here = settings(lambda w, p, t: grid.cell(w, p, t, grid.seeds[0]))
    models = ", ".join(name.upper() for name in MODELS)
    set_here = ", ".join(f"{name}={value}" for name, value in grid.parameters.items())
    rows = [
        ("Base models", f"Qwen3 {models}", ", ".join(f"{m.repo} at {m.revision[:8]}" for m in MODELS.values()),
         MODELS[grid.scale].repo if grid.scale in MODELS else f"{grid.scale}, embedded"),
        ("Seeds per cell", "1 (A.1)", "1", f"{len(grid.seeds)}: {listed(grid.seeds)}"),
        *((name, PAPER.get(name, NOT_IN_TABLE), ours[name], here[name]) for name in ours),
        ("Options that the grid sets beside its scale's preset", MISSING, MISSING, set_here or "none"),
    ]  # fmt: skip
    shown = pd.DataFrame(
        rows, columns=["setting", "paper, Table 7", "preset of this project", f"this grid ({grid.scale})"]
    )
    values = shown.set_axis(["setting", "paper", "preset", "grid"], axis=1)
    changed = sum(ours[name] != here[name] for name in ours)
    caption = (
        "The second column is typed from the paper's text, the only table whose numbers that text holds; the third is "
        "what a cell at a scale of the paper (0.6B, 1.7B, 4B) is trained with here; the fourth is what the runs "
        f"behind the other tables were trained with, {changed} of {len(ours)} settings differently. Settings of a run "
        "have no interval. Where Table 7 is silent the value is the released code's, or ours (README). The paper "
        "counts 1412 (Math) and 1000 (Code) validation problems; its filter of Code by runtime is not published."
    )
    return Table("table_7", "Table 7: hyper-parameters", caption, shown, values)


COST = ("rollout_seconds", "update_seconds", "grading_seconds", "prompt_tokens", "completion_tokens", "optimizer_steps")
MILLIONS, WHOLE = fixed(1, 1e-6), fixed(0)


def table_compute(results: Results) -> Table:
    """Wall-clock, CPU time, tokens and optimizer steps of every cell, and their sum; tokens of the evaluations."""
    metrics, threads = results.table("metrics"), _threads(results)
    rows = []
    for task, (workflow, policy) in product(TASKS, [*product(WORKFLOWS, POLICIES), ("single", "sp")]):
        mine = metrics[(metrics[["workflow", "policy", "task"]] == [workflow, policy, task]).all(axis=1)]
        if len(mine):
            wall = mine["rollout_seconds"] + mine["update_seconds"]
            allotted = sum(
                threads[workflow, policy, task, seed] * part.sum() for seed, part in wall.groupby(mine["seed"])
            )
            where = {"task": task, "workflow": workflow, "policy": policy, "runs": mine["seed"].nunique()}
            cost = {"wall_seconds": wall.sum(), "cpu_seconds": allotted} | mine[list(COST)].sum().to_dict()
            rows.append(where | {"iterations": len(mine)} | cost)
    lines = [
        _line(TASK_NAMES[r["task"]], WORKFLOW_NAMES[r["workflow"]], policy_label(r["workflow"], r["policy"]), r)
        for r in rows
    ]  # fmt: skip
    total = pd.DataFrame(rows).drop(columns=["task", "workflow", "policy"]).sum().to_dict() if rows else {"runs": 0}
    lines.append(_line("training, sum", "", "", total))
    for kind in dict.fromkeys(kind for kind, _ in results.evaluations):
        tokens = results.evaluated(kind)[["prompt_tokens", "completion_tokens"]].sum().to_dict()
        cost = {"runs": sum(k == kind for k, _ in results.evaluations)} | tokens
        lines.append(_line(f"evaluations, {kind}", "", "", cost))
        rows.append({"task": f"evaluations, {kind}"} | cost)
    title = "Compute: wall-clock, CPU time, tokens and optimizer steps"
    return Table("compute", title, _compute_caption(results), pd.DataFrame(lines), pd.DataFrame(rows))


def _threads(results: Results) -> dict[Key, int]:
    """Processes times torch threads of each run."""
    return {
        key: about["processes"] * about["torch_threads"] for key in results.runs for about in [results.provenance(key)]
    }


def _line(task: str, workflow: str, policy: str, cost: dict[str, float]) -> dict[str, str]:
    """What a cell cost over its seeds; an evaluation has tokens only."""

    def hours(name: str) -> str:
        return significant(cost[f"{name}_seconds"] / 3600) if f"{name}_seconds" in cost else MISSING

    def text(name: str, form: Form) -> str:
        return form(cost[name]) if name in cost else MISSING

    return {
        "task": task,
        "workflow": workflow,
        "policy": policy,
        "runs": text("runs", WHOLE),
        "wall-clock (h)": hours("wall"),
        "rollout (h)": hours("rollout"),
        "grading, in it (h)": hours("grading"),
        "CPU time allotted (h)": hours("cpu"),
        "s per iteration": significant(cost["wall_seconds"] / cost["iterations"]) if "iterations" in cost else MISSING,
        "tokens sampled (M)": text("completion_tokens", MILLIONS),
        "tokens read (M)": text("prompt_tokens", MILLIONS),
        "optimizer steps": text("optimizer_steps", WHOLE),
    }


def _compute_caption(results: Results) -> str:
    machines = Counter(
        f"{about['device']} ({about['processes']} process{'es' * (about['processes'] > 1)}, {about['torch_threads']} "
        "torch thread"
        f"{'s' * (about['torch_threads'] > 1)})" for about in map(results.provenance, results.runs)
    )  # fmt: skip
    where = listed([f"{n} runs on {machine}" for machine, n in sorted(machines.items())]) if machines else "no run yet"
    return (
        f"Scale {results.grid.scale}, sums over seeds {listed(results.grid.seeds)}: {where}. Wall-clock is that of "
        "rollout and update; validation, checkpoints and start-up are not in it. CPU time was not measured: allotted "
        "is wall-clock x processes x threads, without what graded programs ran beside it. Sampled are completion "
        "tokens, read are prompt tokens, of all turns. Counts and sums have no interval; a busy machine makes hours "
        "longer. The paper reports about 235 days of aggregate wall-clock on nodes of two GPUs for its matrix (A.8), "
        f"and that IP and SP cost the same; its cost per cell is not published in the text. {unfinished(results)}"
    )
