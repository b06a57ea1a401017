"""Measure on the turns of an evaluation how much each role adds over a trivial role in its place.

Accuracy does not say whether a role still works: an aggregator whose selections cannot be parsed always gives candidate 1, and
an evaluator that always says "Incorrect" only runs the loop to its end. Every *measure* compares a role with a
trivial one; METRICS.md (`skills.parquet`) has a table of them.

The workflow declares what a role does (`Structure.duties`); a role without a duty has only format and length. The trivial
workflow of Eval-Opt is its first draft. Three drafts regardless of the verdicts would be another one, but these are not recorded.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.credit.turn_grading import grade_answers
from multirole.types import Episode, Structure, structure_of

MAX_GRADED_EPISODES = 512
"""Number of an evaluation's episodes whose turns are graded."""
NAN = float("nan")
Skill = tuple[str, float, float, int]
"""measure, skill, trivial, number of cases."""


COLUMNS = ["problem", "correct", "role", "slot", "round", "outcome", "completion_tokens", "turn_correct"]


def frame_of(episodes: list[Episode]) -> pd.DataFrame:
    """Return the turns of judged episodes as the data frame that `role_skills` takes; what has no grade is None in it."""
    rows = [
        {
            "problem": i, "correct": episode.reward and episode.reward.is_correct, "role": turn.role, "slot": turn.slot,
            "round": turn.round, "outcome": turn.outcome, "completion_tokens": len(turn.completion_ids),
            "turn_correct": turn.is_right,
        }
        for i, episode in enumerate(episodes)
        for turn in episode.turns
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def role_skills(turns: pd.DataFrame, structure: Structure) -> list[dict[str, Any]]:
    """Return one row per role and measure. `valid` is the fraction of the role's turns that were parsed, `length` their mean tokens.

    `turns` holds every turn of some episodes of one workflow: problem, correct (of the episode), role, slot, round, outcome,
    completion_tokens and turn_correct (of solvers). What has no grade is no case. Skills without a case are NaN. The last row is the whole workflow's.
    """
    turns_of = {str(role): part for role, part in turns.groupby("role", sort=False)}
    rows = []
    for role, part in turns_of.items():
        about = {
            "valid": float((part["outcome"] != "unparsed").mean()),
            "length": float(part["completion_tokens"].mean()),
        }
        skills = list(_skills_of(role, turns_of, structure)) or [("other", NAN, NAN, 0)]
        rows += [{"role": role, "measure": m, "skill": s, "trivial": t, "cases": n} | about for m, s, t, n in skills]
    solver = turns_of.get(structure.solver or "")
    if solver is not None:
        right = turns.drop_duplicates("problem")["correct"].astype(float)
        first = solver[(solver["slot"] == 0) & (solver["round"] == 0)]["turn_correct"].astype(float)
        whole = {
            "role": "",
            "measure": "workflow",
            "skill": right.mean(),
            "trivial": first.mean(),
            "cases": int(right.count()),
        }
        rows.append(whole | {"valid": NAN, "length": NAN})
    return rows


def _skills_of(role: str, turns_of: dict[str, pd.DataFrame], structure: Structure) -> Iterator[Skill]:
    """Compute the skills of one role, by its duty."""
    duty, part = structure.duties.get(role), turns_of[role]
    if duty is None or duty.of is not None and duty.of not in turns_of:
        return
    if duty.kind == "solves":
        first = part[part["round"] == 0]["turn_correct"].astype(float)
        yield "solves", first.mean(), NAN, int(first.count())
        if part["round"].max() > 0:
            before, after = _drafts(part), _drafts(part.assign(round=part["round"] - 1))
            after = after.reindex(before.index).dropna().astype(bool)
            before = before.reindex(after.index).astype(bool)
            yield "repairs", after[~before].mean(), 1 - after[before].mean(), int((~before).sum())
    elif duty.kind == "judges":
        verdicts = part.set_index(["problem", "slot", "round"])["outcome"].to_frame()
        verdicts = verdicts.join(_drafts(turns_of[str(duty.of)]), how="inner")
        is_right = verdicts["turn_correct"].astype(bool)
        on_right, on_wrong = verdicts["outcome"][is_right] == "correct", verdicts["outcome"][~is_right] == "incorrect"
        yield "judges", (on_right.mean() + on_wrong.mean()) / 2, 0.5, len(verdicts)
    elif duty.kind == "plans":
        share = _share(turns_of[str(duty.of)])
        yield "plans", (share > 0).mean(), share.mean(), len(share)
    else:
        share = _share(turns_of[str(duty.of)])
        split = share[(share > 0) & (share < 1)]
        right = (
            part.drop_duplicates("problem").set_index("problem")["correct"].reindex(split.index).dropna().astype(float)
        )
        split = split[right.index]
        yield duty.kind, right.mean(), split.mean(), len(split)


def _drafts(turns: pd.DataFrame) -> pd.Series:
    return turns.set_index(["problem", "slot", "round"])["turn_correct"].dropna()


def _share(part: pd.DataFrame) -> pd.Series:
    """Return for each problem the fraction of slots whose last turn is right."""
    last = part.sort_values("round", kind="stable").drop_duplicates(["problem", "slot"], keep="last")
    return last["turn_correct"].astype(float).groupby(last["problem"]).mean().dropna()


class SkillWatch(MultiRoleCallback):
    """Callback that measures every role's skill at each evaluation: `rows`, and `<prefix>_<role>_<measure>` in the evaluation's metrics.

    The trainer's reward functions grade the solvers' turns, so one of them must set `episode.reward` to a [`Reward`] with `is_correct`.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        structure = structure_of(trainer.workflow)
        solvers = [role for role, duty in structure.duties.items() if duty.kind == "solves"]
        grade_answers(episodes[:MAX_GRADED_EPISODES], solvers, trainer.score)
        self.rows = role_skills(frame_of(episodes[:MAX_GRADED_EPISODES]), structure)
        metrics |= {f"{prefix}_{row['role'] or 'workflow'}_{row['measure']}": row["skill"] for row in self.rows
                    if row["measure"] != "workflow" and row["skill"] == row["skill"]}  # fmt: skip
