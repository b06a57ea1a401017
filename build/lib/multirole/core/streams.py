"""Datasets that can only be read from front to back (`datasets.IterableDataset`)."""

from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

MOST_EVALUATION_ROWS = 100_000
"""An evaluation set is read to its end; a stream without an end would be read for ever."""


class StreamedRows(TorchDataset):
    """The rows of a stream by their place in the run: row i is the i-th that is read, in as many passes as needed.

    Rows are read as they are asked for, and the last `n_kept` stay. Asking for an earlier one reads the stream again from its
    front, so that a resumed run gets the rows of the unbroken one. Every process reads the whole stream.

    Args:
        stream: at least one row in each pass.
        length: rows of the whole run.
        n_kept: rows that may be asked for once more.
        index_column: the column in which every row gets its place.
    """

    def __init__(self, stream: IterableDataset, length: int, n_kept: int, index_column: str) -> None:
        self.stream, self.length, self.index_column = stream, length, index_column
        self._recent: deque[dict[str, Any]] = deque(maxlen=n_kept)
        self._restart()

    def __len__(self) -> int:
        return self.length

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
                raise ValueError(f"`train_dataset` gave no row in pass {epoch + 1} over it.")


def read_whole(name: str, stream: IterableDataset) -> Dataset:
    """An evaluation set that is a stream, as a `Dataset`; ValueError where it is longer than `MOST_EVALUATION_ROWS`."""
    rows = list(islice(stream, MOST_EVALUATION_ROWS + 1))
    if len(rows) > MOST_EVALUATION_ROWS:
        raise ValueError(
            f"`{name}` is a stream of more than {MOST_EVALUATION_ROWS} rows, which an evaluation would read to its end. Pass a part of it, "
            f"such as `{name}.take(500)`."
        )
    return Dataset.from_list(rows)


def first_row(name: str, stream: IterableDataset) -> dict[str, Any]:
    """The first row of a stream; ValueError where it has none."""
    for row in stream:
        return row
    raise ValueError(f"`{name}` is empty.")
