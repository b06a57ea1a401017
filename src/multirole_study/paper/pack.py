"""Pack finished runs and evaluations into one Parquet file per kind of table, and read those files.

    <results_dir>/<scale>/
        runs.parquet            one row per run and per evaluation: settings, provenance, `done` (the SHA-256 of its list of checksums)
        metrics.parquet ...     the concatenated tables of all runs, with a column `run`
        turns.parquet           the turns of all runs
        evaluations.parquet     `eval.parquet` of all evaluations; their turns are in `evaluation_turns.parquet`
    gradient_signal.parquet, credit_accuracy.parquet, role_value.parquet    measurements of runs at their checkpoints (`add_measurements`)

All rows are kept, and all columns except those of `NEVER_PACKED` and `PACKED_FOR_SOME`; the latter are kept for some runs
(`multirole_study.paper.grid.detailed`). Floats are stored as float32 (measurements with 16 significant bits, about five digits,
rewards with all) and learning rates as float64. Log-probs are int16 in thousandths of a nat, rounded to multiples of ten;
values below -32.76 are stored as -32.76. A turn's text is dropped if it is the concatenation of its tokens, a reward if it is
1 for a correct and 0 for a wrong answer, `chi2_raw` if it equals `chi2`; reading restores them.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from multirole.policy import SHARED
from multirole_study.experiment.run_folder import (
    CREDIT_FILE,
    ROLE_VALUE_FILE,
    SIGNAL_FILE,
    TURN_EFFECTS_FILE,
    write_done,
)
from multirole_study.experiment.storage import SCHEMA_VERSION, sha256

EVALUATION_TABLES = {"eval": "evaluations", "turns": "evaluation_turns"}
GROUP_BYTES = 2**28
"""In-memory size of a row group: larger ones compress better."""
DERIVED: dict[str, tuple[str, Callable[[pa.Array], pa.Array]]] = {
    "text": ("tokens", lambda tokens: pc.binary_join(tokens, "")),
    "reward": ("correct", lambda correct: correct.cast(pa.float32())),
    "chi2_raw": ("chi2", lambda chi2: chi2),  # at temperature 1
}
"""Column -> the column from which it can mostly be derived, and how. Values that can be derived are stored as null."""
NEVER_PACKED = {"eval": {"answer"}, "ledger": {"grad_norm_clipped"}}
"""Table -> columns that are never packed: `turns` has the answers to the first problems, and `max_grad_norm` is in the settings."""
PACKED_FOR_SOME = {
    "turns": {"tokens", "logprobs", "base_logprobs"},
    "episodes": {"advantage"},
    "evaluations": {"answer"},
}
"""Columns that are only packed for some runs, most of their bytes: numbers by token, whose means by iteration are in `roles`;
advantages, which follow from the rewards; and answers, which only votes need. A run's texts are kept."""


MEASUREMENTS = tuple(Path(name).stem for name in (SIGNAL_FILE, CREDIT_FILE, ROLE_VALUE_FILE))
"""Tables with a column `run` that `multirole signal`, `credit` and `role_value` write into a run's folder; they are not part of its record."""


def pack(folder: str | Path, runs: str | Path | None = None, whole: Collection[str] | None = None) -> list[str]:
    """Pack the finished runs of `<results_dir>/<scale>`, or of another such folder `runs`; return those added or replaced.

    Runs that are not named in `whole` are packed without `PACKED_FOR_SOME`; with None all are packed whole. A run or evaluation with
    unchanged checksums is skipped. Raises ValueError if a file does not match the checksum in its folder's DONE.
    """
    folder, runs = Path(folder), Path(runs or folder)
    old = index(folder)
    packed = dict(zip(old["run"], old["done"], strict=True))
    folders = sorted(path.parent for path in (*runs.glob("*/DONE"), *runs.glob("evaluations/*/*/DONE")))
    names = {path.relative_to(runs).as_posix().removeprefix("evaluations/"): path for path in folders}
    new = {name: path for name, path in names.items() if packed.get(name) != _digest(path)}
    rows = [{"run": name} | _about(path) for name, path in new.items()]
    if rows:
        folder.mkdir(parents=True, exist_ok=True)
        unchanged = old[~old["run"].isin(list(new))]
        files = {run: _tables(path) for run, path in new.items()}
        replaced = old[old["run"].isin(list(new))]  # which may have had tables that they no longer have
        for name in sorted(set().union(*files.values(), *map(json.loads, replaced.get("columns", ())))):
            path = folder / f"{name}.parquet"
            parts = [pq.read_table(path, filters=_of_runs(unchanged["run"]))] if path.exists() else []
            for run, tables in files.items():
                left_out = NEVER_PACKED.get(name, set())
                if whole is not None and run not in whole:
                    left_out = left_out | PACKED_FOR_SOME.get(name, set())
                for file in tables.get(name, ()):
                    table = _as_packed(pq.read_table(file), left_out)
                    parts.append(table.add_column(0, "run", pa.array([run] * len(table))))
            if parts:
                _write(path, pa.concat_tables(parts, promote_options="permissive"))
        about = pd.concat([unchanged, pd.DataFrame(rows)]).sort_values("run")[list(rows[0])]
        _write(folder / "runs.parquet", pa.Table.from_pandas(about, preserve_index=False))
    return list(new)


