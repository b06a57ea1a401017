"""The checks: each returns whether it holds, what was measured and what was expected.

Log-probs of the engine and of the trainer differ by rounding, in bfloat16 by 0.01 to 0.04 on average. So a difference must be
small against the difference that a fault would make (another adapter, old weights, another temperature), which is measured
on the same rows.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from multirole.core.rows import Row
from multirole.core.types import Problem
from multirole.doctor.bench import Bench, Trial, Weights
from multirole.doctor.samples import SAMPLES
from multirole.tasks import TaskLike

ROWS_OF_A_ROLE = 4
"""Rows of each role that are computed again."""
EXACT, ROUNDED = (1e-4, 1e-3), (0.1, math.inf)
"""Mean and largest difference between log-probs of a token that rounding may make, in float32 and at half precision."""
SHARE = 1 / 3
"""A difference may be at most this part of the one that a fault would make."""
CERTAIN = -1e-3
"""Tokens of a larger log-prob may have a gradient that rounds to zero."""

Verdict = tuple[bool, str, str]


@dataclass(frozen=True)
class Case:
    """Two iterations in a row and the weights before, between and after them; checksums of the base at the start."""

    bench: Bench
    task: TaskLike | None
    first: Trial
    second: Trial
    weights: tuple[Weights, Weights, Weights]
    base: dict[str, int]

    @classmethod
    def of(cls, bench: Bench, task: TaskLike | None) -> "Case":
        """Run the iterations."""
        base, before = bench.checksums(), bench.weights()
        first = bench.train()
        between = bench.weights()
        second = bench.train()
        return cls(bench, task, first, second, (before, between, bench.weights()), base)

    def few(self, trial: Trial) -> list[Row]:
        """The first rows of each role."""
        roles = {row.turn.role for row in trial.rows}
        return [r for role in sorted(roles) for r in [r for r in trial.rows if r.turn.role == role][:ROWS_OF_A_ROLE]]

    def gaps(self, rows: list[Row], temperature: float | None = None) -> torch.Tensor:
        """|log-prob of the engine - plain log-prob under the present weights| per token."""
        return torch.cat([self._gap(row, row.adapter, temperature) for row in rows])

    def mixed_up(self, rows: list[Row]) -> float:
        """The least mean difference if rows had been sampled by another adapter, or by the base."""
        others: list[str | None] = [*self.bench.adapters, None]
        pairs = [(other, [row for row in rows if row.adapter != other]) for other in others]
        return min(torch.cat([self._gap(r, other, None) for r in mine]).mean().item() for other, mine in pairs if mine)

    def _gap(self, row: Row, adapter: str | None, temperature: float | None) -> torch.Tensor:
        return (self.bench.plain(row.turn, adapter, temperature) - torch.tensor(row.turn.logprobs)).abs()

    def compare(self, gaps: torch.Tensor, fault: float, what: str) -> Verdict:
        """Judge differences of log-probs against rounding, and against what a fault would make of them."""
        is_exact = next(self.bench.model.get_base_model().parameters()).dtype == torch.float32
        limit, most = EXACT if is_exact else ROUNDED
        mean, largest = gaps.mean().item(), gaps.max().item()
        return (
            mean <= min(limit, SHARE * fault) and largest <= most,
            f"log-probs differ by {mean:.1e} on average and {largest:.1e} at most",
            f"at most {min(limit, SHARE * fault):.1e} on average; {what} would make {fault:.1e}",
        )


def engine(case: Case) -> Verdict:
    """The engine's log-probs are the trainer's at the first step of every adapter."""
    gaps = [micro.gaps.abs() for trial in (case.first, case.second) for micro in trial.micros if micro.step == 0]
    case.bench.put(case.weights[0])
    return case.compare(torch.cat(gaps), case.mixed_up(case.few(case.first)), "another adapter")


def published_weights(case: Case) -> Verdict:
    """The second iteration is sampled from the weights after the first one, and not from those before it."""
    rows = case.few(case.second)
    case.bench.put(case.weights[0])
    old = case.gaps(rows).mean().item()
    case.bench.put(case.weights[1])
    return case.compare(case.gaps(rows), old, "the weights before the update")


def temperature(case: Case) -> Verdict:
    """The engine's log-probs are those of logits / temperature."""
    rows, given = case.few(case.first), case.bench.trainer.args.temperature
    other = 1.0 if given != 1.0 else 0.7
    case.bench.put(case.weights[0])
    return case.compare(case.gaps(rows), case.gaps(rows, other).mean().item(), f"temperature {other:g}, not {given:g},")


def masks(case: Case) -> Verdict:
    """Every turn is trained once, and the loss reaches the outputs that predict its completion and no others."""
    trial, lost, others = case.first, 0, 0
    for micro in trial.micros:
        for row, ids, reached in zip(micro.rows, micro.ids.tolist(), micro.reached, strict=True):
            start = _find(ids, row.turn.prompt_ids + row.turn.completion_ids) + len(row.turn.prompt_ids) - 1
            own = reached[start : start + len(row.turn.completion_ids)]
            others += int(reached.sum() - own.sum())
            if row.advantage and micro.step == 0:  # later steps clip ratios
                lost += int((~own & (torch.tensor(row.turn.logprobs) < CERTAIN)).sum())
    sampled = Counter(id(turn) for episode in trial.episodes for turn in episode.turns)
    trained = Counter(id(row.turn) for micro in trial.micros for row in micro.rows)
    wrong = sum((sampled - trained).values()) + sum((trained - sampled).values())
    n_tokens = sum(len(turn.completion_ids) for episode in trial.episodes for turn in episode.turns)
    measured = (
        f"{lost} of {n_tokens} completion tokens have no gradient, {others} prompt and pad tokens have one; "
        f"{wrong} of {sum(sampled.values())} turns are not trained exactly once"
    )
    return not (lost or others or wrong), measured, "0, 0 and 0"


