"""Pack finished runs and evaluations into one Parquet file per kind of table, and read those files.

    <results_dir>/<scale>/
        runs.parquet            one row per run and per evaluation: settings, provenance, checksums of the original files
        metrics.parquet ...     the tables of all runs below each other, with a column `run`
        turns.parquet           the turns of all runs
        evaluations.parquet     `eval.parquet` of all evaluations; their turns are in `evaluation_turns.parquet`

All rows are kept. Floats are stored as float32 (but for learning rates), log-probs as int16 in thousandths of a nat; those
below -32.768 are stored as that.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from multirole.core.policy import SHARED
from multirole.experiment.folders import write_done
from multirole.experiment.storage import SCHEMA_VERSION, sha256

TABLES = ("metrics", "roles", "ledger", "steps", "cosines", "alarms", "eval", "turns")
EVALUATION_TABLES = {"eval": "evaluations", "turns": "evaluation_turns"}
GROUP_BYTES = 2**28
"""In-memory size of a row group: larger ones compress better, and packing holds one of them at a time."""
EXACT = ("lr",)
"""Columns that stay in double precision: learning rates are compared with their schedule."""
LEVEL = 17
"""Of zstd; slow to write, as fast to read as any other."""


def pack(folder: str | Path) -> list[str]:
    """Pack what is finished in `<results_dir>/<scale>` and return the names of what was added or replaced.

    A run or evaluation whose checksums are the packed ones is left alone. Raises ValueError where a file does not match
    the checksum in its folder's DONE.
    """
    folder = Path(folder)
    old = index(folder)
    done = dict(zip(old["run"], old["done"], strict=True))
    found = [path.parent for path in (*folder.glob("*/DONE"), *folder.glob("evaluations/*/*/DONE"))]
    names = {path.relative_to(folder).as_posix().removeprefix("evaluations/"): path for path in sorted(found)}
    new = {name: read_folder(path) for name, path in names.items() if done.get(name) != _done(path)}
    if new:
        write(folder, new)
    return list(new)


def read_folder(folder: Path) -> tuple[dict[str, object], dict[str, pa.Table]]:
    """Read a finished run or evaluation: its row of `runs.parquet` (but for the name) and its tables.

    Raises ValueError where a file does not match the checksum in DONE.
    """
    sums = json.loads((folder / "DONE").read_text())
    for file, digest in sums.items():
        if not (folder / file).is_file() or sha256(folder / file) != digest:
            raise ValueError(
                f"{folder / file} is missing or does not match the checksum in {folder / 'DONE'}, so the folder cannot be packed. "
                "Restore the file, or move the folder away."
            )
    settings = json.loads((folder / "config.json").read_text())
    is_evaluation = "cell" in settings
    cell = settings.get("cell", settings)
    parts: dict[str, list[pa.Table]] = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("turns/*.parquet")]):
        stem = "turns" if path.parent != folder else path.stem
        parts.setdefault(EVALUATION_TABLES[stem] if is_evaluation else stem, []).append(pq.read_table(path))
    tables = {name: pa.concat_tables(held, promote_options="permissive") for name, held in parts.items()}
    row = {
        "kind": "evaluation" if is_evaluation else "run",
        **{name: cell[name] for name in ("workflow", "task", "scale", "seed", "preset")},
        "policy": policy_name(cell["policy"]),
        "settings": json.dumps(settings),
        "provenance": json.dumps(json.loads((folder / "provenance.json").read_text())),
        "done": _done(folder),
        "columns": json.dumps({name: table.column_names for name, table in tables.items()}),
    }
    return row, tables


def write(folder: Path, new: dict[str, tuple[dict[str, object], dict[str, pa.Table]]]) -> None:
    """Add runs, as `read_folder` returns them, to the packed tables of a folder; `runs.parquet` is written last."""
    old = index(folder)
    kept = old[~old["run"].isin(list(new))]
    for name in sorted({name for _, tables in new.values() for name in tables}):
        added = [
            tables[name].add_column(0, "run", pa.array([run] * len(tables[name])))
            for run, (_, tables) in new.items()
            if name in tables
        ]
        _write(folder / f"{name}.parquet", added, list(kept["run"]))
    rows = pa.Table.from_pylist([{"run": run} | row for run, (row, _) in new.items()])
    runs = pa.concat_tables([pa.Table.from_pandas(kept, preserve_index=False), rows], promote_options="permissive")
    _replace(folder / "runs.parquet", [runs.select(rows.column_names).sort_by("run")])


def index(folder: str | Path) -> pd.DataFrame:
    """Read `runs.parquet`; without rows where nothing is packed."""
    path = Path(folder) / "runs.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame(columns=["run", "done"])


def read(
    folder: str | Path, name: str, runs: list[str] | None = None, columns: list[str] | None = None
) -> pd.DataFrame:
    """Read the rows of some runs, or of all, from a packed table, with the column `run`; floats are in double precision again."""
    path = Path(folder) / f"{name}.parquet"
    if not path.exists():
        return pd.DataFrame(columns=["run"])
    wanted = None if runs is None else pc.field("run").isin(pa.array(runs, pa.string()))
    return _as_recorded(pq.read_table(path, columns=columns, filters=wanted, read_dictionary=["run"])).to_pandas()


def unpack(folder: str | Path, run: str, to: str | Path) -> Path:
    """Write one packed run or evaluation as the folder it was, below `to`, and return that folder.

    Its DONE holds the checksums of the files as they are now; those of the original files stay in `runs.parquet`.
    """
    runs = index(folder).set_index("run")
    if run not in runs.index:
        raise ValueError(f"{folder} holds no run {run!r}. The names are in {Path(folder) / 'runs.parquet'}.")
    row, names = runs.loc[run], {packed: recorded for recorded, packed in EVALUATION_TABLES.items()}
    target = Path(to) / ("evaluations" if row["kind"] == "evaluation" else "") / run
    tables: dict[str, pa.Table] = {}
    for name, columns in json.loads(row["columns"]).items():
        path = Path(folder) / f"{name}.parquet"
        table = _as_recorded(pq.read_table(path, filters=[("run", "==", run)], columns=columns))
        if name == "turns":
            for step in pc.unique(table["step"]).to_pylist():
                tables[f"turns/step_{step:05d}.parquet"] = table.filter(pc.field("step") == step)
        else:
            tables[f"{names.get(name, name)}.parquet"] = table
    for name, table in tables.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata({"multirole_schema": SCHEMA_VERSION}), target / name)
    for name, text in {"config.json": row["settings"], "provenance.json": row["provenance"]}.items():
        (target / name).write_text(json.dumps(json.loads(text), indent=2))
    write_done(target)
    return target


def policy_name(policy: dict[str, str]) -> str:
    """Name a role-to-adapter map: "sp", "ip", or "map"."""
    if set(policy.values()) == {SHARED}:
        return "sp"
    return "ip" if all(role == adapter for role, adapter in policy.items()) else "map"


def main(argv: list[str]) -> int:
    """`multirole pack FOLDER`: pack the finished runs of `<results_dir>/<scale>`; 0 if that succeeds."""
    parser = argparse.ArgumentParser(prog="multirole pack", description="Pack finished runs into one file per table.")
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, which holds the folders of the runs")
    folder = parser.parse_args(argv).folder
    added = pack(folder)
    print("\n".join([*added, f"packed {len(added)} runs and evaluations; {folder} holds {len(index(folder))}"]))
    return 0


def _done(folder: Path) -> str:
    return json.dumps(json.loads((folder / "DONE").read_text()), sort_keys=True)


def _write(path: Path, added: list[pa.Table], kept: list[str]) -> None:
    """Append tables to a packed file, of which only the rows of `kept` runs remain."""
    added = [_as_packed(table) for table in added]
    old = pq.ParquetFile(path) if path.exists() else None

    def parts() -> Iterator[pa.Table]:
        for i in range(old.num_row_groups if old else 0):
            yield old.read_row_group(i).filter(pc.is_in(pc.field("run"), pa.array(kept, pa.string())))
        yield from added

    schemas = [table.schema for table in added] + ([old.schema_arrow] if old else [])
    _replace(path, parts(), pa.unify_schemas(schemas, promote_options="permissive"))


def _replace(path: Path, parts: Iterator[pa.Table] | list[pa.Table], schema: pa.Schema | None = None) -> None:
    """Write tables to a Parquet file in large row groups; the old file is replaced when the new one is whole."""
    schema = (schema or parts[0].schema).remove_metadata()
    split = [_leaf(field) for field in schema if _is_split(_values(field.type))]
    options = {
        "use_dictionary": [_leaf(field) for field in schema if _leaf(field) not in split],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
    }
    aside = path.with_name(f"{path.name}.tmp")
    with pq.ParquetWriter(
        aside, schema, compression="zstd", compression_level=LEVEL, write_page_checksum=True, **options
    ) as writer:
        held: list[pa.Table] = []
        for part in parts:
            held.append(_with_schema(part, schema))
            if sum(table.nbytes for table in held) > GROUP_BYTES:
                writer.write_table(pa.concat_tables(held), row_group_size=2**31)
                held = []
        if held:
            writer.write_table(pa.concat_tables(held), row_group_size=2**31)
    os.replace(aside, path)


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Add the columns that a table lacks, as nulls."""
    names = table.column_names
    return pa.table(
        [table[f.name].cast(f.type) if f.name in names else pa.nulls(len(table), f.type) for f in schema], schema
    )