def add_measurements(folder: str | Path, runs: str | Path) -> list[Path]:
    """Add the `MEASUREMENTS` of the runs below `runs` to those of a results folder, and return the files that were written.

    A run's new rows replace those of the same step. The runs need not be packed or finished.
    """
    written = []
    for name in MEASUREMENTS:
        parts = [pd.read_parquet(path) for path in sorted(Path(runs).glob(f"*/{name}.parquet"))]
        if not parts:
            continue
        path, new = Path(folder) / f"{name}.parquet", pd.concat(parts)
        if path.exists():
            old = pd.read_parquet(path)
            steps = set(zip(new["run"], new["step"], strict=True))
            is_kept = [key not in steps for key in zip(old["run"], old["step"], strict=True)]
            new = pd.concat([old[is_kept], new])
        floats = {column: "float32" for column, kind in new.dtypes.items() if kind == "float64"}
        _write(path, pa.Table.from_pandas(new.astype(floats), preserve_index=False))
        written.append(path)
    return written


def read_measurement(folder: str | Path, name: str) -> pd.DataFrame | None:
    """Read one of the `MEASUREMENTS` of a results folder, of all runs; None if it has none."""
    path = Path(folder) / f"{name}.parquet"
    return pd.read_parquet(path) if path.exists() else None


def index(folder: str | Path) -> pd.DataFrame:
    """Read `runs.parquet`; empty if nothing is packed."""
    path = Path(folder) / "runs.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame(columns=["run", "done", "provenance"])


def read(
    folder: str | Path, name: str, runs: list[str] | None = None, columns: list[str] | None = None
) -> pd.DataFrame:
    """Read the rows of some runs, or of all, from a packed table, with the column `run`; floats are returned as float64."""
    path = Path(folder) / f"{name}.parquet"
    if not path.exists():
        return pd.DataFrame(columns=["run"])
    sources = {DERIVED[column][0] for column in columns or () if column in DERIVED} & set(pq.read_schema(path).names)
    needed = columns and list(dict.fromkeys([*columns, *sources]))
    packed = pq.read_table(
        path, columns=needed, filters=None if runs is None else _of_runs(runs), read_dictionary=["run"]
    )
    return _as_recorded(packed).select(columns or packed.column_names).to_pandas()


def unpack(folder: str | Path, run: str, to: str | Path) -> Path:
    """Restore the folder of one packed run or evaluation below `to`, and return it.

    Its DONE has the checksums of the restored files, which differ from the original ones.
    """
    runs = index(folder).set_index("run")
    if run not in runs.index:
        raise ValueError(f"{folder} holds no run {run!r}. The names are in {Path(folder) / 'runs.parquet'}.")
    row, recorded = runs.loc[run], {packed: name for name, packed in EVALUATION_TABLES.items()}
    target = Path(to) / ("evaluations" if row["kind"] == "evaluation" else "") / run
    for name, columns in json.loads(row["columns"]).items():
        path = Path(folder) / f"{name}.parquet"
        if not path.exists():  # a table that only older runs have
            continue
        column_names = set(pq.read_schema(path).names)
        columns = [column for column in columns if column in column_names]  # the others were dropped
        packed = pq.read_table(path, columns=columns, filters=_of_runs([run]))
        table = _as_recorded(packed).replace_schema_metadata({"multirole_schema": SCHEMA_VERSION})
        parts = {recorded.get(name, name): table}
        if name == "turns":
            steps = pc.unique(table["step"]).to_pylist()
            parts = {f"turns/step_{step:05d}": table.filter(pc.field("step") == step) for step in steps}
        for file, part in parts.items():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(part, target / f"{file}.parquet")
    for name, text in {"config.json": row["settings"], "provenance.json": row["provenance"]}.items():
        (target / name).write_text(json.dumps(json.loads(text), indent=2))
    write_done(target)
    return target


def _of_runs(runs: Iterable[str]) -> pc.Expression:
    return pc.field("run").isin(pa.array(runs, pa.string()))


def _text(path: Path) -> str:
    return json.dumps(json.loads(path.read_text()))


