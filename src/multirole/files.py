"""Checksums of files, and files and folders that appear complete or not at all.

A rename is atomic. File content and folder entries survive a power cut once both are synced, in that order.
"""

import hashlib
import os
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, path: Path) -> None:
    """Sync the temporary file or folder, then rename it into place."""
    for item in [*sorted(temporary.rglob("*")), temporary]:
        sync(item)
    os.replace(temporary, path)
    for folder in {path.parent, temporary.parent}:
        sync(folder)


def sync(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