def _as_packed(table: pa.Table) -> pa.Table:
    """Store floats as float32 and log-probs as thousandths of a nat."""
    for i, field in enumerate(table.schema):
        column = table[field.name]
        if field.name.endswith("logprobs") and pa.types.is_list(field.type):
            scaled = pc.max_element_wise(
                pc.round(pc.multiply(pc.list_flatten(column).cast(pa.float64()), 1000)), -(2**15)
            )
            column = _regrouped(column, scaled.cast(pa.int16()))
        elif field.type == pa.float64() and field.name not in EXACT:
            column = column.cast(pa.float32())
        table = table.set_column(i, field.name, column)
    return table


def _as_recorded(table: pa.Table) -> pa.Table:
    """Undo `_as_packed`, but for the precision."""
    for i, field in enumerate(table.schema):
        column = table[field.name]
        if field.name.endswith("logprobs") and pa.types.is_list(field.type):
            column = _regrouped(column, pc.divide(pc.list_flatten(column).cast(pa.float32()), 1000))
        elif field.type == pa.float32():
            column = column.cast(pa.float64())
        table = table.set_column(i, field.name, column)
    return table


def _regrouped(column: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.Array:
    """Give a list column other values, keeping lengths and nulls."""
    lists, values = column.combine_chunks(), values.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    return pa.ListArray.from_arrays(offsets, values, mask=pc.is_null(lists))


def _values(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind


def _leaf(field: pa.Field) -> str:
    """A column's path within the file."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def _is_split(kind: pa.DataType) -> bool:
    """Whether a column is smaller with its bytes apart than with a dictionary: floats and packed log-probs."""
    return kind in (pa.float32(), pa.int16())
