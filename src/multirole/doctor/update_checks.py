"""Checks of the update: which tensors move, by which gradient, how far. Each says whether it holds and what it measured."""

from collections import Counter

import torch
from torch import Tensor

from multirole.core.rows import Row
from multirole.core.schedule import lr_factor
from multirole.doctor.case import Case, Verdict, first_steps, gap_of

SURE = -1e-3
"""A token of a larger log-prob may have a gradient that rounds to zero."""


def adapter_isolation(case: Case) -> Verdict:
    """A step on the rows of a role moves the tensors of its adapter and no other, bit for bit."""
    policy, sizes = case.bench.cell.policy, {name: len(tensors) for name, tensors in case.bench.first.items()}
    lines, is_good = {}, True
    for step in case.first.steps:
        owners = {policy[row.turn.role] for row in step.rows}
        own = min(owners)
        moved = Counter[str]()
        for one in step.moved:
            moved.update(one)
        others = sum(moved.values()) - moved[own]
        holds = len(owners) == 1 and moved[own] == sizes[own] * len(step.moved) > 0 and others == 0
        line = (
            f"a step on {' and '.join(sorted(owners))} moved {moved[own]} of its {sizes[own]} tensors and {others} of "
            f"{sum(sizes.values()) - sizes[own]} others"
        )
        if not holds or is_good:
            lines[own] = line
        is_good = is_good and holds
    idle = sorted(set(policy.values()) - set(lines))
    return is_good and not idle, "; ".join([*lines.values(), *(f"no step on {name}" for name in idle)])


def frozen_base(case: Case) -> Verdict:
    """No step moves the base."""
    now = case.bench.checksum()
    changed = [name for name, value in case.base.items() if now[name] != value]
    n_steps = sum(len(step.rates) for trial in (case.first, case.second, case.again) for step in trial.steps)
    line = f"{len(changed)} of {len(now)} tensors of the base changed their checksum in {n_steps} optimizer steps"
    return not changed and len(now) > 0, line + (f": {changed[0]}" if changed else "")


def _find(ids: list[int], rows: list[Row]) -> tuple[int, int] | None:
    """Index of the longest row that stands in padded `ids`, and where it starts."""
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].length):
        sequence = rows[i].turn.prompt_ids + rows[i].turn.completion_ids
        for start in range(len(ids) - len(sequence) + 1):
            if ids[start : start + len(sequence)] == sequence:
                return i, start
    return None


def mask_ownership(case: Case) -> Verdict:
    """The loss reaches the outputs that predict completion tokens, each role's once, and no other position."""
    bench = case.bench
    bench.put(bench.first)
    reached, sampled, others, lost, unknown = Counter(), Counter(), 0, 0, 0
    for adapter in bench.adapters:
        rows = case.sample(adapter)
        for row in rows:
            sampled[row.turn.role] += len(row.turn.completion_ids)
        with bench.watched_positions() as seen:
            bench.gradient(adapter, rows, micro_batch_tokens=10**9)
        for ids, has_loss in ((one.tolist(), flags) for batch in seen for one, flags in zip(*batch, strict=True)):
            if (found := _find(ids, rows)) is None:
                unknown += 1
                continue
            turn, start = rows.pop(found[0]).turn, found[1]
            first = start + len(turn.prompt_ids) - 1
            own = has_loss[first : first + len(turn.completion_ids)]
            sure = torch.tensor(turn.logprobs) > SURE
            reached[turn.role] += int((own | sure).sum())
            lost += int((~own & ~sure).sum())
            others += int(has_loss.sum() - own.sum())
        unknown += len(rows)
    shares = ", ".join(f"{role} {reached[role]} of {n}" for role, n in sampled.items())
    line = f"the loss reaches the sampled tokens ({shares}) and {others} prompt and pad positions"
    if lost or unknown:
        line += f"; {lost} tokens have no gradient, {unknown} rows were not trained as they were sampled"
    return reached == sampled and not (others or lost or unknown), line


def _distance(one: Tensor, other: Tensor) -> float:
    """|difference| over |other|."""
    return ((one - other).norm() / other.norm()).item()


def padding_invariance(case: Case) -> Verdict:
    """How rows are packed, padded and ordered does not change the gradient."""
    bench, worst, scales = case.bench, 0.0, []
    bench.put(bench.first)
    for adapter in bench.adapters:
        rows = case.sample(adapter)
        alone = bench.gradient(adapter, rows, micro_batch_tokens=1)
        packed = (bench.gradient(adapter, rows, micro_batch_tokens=10**9), bench.gradient(adapter, rows[::-1]))
        worst = max(worst, *(_distance(other, alone) for other in packed))
        scales.append(alone.norm().item())
    limit = case.tolerance.gradient
    line = (
        f"the gradient of rows alone, all in one micro-batch and in {bench.cell.micro_batch_tokens}-token ones differs by "
        f"{worst:.1e} of its norm (allowed in {bench.cell.dtype}: {limit:g})"
    )
    return worst <= limit and min(scales) > 0, line


