"""Cut turns into rows, mini-batches (one optimizer step each) and micro-batches (one forward pass each), and collate tensors.

Every turn is one row: its prompt, which may quote other roles, is masked; its completion, end-of-turn token included, is trained on. So the
rows' completion masks partition the trained tokens by role.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirole.option_rules import listed
from multirole.options import MultiRoleGRPOConfig
from multirole.types import Episode, Turn


@dataclass(eq=False)
class Row:
    """One turn as a training sequence.

    `advantage` is the weight of its tokens' log-ratios. `old_logps` and `ref_logps` (C,) are the trainer's own log-probs of
    the completion under the weights at the start of the update and under the reference of `beta`, if the loss needs them. A role's teacher is
    known by its hidden states `teacher_states` (C, H), or by its log-probs `teacher_logps` (C,) if it is behind a server. A row that `is_masked`
    (`mask_truncated_completions`) is left out of the loss but counted if the loss is a mean over rows, as in TRL.
    """

    episode: Episode
    turn: Turn
    adapter: str
    advantage: float = 0.0
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    teacher_states: Tensor | None = None
    teacher_logps: Tensor | None = None
    is_masked: bool = False

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and completion."""
        return len(self.turn.prompt_ids) + len(self.turn.completion_ids)


class MiniBatch(NamedTuple):
    """The rows of one optimizer step. Their losses are summed and divided by `divisor`: by the number of rows, unless a callback sets another."""

    rows: list[Row]
    divisor: int


Steps = dict[str, list[MiniBatch]]
"""adapter -> its optimizer steps, in order."""