def _find(ids: list[int], sequence: list[int]) -> int:
    """Where a sequence starts in padded ids."""
    for start in range(len(ids) - len(sequence) + 1):
        if ids[start : start + len(sequence)] == sequence:
            return start
    raise ValueError("a row was not trained with the tokens that were sampled")


def adapters(case: Case) -> Verdict:
    """A step on the rows of a role changes the tensors of the role's adapter and no other tensor."""
    policy, own, others = case.bench.trainer.policy, [], 0
    sizes = {name: len(tensors) for name, tensors in case.weights[0].items()}
    for step, moved in case.first.steps:
        owners = {policy[row.turn.role] for row in step.rows}
        own += [(moved[name], sizes[name]) for name in owners]
        others += sum(n for name, n in moved.items() if owners != {name})
    now = case.bench.checksums()
    changed = sum(now[name] != value for name, value in case.base.items())
    idle = set(policy.values()) - {step.adapter for step, _ in case.first.steps}
    measured = (
        f"{len(own)} steps moved {sum(n for n, _ in own)} of {sum(n for _, n in own)} tensors of their own adapters, {others} of "
        f"others and {changed} of the base; {len(idle)} adapters took no step"
    )
    holds = all(n == size for n, size in own) and not (others or changed or idle)
    return holds, measured, "all of their own, 0, 0 and 0"


def advantages(case: Case) -> Verdict:
    """Every episode has its own reward, and rows are compared within their group alone."""
    bench, gap = case.bench, 0.0
    args = bench.trainer.args
    swapped = sum(e.reward is None or abs(e.reward.value - bench.due(e)) > 1e-5 for e in case.first.episodes)
    groups: dict[tuple, dict[int, tuple[float, list[float]]]] = defaultdict(dict)
    for row in case.first.rows:
        turn, is_episode = row.turn, args.advantage_group == "episode"
        own = () if is_episode else (turn.role, turn.slot if args.advantage_group == "slot" else 0)
        key = id(row.episode) if is_episode else id(row)
        members = groups[row.episode.problem.id, *own]
        members.setdefault(key, (bench.due(row.episode), []))[1].append(row.advantage)
    every = torch.tensor([reward for members in groups.values() for reward, _ in members.values()])
    for members in groups.values():
        rewards = torch.tensor([reward for reward, _ in members.values()])
        if len(rewards) == 1:  # nothing to compare with
            continue
        scale = {"group": rewards.std().item(), "batch": every.std().item()}.get(str(args.scale_rewards), 1.0)
        for (_, found), due in zip(members.values(), ((rewards - rewards.mean()) / scale).tolist(), strict=True):
            gap = max(gap, *(abs(advantage - due) for advantage in found))
    return (
        gap < 5e-3 and not swapped,
        f"advantages of {len(case.first.rows)} rows differ by at most {gap:.1e}; {swapped} episodes have another's reward",
        "less than 5.0e-03, and 0",
    )


def rewards(case: Case) -> Verdict:
    """An answer is graded the same alone and in a batch, and right and wrong answers of a built-in task are told apart."""
    episodes, wrong = case.first.episodes, []
    together, alone = case.bench.grade(episodes), [case.bench.grade([episode])[0] for episode in episodes]
    differ = sum(one != other for one, other in zip(together, alone, strict=True))
    sample = SAMPLES.get(case.task.name) if case.task else None
    if sample and case.task:
        problem, other = (
            Problem(name, case.task.name, "", r) for name, r in (("a", sample.reference), ("b", sample.other))
        )
        answers = [(problem, sample.right, True), (problem, sample.wrong, False), (other, sample.right, False)]
        graded = case.task.score([p for p, _, _ in answers], [text for _, text, _ in answers])
        wrong = [text for (_, text, due), reward in zip(answers, graded, strict=True) if reward.is_correct is not due]
    known = f"; {len(wrong)} of 3 known answers are misjudged" if sample else ""
    return (
        not (differ or wrong),
        f"{differ} of {len(episodes)} rewards depend on the batch{known}",
        "0" + " and 0" * bool(sample),
    )


def resume(case: Case) -> Verdict:
    """A checkpoint gives back every adapter and the optimizer's moments, bit for bit."""
    case.bench.put(case.weights[2])
    before, moments, after, loaded = case.bench.save_and_load()
    pairs = [(a, b) for name in before for a, b in zip(before[name], after[name], strict=True)]
    lost = sum(not a.equal(b) for a, b in pairs)
    lost_moments = len(moments) - sum(a.equal(b) for a, b in zip(moments, loaded, strict=False))
    measured = (
        f"{lost} of {len(pairs)} adapter tensors and {lost_moments} of {len(moments)} moments differ after loading"
    )
    return not (lost or lost_moments) and len(moments) > 0, measured, "0 and 0"


CHECKS: dict[str, Callable[[Case], Verdict]] = {
    "engine": engine,
    "published weights": published_weights,
    "temperature": temperature,
    "masks": masks,
    "adapters": adapters,
    "advantages": advantages,
    "rewards": rewards,
    "resume": resume,
}