def loss_formula(case: Case) -> Verdict:
    """The trainer's gradient is that of GRPO's loss, written out row by row."""
    bench = case.bench
    bench.put(bench.first)
    worst = 0.0
    for adapter in bench.adapters:
        rows = case.sample(adapter)
        worst = max(worst, _distance(bench.gradient(adapter, rows), bench.plain_gradient(adapter, rows)))
    limit = case.tolerance.formula
    line = f"the trainer's gradient differs by {worst:.1e} from the formula's, taken row by row (allowed: {limit:g})"
    return worst <= limit, line


def ratio(case: Case) -> Verdict:
    """The PPO ratio is 1 at an adapter's first step, and in the later ones still against the policy that sampled."""
    limit = case.tolerance
    firsts = [(m.logprobs[m.mask], m.old[m.mask]) for step in first_steps(case.first).values() for m in step.micros]
    mean, largest = gap_of([(now.exp() / old.exp(), torch.ones_like(old)) for now, old in firsts])
    every = [(m.old[m.mask], m.recorded[m.mask]) for step in case.first.steps for m in step.micros]
    mean_old, largest_old = gap_of(every)
    line = (
        f"largest |ratio - 1| at each adapter's first step: {largest:.1e}; log-probs of the old policy are within "
        f"{largest_old:.1e} of the sampled ones in all {len(case.first.steps)} steps"
    )
    return (
        mean <= limit.mean and largest <= limit.largest and mean_old <= limit.mean and largest_old <= limit.largest,
        line,
    )


def optimizer(case: Case) -> Verdict:
    """Every step uses the scheduled learning rate, and a gradient whose norm is cut at the configured one."""
    bench, worst, clips, gap = case.bench, 0.0, Counter(), 0.0
    cell = bench.cell
    last, warmup = cell.iterations - 1, cell.warmup_iterations
    iterations = sorted({0, warmup // 2, warmup, (warmup + last) // 2, last})
    if len(iterations) == 1:
        iterations *= 2  # a gradient to be cut and one to be left
    bench.start(noise=3)
    bench.trainer.cell = bench.rated
    for i, iteration in enumerate(iterations):
        bench.put(bench.first)
        trial = bench.update(iteration, case.first.episodes[0], advantage=(1e-5, 1e5)[i % 2])
        calls = list(dict.fromkeys(entry["adapter"] for entry in trial.ledger))
        for step, entry in zip(trial.steps, trial.ledger, strict=True):
            rate = cell.learning_rate * lr_factor(cell, iteration, calls.index(entry["adapter"]), len(bench.adapters))
            worst = max(worst, *(abs(used - rate) / cell.learning_rate for used in step.rates[0]))
            clips[entry["grad_norm"] > cell.max_grad_norm] += 1
            due = min(entry["grad_norm"], cell.max_grad_norm)
            gap = max(gap, abs(step.norms[0] - due) / due)
    bench.trainer.cell = bench.small
    line = (
        f"the rates of iterations {iterations} differ by {worst:.1e} of the peak {cell.learning_rate:g} from the schedule; "
        f"{clips[True]} gradients above norm {cell.max_grad_norm:g} were cut to it, {clips[False]} below were left (within {gap:.1e})"
    )
    return worst <= 1e-9 and gap <= 1e-4 and clips[True] > 0 and clips[False] > 0, line


def ledger(case: Case) -> Verdict:
    """The optimizer steps that were taken and recorded are the analytic count's."""
    cell, expected, recorded, taken = case.bench.small, Counter(), Counter(), Counter()
    rows, tokens = Counter(), Counter()
    for turn in case.first.turns:
        rows[cell.policy[turn.role]] += 1
        tokens[cell.policy[turn.role]] += len(turn.completion_ids)
    for adapter, n in rows.items():
        step_rows = {"one": n, "per_batch": cell.n_problems * cell.n_episodes}
        expected[adapter] = (
            min(n, -(-tokens[adapter] // cell.step_tokens))
            if cell.updates == "tokens"
            else -(-n // step_rows[cell.updates])
        )
    for entry in case.first.ledger:
        recorded[entry["adapter"]] += 1
        rows[entry["adapter"]] -= entry["rows"]
        tokens[entry["adapter"]] -= entry["tokens"]
    for step in case.first.steps:
        taken[cell.policy[step.rows[0].turn.role]] += len(step.rates)
    parts = ", ".join(
        f"{name} {taken[name]} taken, {recorded[name]} recorded, {n} by count" for name, n in expected.items()
    )
    line = (
        f"optimizer steps: {parts}; the ledger misses {sum(map(abs, rows.values()))} rows and "
        f"{sum(map(abs, tokens.values()))} tokens"
    )
    return expected == recorded == taken and not any(rows.values()) and not any(tokens.values()), line
