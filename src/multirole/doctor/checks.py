"""The checks: each returns whether it holds, what was measured and what was expected.

Log-probs of the engine and of the trainer differ by rounding. How much, is measured on the spot: the same rows are computed
in the run's precision and in float32. A difference must be small against that, and against the difference that a fault would
make (another adapter, old weights, another temperature), which is measured on the same rows.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from multirole.core.rows import Row
from multirole.core.types import Episode, Problem
from multirole.doctor.bench import BETA, Bench, Trial, Weights
from multirole.tasks import TaskLike

ROWS_OF_A_ROLE = 4
"""Rows of each role that are computed again."""
EXACT = (1e-4, 1e-3)
"""Mean and largest difference between log-probs of a token that float32 may make."""
FLOORS = 4
"""So many times the measured rounding may lie between the engine and the trainer, which round apart from each other."""
EXACT_GRADIENT, ROUNDED_GRADIENT = 1e-3, 0.3
"""Part of its norm by which float32 or half precision may change a gradient. What rounding adds has no direction, so that it
hardly goes towards a fault's gradient."""
SHARE = 1 / 3
"""A difference may be at most this part of the one that a fault would make."""
CERTAIN = -1e-3
"""Tokens of a larger log-prob may have a gradient that rounds to zero."""
CANARY = "the-reference-8271"

Verdict = tuple[bool, str, str]


@dataclass
class Case:
    """Three iterations in a row, an evaluation after them, and the weights before, between and after the iterations."""

    bench: Bench
    task: TaskLike | None
    trials: list[Trial]
    weights: list[Weights]
    evaluated: list[Episode]
    base: dict[str, int]
    """Checksums of the base at the start."""

    @classmethod
    def of(cls, bench: Bench, task: TaskLike | None) -> "Case":
        """Run the iterations; the last one moves the weights before its update."""
        base, weights, trials = bench.checksums(), [bench.weights()], []
        for is_nudged in (False, False, True):
            trials.append(bench.train(is_nudged))
            weights.append(bench.weights())
        return cls(bench, task, trials, weights, bench.evaluate(), base)

    @property
    def first(self) -> Trial:
        """The first iteration."""
        return self.trials[0]

    @cached_property
    def is_exact(self) -> bool:
        """Whether base and computation are in float32."""
        model, accelerator = self.bench.model.get_base_model(), self.bench.trainer.accelerator
        return next(model.parameters()).dtype == torch.float32 and accelerator.mixed_precision == "no"

    @cached_property
    def floor(self) -> float:
        """Mean difference between log-probs of the same rows in the run's precision and in float32."""
        if self.is_exact:
            return 0.0
        self.bench.put(self.weights[0])
        plain, few = self.bench.plain, self.few(self.first.rows)
        pairs = [(plain(row.turn, row.adapter, is_exact=True), plain(row.turn, row.adapter)) for row in few]
        return torch.cat([(a - b).abs() for a, b in pairs]).mean().item()

    def few(self, rows: list[Row]) -> list[Row]:
        """The first rows of each role."""
        roles = {row.turn.role for row in rows}
        return [r for role in sorted(roles) for r in [r for r in rows if r.turn.role == role][:ROWS_OF_A_ROLE]]

    def gaps(
        self, at: int, rows: list[Row], adapters: Iterable[str | None] = (), temperature: float | None = None
    ) -> Tensor:
        """|log-prob of the engine - plain log-prob| per token, under the weights `at` and the rows' own adapters or other ones."""
        self.bench.put(self.weights[at])
        pairs = zip(rows, adapters or [row.adapter for row in rows], strict=False)
        plain = [(row, self.bench.plain(row.turn, adapter, temperature)) for row, adapter in pairs]
        return torch.cat([(logps - torch.tensor(row.turn.logprobs)).abs() for row, logps in plain])

    def compare(self, gaps: Tensor, fault: float, what: str) -> Verdict:
        """Judge differences of log-probs against rounding, and against what a fault would make of them."""
        limit, most = EXACT if self.is_exact else (FLOORS * self.floor, math.inf)
        mean, largest = gaps.mean().item(), gaps.max().item()
        rounding = "" if self.is_exact else f"; rounding makes {self.floor:.1e}"
        return (
            mean <= min(limit, SHARE * fault) and largest <= most,
            f"log-probs differ by {mean:.1e} on average and {largest:.1e} at most",
            f"at most {min(limit, SHARE * fault):.1e} on average; {what} would make {fault:.1e}{rounding}",
        )


