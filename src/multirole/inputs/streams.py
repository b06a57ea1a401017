"""Rows of a dataset with their indices; read datasets that support only sequential access (`datasets.IterableDataset`)."""

from collections import deque
from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from multirole.options import MultiRoleGRPOConfig

ITERATIONS_AHEAD = 4
"""Iterations whose rows may be in the hands of the data loader."""
MAX_EVALUATION_ROWS = 100_000
"""Largest evaluation set that is read from a stream, which may have no end."""


def is_transformed(dataset: Any) -> bool:
    """Return whether a dataset makes its rows by a transform (`set_transform`), so that reading them twice may give others."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


class IndexedRows(TorchDataset):
    """The rows of a dataset, each with its index in the column `index_column`.

    The dataset may format its rows. Where it transforms them (`set_transform`), they are read once, so that the workflow, all episodes
    of a problem and the reward functions see the same row, whatever the transform draws.
    """

    def __init__(self, dataset: Dataset, index_column: str) -> None:
        self.dataset: Dataset | list[dict[str, Any]] = list(dataset) if is_transformed(dataset) else dataset
        self.index_column = index_column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset[index] | {self.index_column: index}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row | {self.index_column: i} for i, row in enumerate(self.dataset))


class StreamedRows(TorchDataset):
    """Index the rows of a stream: row i is the i-th that is read, in as many passes as needed.

    Rows are read on demand, and the last `n_kept` are cached. An earlier index restarts the stream, so that a resumed run gets
    the same rows as an unbroken one. Every process reads the whole stream.

    Args:
        stream: at least one row in each pass.
        length: number of rows of the whole run.
        n_kept: number of latest rows that can be read again without a restart.
        index_column: name of the column that is added with the row's index.
    """

    def __init__(self, stream: IterableDataset, length: int, n_kept: int, index_column: str) -> None:
        self.stream, self.length, self.index_column = stream, length, index_column
        self._recent: deque[dict[str, Any]] = deque(maxlen=n_kept)
        self._restart()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(self.length))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < self._n_read - len(self._recent):
            self._restart()
        while index >= self._n_read:
            self._recent.append(next(self._rows) | {self.index_column: self._n_read})
            self._n_read += 1
        return dict(self._recent[index - self._n_read])

    def _restart(self) -> None:
        self._recent.clear()
        self._n_read = 0
        self._rows = self._passes()

    def _passes(self) -> Iterator[dict[str, Any]]:
        for epoch in count():
            self.stream.set_epoch(epoch)  # a shuffled stream gets another order
            n_rows = 0
            for n_rows, row in enumerate(self.stream, start=1):
                yield row
            if not n_rows:
                raise ValueError(
                    f"`train_dataset` gave no row in pass {epoch + 1}. Pass a stream that yields rows in every pass, such as `IterableDataset.from_generator(...)`."
                )


def stream_rows(stream: IterableDataset, args: MultiRoleGRPOConfig, index_column: str) -> StreamedRows:
    """Return the rows of a run on a stream, shuffled as TRL shuffles streams; ValueError where its length would have to be known."""
    args.check(is_stream=True)
    ordered = stream.shuffle(seed=args.seed) if args.shuffle_dataset else stream
    n_kept = (ITERATIONS_AHEAD + args.max_staleness) * args.n_problems
    return StreamedRows(ordered, args.max_steps * args.n_problems, n_kept, index_column)


def read_whole(name: str, stream: IterableDataset) -> Dataset:
    """Read an evaluation set from a stream into a `Dataset`; ValueError if it is longer than `MAX_EVALUATION_ROWS`."""
    rows = list(islice(stream, MAX_EVALUATION_ROWS + 1))
    if len(rows) > MAX_EVALUATION_ROWS:
        raise ValueError(
            f"`{name}` is a stream of more than {MAX_EVALUATION_ROWS} rows, which an evaluation would read to its end. Pass a part of it, "
            f"such as `{name}.take(500)`."
        )
    names = dict.fromkeys(chain.from_iterable(rows))  # `Dataset.from_list` takes the columns of the first row alone
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


def first_row(name: str, stream: IterableDataset) -> dict[str, Any]:
    """Return the first row of a stream; ValueError if it has none."""
    for row in stream:
        return row
    raise ValueError(f"`{name}` is empty.")
