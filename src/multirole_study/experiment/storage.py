"""Files that are whole or absent: written aside, synced, renamed; removed by a rename first. All that a run keeps goes here.

A rename is atomic; a file's content and a folder's names last through a power cut once each was synced, in that order.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

SCHEMA_VERSION = "1"


class NotWritten(OSError):
    """A file could not be written, mostly because the disk is full; what was there before is whole."""


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_of(folder: Path, *patterns: str) -> dict[str, str]:
    """Relative name -> sha256 of the files of a folder that match."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(paths)}


def damage(listing: Path) -> str:
    """The first file that is not as a listing of checksums (name from its folder -> sha256) has it; empty if all are."""
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
    """A reader sees the old file or the new one."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_table(path: Path, rows: list[dict]) -> None:
    """Rows (dicts with the same keys) as Parquet with checksums, and with the schema's version in its metadata."""
    import pyarrow as pa  # with pandas the longest import of a command that only reads names
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows).replace_schema_metadata({"multirole_schema": SCHEMA_VERSION})
    with writing(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which then gets its name at once; `NotWritten` where that fails."""
    temporary = path.with_name(f"{path.name}.tmp")
    with reporting(path):
        try:
            yield temporary
            publish(temporary, path)
        except BaseException:
            remove(temporary)
            raise


def publish(temporary: Path, path: Path) -> None:
    """Give what was written aside its name, for good."""
    for item in [*sorted(temporary.rglob("*")), temporary]:
        sync(item)
    os.replace(temporary, path)
    for folder in {path.parent, temporary.parent}:
        sync(folder)


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Say which file could not be written, and what to do."""
    try:
        yield
    except NotWritten:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the system's errors
        free = shutil.disk_usage(path.parent).free // 2**20  # torch's own error does not name a full disk
        raise NotWritten(
            f"{path} could not be written ({error}; {free} MB free), so the run stops. Free some space, or make the disk writable, "
            "and start the same command again: it continues from the newest checkpoint."
        ) from error


def remove(path: Path) -> None:
    """Delete a file or a folder; a folder loses its name first, so that it is never half there under it."""
    if path.is_dir():
        temporary = path.with_suffix(".tmp")  # which nothing reads
        if path != temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            os.replace(path, temporary)
        shutil.rmtree(temporary)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
