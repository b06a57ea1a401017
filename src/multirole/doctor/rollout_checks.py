"""Checks of the rollout: who samples what, and what it is worth. Each says whether it holds and what it measured."""

import math
from collections import Counter, defaultdict

import torch
from torch import Tensor

from multirole.core.rows import Row
from multirole.core.types import Answer, Episode, Problem
from multirole.diagnostics import judging
from multirole.doctor.bench import given_reward
from multirole.doctor.case import Case, Verdict, first_steps, gap_of, key_of
from multirole.doctor.graded import SAMPLES
from multirole.sandbox.pool import Pool
from multirole.sandbox.selftest import ATTACKS, GOOD, check


def episodes(case: Case) -> Verdict:
    """Each (role, slot, round) of an episode is one request, one turn, one row, and is trained once."""
    trial, slots = case.first, case.bench.trainer.workflow.roles
    turns = Counter(id(turn) for turn in trial.turns)
    trained = [row for step in trial.steps for row in step.rows]
    batched = sum(len(micro.mask) for step in trial.steps for micro in step.micros)
    keys = Counter(key_of(e, turn) for e in trial.episodes for turn in e.turns)
    repeated = sum(n > 1 for n in keys.values())
    outside = sum(turn.slot >= slots[turn.role] for turn in trial.turns)
    silent = sum(not episode.turns for episode in trial.episodes)
    is_good = turns == Counter(id(row.turn) for row in trial.rows) == Counter(id(row.turn) for row in trained)
    counts = (len(trial.requests), len(trial.turns), len(trial.rows), len(trained), batched)
    line = (
        f"{len(trial.episodes)} episodes: {counts[0]} requests, {counts[1]} turns, {counts[2]} rows, {counts[3]} rows in optimizer "
        f"steps, {counts[4]} in micro-batches; {repeated} (role, slot, round) doubled"
    )
    return is_good and len(set(counts)) == 1 and not (repeated or outside or silent), line


def engine_agrees(case: Case) -> Verdict:
    """The engine's log-probs are the trainer's, under every adapter, before and after an update."""
    bench, limit, is_good, worst = case.bench, case.tolerance, True, 0.0
    found: dict[str, list[str]] = defaultdict(list)
    for trial in (case.first, case.second):
        for adapter, step in first_steps(trial).items():
            mean, largest = gap_of([(m.logprobs[m.mask], m.recorded[m.mask]) for m in step.micros])
            is_good, worst = is_good and mean <= limit.mean and largest <= limit.largest, max(worst, mean)
            found[adapter].append(f"{largest:.1e}")
    bench.put(bench.first)
    least = math.inf
    for other in bench.adapters:
        if rows := [row for name in bench.adapters if name != other for row in case.sample(name)]:
            least = min(least, case.off(rows, adapter=other)[0])
    gaps = ", ".join(f"{adapter} {' and '.join(values)}" for adapter, values in found.items())
    line = f"largest |engine - trainer| log-prob before and after an update: {gaps} (allowed: {limit.largest:g})"
    if least < math.inf:
        line += f"; another adapter would be {least:.1e} (mean) off"
    return is_good and least > 3 * worst, line


def update_reaches_engine(case: Case) -> Verdict:
    """The rollout after an update is sampled from the new weights, not from the old ones or from what they left behind."""
    bench, limit = case.bench, case.tolerance
    gaps = []
    for weights in case.weights[1::-1]:
        bench.put(weights)
        gaps.append(case.off(case.few(case.second)))
    (new, largest), (old, _) = gaps
    line = f"the next rollout's log-probs are within {largest:.1e} of the new weights' and {old:.1e} (mean) off the old ones'"
    return new <= limit.mean and largest <= limit.largest and old > 3 * new, line


def temperature(case: Case) -> Verdict:
    """The recorded log-probs are those of the distribution that was sampled: logits / temperature."""
    bench, limit = case.bench, case.tolerance
    bench.put(bench.first)
    at, other = bench.cell.temperature, 1.0 if bench.cell.temperature != 1.0 else 0.7
    rows = case.few(case.first)
    (mean, largest), (off, _) = case.off(rows), case.off(rows, other)
    asked = {request.temperature for request in case.first.requests}
    line = (
        f"replies are asked for at {sorted(asked)}; log-probs are within {largest:.1e} of logits / {at:g}, and would be {off:.1e} "
        f"(mean) off at {other:g}"
    )
    return asked == {at} and mean <= limit.mean and largest <= limit.largest and off > 3 * mean, line


