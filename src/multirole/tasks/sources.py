"""Rows of the paper's tasks: pinned files of the Hugging Face Hub, or your own files in the same schema.

Every pinned file is named by its SHA-256, and the number of rows is checked too: a run on other bytes never passes for
a run on the paper's data. The authors pin nothing; the revisions and checksums of `math.py` and `code.py` were
published by a follow-up project (MaoMaoLYJ/ASPECT), and the files were not downloaded when this was written.

`data=None` takes the files from the local Hub cache, else downloads them. `data=PATH` takes a .parquet, .jsonl or .json
file, or a folder of such files: a copy of the pinned files (same SHA-256, under any name) counts as the pinned dataset,
anything else as your own rows. Both are split by the same rule.

A broken row is left out and counted by reason; more than 1 % of them stop the run. A question that occurs again is
kept in the pinned datasets, whose splits are the paper's, and left out of your own rows, where the copy in the validation
split wins, so that no validation question is trained on; either is counted.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import huggingface_hub  # lazy: httpx is imported by the first use, not here
import numpy as np

from multirole.core.types import Problem
from multirole.tasks.splits import SPLITS

logger = logging.getLogger(__name__)

SPLIT_SEED = 42
MOST_BROKEN = 0.01
SUFFIXES = (".parquet", ".jsonl", ".json")
CONNECT_SECONDS = 5.0

Row = dict[str, object]
Stamp = tuple[str, Path, int, int]
"""Name, place, size and time of change of a file: what a cached reading depends on."""


class DataError(ValueError):
    """The rows are not what they must be. Nothing was trained or scored."""


class DataNotFound(FileNotFoundError):
    """The rows are not on this machine and could not be fetched."""


class BadRow(ValueError):
    """One row cannot become a problem; its message is the reason under which it is counted, for example "no_tests"."""


@dataclass(frozen=True)
class Pin:
    """One version of a public dataset: `files` are (path in the repository, SHA-256), in the order of their rows."""

    repo: str
    config: str
    revision: str
    files: tuple[tuple[str, str], ...]
    rows: int
    note: str = ""

    def download_command(self, target: str = "DIR") -> str:
        """What fetches exactly these files on a machine that has a connection."""
        names = " ".join(name for name, _ in self.files)
        return f"hf download {self.repo} {names} --repo-type dataset --revision {self.revision} --local-dir {target}"


@dataclass(frozen=True)
class Layout:
    """How rows become problems: their columns, `to_problem` (raises BadRow), and number of rows -> of test rows."""

    columns: tuple[str, ...]
    optional: tuple[str, ...]
    to_problem: Callable[[Row], Problem]
    n_test: Callable[[int], int]


@dataclass(frozen=True)
class TaskData:
    """Both splits, and what a run's provenance says about them."""

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    description: dict[str, object]

    def take(self, split: str, count: int | None) -> list[Problem]:
        """The first `count` problems of a split, or all of them."""
        if split not in SPLITS:
            raise ValueError(
                f"got split={split!r}: the paper's tasks have no such split; write 'train' or 'validation'"
            )
        found = self.train if split == "train" else self.validation
        if count is not None and not 0 < count <= len(found):
            raise DataError(
                f"got count={count} for the {split} split: it holds {len(found)} problems, and fewer than asked for "
                f"would be another experiment; write 1 <= count <= {len(found)}, or None for all of them"
            )
        return list(found[:count])


def load(pin: Pin, layout: Layout, data: str | Path | None = None) -> TaskData:
    """Find, verify, read and split the rows. Raises DataNotFound or DataError; keeps the last readings in memory."""
    named = _from_hub(pin) if data is None else _from_disk(pin, Path(data).expanduser())
    stamps = tuple((name, path, path.stat().st_size, path.stat().st_mtime_ns) for name, path in named)
    return _load(pin, layout, stamps, data is None)


def forget_rows() -> None:
    """Free the readings that are kept in memory: the code dataset holds about 2 GB of tests."""
    _load.cache_clear()


def split_order(n_rows: int, n_test: int) -> tuple[list[int], list[int]]:
    """Row numbers of (test, train).

    The permutation of `datasets`: `train_test_split(test_size=..., seed=42)` and `shuffle(seed=42)` followed by "the
    first n_test rows" both give it.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(n_rows).tolist()
    return order[:n_test], order[n_test:]


def question_id(task: str, question: str) -> str:
    """`math/0123456789ab`: the same question has the same id in every file and version."""
    return f"{task}/{hashlib.sha1(question.encode(), usedforsecurity=False).hexdigest()[:12]}"


def text_of(row: Row, column: str, reason: str) -> str:
    """A column that must hold text; BadRow(reason) where it is missing, empty or something else."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(reason)
    return value


