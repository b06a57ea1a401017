"""Pack rows with a common prefix into one sequence, in which every shared token is computed once.

The voters of a problem and its n episodes have the same prompt, and a conversation's later prompts repeat its earlier turns.
Sorted by their tokens, such rows form a tree: each row shares a prefix with the row before it and adds the rest, its *block*.
A token attends to the earlier tokens of its row, wherever these are packed, and keeps its position in the row, so that
log-probs and gradients are those of separate rows.

Two rows share a token only if they agree on the next one, too (as in TRL 1.16's AsyncGRPO, `trl.experimental.async_grpo`):
every position then has one label, which TRL's fused head needs, at the cost of one token per branch.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirole.update.rows import Row

MIN_SHARED_FRACTION = 0.05
"""Smallest fraction of tokens saved for which rows are packed."""
MIN_PARAMETERS = 10_000_000
"""Smallest model for which rows are packed; for smaller ones the overhead in Python exceeds the tokens saved."""
MIN_RELATIVE_LENGTH = 0.75
"""Blocks are attended in one call if each has at least this fraction of the longest one's length."""
CPU_SCORES = 2**18
"""Largest number of scores per head in a call on a CPU, padding included, for several blocks: larger tensors leave the processor's cache."""


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of similar size, attended in one call: S blocks, padded to Q queries and K keys.

    Args:
        queries: (S * Q) indices of the queries in the packed sequence; padding repeats an index.
        keys: (S * K) indices of the keys.
        mask: (S, 1, Q, K) True where a query attends to a key.
        outputs: (tokens,) indices of the S * Q outputs that are not padding, in the order of the blocks.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    outputs: Tensor

    @cached_property
    def bias(self) -> Tensor:
        """The mask (S, 1, 1, Q, K) as a float32 tensor to add to scores: 0 where it is True, else -inf."""
        return torch.zeros(self.mask.shape, device=self.mask.device).masked_fill_(~self.mask, -torch.inf)[:, :, None]

    @cached_property
    def is_query(self) -> Tensor:
        """1 for queries and 0 for padding, float32 (S, 1, 1, Q, 1)."""
        n_blocks, _, n_queries, _ = self.mask.shape
        inside = torch.zeros(n_blocks * n_queries, device=self.mask.device).index_fill_(0, self.outputs, 1.0)
        return inside.view(n_blocks, 1, 1, n_queries, 1)


@dataclass(frozen=True)
class BlockSequence:
    """The blocks of a packed sequence one after another, without padding, as `torch.nn.attention.varlen` takes them.

    Args:
        keys: (total keys,) indices of each block's keys in the packed sequence: its whole row.
        query_ends, key_ends: (blocks + 1,) int32, where each block ends; the first entry is 0.
        max_queries, max_keys: the largest block.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class Packing:
    """A micro-batch of R rows as one sequence of N tokens.

    Args:
        ids, positions, labels: (1, N). A label is the next token where it belongs to a completion, and -100 elsewhere.
        scores: (R, C) index of the output that scores each completion token, padded with 0.
        is_token: (R, C) False on padding.
        paths: of each row, the place of each of its tokens in the sequence; on the CPU.
        blocks: number of tokens that each row adds; they follow each other in the sequence.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    scores: Tensor
    is_token: Tensor
    paths: list[Tensor]
    blocks: list[int]

    @cached_property
    def groups(self) -> list[BlockGroup]:
        """The attention, in calls for blocks of similar size."""
        return [block_group([(self.paths[i], self.blocks[i]) for i in m], self.ids.device) for m in self._members]

    @cached_property
    def order(self) -> Tensor:
        """(N,) index of each token's output in the concatenated outputs of all groups."""
        packed = [self.paths[i][len(self.paths[i]) - self.blocks[i] :] for i in itertools.chain(*self._members)]
        return torch.cat(packed).argsort().to(self.ids.device)

    @cached_property
    def _members(self) -> list[list[int]]:
        sizes = [(block, len(path)) for block, path in zip(self.blocks, self.paths, strict=True)]
        return list(similar_blocks(sizes, CPU_SCORES if self.ids.device.type == "cpu" else None))

    @cached_property
    def sequence(self) -> BlockSequence:
        """The attention in one call without padding."""
        members = [i for i, block in enumerate(self.blocks) if block]
        sizes = torch.tensor([[self.blocks[i], len(self.paths[i])] for i in members])  # (blocks, 2)
        ends = torch.nn.functional.pad(sizes.cumsum(0), (0, 0, 1, 0)).int().to(self.ids.device)  # (blocks + 1, 2)
        keys = torch.cat([self.paths[i] for i in members]).to(self.ids.device)
        largest = sizes.amax(0).tolist()
        return BlockSequence(keys, ends[:, 0].contiguous(), ends[:, 1].contiguous(), *largest)


def tokens_of(row: Row) -> Tensor:
    """Return the tokens of the row's prompt and completion, (length,)."""
    return torch.tensor(row.turn.prompt_ids + row.turn.completion_ids)


def shared_length(previous: Tensor, row: Tensor) -> int:
    """Count the first tokens of `row` that a tree which holds `previous` has already."""
    n = min(len(previous), len(row))
    is_equal = previous[:n] == row[:n]
    common = n if is_equal.all() else int(is_equal.int().argmin())
    return common if common == len(previous) == len(row) else max(0, common - 1)


