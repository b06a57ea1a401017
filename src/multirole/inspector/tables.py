"""A run's tables as the inspector's page needs them: curves, alarms, roles, workflow graph, configuration.

Every table may be missing, short or hold NaN: a run that was cut short is read as far as it went. Nothing new is computed
but the order of things; what the names mean stands in METRICS.md.
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd

from multirole.core.policy import adapter_names, parse_policy
from multirole.experiment.record import is_done
from multirole.inspector.report import ROLE_COLOURS, validation

OTHER_COLOURS = ("#56b4e9", "#949494", "#fbafe4", "#8c6d31", "#7b4173", "#637939")
"""For roles of your own, in the order in which they appear."""


GROUPS = {"main": "", "gradients": "Gradients", "signatures": "Signatures of the texts", "more": "More"}
"""Where a panel stands; the first two are open when the page is."""


@dataclass(frozen=True)
class Panel:
    """A column of roles.parquet that is drawn when it is there. `scale`: "linear", "log", "symlog" or "rate" (0 to 1)."""

    column: str
    title: str
    unit: str = ""
    scale: str = "linear"
    group: str = "main"


PANELS = (
    Panel("chi2", "chi2, trainer against engine", scale="symlog"),
    Panel("perplexity", "perplexity", scale="log"),
    Panel("entropy", "entropy", "nats per token"),
    Panel("grad_norm", "gradient norm", "per optimizer step"),
    Panel("length_mean", "length, mean", "tokens"),
    Panel("length_p95", "length, 95th percentile", "tokens"),
    Panel("unparsed_rate", "unparsed turns", "fraction", "rate"),
    Panel("truncated_rate", "truncated turns", "fraction", "rate"),
    Panel("grad_share", "share of its adapter's gradient", "fraction", group="gradients"),
    Panel("coherence", "coherence of same-role slots", "mean cosine", group="gradients"),
    Panel("amplification", "amplification", "slots x coherence", group="gradients"),
    Panel("chi2_after", "chi2 after the update", scale="symlog", group="gradients"),
    Panel("cosine_previous", "successive updates", "cosine", group="gradients"),
    Panel("token_mass", "token mass on its adapter", "fraction", "rate", "gradients"),
    Panel("row_mass", "row mass on its adapter", "fraction", "rate", "gradients"),
    Panel("boxed_rate", "boxed", "fraction", "rate", "signatures"),
    Panel("box_retention", "boxed first turns", "fraction", "rate", "signatures"),
    Panel("verdict_rate", "turns with a verdict", "fraction", "rate", "signatures"),
    Panel("correct_verdict_rate", "verdicts of correct", "fraction", "rate", "signatures"),
    Panel("hedging_rate", "hedging", "fraction", "rate", "signatures"),
    Panel("terse_rate", "terse", "fraction", "rate", "signatures"),
    Panel("code_fence_rate", "code fences", "fraction", "rate", "signatures"),
    Panel("bare_stamp_rate", "bare stamps", "fraction", "rate", "signatures"),
    Panel("unique_openers", "distinct 3-word openers", "count", group="signatures"),
    Panel("opener_share", "distinct openers per turn", "fraction", "rate", "signatures"),
    Panel("jaccard", "3-gram overlap of slots", "Jaccard", "rate", "signatures"),
    Panel("chi2_raw", "chi2, raw log-probabilities", scale="symlog", group="more"),
    Panel("clip_fraction", "clipped tokens", "fraction", group="more"),
    Panel("kl", "KL, k1", "nats per token", "symlog", "more"),
    Panel("k3_kl", "KL, k3", "nats per token", "symlog", "more"),
    Panel("max_logprob_gap", "largest log-probability gap", "nats", group="more"),
    Panel("reward", "reward of the role's rows", "mean", group="more"),
    Panel("advantage_abs", "advantage, mean size", "standard deviations", group="more"),
    Panel("length_p50", "length, median", "tokens", group="more"),
    Panel("optimizer_steps", "optimizer steps", "per iteration", group="more"),
)


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """One table of a run; an empty frame where it was not written."""
    path = folder / f"{name}.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


def number(value: float) -> float | None:
    """A number for JSON, to 7 significant digits; None for NaN, infinities and missing values."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def read_config(folder: Path) -> dict:
    """The run's cell; ValueError where the folder holds no run."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no run: it has no config.json. Write the folder of one run, such as "
            "results/tiny-s/voting-sp-math-s0, or a folder that holds runs."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def policy_name(policy: dict[str, str]) -> str:
    """ "sp", "ip" or the map as text, from the map that config.json holds."""
    for name in ("sp", "ip"):
        if policy == parse_policy(name, list(policy)):
            return name
    return ",".join(f"{role}={adapter}" for role, adapter in policy.items())


def role_names(config: dict, roles: pd.DataFrame, turns: pd.DataFrame) -> list[str]:
    """Every role of the run: in the order of the turns, then of the policy, then of the roles' table."""
    found = [*(turns["role"] if len(turns) else []), *config["policy"], *(roles["role"] if len(roles) else [])]
    return list(dict.fromkeys(found))


