"""Turns -> rows -> mini-batches (one optimizer step each) -> micro-batches (one forward pass each) -> tensors.

Every turn is one row: its prompt, which may quote other roles, is masked; its completion is trained, end-of-turn token
included. So the rows' completion masks partition the trained tokens by role.
"""

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.types import Episode, Turn


@dataclass(eq=False)
class Row:
    """One turn as a training sequence.

    `advantage` is the weight of its tokens' log-ratios. `old_logps` and `ref_logps` (C,) are the trainer's own log-probs of
    the completion under the weights that sampled and under the frozen base, where the loss needs them. A row that `is_masked`
    (`mask_truncated_completions`) has no part in the loss, but is counted where the loss is a mean over rows, as in TRL.
    """

    episode: Episode
    turn: Turn
    adapter: str
    advantage: float = 0.0
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    is_masked: bool = False

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.turn.prompt_ids) + len(self.turn.completion_ids)


MiniBatch = tuple[list[Row], int]
"""The rows of one optimizer step and the divisor of their loss sum."""
Steps = dict[str, list[MiniBatch]]
"""adapter -> its optimizer steps, in order."""


def problem_order(n_rows: int, num_generations: int, length: int, seed: int, shuffle: bool = True) -> list[int]:
    """The indices of a whole run's problems: each `num_generations` times, in a fresh permutation per pass.

    TRL's RepeatSampler replays the order of epoch 0 after a resume in a later epoch; one long epoch cannot.
    """
    drawn: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(drawn) < length:
        order = torch.randperm(n_rows, generator=generator) if shuffle else torch.arange(n_rows)
        drawn += order.repeat_interleave(num_generations).tolist()
    return drawn[:length]


def mini_batches(rows: list[Row], size: int) -> list[MiniBatch]:
    """Cut one adapter's rows into ceil(len / size) optimizer steps of near-equal size, each divided by its own."""
    n, k = len(rows), math.ceil(len(rows) / size)
    cuts = [n * i // k for i in range(k + 1)] if k else [0]
    return [(rows[a:b], b - a) for a, b in itertools.pairwise(cuts)]


def token_batches(rows: list[Row], step_tokens: int) -> list[MiniBatch]:
    """Cut rows, in their order, into ceil(tokens / `step_tokens`) optimizer steps of near-equal completion tokens.

    Each holds at least one row, so there are no more steps than rows, and each is divided by its own size.
    """
    n, ends = len(rows), [0, *itertools.accumulate(len(row.turn.completion_ids) for row in rows)]
    k, cuts = min(n, -(-ends[-1] // step_tokens)), [0]
    for i in range(1, k):
        nearest = min(range(n + 1), key=lambda at: abs(ends[at] * k - ends[-1] * i))
        cuts.append(min(max(nearest, cuts[-1] + 1), n - (k - i)))
    return [(rows[a:b], b - a) for a, b in itertools.pairwise([*cuts, n])] if rows else []


def optimizer_steps(rows: list[Row], args: MultiRoleGRPOConfig) -> list[MiniBatch]:
    """One adapter's rows of an iteration as its optimizer steps (`MultiRoleGRPOConfig.updates`)."""
    if args.updates == "tokens":
        return token_batches(rows, args.step_tokens or 1)
    return mini_batches(rows, max(1, len(rows)) if args.updates == "one" else args.generation_batch_size)


def loss_mass(rows: list[Row], loss_type: str) -> int:
    """What TRL's loss of a micro-batch, a mean, weighs in its optimizer step: its trained tokens or its rows."""
    if loss_type in ("bnpo", "dapo", "cispo", "vespo"):
        return trained_tokens(rows)
    return len(rows)


def trained_tokens(rows: list[Row]) -> int:
    """Completion tokens of the rows that have a part in the loss."""
    return sum(len(row.turn.completion_ids) for row in rows if not row.is_masked)


def padded(batch: list[Row]) -> int:
    """Tokens of a batch with its padding."""
    return len(batch) * max(row.length for row in batch)


def micro_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Length-sorted batches whose padded size, rows x longest row, stays within `max_tokens` (one row always fits)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def even_micro_batches(rows: list[Row], max_tokens: int, n: int) -> list[list[Row]]:
    """Micro-batches of near-equal padded size for `n` processes, no more than a multiple of `n`; the largest first."""
    most = -(-len(micro_batches(rows, max_tokens)) // n) * n
    fits = range(1, max_tokens)
    smallest = 1 + bisect_left(fits, True, key=lambda size: len(micro_batches(rows, size)) <= most)
    return sorted(micro_batches(rows, smallest), key=padded, reverse=True)


def _pad(sequences: list[list], value: float = 0.0, side: str = "right") -> Tensor:
    return pad_sequence([torch.tensor(s) for s in sequences], True, value, side)  # (N, width)


def collate(rows: list[Row], pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """The inputs of TRL's `_compute_loss`: prompts (N, P) left-padded, completions (N, C) right-padded."""
    prompts, completions = [r.turn.prompt_ids for r in rows], [r.turn.completion_ids for r in rows]
    sampled = _pad([r.turn.logprobs for r in rows])  # (N, C)
    batch = {
        "prompt_ids": _pad(prompts, pad_id, "left"),
        "prompt_mask": _pad([[1] * len(ids) for ids in prompts], side="left"),
        "completion_ids": _pad(completions, pad_id),
        "completion_mask": _pad([[1] * len(ids) for ids in completions]),
        "sampling_per_token_logps": sampled,
        "old_per_token_logps": sampled,
        "advantages": torch.tensor([r.advantage for r in rows], dtype=torch.float32),  # (N,)
    }
    for name in ("old", "ref"):
        known = [logps for r in rows if (logps := getattr(r, f"{name}_logps")) is not None]
        if len(known) == len(rows):
            batch[f"{name}_per_token_logps"] = pad_sequence(known, batch_first=True)  # (N, C)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def left_aligned(
    input_ids: Tensor, attention_mask: Tensor, n_completion: int, multiple: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows that TRL has padded on both sides, moved to the left edge; padding is then last, and causal attention blind to it.

    From ids and mask (N, P + C) with C = `n_completion`: ids and labels (N, width), labels being -100 outside completions;
    and for the completion tokens the position (N, C) of the output that scores each, and whether there is one (N, C).
    `width` is a multiple of `multiple`.
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
