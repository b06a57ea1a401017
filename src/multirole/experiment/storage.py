"""Files that are whole or absent: written aside, synced, renamed; removed by a rename first. All that a run keeps goes here.

A rename is atomic; a file's content and a folder's names last through a power cut once each was synced, in that order.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = "1"
AGAIN = "Free some space, or make the disk writable, and start the same command again"


class NotWritten(OSError):
    """A file could not be written, mostly because the disk is full; what was there before is whole."""


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    _replace(path, lambda file: file.write(text.encode()))


def write_table(path: Path, rows: list[dict]) -> None:
    """Rows (dicts with the same keys) as Parquet with checksums, and with the schema's version in its metadata."""
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"multirole_schema": SCHEMA_VERSION})
    _replace(path, lambda file: pq.write_table(table, file, write_page_checksum=True))


def read_table(path: Path) -> list[dict]:
    """The rows of a Parquet file; OSError (pyarrow's errors too) where a byte of it is not as it was written.

    Raises ValueError where it was written with another version of the schema.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
    held = (table.schema.metadata or {}).get(b"multirole_schema", b"none").decode()
    if held != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {held}, and this version of multirole continues tables of version {SCHEMA_VERSION} "
            "only. Use the version that wrote it (git_sha in provenance.json), or move that folder away to start afresh."
        )
    return table.to_pylist()


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        move(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise NotWritten(
            f"{path} could not be written: {error}. What was there before is whole. {AGAIN}: it continues from there."
        ) from error


def move(source: Path, target: Path) -> None:
    """Rename, for good: both folders' names are synced."""
    os.replace(source, target)
    for folder in {target.parent, source.parent}:
        _sync(folder)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder to the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        _sync(path)


def remove(path: Path) -> None:
    """Delete a file or a folder; a folder loses its name first, so that it is never half there under it."""
    if path.is_dir():
        nameless = path.with_suffix(".tmp")
        if path != nameless:
            shutil.rmtree(nameless, ignore_errors=True)
            os.replace(path, nameless)
        shutil.rmtree(nameless)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
