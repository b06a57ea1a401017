"""Tables 4-6: what each role's texts look like at the early, the best and the terminal checkpoint.

`signature_table` makes the same for any cell of the grid; the paper's panels are calls of its rows. The definitions are
`signatures`'; what the captions add to them is in `measured`.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.diagnostics.signatures import signatures_of_frame
from multirole.experiment.evaluate import N_READ, named_steps
from multirole.paper.numbers import (
    MISSING,
    TASK_NAMES,
    WORKFLOW_NAMES,
    Form,
    fixed,
    listed,
    not_published,
    policy_label,
    spread,
)  # fmt: skip
from multirole.paper.results import Key, Results
from multirole.paper.write import Table

CHECKPOINTS = ("base", "early", "best", "terminal")


class Signature(NamedTuple):
    """One row of a table: whose, which value of `measured`, and what it is called."""

    role: str
    name: str
    label: str
    form: Form


class Panel(NamedTuple):
    """One of the paper's panels: the cell, the scale that the paper chose, and its signatures."""

    name: str
    workflow: str
    policy: str
    task: str
    paper_scale: str
    signatures: tuple[Signature, ...]


RATE, TOKENS, SHARE = fixed(1, 100), fixed(1), fixed(2)


def _solving(role: str, task: str = "math") -> tuple[Signature, ...]:
    """Of a role that answers in parallel slots: Panel C1, Panel C2, Table 6. Programs are not boxed."""
    boxed = ("boxed_rate", "boxed (%)") if task == "math" else ("answered_rate", "holds a program (%)")
    return (
        Signature(role, "length_mean", "mean length (tokens)", TOKENS),
        Signature(role, "truncated_rate", "truncated (%)", RATE),
        Signature(role, *boxed, RATE),
        Signature(role, "hedging_rate", "hedging (%)", RATE),
        Signature(role, "jaccard", "3-gram Jaccard between slots", SHARE),
    )


def _lengths(role: str) -> tuple[Signature, ...]:
    return (
        Signature(role, "length_p50", "length p50 (tokens)", TOKENS),
        Signature(role, "length_p95", "length p95 (tokens)", TOKENS),
    )


def _orch_workers(task: str) -> tuple[Signature, ...]:
    return (
        *_solving("worker", task),
        Signature("orchestrator", "unique_openers", "unique 3-word openers", TOKENS),
        *_lengths("synthesizer"),
    )


C1 = (*_solving("generator"), Signature("aggregator", "length_p50", "length p50 (tokens)", TOKENS))
A1 = (
    Signature("evaluator", "first_code_fence_rate", "first turn: Python fence (%)", RATE),
    Signature("evaluator", "first_bare_stamp_rate", "first turn: bare stamp (%)", RATE),
    Signature("evaluator", "first_other_rate", "first turn: other (%)", RATE),
    Signature("evaluator", "first_correct_verdict_rate", "first turn: boxed Correct (%)", RATE),
    Signature("evaluator", "first_no_verdict_rate", "first turn: no verdict (%)", RATE),
    Signature("generator", "first_truncated_rate", "first turn: truncated (%)", RATE),
)
A2 = (
    *_lengths("evaluator"),
    Signature("evaluator", "truncated_rate", "truncated (%)", RATE),
    Signature("evaluator", "verdict_rate", "verdict retention (%)", RATE),
    *_lengths("generator"),
    Signature("generator", "truncated_rate", "truncated (%)", RATE),
    Signature("generator", "box_retention", "first turn: boxed (%)", RATE),
)
A3 = (
    *_lengths("aggregator"),
    Signature("aggregator", "terse_rate", "terse (%)", RATE),
    Signature("generator", "slots_p50", "length p50, mean of slots (tokens)", TOKENS),
    Signature("generator", "slots_p95", "length p95, mean of slots (tokens)", TOKENS),
)
TABLE_4 = (
    Panel("C1", "voting", "ip", "math", "1.7b", C1),
    Panel("C2", "orch_workers", "ip", "math", "1.7b", _orch_workers("math")),
)
TABLE_5 = (
    Panel("A1", "eval_opt", "sp", "code", "0.6b", A1),
    Panel("A2", "eval_opt", "sp", "math", "1.7b", A2),
    Panel("A3", "voting", "sp", "math", "4b", A3),
)
TABLE_6 = (Panel("Table 6", "orch_workers", "sp", "math", "4b", _orch_workers("math")),)


