"""Compute the logits that tokens are sampled from, in three ways that are equal up to rounding (`kernels.Kernels.head`)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from multirole_cpu import packed_products
from multirole_cpu.half_model import products_in

N_FIRST = 2048
"""Words among which `RoundedHead` looks for a large logit: the first of a vocabulary are its commonest."""
PADDING = 32
"""Columns that `RoundedHead` adds to the weight, of which one is used: oneDNN multiplies blocks of this width."""


class SamplingHead(Protocol):
    """The rows of a head (V, H), which all adapters share."""

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Return float32 logits (N, V) of hidden states (N, H), in `buffer` or elsewhere; a row may lack a number that is the same for all its words."""


def factors_of(hidden: Tensor) -> AbstractContextManager[None]:
    """Return the context in which float32 products round their factors to bfloat16 if the hidden states are bfloat16.

    Bfloat16 products would round a logit of 20 by up to 0.06.
    """
    return products_in("bf16") if hidden.dtype == torch.bfloat16 else nullcontext()


class PlainHead:
    """Multiplies with the weight in float32 as it is stored."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.float()

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        with factors_of(hidden):
            return torch.mm(hidden.float(), self.weight.t(), out=buffer)


class PackedHead:
    """Multiplies with the weight in float32 as oneDNN packs it."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = packed_products.pack(weight.float())

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        with factors_of(hidden):
            return packed_products.product(hidden.float(), self.packed)


class RoundedHead:
    """Multiplies with a packed bfloat16 weight, which rounds the difference of each logit to a large one of its row, instead of the logit itself.

    So the likely words, whose differences are small, are rounded by less than 0.01. The large logit is the largest of the first `N_FIRST`
    words, computed in float32. It is subtracted by the product: the hidden state is extended by its negative, and the weight by a column of ones.
    """

    def __init__(self, weight: Tensor) -> None:
        n_words, self.size = weight.shape
        extended = torch.zeros(n_words, self.size + PADDING, dtype=torch.bfloat16)
        extended[:, : self.size], extended[:, self.size] = weight, 1.0
        self.packed, self.first = packed_products.pack(extended), weight[:N_FIRST].float()

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        with factors_of(hidden):
            large = (hidden.float() @ self.first.t()).amax(1)  # (N,)
        extended = hidden.new_zeros(len(hidden), self.size + PADDING)
        extended[:, : self.size], extended[:, self.size] = hidden, -large
        return buffer.copy_(packed_products.product(extended, self.packed))


SAMPLING_HEADS: dict[str, type[PlainHead] | type[PackedHead] | type[RoundedHead]] = {
    "plain": PlainHead,
    "packed": PackedHead,
    "bfloat16": RoundedHead,
}
"""Name of the kernel -> the head. "bfloat16" takes bfloat16 hidden states alone."""