def describe_roles(names: list[str], config: dict, turns: pd.DataFrame) -> list[dict]:
    """Colour, adapter and slots of every role; slots as the turns show them, else one."""
    spare = iter(OTHER_COLOURS * (1 + len(names)))
    slots = turns.groupby("role")["slot"].max() + 1 if len(turns) else {}
    return [
        {
            "name": name,
            "colour": ROLE_COLOURS.get(name) or next(spare),
            "adapter": config["policy"].get(name, ""),
            "slots": int(slots.get(name, 1)),
        }
        for name in names
    ]


def graph(config: dict, roles: list[dict], turns: pd.DataFrame) -> dict:
    """The workflow as columns of roles and edges between them, with the adapters that the roles share.

    `edges` lead from "question" over roles to "answer"; "back" edges are revisions. Built-in workflows say what is read by
    whom; of any other only the order is known, and `is_order_only` says so.
    """
    order = [role["name"] for role in roles]
    rounds = int(turns["round"].max()) + 1 if len(turns) else 1
    known = {
        "single": [("question", "generator", ""), ("generator", "answer", "")],
        "voting": [("question", "generator", ""), ("generator", "aggregator", "all candidates"),
                   ("aggregator", "answer", "the candidate it picks")],
        "eval_opt": [("question", "generator", ""), ("generator", "evaluator", "draft"),
                     ("generator", "answer", "the last draft")],
        "orch_workers": [("question", "orchestrator", ""), ("orchestrator", "worker", "one strategy each"),
                         ("worker", "synthesizer", "all solutions"), ("synthesizer", "answer", "")],
    }  # fmt: skip
    edges = known.get(config["workflow"])
    if edges is None:
        path = ["question", *order, "answer"]
        edges = [(a, b, "") for a, b in pairwise(path)]
    else:
        order = [name for name in dict.fromkeys(n for edge in edges for n in edge[:2]) if name in order]
    back = [("evaluator", "generator", "critique, until correct")] if config["workflow"] == "eval_opt" else []
    policy = {role["name"]: role["adapter"] for role in roles}
    return {
        "columns": order,
        "edges": [list(edge) for edge in edges],
        "back": [list(edge) for edge in back],
        "adapters": [name for name in adapter_names(policy) if name],
        "rounds": rounds,
        "is_order_only": config["workflow"] not in known,
    }


def curves(metrics: pd.DataFrame, roles: pd.DataFrame, names: list[str]) -> dict:
    """Iterations, training reward and accuracy, and a panel per known column: role -> one value per iteration."""
    iterations = sorted({int(i) for table in (metrics, roles) if len(table) for i in table["iteration"]})

    def align(table: pd.DataFrame, column: str) -> list[float | None]:
        by_iteration = table.drop_duplicates("iteration", keep="last").set_index("iteration")[column]
        return [number(value) for value in by_iteration.reindex(iterations).astype(float)]

    if {"jaccard", "slot_pairs"} <= set(roles):  # 0 pairs: nothing was compared
        roles = roles.assign(jaccard=roles["jaccard"].where(roles["slot_pairs"] > 0))
    panels = []
    for panel in PANELS:
        held = roles[panel.column].dropna() if panel.column in roles else pd.Series(dtype=float)
        if len(held) and (panel.group != "signatures" or held.ne(0).any()):  # a workflow asks for some forms only
            series = {name: align(roles[roles["role"] == name], panel.column) for name in names}
            series = {name: values for name, values in series.items() if any(v is not None for v in values)}
            panels.append(vars(panel) | {"series": series})
    training = {column: align(metrics, column) for column in ("reward", "accuracy") if column in metrics}
    return {"iterations": iterations, "training": training, "panels": panels}


def validation_points(folder: Path) -> dict[str, list]:
    """Validation accuracy per evaluated step with its 95 % Wilson interval; empty lists before the first evaluation."""
    if not len(read_table(folder, "eval")):
        return {name: [] for name in ("step", "accuracy", "low", "high", "n")}
    points = validation(folder)
    whole = {name: [int(value) for value in points[name]] for name in ("step", "n")}
    return whole | {name: [number(value) for value in points[name]] for name in ("accuracy", "low", "high")}


def alarms(folder: Path) -> list[dict] | None:
    """The alarms in the order of their iterations; None where the run kept no such table."""
    if not (folder / "alarms.parquet").exists():
        return None
    table = read_table(folder, "alarms")
    if not len(table):
        return []
    return [
        {
            "iteration": int(row["iteration"]),
            **{name: "" if pd.isna(row[name]) else str(row[name]) for name in ("alarm", "role", "adapter", "message")},
            **{name: number(row[name]) for name in ("value", "threshold")},
        }
        for row in table.sort_values("iteration", kind="stable").to_dict("records")
    ]


def status(folder: Path, config: dict, iterations: list[int]) -> str:
    """Whether the run is complete, in words."""
    planned, reached = config.get("iterations"), iterations[-1] if iterations else 0
    if is_done(folder):
        return f"finished, {reached} iterations"
    if (folder / "DONE").exists():
        return "its files are no longer those that were recorded when it finished"
    return f"not finished: recorded up to iteration {reached}" + (f" of {planned}" if planned else "")


def provenance(folder: Path) -> dict:
    """What provenance.json says, without its lists of packages; empty where the run has none."""
    path = folder / "provenance.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in held.items() if name not in ("versions", "resumed", "argv")}
