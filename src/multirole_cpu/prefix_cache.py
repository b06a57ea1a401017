"""Cache keys and values of finished rows, for later prompts with the same prefix, such as a conversation's next turns.

They are stored in blocks of tokens. The key of a block is its tokens and the number of the block before it (for a first block,
a number of its adapter), so that equal prefixes are stored once. When all slots are taken, the least recently used block is
evicted. Numbers are never reused, so the successors of an evicted block are never found again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

BLOCK = 8
"""Tokens per block."""


class PrefixCache:
    """LRU cache of blocks for one version of the weights, of at most `n_bytes`."""

    def __init__(self, empty_kv: Tensor, n_bytes: int) -> None:
        """`empty_kv` is (layers, 2, 0 rows, n_kv, 0 tokens, d). Memory is allocated on demand."""
        layers, _, _, n_kv, _, d = empty_kv.shape
        block = (layers, 2, n_kv, BLOCK, d)
        self.n_slots = n_bytes // (BLOCK * layers * 2 * n_kv * d * empty_kv.itemsize)
        self.kv = empty_kv.new_empty(self.n_slots, *block)
        self.blocks: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = OrderedDict()
        """(number of the block before, tokens) -> (number, slot), the longest unused first."""
        self.n_numbered = 0

    def find(self, adapter: int, ids: Sequence[int]) -> list[int]:
        """Return the slots of the cached blocks that `ids` begins with, for this adapter."""
        return [slot for _, slot in self._walk(adapter, ids)]

    def read(self, slots: list[int]) -> Tensor:
        """Return the keys and values (layers, 2, n_kv, tokens, d) in these slots."""
        return self.kv[slots].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    def write(self, adapter: int, ids: Sequence[int], kv_of: Callable[[int, int], Tensor]) -> None:
        """Store the complete blocks of `ids`. `kv_of(start, stop)` returns keys and values (layers, 2, n_kv, stop - start, d)."""
        known = self._walk(adapter, ids)
        start = len(known) * BLOCK
        stop = min(len(ids) // BLOCK, len(known) + self.n_slots) * BLOCK
        if start >= stop:
            return
        before, keys, slots = known[-1][0] if known else -1 - adapter, [], []
        for first in range(start, stop, BLOCK):
            slots.append(len(self.blocks) if len(self.blocks) < self.n_slots else self.blocks.popitem(last=False)[1][1])
            keys.append((before, tuple(ids[first : first + BLOCK])))
            before = self.n_numbered
            self.n_numbered += 1
            self.blocks[keys[-1]] = before, slots[-1]
        self._touch(keys)
        parts = kv_of(start, stop).unflatten(3, (-1, BLOCK))  # (layers, 2, n_kv, blocks, BLOCK, d)
        self.kv[slots] = parts.permute(3, 0, 1, 2, 4, 5)

    def _walk(self, adapter: int, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (number, slot) of the cached blocks that `ids` begins with, and mark them as used."""
        keys, blocks, before = [], [], -1 - adapter
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = (before, tuple(ids[start : start + BLOCK]))
            if key not in self.blocks:
                break
            keys.append(key)
            blocks.append(self.blocks[key])
            before = blocks[-1][0]
        self._touch(keys)
        return blocks

    def _touch(self, keys: list[tuple[int, tuple[int, ...]]]) -> None:
        """Mark the blocks of a sequence as used, from last to first: a block cannot be found without those before it."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