# ---- sampling


def engine(case: Case) -> Verdict:
    """The engine's log-probs are the trainer's at the first step of every adapter."""
    gaps = [micro.gaps.abs() for trial in case.trials[:2] for micro in trial.micros if micro.step == 0]
    few, adapters = case.few(case.first.rows), [*case.bench.adapters, None]  # sampled by each, or by the base
    pairs = [(other, [row for row in few if row.adapter != other]) for other in adapters]
    fault = min(case.gaps(0, rows, repeat(other)).mean().item() for other, rows in pairs if rows)
    return case.compare(torch.cat(gaps), fault, "another adapter")


def published_weights(case: Case) -> Verdict:
    """The second iteration is sampled from the weights after the first one, and not from those before it."""
    rows = case.few(case.trials[1].rows)
    return case.compare(case.gaps(1, rows), case.gaps(0, rows).mean().item(), "the weights before the update")


def temperature(case: Case) -> Verdict:
    """The engine's log-probs are those of logits / temperature."""
    rows, given = case.few(case.first.rows), case.bench.trainer.args.temperature
    other = 1.0 if given != 1.0 else 0.7
    fault = case.gaps(0, rows, temperature=other).mean().item()
    return case.compare(case.gaps(0, rows), fault, f"temperature {other:g}, not {given:g},")


def evaluation(case: Case) -> Verdict:
    """Evaluation samples from the adapters as they are, and not from the base."""
    policy = case.bench.trainer.policy
    rows = case.few([Row(episode, turn, policy[turn.role]) for episode in case.evaluated for turn in episode.turns])
    if not rows:
        return True, "the trainer has no evaluation problems", "nothing"
    return case.compare(case.gaps(-1, rows), case.gaps(-1, rows, repeat(None)).mean().item(), "the base model")


def seeds(case: Case) -> Verdict:
    """No two requests share a seed, within an iteration or between two, and another seed of the run changes all of them."""
    trainer = case.bench.trainer
    given = [seed for trial in case.trials for seed in trial.seeds]
    attempts = [(episode.problem, episode.index) for episode in case.first.episodes]
    found = []
    for offset in (0, 1):
        trainer.rollout.seed = trainer.args.seed + offset
        found.append({request.seed for request in case.bench.play(attempts)})
    trainer.rollout.seed, repeated, kept = trainer.args.seed, len(given) - len(set(given)), len(found[0] & found[1])
    return (
        not (repeated or kept),
        f"{repeated} of {len(given)} seeds are used twice; {kept} of {len(found[0])} stay under another seed of the run",
        "0 and 0",
    )


def problems(case: Case) -> Verdict:
    """A pass over the data has every problem once and the next pass another order, and what is drawn is what is trained."""
    bench, trainer = case.bench, case.bench.trainer
    n, size, steps = len(trainer.problems), trainer.args.num_generations, trainer.args.max_steps
    trainer.args.max_steps = 2 * math.ceil(n * size / trainer.args.generation_batch_size)
    drawn = list(trainer._get_train_sampler())[: 2 * n * size]
    trainer.args.max_steps = steps
    passes = [drawn[start : start + n * size] for start in (0, n * size)]
    missed = sum(n - len(set(one)) for one in passes)
    same = passes[0] == passes[1] and n > 2 and trainer.args.shuffle_dataset
    ids = Counter(trainer.problems[i].id for i in bench.indices)
    other = sum(Counter(episode.problem.id for episode in trial.episodes) != ids for trial in case.trials)
    measured = (
        f"{missed} of {2 * n} problems are missing from two passes, whose orders are {'equal' if same else 'not equal'}"
    )
    return (
        not (missed or same or other),
        f"{measured}; {other} of 3 iterations were of other problems",
        "0, not equal, 0",
    )


