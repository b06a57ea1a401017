"""Keys and values of finished rows, for later prompts that begin with the same tokens: a conversation's next turns.

They are kept in blocks of tokens. A block is found by its tokens and the number of the block before it, so that equal
beginnings are stored once; the first block of an adapter comes after that adapter's own number. When all slots are taken, the
block that was not used for longest makes room. Numbers are never given twice: what came after a block that is gone is never
found again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

BLOCK = 8
"""Tokens of a block."""


class PrefixCache:
    """Blocks of one version of the weights, at most `n_bytes` large together."""

    def __init__(self, empty_kv: Tensor, n_bytes: int) -> None:
        """`empty_kv` is (layers, 2, 0 rows, n_kv, 0 tokens, d). Memory is taken as it is written."""
        layers, _, _, n_kv, _, d = empty_kv.shape
        block = (layers, 2, n_kv, BLOCK, d)
        self.n_slots = n_bytes // (BLOCK * layers * 2 * n_kv * d * empty_kv.itemsize)
        self.kv = empty_kv.new_empty(self.n_slots, *block)
        self.blocks: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = OrderedDict()
        """(number of the block before, tokens) -> (number, slot), the longest unused first."""
        self.n_numbered = 0

    def find(self, adapter: int, ids: Sequence[int]) -> list[int]:
        """Slots of the blocks that `ids` begins with, under this adapter."""
        return [slot for _, slot in self._walk(adapter, ids)]

    def read(self, slots: list[int]) -> Tensor:
        """Keys and values (layers, 2, n_kv, tokens, d)."""
        return self.kv[slots].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    def write(self, adapter: int, ids: Sequence[int], kv_of: Callable[[int, int], Tensor]) -> None:
        """Store the whole blocks of `ids`. `kv_of(start, stop)` gives the keys and values (layers, 2, n_kv, stop - start, d)."""
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
        """(number, slot) of the blocks that `ids` begins with, which are now the ones used last."""
        keys, found, before = [], [], -1 - adapter
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = (before, tuple(ids[start : start + BLOCK]))
            if key not in self.blocks:
                break
            keys.append(key)
            found.append(self.blocks[key])
            before = found[-1][0]
        self._touch(keys)
        return found

    def _touch(self, keys: list[tuple[int, tuple[int, ...]]]) -> None:
        """Use the blocks of a sequence, the last one first: without those before it, it could not be found."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