# ---- finding the files


def _from_hub(pin: Pin) -> list[tuple[str, Path]]:
    """The pinned files from the cache, else downloaded; no retries before we know that the Hub answers at all."""
    where = {"repo_id": pin.repo, "repo_type": "dataset", "revision": pin.revision}
    cached = {name: huggingface_hub.try_to_load_from_cache(filename=name, **where) for name, _ in pin.files}
    paths = {name: Path(found) for name, found in cached.items() if isinstance(found, str)}
    missing = [name for name, _ in pin.files if name not in paths]
    if missing:
        from huggingface_hub.errors import EntryNotFoundError, HTTPError  # 0.3 s, needed here only

        try:
            first = huggingface_hub.hf_hub_url(filename=missing[0], **where)
            huggingface_hub.get_hf_file_metadata(first, timeout=CONNECT_SECONDS)
            for name in missing:
                paths[name] = Path(huggingface_hub.hf_hub_download(filename=name, **where))
        except (OSError, EntryNotFoundError, HTTPError) as error:
            raise _unreachable(pin, missing, error) from error
    return [(name, paths[name]) for name, _ in pin.files]


def _unreachable(pin: Pin, missing: list[str], error: Exception) -> DataNotFound:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DataNotFound(
        f"{pin.repo} (config {pin.config}, revision {pin.revision}): {len(missing)} of {len(pin.files)} files are not "
        f"in the cache {huggingface_hub.constants.HF_HUB_CACHE} and could not be fetched ({why}): {', '.join(missing)}. "
        f"Where there is a connection, run `{pin.download_command()}`, bring DIR here and write data=DIR; or fill the "
        "cache (HF_HOME, HF_HUB_CACHE), which is used as it is, also with HF_HUB_OFFLINE=1."
    )