def prompts(case: Case) -> Verdict:
    """No prompt holds the reference answer."""
    trainer, task = case.bench.trainer, case.task
    if task is None:
        return True, "the trainer's references are not known", "nothing"
    problem = Problem("doctor", trainer.problems[0].task, "How much is 1 + 1?", CANARY)
    requests = case.bench.play([(problem, 0)])
    quoted = sum(CANARY in trainer.rollout.tokenizer.decode(request.prompt_ids) for request in requests)
    references = {p.id: str(p.reference) for p in task.problems("train", min(256, len(trainer.problems)))}
    known = [(p.question, references[p.id]) for p in trainer.problems if p.id in references]
    told = sum(bool(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text)) for text, answer in known)
    return (
        not quoted and told <= len(known) / 2,  # a number may stand in a question by chance
        f"{quoted} of {len(requests)} prompts of a workflow and {told} of {len(known)} questions hold the reference",
        f"0 and at most {len(known) // 2}",
    )


# ---- training


def masks(case: Case) -> Verdict:
    """Every turn is trained once, and the loss reaches the outputs that predict its completion and no others."""
    trial, lost, others = case.first, 0, 0
    for micro in trial.micros:
        for row, ids, reached in zip(
            [trial.rows[i] for i in micro.rows], micro.ids.tolist(), micro.reached, strict=True
        ):
            start = _find(ids, row.turn.prompt_ids + row.turn.completion_ids) + len(row.turn.prompt_ids) - 1
            own = reached[start : start + len(row.turn.completion_ids)]
            others += int(reached.sum() - own.sum())
            if row.advantage and micro.step == 0:  # later steps clip ratios
                lost += int((~own & (torch.tensor(row.turn.logprobs) < CERTAIN)).sum())
    sampled = Counter(id(turn) for episode in trial.episodes for turn in episode.turns)
    trained = Counter(id(trial.rows[i].turn) for micro in trial.micros for i in micro.rows)
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


def loss(case: Case) -> Verdict:
    """The gradient is that of the clipped objective and its KL term, written down here, at ratios that are not 1."""
    args = case.bench.trainer.args
    if (args.loss_type, args.importance_sampling_level) != ("grpo", "token"):
        return True, f"not compared for loss_type={args.loss_type!r}", "loss_type='grpo'"
    gap, way, clipped, n_tokens = 0.0, 0.0, 0, 0
    limit = EXACT_GRADIENT if case.is_exact else ROUNDED_GRADIENT
    case.bench.put(case.weights[2])
    case.bench.nudge()
    for adapter, (rows, divisor, gradient) in case.trials[2].first.items():
        due = [torch.zeros_like(gradient) for _ in range(4)]
        for row in rows:
            terms, n_clipped = _objectives(case, row)
            clipped, n_tokens = clipped + n_clipped, n_tokens + len(row.turn.completion_ids)
            case.bench.model.set_adapter(adapter)
            for total, term in zip(due, terms, strict=True):
                total += case.bench.gradient(adapter, term / divisor)
        apart = gradient - due[0]
        gap = max(gap, (apart.norm() / due[0].norm()).item())
        for wrong in [other - due[0] for other in due[1:]]:
            if wrong.norm() > limit * due[0].norm():  # else so little was clipped that rounding hides it
                way = max(way, ((apart @ wrong) / (wrong @ wrong)).abs().item())
    return (
        gap <= limit and way <= SHARE,
        f"gradients differ by {gap:.1e} of their norm and go {way:.2f} of the way to a fault's; {clipped} of {n_tokens} tokens are clipped",
        f"at most {limit:.1e}, and {SHARE:.2f} of the way to no clipping, half the range or another sign of the KL term",
    )


