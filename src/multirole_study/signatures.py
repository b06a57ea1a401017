"""Compute text signatures of roles: those of the paper's Tables 4-6 and of its monitoring list (A.6.2).

Every signature has one definition, used for the turns of a training iteration (`signatures`) and the recorded turns of
validation episodes (`signatures_of_frame`); METRICS.md has their table. Where the paper's captions leave a choice open:

- *boxed*: `math_answers.extract` finds the last `\\boxed{...}`, its braces close, and it is not empty.
- *verdict*: the first literal `\\boxed{Correct}` or `\\boxed{Incorrect}`, as the released code parses it.
- *hedging*: one of the phrases of `HEDGES`, in any case, not inside a longer word ("await" is no "wait"), with single
  spaces as written. The paper does not state case or boundaries.
- *3-gram Jaccard*: sets of three successive whitespace-separated words, case-sensitive. Two texts of fewer than three words
  have no 3-gram and count as 1.0 (identical). If only one of two texts has no 3-gram, the value is 0.0.
- *forms* (Table 5, panel A1): a text with a Python fence is "code_fence", even if it also has a bare stamp; the three rates
  sum to 1. A fence that is never closed counts: a truncated program is a program. A fence without `python` does not.
- *retention*: the fraction of first turns (lowest round of the role's slot in the episode) that are boxed. It is a level, not
  a ratio to an earlier checkpoint.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from math_answers import extract
from multirole.types import Episode
from multirole.workflows.eval_opt import parse_verdict

HEDGES = (
    "wait", "alternatively", "actually", "hmm", "let me reconsider", "on second thought", "not correct", "this is wrong",
)  # fmt: skip
"""The paper's list of hedging phrases (A.4)."""
HEDGING = re.compile(rf"(?<!\w)(?:{'|'.join(HEDGES)})(?!\w)", re.IGNORECASE)
PYTHON_FENCE = re.compile(r"```(?:python3?|py)[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
TERSE_TOKENS = 30  # Table 5, panel A3
STAMP_TOKENS = 200  # Table 5, panel A1
FENCE_LINES = 3  # Table 5, panel A1; blank lines do not count
FORMS = ("code_fence", "bare_stamp", "other")
SIGNATURES = (
    "truncated_rate", "length_mean", "length_p50", "length_p95", "boxed_rate", "box_retention", "verdict_rate",
    "correct_verdict_rate", "hedging_rate", "terse_rate", "code_fence_rate", "bare_stamp_rate", "other_rate",
    "unique_openers", "jaccard", "slot_pairs",
)  # fmt: skip
"""The keys of every role, in order. No value is NaN: a role with one slot per stage has `jaccard` 0.0 and `slot_pairs` 0, which
says that nothing was compared. A rate that does not apply to a role (such as the verdicts of a generator) is 0.0."""


class Reply(NamedTuple):
    """The fields of a turn that the signatures use. `episode` identifies the episode; `n_tokens` counts the completion."""

    episode: Hashable
    role: str
    slot: int
    round: int
    n_tokens: int
    finish_reason: str
    text: str


class TurnSignature(NamedTuple):
    """The signature of one text: `verdict` is the result of `parse_verdict`, `form` one of `FORMS`."""

    is_boxed: bool
    verdict: str
    is_hedging: bool
    is_terse: bool
    form: str
    opener: str


def is_hedging(text: str) -> bool:
    """Return whether a phrase of `HEDGES` occurs."""
    lowered = text.lower()
    # the plain search is twenty times as fast as the pattern, and most texts have no such phrase
    return any(phrase in lowered for phrase in HEDGES) and HEDGING.search(text) is not None


def form(text: str, n_tokens: int, verdict: str) -> str:
    """Return "code_fence" (a Python fence of at least 3 lines), "bare_stamp" (a verdict in <= 200 tokens, no fence) or "other"."""
    has_fence = "```" in text
    if has_fence and any(_n_lines(body) >= FENCE_LINES for body in PYTHON_FENCE.findall(text)):
        return "code_fence"
    return "bare_stamp" if verdict != "unparsed" and n_tokens <= STAMP_TOKENS and not has_fence else "other"


def _n_lines(body: str) -> int:
    return sum(bool(line.strip()) for line in body.splitlines())


def opener(text: str) -> str:
    """Return the first three words."""
    return " ".join(text.split(None, 3)[:3])


def turn_signature(text: str, n_tokens: int) -> TurnSignature:
    """Compute the signature of one text of `n_tokens` tokens."""
    is_boxed = "\\boxed" in text and bool(extract(text))
    verdict = parse_verdict(text, "first_literal") if "\\boxed" in text else "unparsed"
    is_terse = is_boxed and n_tokens <= TERSE_TOKENS
    return TurnSignature(is_boxed, verdict, is_hedging(text), is_terse, form(text, n_tokens, verdict), opener(text))


def grams(text: str) -> set[tuple[str, str, str]]:
    """Return the set of runs of three whitespace-separated words."""
    words = text.split()
    return set(zip(words, words[1:], words[2:], strict=False))


def jaccard(a: set, b: set) -> float:
    """Return the size of the intersection over the size of the union; 1.0 if both sets are empty."""
    if not a and not b:
        return 1.0
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def slot_jaccard(replies: Iterable[Reply]) -> tuple[float, int]:
    """Return the 3-gram Jaccard between the slots of one role's stages, and the number of pairs compared.

    A pair is two turns of the same episode and round in different slots. The mean is taken within each episode, then over the
    episodes with a pair; (0.0, 0) if there are none.
    """
    stages: dict[Hashable, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for reply in replies:
        stages[reply.episode][reply.round].append(reply.text)
    means, n_pairs = [], 0
    for rounds in stages.values():
        grams_of = {text: grams(text) for texts in rounds.values() if len(texts) > 1 for text in texts}
        values = [jaccard(grams_of[a], grams_of[b]) for texts in rounds.values() for a, b in combinations(texts, 2)]
        n_pairs += len(values)
        if values:
            means.append(sum(values) / len(values))
    return (sum(means) / len(means) if means else 0.0), n_pairs


def of_role(replies: Sequence[Reply]) -> dict[str, float]:
    """Compute `SIGNATURES` of one role's turns, of which there must be one. Rates are fractions of its turns, lengths per turn."""
    turns = [turn_signature(reply.text, reply.n_tokens) for reply in replies]
    n = len(turns)
    first: dict[tuple[Hashable, int], tuple[int, bool]] = {}  # (episode, slot) -> its lowest round, boxed there
    for reply, turn in zip(replies, turns, strict=True):
        key = (reply.episode, reply.slot)
        if key not in first or reply.round < first[key][0]:
            first[key] = (reply.round, turn.is_boxed)
    lengths = [reply.n_tokens for reply in replies]
    median, long = np.quantile(lengths, [0.5, 0.95])
    alike, n_pairs = slot_jaccard(replies)
    values: dict[str, Any] = {
        "truncated_rate": sum(reply.finish_reason == "length" for reply in replies) / n,
        "length_mean": sum(lengths) / n,
        "length_p50": median,
        "length_p95": long,
        "boxed_rate": sum(turn.is_boxed for turn in turns) / n,
        "box_retention": sum(is_boxed for _, is_boxed in first.values()) / len(first),
        "verdict_rate": sum(turn.verdict != "unparsed" for turn in turns) / n,
        "correct_verdict_rate": sum(turn.verdict == "correct" for turn in turns) / n,
        "hedging_rate": sum(turn.is_hedging for turn in turns) / n,
        "terse_rate": sum(turn.is_terse for turn in turns) / n,
        **{f"{name}_rate": sum(turn.form == name for turn in turns) / n for name in FORMS},
        "unique_openers": len({turn.opener for turn in turns}),
        "jaccard": alike,
        "slot_pairs": n_pairs,
    }
    return {name: float(values[name]) for name in SIGNATURES}


def by_role(replies: Iterable[Reply]) -> dict[str, dict[str, float]]:
    """Return role -> `SIGNATURES`, in order of appearance."""
    roles: dict[str, list[Reply]] = defaultdict(list)
    for reply in replies:
        roles[reply.role].append(reply)
    return {role: of_role(role_replies) for role, role_replies in roles.items()}


def signatures(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """Return role -> `SIGNATURES` over the episodes of one iteration."""
    return by_role(
        Reply(i, t.role, t.slot, t.round, len(t.completion_ids), t.finish_reason, t.text)
        for i, episode in enumerate(episodes)
        for t in episode.turns
    )


def signatures_of_frame(turns: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step and role of `turns/step_*.parquet`, with `SIGNATURES` as columns (Tables 4-6).

    Filter the frame first, e.g. `round == 0`. Raises ValueError if a turn occurs twice, because its episodes cannot be distinguished.
    """
    keys = ["step", "problem", "role", "slot", "round"]
    twice = turns.duplicated(keys)
    if twice.any():
        raise ValueError(
            f"{int(twice.sum())} of {len(turns)} rows repeat an earlier {tuple(keys)}, the first of them "
            f"{tuple(turns.loc[twice, keys].iloc[0])}: these episodes cannot be told apart. Pass the turns of one run, "
            "with one episode per problem and step."
        )
    columns, rows = ["problem", "role", "slot", "round", "completion_tokens", "finish_reason", "text"], []
    for step, part in turns.groupby("step", sort=True):
        values_by_role = by_role(Reply(*row) for row in part[columns].itertuples(index=False))
        rows += [{"step": step, "role": role} | values for role, values in values_by_role.items()]
    return pd.DataFrame(rows, columns=["step", "role", *SIGNATURES])