def signatures_of(workflow: str, task: str) -> tuple[Signature, ...]:
    """Every signature of the paper's panels that a workflow's roles have."""
    if workflow == "orch_workers":
        return _orch_workers(task)
    if workflow == "voting":
        return (*_solving("generator", task), *A3)
    if workflow == "eval_opt":
        return (*A1, *(A2 if task == "math" else A2[:-1]))
    return _solving("generator", task)[:-1]  # one slot: nothing to compare


def measured(turns: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(role, name) -> value of the turns of one checkpoint: `SIGNATURES`, and what the captions add.

    `first_*` is over turns of round 0; `slots_*` quantiles are of each problem's mean length over the role's slots
    (Panel A3); `answered_rate` is the share of turns that the workflow or the task could parse.
    """
    values = {}
    for prefix, part in (("", turns), ("first_", turns[turns["round"] == 0])):
        of_roles = signatures_of_frame(part).set_index("role").drop(columns="step")
        values |= {(role, prefix + name): value for role, row in of_roles.iterrows() for name, value in row.items()}
        values |= {(role, f"{prefix}no_verdict_rate"): 1 - row["verdict_rate"] for role, row in of_roles.iterrows()}
    for role, said in turns.groupby("role"):
        lengths = said.groupby("problem")["completion_tokens"].mean()
        values[role, "slots_p50"], values[role, "slots_p95"] = np.quantile(lengths, [0.5, 0.95])
        values[role, "answered_rate"] = (said["outcome"] != "unparsed").mean()
    return values


class Reading(NamedTuple):
    """The turns of one checkpoint of one seed, measured."""

    step: int
    problems: int
    values: dict[tuple[str, str], float]


def readings(results: Results, workflow: str, policy: str, task: str) -> dict[str, list[Reading]]:
    """Checkpoint -> one reading per seed that has it."""
    found: dict[str, list[Reading]] = {name: [] for name in CHECKPOINTS}
    untrained = [Key(workflow, "sp", task, seed) for seed in results.grid.seeds]  # of either policy: it has no adapter
    for key in untrained:
        if ("base", key) in results.evaluations:
            found["base"].append(_read(results, "base", key)[0])
    for key in (Key(workflow, policy, task, seed) for seed in results.grid.seeds):
        if ("own", key) in results.evaluations and key in results.runs:
            by_step = _read(results, "own", key)
            for name, step in named_steps(results.runs[key]).items():
                found[name].append(by_step[step])
    return found


def _read(results: Results, kind: str, key: Key) -> dict[int, Reading]:
    table = results.evaluated(kind, "turns")
    mine = table[(table[list(Key._fields)] == list(key)).all(axis=1)]
    return {step: Reading(step, part["problem"].nunique(), measured(part)) for step, part in mine.groupby("step")}


def _lines(results: Results, panel: Panel) -> tuple[list[dict], list[dict]]:
    """What is shown of a panel, and the numbers behind it."""
    found = readings(results, panel.workflow, panel.policy, panel.task)
    where = {"panel": panel.name, "workflow": panel.workflow, "policy": panel.policy, "task": panel.task}
    steps = {name: spread([r.step for r in read], np.mean, fixed(0)) for name, read in found.items()}
    lines = [{"panel": panel.name, "role": "", "signature": "iteration"} | steps]
    values = []
    for role, signature, label, form in panel.signatures:
        line = {"panel": panel.name, "role": role, "signature": label}
        for checkpoint, read in found.items():
            numbers = [r.values[role, signature] for r in read if (role, signature) in r.values]
            line[checkpoint] = spread(numbers, np.mean, form)
            if numbers:
                values.append(
                    where | {"checkpoint": checkpoint, "role": role, "signature": signature}
                    | {"mean": np.mean(numbers), "low": min(numbers), "high": max(numbers), "seeds": len(numbers)}
                    | {"problems": min(r.problems for r in read)}
                )  # fmt: skip
        lines.append(line)
    return lines, values


NOTES = {
    "truncated_rate": "Truncated: the text ends at the cap of {cap} tokens.",
    "boxed_rate": "Boxed: the text holds a parseable \\boxed{{}}.",
    "hedging_rate": "Hedging: it holds a phrase of the paper's list (wait, alternatively, actually, ...).",
    "jaccard": "3-gram Jaccard: of word triples between the slots of a problem, mean within it, then over problems.",
    "unique_openers": "Openers: distinct first three words over all problems.",
    "first_code_fence_rate": "Of the first turn of each episode: a Python fence of at least 3 lines; else a bare stamp, "
    "a verdict of at most 200 tokens without a fence; else other. No verdict: neither \\boxed{{Correct}} nor "
    "\\boxed{{Incorrect}}.",
    "verdict_rate": "Verdict retention: evaluator turns with a verdict.",
    "terse_rate": "Terse: at most 30 tokens and boxed.",
    "slots_p50": "The generators are the voters; mean of slots: of a problem's three, before the percentile.",
}


def _table(results: Results, name: str, title: str, panels: tuple[Panel, ...], note: str) -> Table:
    """Panels below each other."""
    made = [_lines(results, panel) for panel in panels]
    shown = pd.DataFrame([line for lines, _ in made for line in lines])
    values = pd.DataFrame([value for _, numbers in made for value in numbers])
    used = {signature.name for panel in panels for signature in panel.signatures}
    cell, seeds = results.grid.cells()[0], results.grid.seeds
    notes = " ".join(text.format(cap=cell.max_response_tokens) for key, text in NOTES.items() if key in used)
    keys = [Key(p.workflow, p.policy, p.task, seed) for p in panels for seed in seeds]
    asked, done = len(keys), sum(("own", key) in results.evaluations and key in results.runs for key in keys)
    missing = f" Not finished: {asked - done} of {asked} evaluations; {MISSING} stands where there is none." * (
        done < asked
    )
    n = min(N_READ, cell.n_validation or N_READ)
    caption = (
        f"{note} n = {n} validation problems per checkpoint, scale {cell.scale}; mean over seeds {listed(seeds)}, "
        "brackets: their range, left out where they agree; no other interval is given. Best is the checkpoint of "
        "highest validation accuracy, early the evaluated one nearest to the middle between the first and it (the two "
        "can be the same), terminal the last; base is the untrained workflow, of the first seed, and not in the "
        f"paper. {notes}{missing}"
    )
    return Table(name, title, caption, shown if len(panels) > 1 else shown.drop(columns="panel"), values)


def signature_table(results: Results, workflow: str, policy: str, task: str) -> Table:
    """Every signature of any cell."""
    panel = Panel("", workflow, policy, task, "", signatures_of(workflow, task))
    cell = f"{WORKFLOW_NAMES[workflow]}, {policy_label(workflow, policy)}, {TASK_NAMES[task]}"
    name = f"signatures_{workflow}_{policy}_{task}"
    return _table(results, name, f"Trajectory signatures: {cell}", (panel,), "As Tables 4-6, of this cell.")


def _described(panels: tuple[Panel, ...], number: int) -> str:
    cells = [
        f"{p.name} is {WORKFLOW_NAMES[p.workflow]}, {policy_label(p.workflow, p.policy)}, {TASK_NAMES[p.task]} (the "
        "paper: "
        f"{p.paper_scale.upper()})" for p in panels
    ]  # fmt: skip
    return (
        f"{'; '.join(cells)}. The paper has a row per checkpoint; here each signature is a row, and its checkpoints "
        f"stand side by side. {not_published(f'Table {number}')}"
    )


def table_4(results: Results) -> Table:
    """Gradient amplification under IP."""
    title = "Table 4: trajectory signatures of gradient amplification under IP"
    return _table(results, "table_4", title, TABLE_4, _described(TABLE_4, 4))


def table_5(results: Results) -> Table:
    """Token-distribution asymmetry under SP."""
    title = "Table 5: trajectory signatures of token-distribution asymmetry under SP"
    return _table(results, "table_5", title, TABLE_5, _described(TABLE_5, 5))


def table_6(results: Results) -> Table:
    """Worker-shape capture under SP."""
    title = "Table 6: trajectory signatures of worker-shape capture under SP"
    return _table(results, "table_6", title, TABLE_6, _described(TABLE_6, 6))