def seeds(case: Case) -> Verdict:
    """The cell's seed alone decides tokens and weights; attempts at one prompt have seeds of their own."""
    said = [
        {key_of(e, turn): turn.completion_ids for e in trial.episodes for turn in e.turns}
        for trial in (case.first, case.again)
    ]
    equal = sum(said[1].get(key) == ids for key, ids in said[0].items())
    tensors = [
        (a, b)
        for name in case.bench.adapters
        for a, b in zip(case.weights[1][name], case.weights[2][name], strict=True)
    ]
    same = sum(a.equal(b) for a, b in tensors)
    distinct = len({request.seed for request in case.first.requests})
    line = (
        f"sampled and trained again, with other states of the global generators: {equal} of {len(said[0])} turns and {same} of "
        f"{len(tensors)} tensors are equal, bit for bit; {distinct} seeds for {len(case.first.requests)} requests"
    )
    is_equal = equal == len(said[0]) and same == len(tensors)
    if torch.cuda.is_available():  # kernels there need not repeat their last bit, which in the end changes tokens
        is_equal = equal >= len(said[0]) / 2
    return is_equal and len(said[0]) == len(said[1]) and distinct == len(case.first.requests), line


def _normalised(rewards: Tensor, norm: str) -> Tensor:
    """Rewards (G,) against their group, but for TRL's and our epsilons."""
    deviation, n = rewards - rewards.mean(), len(rewards)
    if norm == "leave_one_out":
        return deviation * n / (n - 1)
    return deviation if norm == "none" or not deviation.any() else deviation / rewards.std()


def advantages(case: Case) -> Verdict:
    """Rewards are compared within their group alone, and an episode's advantage is on all of its turns."""
    cell, trial, gap, largest_sum = case.bench.small, case.first, 0.0, 0.0
    problems = list(dict.fromkeys(e.problem.id for e in trial.episodes))
    wrong = sum(
        not math.isclose(e.reward.value, given_reward(problems.index(e.problem.id), e.index)) for e in trial.episodes
    )
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in trial.rows:
        role, slot, round = row.turn.role, row.turn.slot, row.turn.round
        own = {"episode": (), "role": (role,), "slot": (role, slot), "role_round": (role, round)}[cell.advantage_group]
        group = (role,) if cell.advantage_norm == "agent" else (*row.episode.group(cell.n_episodes), *own)
        groups[group].append(row)
    is_by_episode = cell.advantage_group == "episode" and cell.advantage_norm != "agent"
    for rows in groups.values():
        compared = list({id(row.episode): row for row in rows}.values()) if is_by_episode else rows
        if len(compared) == 1:  # nothing to be compared with: a convention, not a comparison
            continue
        rewards = torch.tensor([row.episode.reward.value for row in compared], dtype=torch.float64)
        values = _normalised(rewards, cell.advantage_norm).tolist()
        due = {id(row.episode): value for row, value in zip(compared, values, strict=True)}
        gap = max(gap, *(abs(row.advantage - due[id(row.episode)]) for row in rows))
        largest_sum = max(largest_sum, abs(sum(row.advantage for row in compared)))
    each = "the same on all turns of an episode" if is_by_episode else f"by {cell.advantage_group}"
    line = (
        f"{len(trial.rows)} advantages, {each}, are within {gap:.1e} of the reward against its own group ({len(groups)} "
        f"groups); the largest sum over a group is {largest_sum:.1e}; {wrong} episodes have another's reward"
    )
    return gap < 5e-3 and largest_sum < 5e-3 and not wrong, line


def reward(case: Case) -> Verdict:
    """An episode's reward is the grade of its own answer, and the task tells right, wrong and malformed ones apart."""
    cell, trial = case.bench.cell, case.first
    sample = SAMPLES[cell.task_name]
    malformed = cell.malformed_reward if cell.task == "math" else 0.0
    partial = sample.partial if cell.task == "math" or cell.code_reward == "fraction" else 0.0
    due = {"right": (1.0, True), "wrong": (partial, False), "malformed": (malformed, False), "another's": (0.0, False)}
    problem = Problem("doctor", cell.task_name, "", sample.reference)
    other = Problem("doctor 2", cell.task_name, "", sample.other)
    answers = [(problem, sample.right), (problem, sample.wrong), (problem, sample.malformed), (other, sample.right)]
    made = [Episode(problem, 0, answer=Answer(text)) for problem, text in answers]
    alone = [Episode(e.problem, e.index, answer=e.answer) for e in trial.episodes]
    for some in (made, *([one] for one in alone)):
        judging.score_episodes(some, cell)
    got = dict(zip(due, ((e.reward.value, e.reward.is_correct) for e in made), strict=True))
    equal = sum(one.reward == graded for one, graded in zip(alone, trial.graded, strict=True))
    grades = ", ".join(f"{name} {value:g}" for name, (value, _) in got.items())
    line = (
        f"hand-written {cell.task_name} answers: {grades}; {equal} of {len(alone)} episodes have the grade of their own"
    )
    return got == due and equal == len(alone), line


def sandbox_holds(case: Case) -> Verdict:
    """What a program must not do it cannot do here."""
    pool = Pool()
    pool.start(1)
    try:
        check(pool)
    finally:
        pool.close()
    return True, f"{len(GOOD)} good programs passed and {len(ATTACKS)} attacks were stopped at level {pool.level!r}"
