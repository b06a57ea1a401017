"""The distillation loss: reverse KL of a role's policy from its teacher's, on the tokens that the role sampled.

With a teacher in this process it is that of TRL's `DistillationTrainer` at `beta=1`: KL(student || teacher) over the whole vocabulary at each token,
by TRL's own kernel. A server tells the log-probs of sampled tokens alone, which estimate it: the reward of a token is then log q - log p, with p the
student's and q the teacher's probability, and the loss that reward's PPO loss. Its expectation over the sampled token has the gradient of the KL.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from multirole.update.passes.logprobs import Head
from multirole.update.passes.model_passes import MicroBatch

REVERSE = 1.0
"""TRL's `beta` of the reverse KL."""


@dataclass(frozen=True)
class Distillation:
    """The loss of the roles that have a teacher.

    Args:
        weights: role -> weight, for these roles.
        temperature: of the sampled distributions, the teacher's included.
        clip: bounds of the ratio in the loss of a token's reward (PPO).
        heads: role -> head of its teacher, for teachers in this process.
    """

    weights: Mapping[str, float]
    temperature: float
    clip: tuple[float, float]
    heads: dict[str, Head] = field(default_factory=dict)

    def applies_to(self, micro: MicroBatch) -> bool:
        """Return whether a row of a micro-batch has a teacher."""
        return any(row.turn.role in self.weights for row in micro.rows)

    def loss(self, micro: MicroBatch, n_tokens: int) -> Tensor:
        """Return a micro-batch's part of the loss, whose parts sum to the mean over `n_tokens` of weight x KL; set its `teacher_kl`.

        Call it after the forward pass of a micro-batch with a `watch`, in its autocast.
        """
        mask = micro.batch["completion_mask"].bool()  # (N, C)
        total, micro.teacher_kl = micro.logps.new_zeros(()), torch.zeros_like(micro.logps)
        for role, weight in self.weights.items():
            index = [i for i, row in enumerate(micro.rows) if row.turn.role == role]
            if not index:
                continue
            inside = torch.zeros_like(mask)
            inside[index] = mask[index]
            terms, kl = self._divergence(micro, role, index, inside)  # (tokens,)
            micro.teacher_kl[inside] = kl.detach().to(micro.teacher_kl.dtype)
            total = total + weight * terms.sum()
        return total / n_tokens

    def _divergence(self, micro: MicroBatch, role: str, index: list[int], inside: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the KL of the tokens `inside` (N, C) of the rows of one role, row by row."""
        device = micro.logps.device
        if role in self.heads:
            assert micro.watch is not None
            student, teacher = micro.watch.head, self.heads[role]
            states = torch.cat([row.teacher_states for i in index if (row := micro.rows[i]).teacher_states is not None])
            kl, _ = ChunkedDivergenceFunction.apply(
                micro.watch.states[inside], student.weight, student.bias, states.to(device), teacher.weight, teacher.bias, REVERSE,
                self.temperature, student.scale, student.softcap, teacher.scale, teacher.softcap,
            )  # fmt: skip
            return kl, kl
        teacher_logps = torch.cat(
            [row.teacher_logps for i in index if (row := micro.rows[i]).teacher_logps is not None]
        )
        logps = micro.logps[inside]
        gap = logps.detach() - teacher_logps.to(logps)  # (tokens,)
        ratio = (logps - micro.batch["old_per_token_logps"][inside]).exp()
        low, high = self.clip
        return torch.maximum(ratio * gap, ratio.clamp(1 - low, 1 + high) * gap), gap
