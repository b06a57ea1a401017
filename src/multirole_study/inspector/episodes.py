"""Prepare recorded episodes for the page: choose checkpoints and problems, shorten texts, and list training groups."""

import bisect
import itertools
import math
from os.path import commonprefix

import pandas as pd

from multirole_study.inspector.run_reader import number

TURN_BYTES, EPISODE_BYTES = 12_000, 120_000
"""Largest size of one turn on the page, and of all turns of an episode; the middle of longer ones is left out."""
MAX_SHOWN_STEPS = 12
"""Largest number of checkpoints on a page, without the named ones; if there are more, every k-th is shown."""
MAX_QUESTION = 80
"""Characters of a question that name its training group."""
MAX_TRAINING = 20_000
"""Largest number of training episodes on a page; if there are more, every k-th iteration is shown."""
QUESTION, PIECE = 8_000, 80
"""Largest length of a question, and length of the pieces of a text whose tokens were not recorded, in characters."""


def describe_turn(row: dict, room: int = TURN_BYTES) -> dict:
    """Return one turn for the page, in at most `room` bytes: its text in `pieces`, which are its tokens if these were recorded.

    `ratios` are log p(policy) - log p(base) of each token in nats. If the middle is left out, `gap` has the number of pieces before
    it and its number of characters. `text` is set if it is not the concatenation of the tokens' texts (a character may span several
    tokens). `right` is set if the turn was graded by itself.
    """
    has_tokens = all(pd.api.types.is_list_like(row.get(n)) for n in ("tokens", "logprobs", "base_logprobs"))
    text = row["text"]
    pieces = list(row["tokens"]) if has_tokens else [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    # bytes with the JSON around each piece; `<` is written as six characters
    ends = list(itertools.accumulate(len(piece.encode()) + 5 * piece.count("<") + 10 for piece in pieces))
    is_whole = not ends or ends[-1] <= room
    head = len(pieces) if is_whole else bisect.bisect(ends, room / 2)
    tail = len(pieces) if is_whole else 1 + bisect.bisect(ends, ends[-1] - room / 2)
    shown = [*range(head), *range(tail, len(pieces))]
    turn = {
        "role": row["role"], "slot": row["slot"], "round": row["round"], "outcome": row["outcome"],
        "finish": row["finish_reason"], "tokens": row["completion_tokens"], "pieces": [pieces[i] for i in shown],
    }  # fmt: skip
    if (right := judged(row.get("turn_correct"))) is not None:
        turn["right"] = right
    if has_tokens:
        pairs = [(row["logprobs"][i], row["base_logprobs"][i]) for i in shown]
        ratios = [math.nan if a is None or b is None else float(a - b) for a, b in pairs]
        turn["ratios"] = [round(ratio, 2) if math.isfinite(ratio) else None for ratio in ratios]
    if not is_whole:
        turn["gap"] = [head, sum(map(len, pieces[head:tail]))]
    elif "".join(pieces) != text:
        turn["text"] = text
    return turn


Effects = dict[tuple, dict[str, list[int]]]
"""(step, problem, role, slot, round) -> intervention -> how many of its replays have another outcome, and how many there are."""


def effects_by_turn(effects: pd.DataFrame) -> Effects:
    """Return the effects of single turns (`turn_effects.parquet`, from `multirole role_value --turns`); none if they were not measured."""
    by_turn: Effects = {}
    for row in effects.itertuples():
        place = (row.step, row.problem, row.role, row.slot, row.round)
        by_turn.setdefault(place, {})[row.how] = [row.changed, row.replays]
    return by_turn


def judged(correct: object) -> bool | None:
    """Return a recorded verdict as a bool; None if the task does not define correctness."""
    return None if pd.isna(correct) else bool(correct)


def describe_problems(
    turns: pd.DataFrame, outcomes: pd.DataFrame, steps: list[int], effects: Effects
) -> list[dict]:  # fmt: skip
    """Return every problem with recorded turns: its question and, per step, whether its answer was right and why, and the turns."""
    described: dict[str, dict] = {}
    scored = {(row["step"], row["problem"]): row for row in outcomes.to_dict("records")}
    for (step, problem), rows in turns[turns["step"].isin(steps)].groupby(["step", "problem"], sort=False):
        first = rows.iloc[0]
        entry = described.setdefault(
            problem, {"problem": problem, "question": first["question"][:QUESTION], "steps": {}}
        )
        room = min(TURN_BYTES, EPISODE_BYTES // len(rows))
        entry["steps"][str(step)] = {
            "correct": judged(first["correct"]), "reason": first["reason"],
            "reward": scored.get((step, problem), {}).get("reward"), "turns": [describe_turn(row, room) for row in rows.to_dict("records")],
        }  # fmt: skip
        for turn in entry["steps"][str(step)]["turns"]:
            if effect := effects.get((step, problem, turn["role"], turn["slot"], turn["round"])):
                turn["effects"] = effect
    for (step, problem), row in scored.items():  # an episode whose first prompt was too long has an outcome but no turn
        if step in steps and problem in described:
            outcome = {"correct": judged(row["correct"]), "reason": row["reason"], "reward": row["reward"], "turns": []}
            described[problem]["steps"].setdefault(str(step), outcome)
    return list(described.values())


def name_steps(steps: list[int], best: int | None) -> dict[int, str]:
    """Return the steps shown side by side at first, with their names: start, best and last, or one in the middle."""
    named = {steps[0]: "start", steps[-1]: "last"}
    if best is not None:
        named[best] = f"{named[best]}, best" if best in named else "best"
    if len(named) < min(3, len(steps)):
        named[steps[len(steps) // 2]] = ""
    return dict(sorted(named.items()))


def contrast(name: str, title: str, right: int | str, wrong: int | str) -> dict[str, object]:
    """Return a filter of the page: the problems that are right at one checkpoint and wrong at another."""
    return {"name": name, "title": title, "right": right, "wrong": wrong}


def describe_episodes(
    turns: pd.DataFrame, outcomes: pd.DataFrame, points: pd.DataFrame, effects: pd.DataFrame
) -> dict | None:  # fmt: skip
    """Return the checkpoints, the columns shown first, and the problems with their turns; None if no turn was recorded.

    `outcomes` are all validation outcomes, `points` the accuracy by step and `effects` those of single turns. "lost" problems are
    right at the best and wrong at the last checkpoint that has turns. Checkpoints with effects are always shown.
    `contrasts` are the filters that compare two checkpoints.
    """
    if not len(turns):
        return None
    steps = sorted(int(step) for step in turns["step"].unique())
    accuracy = dict(zip(points["step"], points["accuracy"], strict=True))
    best = max((step for step in steps if step in accuracy), key=lambda step: (accuracy[step], -step), default=None)
    named = name_steps(steps, best)
    forked = {int(step) for step in effects["step"]} & {*steps} if len(effects) else set()
    shown = sorted({*steps[:: math.ceil(len(steps) / MAX_SHOWN_STEPS)], *named, *forked})
    right = {} if best is None else outcomes[outcomes["correct"].eq(True)].groupby("step")["problem"].agg(set)
    return {
        "steps": [{"step": step, "name": named.get(step, ""), "accuracy": accuracy.get(step)} for step in shown],
        "left_out": len(steps) - len(shown),
        "columns": list(named),
        "contrasts": [] if best is None else [contrast("lost", "wrong at last, right at best", best, steps[-1])],
        "n_validation": int(points["n"].iloc[-1]) if len(points) else None,
        "n_lost": None if best is None else len(right.get(best, set()) - right.get(steps[-1], set())),
        "forked": sorted(forked),
        "problems": describe_problems(turns, outcomes, shown, effects_by_turn(effects)),
    }


def questions_of(episodes: pd.DataFrame) -> dict[str, str]:
    """Return problem -> its question, shortened and without the words with which all questions begin; empty if not recorded."""
    if "question" not in episodes:
        return {}
    by_problem = episodes.drop_duplicates("problem")
    shared = commonprefix(by_problem["question"].tolist()) if len(by_problem) > 1 else ""
    start = shared.rfind(" ") + 1
    return dict(zip(by_problem["problem"], by_problem["question"].str.slice(start, start + MAX_QUESTION), strict=True))


def training_groups(episodes: pd.DataFrame, group_size: int) -> dict[int, list] | None:
    """Return iteration -> its groups, each [problem, [reward, advantage, correct] per episode]; None if not recorded.

    `episodes` has a row per training episode: iteration, problem, episode (its index among the attempts at the problem),
    reward, advantage and correct, which is None if the reward does not define it. A problem drawn twice makes two groups.
    """
    if not len(episodes):
        return None
    iterations = sorted(episodes["iteration"].unique())[:: math.ceil(len(episodes) / MAX_TRAINING)]
    shown = episodes[episodes["iteration"].isin(iterations)]
    groups: dict[int, list] = {int(iteration): [] for iteration in iterations}
    by_group = shown.groupby(["iteration", "problem", shown["episode"] // group_size], sort=False)
    for (iteration, problem, _), rows in by_group:
        # NaN: not recorded
        numbers = [map(number, rows[name].astype(float).round(3)) for name in ("reward", "advantage")]
        groups[iteration].append([problem, list(map(list, zip(*numbers, rows["correct"].astype(object), strict=True)))])
    return groups
