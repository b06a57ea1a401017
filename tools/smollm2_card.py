"""Write the model card of scale smollm2 into docs/smollm2.md: the untrained base on its tasks, from evaluations.

    export OMP_NUM_THREADS=1
    multirole evaluate -p scale smollm2 -p adapters base -p policy sp -p workflow single -p num_generations_eval 3 -p n_validation 128 -p results_dir card
    multirole evaluate -p scale smollm2 -p adapters base -p policy sp -p workflow single -p num_generations_eval 3 -p task code -p results_dir card
    multirole evaluate -p scale smollm2 -p adapters base -p policy sp -p workflow voting -p n_validation 32 -p results_dir card
    (and eval_opt, and orch_workers)
    python tools/smollm2_card.py card/smollm2

Facts go to docs/smollm2.json, and the tables of the page are made from that file.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from multirole_study.experiment.run_folder import read_config, read_provenance
from multirole_study.falls import wilson
from multirole_study.paper.output import markdown

ROOT = Path(__file__).parents[1]
PAGE, FACTS = ROOT / "docs" / "smollm2.md", ROOT / "docs" / "smollm2.json"
BEGIN, END = "<!-- card -->", "<!-- /card -->"
ROLLOUTS = 3
WANTED = {"accuracy": (0.10, 0.40), "one of three right - accuracy": (0.15, 1.0)}
"""Fact -> the bounds that a task must meet, so that there is something to choose from and room to learn."""


def mean_interval(values: pd.Series) -> dict[str, float]:
    """Return the mean of one value per problem with its 95 % interval: Wilson's if every value is 0 or 1, else the normal one."""
    if values.isin([0, 1]).all():
        low, high = wilson(values.sum(), len(values))
    else:
        half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
        low, high = values.mean() - half, values.mean() + half
    rounded = [round(float(number), 4) for number in (values.mean(), low, high)]
    return dict(zip(("value", "low", "high"), rounded, strict=True)) | {"n": len(values)}


def solver_facts(folder: Path) -> dict[str, dict[str, float]]:
    """Measure the single agent in `ROLLOUTS` episodes per problem."""
    episodes, turns = (pd.read_parquet(folder / f"{name}.parquet") for name in ("eval", "turns"))
    by_problem = episodes.groupby("problem")
    accuracy, any_right = by_problem["correct"].mean(), by_problem["correct"].any().astype(float)
    facts = {
        "accuracy": mean_interval(accuracy),
        "one of three right": mean_interval(any_right),
        "one of three right - accuracy": mean_interval(any_right - accuracy),
        "mean reward": mean_interval(by_problem["reward"].mean()),
        "tokens of a reply": mean_interval(by_problem["completion_tokens"].mean()),
        "cut off at the cap, first episode": mean_interval((turns["finish_reason"] == "length").astype(float)),
    }
    is_in_form = ~episodes["reason"].str.endswith("_unboxed") & ~episodes["reason"].isin(["no_answer", "no_code"])
    return facts | {"in the asked form": mean_interval(is_in_form.groupby(episodes["problem"]).mean())}


def workflow_facts(folder: Path) -> dict[str, dict[str, float]]:
    """Measure a workflow's accuracy, and how often each role's reply could be parsed."""
    episodes, turns = (pd.read_parquet(folder / f"{name}.parquet") for name in ("eval", "turns"))
    facts = {"accuracy": mean_interval(episodes["correct"].astype(float))}
    for role, rows in turns[turns["outcome"].notna()].groupby("role"):
        if role in ("aggregator", "evaluator", "orchestrator"):
            is_in_form = (~rows["outcome"].str.match(r"unparsed|lines|digit:")).astype(
                float
            )  # fallbacks are not the form
            facts[f"{role}, in the asked form"] = mean_interval(is_in_form.groupby(rows["problem"]).mean())
    return facts


def measure(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Measure all facts from a results folder `<results_dir>/smollm2` with the evaluations above."""
    facts = {}
    for path in sorted(folder.glob("evaluations/base*/*/eval.parquet")):
        config = read_config(path.parent, may_be_evaluation=True)
        workflow, task = config["cell"]["workflow"], config["cell"]["task"]
        is_solver = workflow == "single" and config["num_generations_eval"] == ROLLOUTS
        facts[f"{workflow}, {task}"] = solver_facts(path.parent) if is_solver else workflow_facts(path.parent)
    return {"base": read_provenance(path.parent)["model"], "facts": facts}


def written(measured: dict) -> str:
    """Format the tables of the page."""
    facts = measured["facts"]
    lines = [
        f"Base: {measured['base']['name']}, SHA-256 of its weights `{next(iter(measured['base']['sha256'].values()))[:12]}`.",
        "",
    ]
    rows = []
    for name in facts["single, math"]:
        low, high = WANTED.get(name, (None, None))
        bounds = "" if low is None else f"at least {low}" if high == 1.0 else f"{low} to {high}"
        rows.append([name, bounds, *(_cell(facts[f"single, {task}"][name]) for task in ("math", "code"))])
    lines.append(markdown(["single agent, untrained", "wanted", "math", "code"], rows, "---"))
    lines += ["", "| workflow, untrained, math | | |", "|---|---|---|"]
    for workflow, workflow_facts in facts.items():
        if not workflow.startswith("single"):
            lines += [
                f"| {workflow.removesuffix(', math')} | {name} | {_cell(fact)} |"
                for name, fact in workflow_facts.items()
            ]
    return "\n".join(lines)


def _cell(fact: dict[str, float]) -> str:
    digits = 1 if fact["value"] > 2 else 3
    value, low, high = (f"{fact[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}], n = {fact['n']}"


def page_with(page: str, tables: str) -> str:
    """Return the page with a card's tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Measure, and write the facts and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="<results_dir>/smollm2")
    measured = measure(parser.parse_args().folder)
    FACTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), written(measured)), encoding="utf-8")


if __name__ == "__main__":
    main()