def _digest(folder: Path) -> str:
    """Return the SHA-256 of a finished folder's checksums, which `_about` has verified."""
    return hashlib.sha256(_text(folder / "DONE").encode()).hexdigest()


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Return packed table -> its files in the folder of a run or evaluation."""
    is_evaluation, tables = folder.parent.parent.name == "evaluations", {}
    measured = (*MEASUREMENTS, Path(TURN_EFFECTS_FILE).stem)  # DONE has no checksum of these
    files = [path for path in folder.glob("*.parquet") if path.stem not in measured]
    for path in sorted([*files, *folder.glob("turns/*.parquet")]):
        stem = path.stem if path.parent == folder else "turns"
        tables.setdefault(EVALUATION_TABLES[stem] if is_evaluation else stem, []).append(path)
    return tables


def _about(folder: Path) -> dict[str, object]:
    """Return the row of a run or evaluation in `runs.parquet`, without its name."""
    for file, digest in json.loads((folder / "DONE").read_text()).items():
        if not (folder / file).is_file() or sha256(folder / file) != digest:
            raise ValueError(
                f"{folder / file} is missing or does not match the checksum in {folder / 'DONE'}, so the folder cannot be packed. "
                "Restore the file, or move the folder away."
            )
    settings = json.loads((folder / "config.json").read_text())
    cell = settings.get("cell", settings)
    policy = cell["policy"]
    is_own = all(role == adapter for role, adapter in policy.items())
    return {
        "kind": "run" if cell is settings else "evaluation",
        **{name: cell[name] for name in ("workflow", "task", "scale", "seed", "preset")},
        "policy": "sp" if set(policy.values()) == {SHARED} else "ip" if is_own else "map",
        "settings": json.dumps(settings),
        "provenance": _text(folder / "provenance.json"),
        "done": _digest(folder),
        "columns": json.dumps({name: pq.read_schema(files[0]).names for name, files in _tables(folder).items()}),
    }


def _write(path: Path, table: pa.Table) -> None:
    """Write a Parquet file that compresses well; an old file is replaced once the new one is complete."""
    leaves, split = [], []
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        kind = field.type.value_type if is_list else field.type
        leaves.append(f"{field.name}.list.element" if is_list else field.name)
        # numbers that hardly repeat are stored byte by byte (byte stream split), because their high bytes do repeat
        is_measured = kind in (pa.float32(), pa.int16()) and field.name != "reward"
        if is_measured or (kind == pa.int64() and field.name.endswith("tokens")):
            split.append(leaves[-1])
    aside, large = path.with_name(f"{path.name}.tmp"), 2**31 - 1
    group = max(1, GROUP_BYTES * len(table) // max(1, table.nbytes))
    pq.write_table(
        table.replace_schema_metadata(), aside, compression="zstd", compression_level=20, write_page_checksum=True,
        # compression works within a page: one per column and row group, not one per 20,000 rows
        row_group_size=group, data_page_size=large, dictionary_pagesize_limit=large, max_rows_per_page=large,
        use_dictionary=[leaf for leaf in leaves if leaf not in split],
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
    )  # fmt: skip
    os.replace(aside, path)


def _as_packed(table: pa.Table, left_out: Collection[str]) -> pa.Table:
    columns = {}
    for name in table.column_names:
        if name in left_out:
            continue
        column = table[name]
        if _is_logprobs(name, column):
            column = _with_values(column.combine_chunks(), _thousandths)
        elif column.type == pa.float64() and name != "lr":  # learning rates are compared with their schedule
            column = column.cast(pa.float32())
            column = column if name == "reward" else _rounded(column.combine_chunks())
        columns[name] = column
    for name, (source, transform) in DERIVED.items():
        if {name, source} <= set(columns):
            values, derived = columns[name], transform(columns[source])
            if pa.types.is_floating(values.type):
                values = pc.fill_null(values, math.nan)  # a null would be put back as the derived number
            columns[name] = pc.if_else(pc.fill_null(pc.equal(values, derived), False), None, values)
    return pa.table(columns)


def _as_recorded(table: pa.Table) -> pa.Table:
    columns = {name: table[name] for name in table.column_names}
    for name, (source, transform) in DERIVED.items():
        if {name, source} <= set(columns):
            columns[name] = pc.coalesce(columns[name], transform(columns[source]))
    for name, column in columns.items():
        if _is_logprobs(name, column):
            columns[name] = _with_values(
                column.combine_chunks(), lambda values: pc.divide(values.cast(pa.float32()), 1000)
            )
        elif column.type == pa.float32():
            columns[name] = column.cast(pa.float64())
    return pa.table(columns)


def _is_logprobs(name: str, column: pa.ChunkedArray) -> bool:
    return name.endswith("logprobs") and pa.types.is_list(column.type)


def _with_values(lists: pa.ListArray, transform: Callable[[pa.Array], pa.Array]) -> pa.ListArray:
    return pa.ListArray.from_arrays(lists.offsets, transform(lists.values), mask=lists.is_null())


def _thousandths(logprobs: pa.Array) -> pa.Array:
    scaled = pc.multiply(pc.round(pc.multiply(logprobs.cast(pa.float64()), 100)), 10)
    return pc.max_element_wise(scaled, -32760).cast(pa.int16())


def _rounded(column: pa.Array) -> pa.Array:
    """Round float32 to 16 significant bits: the other bits of a measurement are noise, which does not compress."""
    half, mask = (pa.scalar(value, pa.int32()) for value in (1 << 7, -(1 << 8)))  # of the 8 bits that are dropped
    return pc.bit_wise_and(pc.add(column.view(pa.int32()), half), mask).view(pa.float32())