def _from_disk(pin: Pin, place: Path) -> list[tuple[str, Path]]:
    """The files under `data=`: the pinned names where all of them exist, else every file that can be read, sorted."""
    accepted = ", ".join(SUFFIXES)
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise DataError(
                f"got data={str(place)!r}: not a file that can be read; write one of {accepted}, or a folder"
            )
        return [(place.name, place)]
    if not place.is_dir():
        raise DataNotFound(
            f"got data={str(place)!r}: there is no such file or folder; write a file ({accepted}), a folder of them, "
            f"or fetch the pinned files with `{pin.download_command()}`"
        )
    pinned = [(name, place / name) for name, _ in pin.files]
    present = [name for name, path in pinned if path.is_file()]
    if len(present) == len(pinned):
        return pinned
    if present:
        absent = ", ".join(name for name, _ in pinned if name not in present)
        raise DataNotFound(
            f"got data={str(place)!r}: it holds {len(present)} of the {len(pinned)} files of {pin.repo}, which is a part "
            f"of the dataset and no dataset of its own; fetch {absent} with `{pin.download_command()}`"
        )
    found = sorted(path for path in place.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    named = [(path.relative_to(place).as_posix(), path) for path in found]
    named = [(name, path) for name, path in named if not any(part.startswith(".") for part in name.split("/"))]
    if not named:
        raise DataNotFound(f"got data={str(place)!r}: no rows in this folder; put at least one file ({accepted}) there")
    return named


# ---- reading them


@lru_cache(maxsize=2)  # both splits come from one reading; the code dataset holds about 2 GB of tests
def _load(pin: Pin, layout: Layout, stamps: tuple[Stamp, ...], must_be_pinned: bool) -> TaskData:
    digests = [(name, path, sha256(path)) for name, path, _, _ in stamps]
    in_order = {sha: position for position, (_, sha) in enumerate(pin.files)}
    is_pinned = sorted(sha for _, _, sha in digests) == sorted(in_order)
    if is_pinned:
        digests = [(pin.files[i][0], path, sha) for i, path, sha in sorted((in_order[s], p, s) for _, p, s in digests)]
    elif must_be_pinned:
        expected = dict(pin.files)
        wrong = [f"{path} is {sha}, not {expected[name]}" for name, path, sha in digests if sha != expected[name]]
        raise DataError(
            f"{pin.repo} at revision {pin.revision}: the SHA-256 of a file differs from the pinned one "
            f"({'; '.join(wrong)}), so it is damaged or not the paper's data; delete it from the cache and run again, "
            "or write data=PATH to use other rows on purpose"
        )
    rows = [row for _, path, _ in digests for row in _read(path, layout)]
    if is_pinned and len(rows) != pin.rows:
        raise DataError(
            f"{pin.repo} at revision {pin.revision}: {len(rows)} rows were read where {pin.rows} are known, although "
            "the SHA-256 agrees, so this reader or its pyarrow is at fault; install the versions of the lock file"
        )
    return _assemble(pin, layout, rows, {name: sha for name, _, sha in digests}, is_pinned)


def _assemble(pin: Pin, layout: Layout, rows: list[Row], files: dict[str, str], is_pinned: bool) -> TaskData:
    """Split the rows as they stand, then leave out what is no problem: the split never depends on what is left out."""
    names = ", ".join(files)
    if not rows:
        raise DataError(f"{names}: no rows; write at least one training and one test row")
    test, train = split_order(len(rows), layout.n_test(len(rows)))
    seen: Counter[str] = Counter()
    validation, skipped = _keep(layout, rows, test, seen, is_pinned)
    training, skipped_too = _keep(layout, rows, train, seen, is_pinned)
    skipped += skipped_too
    counts = Counter(reason for _, reason in skipped)
    broken = [f"row {number}: {reason}" for number, reason in skipped if reason != "duplicate"]
    summary = ", ".join(f"{counts[reason]} {reason}" for reason in sorted(counts)) or "none"
    if len(broken) > MOST_BROKEN * len(rows) or not training or not validation:
        raise DataError(
            f"{names}: {len(rows)} rows leave {len(training)} training and {len(validation)} test problems; left out: "
            f"{summary} ({'; '.join(broken[:3])}). More than {MOST_BROKEN:.0%} broken rows, or an empty split, means "
            "that the file is not what it should be; mend these rows, or give at least 2 sound ones"
        )
    logger.info("%s: %d training, %d test problems; left out: %s", names, len(training), len(validation), summary)
    description = {
        "repo": pin.repo if is_pinned else None,
        "config": pin.config if is_pinned else None,
        "revision": pin.revision if is_pinned else None,
        "note": pin.note if is_pinned else "the user's own rows",
        "is_pinned": is_pinned,
        "files": files,
        "rows": len(rows),
        "split_rows": {"train": len(train), "validation": len(test), "seed": SPLIT_SEED},
        "train": len(training),
        "validation": len(validation),
        "skipped": {reason: counts[reason] for reason in sorted(counts)},
        "repeated": sum(seen.values()) - len(seen) if is_pinned else 0,
    }
    return TaskData(tuple(training), tuple(validation), description)


def _keep(
    layout: Layout, rows: list[Row], numbers: list[int], seen: Counter[str], keep_repeated: bool
) -> tuple[list[Problem], list[tuple[int, str]]]:
    """The problems of one split, and (row number, reason) of what is left out; counts the ids `seen`."""
    kept, skipped = [], []
    for number in numbers:
        try:
            problem = layout.to_problem(rows[number])
        except BadRow as error:
            skipped.append((number, str(error)))
            continue
        seen[problem.id] += 1
        if seen[problem.id] == 1:
            kept.append(problem)
        elif keep_repeated:
            kept.append(replace(problem, id=f"{problem.id}-{seen[problem.id]}"))
        else:
            skipped.append((number, "duplicate"))
    return kept, skipped


def _read(path: Path, layout: Layout) -> Iterator[Row]:
    """The wanted columns of one file, row by row."""
    rows = _read_parquet(path, layout) if path.suffix == ".parquet" else _read_json(path, layout)
    wanted = (*layout.columns, *layout.optional)
    for row in rows:
        yield {column: row[column] for column in wanted if column in row}


def _read_parquet(path: Path, layout: Layout) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet  # 0.3 s, needed here only

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = file.schema_arrow.names
            _check_columns(path, layout, present)
            wanted = [column for column in (*layout.columns, *layout.optional) if column in present]
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); fetch or write it again") from error


def _read_json(path: Path, layout: Layout) -> list[Row]:
    """One object per line (.jsonl) or one list of objects (.json); a broken line is a broken file, not a broken row."""
    number = 0
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(
                text.split("\n"), start=1
            ):  # not splitlines: U+2028 may stand inside a string
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, RecursionError) as error:
        where = f"line {number} of {path}" if number else str(path)
        raise DataError(
            f"{where}: not UTF-8 JSON ({error}); write one object per line (.jsonl), or one list"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{path}: its rows are not JSON objects; write one object per line (.jsonl), or one list (.json)"
        )
    if rows:
        _check_columns(path, layout, sorted({column for row in rows for column in row}))
    return rows


def _check_columns(path: Path, layout: Layout, present: list[str]) -> None:
    missing = [column for column in layout.columns if column not in present]
    if missing:
        raise DataError(
            f"{path}: missing columns {missing}, present are {sorted(present)}, and no problem can be made without them; "
            f"rename your columns to {list(layout.columns)} (optional: {list(layout.optional)})"
        )


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