def in_tree_order(rows: Iterable[Row], key: Callable[[Row], int]) -> list[Row]:
    """Sort rows so that each shares the longest prefix with the one before; rows of different `key` share nothing."""
    return sorted(rows, key=lambda row: (key(row), row.turn.prompt_ids + row.turn.completion_ids))


def block_lengths(rows: list[Row], key: Callable[[Row], int]) -> list[int]:
    """Count the tokens that each row adds to the tree of the rows before it; `rows` are in tree order."""
    lengths, before = [], None
    for row in rows:
        tokens = tokens_of(row)
        shared = shared_length(before[1], tokens) if before and before[0] == key(row) else 0
        lengths.append(len(tokens) - shared)
        before = key(row), tokens
    return lengths


def tree_size(rows: list[Row], key: Callable[[Row], int]) -> int:
    """Count the tokens of a tree of rows in tree order."""
    return sum(block_lengths(rows, key))


def tree_batches(rows: list[Row], max_tokens: int, key: Callable[[Row], int]) -> list[list[Row]]:
    """Cut rows into micro-batches in tree order; each is one tree of at most `max_tokens` tokens (a single row always fits)."""
    batches: list[list[Row]] = []
    n_tokens = 0
    ordered = in_tree_order(rows, key)
    for row, block in zip(ordered, block_lengths(ordered, key), strict=True):
        if batches and n_tokens + block <= max_tokens:
            batches[-1].append(row)
            n_tokens += block
        else:
            batches.append([row])
            n_tokens = row.length
    return batches


def packing_pays(rows: list[Row], n_parameters: int, key: Callable[[Row], int]) -> bool:
    """Return whether rows share enough tokens, and the model is large enough, for packing to save time."""
    if n_parameters < MIN_PARAMETERS:
        return False
    total = sum(row.length for row in rows)
    return total - sum(block_lengths(in_tree_order(rows, key), key)) >= MIN_SHARED_FRACTION * total


def pack(rows: list[Row], key: Callable[[Row], int], device: torch.device) -> Packing:
    """Pack rows, which are in tree order, into one sequence."""
    paths: list[Tensor] = []  # of each row: the place of each of its tokens in the sequence
    ids, positions, blocks, n = [], [], block_lengths(rows, key), 0
    for row, block in zip(rows, blocks, strict=True):
        tokens = tokens_of(row)
        shared = len(tokens) - block
        paths.append(torch.cat([paths[-1][:shared] if shared else tokens[:0], torch.arange(n, n + block)]))
        ids.append(tokens[shared:])
        positions.append(torch.arange(shared, len(tokens)))
        n += block
    labels, width = torch.full((n,), -100), max(len(row.turn.completion_ids) for row in rows)
    scores, is_token = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
        first, count = len(row.turn.prompt_ids), len(row.turn.completion_ids)
        places = path[first - 1 : first + count - 1]  # output j scores token j + 1
        labels[places] = torch.tensor(row.turn.completion_ids)
        scores[i, :count], is_token[i, :count] = places, True
    tensors = torch.cat(ids)[None], torch.cat(positions)[None], labels[None], scores, is_token
    return Packing(*(tensor.to(device) for tensor in tensors), paths, blocks)  # type: ignore[arg-type, call-arg]


def similar_blocks(sizes: list[tuple[int, int]], max_scores: int | None = None) -> Iterator[list[int]]:
    """Group the indices of blocks, given as (queries, keys), that may be padded to one size, of at most `max_scores` pairs of both.

    A single block may have more. Empty blocks are left out.
    """
    order = sorted((i for i, (queries, _) in enumerate(sizes) if queries), key=lambda i: sizes[i], reverse=True)
    group: list[int] = []
    for i in order:
        n_queries, n_keys = sizes[group[0]][0] if group else 0, max(sizes[j][1] for j in [*group, i])
        is_full = max_scores is not None and (len(group) + 1) * n_queries * n_keys > max_scores
        is_smaller = group and any(
            size < MIN_RELATIVE_LENGTH * first for size, first in zip(sizes[i], sizes[group[0]], strict=True)
        )
        if is_full or is_smaller:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def block_group(blocks: list[tuple[Tensor, int]], device: torch.device) -> BlockGroup:
    """Build a group of blocks, each given as the indices of its row's tokens and how many of the last ones it adds."""
    paths = [path for path, _ in blocks]
    lengths, counts = torch.tensor([len(path) for path in paths]), torch.tensor([count for _, count in blocks])  # (S,)
    keys = pad_sequence(paths, True)  # (S, K)
    queries = pad_sequence([path[len(path) - count :] for path, count in blocks], True)  # (S, Q)
    at = (lengths - counts)[:, None] + torch.arange(queries.size(1))  # (S, Q) positions of the queries
    to = torch.arange(keys.size(1))[None, None]  # (1, 1, K)
    mask = (to <= at[:, :, None]) & (to < lengths[:, None, None])  # (S, Q, K)
    outputs = (torch.arange(queries.size(1)) < counts[:, None]).flatten().nonzero()[:, 0]
    return BlockGroup(*(tensor.to(device) for tensor in (queries.flatten(), keys.flatten(), mask[:, None], outputs)))


def block_runs(rows: list[Row], blocks: list[int], key: Callable[[Row], int]) -> list[tuple[int, int]]:
    """Return the consecutive runs (key, number of tokens) of a packed sequence."""
    pairs = zip(map(key, rows), blocks, strict=True)
    return [(k, sum(block for _, block in run)) for k, run in itertools.groupby(pairs, key=lambda pair: pair[0])]
