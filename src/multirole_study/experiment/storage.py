"""Write files and folders atomically: write to a temporary path, sync, rename (`multirole.files`). All of a run's files are written here."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from safetensors import SafetensorError

from multirole.files import publish, sha256

SCHEMA_VERSION = "1"


class NotWritten(OSError):
    """A file could not be written, usually because the disk is full; the previous version is intact."""


def checksums_of(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the SHA-256 of a folder's files that match the glob patterns, by relative name."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(paths)}


def damage(listing: Path) -> str:
    """Compare files with a listing of checksums (relative name -> SHA-256) and describe the first mismatch.

    Returns an empty string if all files match.
    """
    try:
        sums = json.loads(listing.read_text())
        for name, digest in sums.items():
            path = listing.parent / name
            if not path.is_file():
                return f"{name} is missing"
            if sha256(path) != digest:
                return f"{name} is not as it was written ({path.stat().st_size} bytes)"
    except (OSError, ValueError, AttributeError) as error:
        return f"{listing.name} cannot be read: {error!r}"
    return "" if sums else f"{listing.name} is empty"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old file or the new one."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_table(path: Path, rows: list[dict]) -> None:
    """Write rows to a Parquet file with page checksums and the schema version as metadata. A column that a row lacks is null there."""
    import pyarrow as pa  # imported late, because it is slow
    import pyarrow.parquet as pq

    from multirole.credit.rewards import with_equal_columns  # it imports torch, as whoever records rows has done

    # Arrow would read the columns of the first row alone
    table = pa.Table.from_pylist(with_equal_columns(rows)).replace_schema_metadata({"multirole_schema": SCHEMA_VERSION})
    with writing(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


def add_steps(path: Path, rows: list[dict]) -> None:
    """Write rows of measured checkpoints (column `step`) to a Parquet file, which keeps its rows of other steps."""
    import pyarrow.parquet as pq

    steps = {row["step"] for row in rows}
    kept = [row for row in pq.read_table(path).to_pylist() if row["step"] not in steps] if path.exists() else []
    write_table(path, sorted(kept + rows, key=lambda row: row["step"]))


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, then sync and rename it to `path`. Raises NotWritten on failure."""
    # of its own name: several processes may write a study's records at once
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")
    with reporting(path):
        try:
            yield temporary
            publish(temporary, path)
        except BaseException:
            remove(temporary)
            raise


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Convert write errors to NotWritten, which names the file and says what to do."""
    try:
        yield
    except NotWritten:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the system's errors
        there = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(there).free // 2**20  # torch's own error does not name a full disk
        raise NotWritten(
            f"{path} could not be written ({error}; {free} MB free), so the run stops. Free some space, or make the disk writable, "
            "and start the same command again: it continues from the newest checkpoint."
        ) from error


def remove(path: Path) -> None:
    """Delete a file or folder. A folder is renamed first, so that its name never holds a partial folder."""
    if path.is_dir():
        temporary = path.with_suffix(".tmp")  # nothing reads this name
        if path != temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            os.replace(path, temporary)
        shutil.rmtree(temporary)
    else:
        path.unlink(missing_ok=True)