def problem_order(n_rows: int, num_generations: int, length: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return the problem indices of a whole run: each `num_generations` times, in a new permutation per pass.

    The run is one long epoch, because TRL's RepeatSampler replays the order of epoch 0 after a resume in a later epoch.
    """
    indices: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(indices) < length:
        order = torch.randperm(n_rows, generator=generator) if shuffle else torch.arange(n_rows)
        indices += order.repeat_interleave(num_generations).tolist()
    return indices[:length]


def episode_rows(episodes: list[Episode], policy: dict[str, str], masks_truncated: bool) -> list[Row]:
    """Return one row per turn of the roles in `policy`, with its advantage, in the order of the episodes; with `masks_truncated`, truncated turns are masked."""
    return [
        Row(
            episode,
            turn,
            policy[turn.role],
            advantage=episode.advantage_of(turn),
            is_masked=masks_truncated and turn.finish_reason == "length",
        )
        for episode in episodes
        for turn in episode.turns
        if turn.role in policy
    ]


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    """Return the rows in a random order, drawn by the seed."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[i] for i in order.tolist()]


def mini_batches(rows: list[Row], size: int) -> list[MiniBatch]:
    """Cut one adapter's rows into ceil(len / size) optimizer steps of near-equal size; each loss is divided by its step's size."""
    n, k = len(rows), math.ceil(len(rows) / size)
    cuts = [n * i // k for i in range(k + 1)] if k else [0]
    return [MiniBatch(rows[a:b], b - a) for a, b in itertools.pairwise(cuts)]


def token_batches(rows: list[Row], step_tokens: int) -> list[MiniBatch]:
    """Cut rows, in order, into ceil(tokens / `step_tokens`) optimizer steps with near-equal numbers of completion tokens.

    Each has at least one row, so there are no more steps than rows. Each loss is divided by its step's size.
    """
    n, ends = len(rows), [0, *itertools.accumulate(len(row.turn.completion_ids) for row in rows)]
    k, cuts = min(n, -(-ends[-1] // step_tokens)), [0]
    for i in range(1, k):
        nearest = min(range(n + 1), key=lambda at: abs(ends[at] * k - ends[-1] * i))
        cuts.append(min(max(nearest, cuts[-1] + 1), n - (k - i)))
    return [MiniBatch(rows[a:b], b - a) for a, b in itertools.pairwise([*cuts, n])] if rows else []


def optimizer_steps(rows: list[Row], args: MultiRoleGRPOConfig) -> list[MiniBatch]:
    """Cut one adapter's rows of an iteration into optimizer steps by `MultiRoleGRPOConfig.updates`."""
    if args.updates == "tokens":
        return token_batches(rows, args.step_tokens or 1)
    return mini_batches(
        rows, max(1, len(rows)) if args.updates == "one" else args.step_rows or args.generation_batch_size
    )


def role_in_turn(role_order: Sequence[str] | str | None, iteration: int) -> str | None:
    """Return the role that an iteration (from 0) trains alone; None without an order, where it trains all."""
    order = listed(role_order)  # text, if the option was set after the configuration was made
    return order[iteration % len(order)] if order else None


def rows_in_turn(rows: list[Row], role_order: Sequence[str] | str | None, iteration: int) -> list[Row]:
    """Return the rows that an iteration (from 0) trains: those of the role whose turn it is in `role_order`, or all of them."""
    role = role_in_turn(role_order, iteration)
    return rows if role is None else [row for row in rows if row.turn.role == role]


def plan_steps(rows: list[Row], adapters: list[str], args: MultiRoleGRPOConfig) -> Steps:
    """Return the optimizer steps of every adapter on an iteration's rows."""
    rows_by_adapter = {name: [row for row in rows if row.adapter == name] for name in adapters}
    return {name: optimizer_steps(adapter_rows, args) for name, adapter_rows in rows_by_adapter.items()}


def later_rows(steps: Steps, num_iterations: int) -> list[Row]:
    """Return the rows that need old log-probs: those trained after a step of their adapter. For all others, the current log-probs are the old ones."""
    n_first = 1 if num_iterations == 1 else 0  # steps on rows that are not trained again
    later = [row for planned in steps.values() for mini_batch in planned[n_first:] for row in mini_batch.rows]
    return [row for row in later if not row.is_masked]


def loss_mass(rows: list[Row], loss_type: str) -> int:
    """Return the weight of a micro-batch's mean loss in its optimizer step: its trained tokens, or its rows."""
    if loss_type in ("bnpo", "dapo", "cispo", "vespo"):
        return trained_tokens(rows)
    return len(rows)


def trained_tokens(rows: list[Row]) -> int:
    """Count the completion tokens of rows that are not masked."""
    return sum(len(row.turn.completion_ids) for row in rows if not row.is_masked)


def padded(batch: list[Row]) -> int:
    """Count the tokens of a batch, with padding."""
    return len(batch) * max(row.length for row in batch)


def micro_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows into length-sorted batches of at most `max_tokens` padded tokens, rows x longest row (one row always fits)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def even_micro_batches(
    rows: list[Row], max_tokens: int, n: int,
    cut: Callable[[list[Row], int], list[list[Row]]] = micro_batches, size: Callable[[list[Row]], int] = padded,
) -> list[list[Row]]:  # fmt: skip
    """Cut rows into near-equal micro-batches for `n` processes, their number a multiple of `n` if rows suffice; the largest first."""
    max_batches = -(-len(cut(rows, max_tokens)) // n) * n
    fits = range(1, max_tokens)
    smallest = 1 + bisect_left(fits, True, key=lambda tokens: len(cut(rows, tokens)) <= max_batches)
    return sorted(cut(rows, smallest), key=size, reverse=True)


def _pad(sequences: list[list], value: float = 0.0, side: str = "right") -> Tensor:
    return pad_sequence([torch.tensor(s) for s in sequences], True, value, side)  # (N, width)


def collate(rows: list[Row], pad_id: int, device: torch.device, old_logprobs: str = "sampled") -> dict[str, Tensor]:
    """Return the inputs of TRL's `_compute_loss`: prompts (N, P) left-padded, completions (N, C) right-padded.

    With `old_logprobs="recomputed"`, TRL's loss takes the current log-probs of rows that have no old ones.
    """
    prompts, completions = [r.turn.prompt_ids for r in rows], [r.turn.completion_ids for r in rows]
    sampled = _pad([r.turn.logprobs for r in rows])  # (N, C)
    batch = {
        "prompt_ids": _pad(prompts, pad_id, "left"),
        "prompt_mask": _pad([[1] * len(ids) for ids in prompts], side="left"),
        "completion_ids": _pad(completions, pad_id),
        "completion_mask": _pad([[1] * len(ids) for ids in completions]),
        "sampling_per_token_logps": sampled,
        "advantages": torch.tensor([r.advantage for r in rows], dtype=torch.float32),  # (N,)
    }
    if old_logprobs == "sampled":
        batch["old_per_token_logps"] = sampled
    for name in ("old", "ref"):
        known = [logps for r in rows if (logps := getattr(r, f"{name}_logps")) is not None]
        if len(known) == len(rows):
            batch[f"{name}_per_token_logps"] = pad_sequence(known, batch_first=True)  # (N, C)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def left_aligned(
    input_ids: Tensor, attention_mask: Tensor, n_completion: int, multiple: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Move rows that TRL has padded on both sides to the left edge, so that causal attention never sees padding.

    `input_ids` and `attention_mask` are (N, P + C) with C = `n_completion`. Returns ids and labels (N, width), where labels are
    -100 outside completions, and for each completion token the index (N, C) of the output that scores it and whether it is
    a token or padding (N, C). `width` is a multiple of `multiple`.
    """
    n_prompt = attention_mask[:, :-n_completion].sum(1, keepdim=True)  # (N, 1)
    lengths = attention_mask.sum(1, keepdim=True)  # (N, 1)
    width = int(lengths.max())
    width += -width % (multiple or 1)
    shift = attention_mask.size(1) - n_completion - n_prompt  # (N, 1): left padding of each row
    positions = torch.arange(width, device=input_ids.device)[None]  # (1, width)
    ids = input_ids.gather(1, (positions + shift).clamp(max=input_ids.size(1) - 1))  # (N, width)
    labels = ids.masked_fill((positions < n_prompt) | (positions >= lengths), -100)  # (N, width)
    # output j scores token j + 1, so the first completion token is scored at n_prompt - 1
    at = n_prompt - 1 + torch.arange(n_completion, device=ids.device)[None]  # (N, C)
    return ids, labels, at.clamp(max=width - 2), at < lengths - 1