def _objectives(case: Case, row: Row) -> tuple[list[Tensor], int]:
    """A row's loss (TRL's "grpo": the mean over its tokens), and that without clipping, with half its range, with -KL.

    Also the number of tokens whose gradient the clipping removes.
    """
    bench, args, a = case.bench, case.bench.trainer.args, row.advantage
    low, high = bench.trainer.epsilon_low, bench.trainer.epsilon_high
    with torch.no_grad():
        base = bench.plain(row.turn, None)
    logps = bench.plain(row.turn, row.adapter, keeps=True)  # (C,)
    old = torch.tensor(row.turn.logprobs) if row.old_logps is None else row.old_logps
    ratio = (logps - old.to(logps)).exp()
    apart = base.to(logps) - logps
    kl = apart.exp() - apart - 1
    capped = ratio if args.delta is None else ratio.clamp(max=args.delta)

    def surrogate(share: float) -> Tensor:
        return torch.min(capped * a, ratio.clamp(1 - share * low, 1 + share * high) * a)

    right = surrogate(1.0)
    terms = [-right + BETA * kl, -ratio * a + BETA * kl, -surrogate(0.5) + BETA * kl, -right - BETA * kl]
    is_clipped = (ratio * a > right) & ((ratio < 1 - low) | (ratio > 1 + high))
    return [term.mean() for term in terms], int(is_clipped.sum())


def optimizer(case: Case) -> Verdict:
    """Each step is that of AdamW on the clipped gradient, with moments that go on, at the scheduled rate."""
    wrong = [both for trial in case.trials for both in trial.wrong]
    weights, rates = (max(column) for column in zip(*wrong, strict=True))
    return (
        weights < 1e-3 and rates < 1e-6,
        f"weights of {len(wrong)} steps differ by {weights:.1e} learning rates at most, the rate by {rates:.1e}",
        "less than 1.0e-03 and 1.0e-06",
    )


# ---- rewards and advantages

BOX = "so the answer is \\boxed{%s}."
FENCE = "```python\n%s\n```"


class Sample(NamedTuple):
    """Of a built-in task: `right` is correct for `reference` and not for `other`; `wrong` is not for `reference`."""

    reference: object
    other: object
    right: str
    wrong: str


def _tests(first: object, second: object) -> dict[str, object]:
    return {"arguments": [[[]], [[1, 2]]], "expected": [first, second]}


def _programs(*outputs: str) -> str:
    return json.dumps([{"input": f"{n}\n", "output": f"{o}\n", "testtype": "stdin"} for n, o in enumerate(outputs)])


SUM, ZERO = FENCE % "def f(xs):\n    return sum(xs)", FENCE % "def f(xs):\n    return 0"
ARITHMETIC = Sample(15, 6, BOX % "15", BOX % "14")
PROGRAM = Sample(_tests(0, 3), _tests(1, 2), SUM, ZERO)
SAMPLES = {
    "tiny_chain": ARITHMETIC,
    "math": Sample("\\frac{1}{2}", "2", BOX % "0.5", BOX % "0.4"),
    "tiny_pipe": PROGRAM,
    "code": Sample(_programs("0", "2"), _programs("1", "3"), FENCE % "print(2 * int(input()))", FENCE % "print(0)"),
}


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


# ---- checkpoints


def resume(case: Case) -> Verdict:
    """A checkpoint gives back every adapter and the optimizer's moments, bit for bit."""
    accelerator = case.bench.trainer.accelerator
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu" and not case.bench.trainer.is_sharded:
        return True, "not tried by several CPU processes, which transformers cannot resume", "nothing"
    case.bench.put(case.weights[-1])
    before, moments, after, loaded = case.bench.save_and_load()
    pairs = [(a, b) for name in before for a, b in zip(before[name], after[name], strict=True)]
    lost = sum(not a.equal(b) for a, b in pairs)
    lost_moments = len(moments) - sum(a.equal(b) for a, b in zip(moments, loaded, strict=False))
    measured = (
        f"{lost} of {len(pairs)} adapter tensors and {lost_moments} of {len(moments)} moments differ after loading"
    )
    return not (lost or lost_moments) and len(moments) > 0, measured, "0 and 0"


CHECKS: dict[str, Callable[[Case], Verdict]] = {
    check.__name__.replace("_", " "): check
    for check in (
        engine, published_weights, temperature, evaluation, seeds, problems, prompts, masks, adapters, loss, optimizer, advantages,
        rewards, resume,
    )
}  # fmt: skip
