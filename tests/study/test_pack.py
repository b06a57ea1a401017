"""Packed tables hold every row of their runs' folders, and the folders can be restored from them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from paper_results import make_evaluation, make_run

from multirole_study.__main__ import pack as command
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.run_folder import MEASUREMENTS, is_done, write_done
from multirole_study.inspector.episodes import describe_turn
from multirole_study.paper import pack
from multirole_study.paper.grid import Grid

ROOT = Path(__file__).parents[2]
SETTINGS = {"max_steps": 20, "eval_steps": 5, "save_steps": 5, "n_validation": 16}
IP = Cell("voting", "ip", **SETTINGS)
SP = Cell("voting", "sp", **SETTINGS)  # has cosines between roles


@pytest.fixture
def folder(tmp_path):
    """A run, an evaluation of it, and a run that is not finished."""
    make_run(IP, tmp_path)
    make_evaluation(Evaluation(IP), tmp_path)
    (make_run(SP, tmp_path) / "DONE").unlink()
    return tmp_path / "tiny-r"


def equal(recorded: Path, unpacked: Path) -> None:
    """Compare every column that is packed: measurements to 16 bits, log-probs to half a hundredth of a nat, the rest as it is."""
    files = sorted(path.relative_to(recorded) for path in recorded.rglob("*.parquet"))
    assert files == sorted(path.relative_to(unpacked) for path in unpacked.rglob("*.parquet")) and files
    for file in files:
        one, other = (pq.read_table(folder / file) for folder in (recorded, unpacked))
        if file.name == "eval.parquet" and recorded.parent.name == "tiny-r":  # not of an evaluation
            one = one.drop_columns(["answer"])
        assert one.schema.equals(other.schema, check_metadata=True), file
        for name in one.column_names:
            before, after = one[name].to_pylist(), other[name].to_pylist()
            if name.endswith("logprobs"):
                assert [len(values) for values in before] == [len(values) for values in after]
                assert np.allclose(np.concatenate(before), np.concatenate(after), rtol=0, atol=5.01e-3)
            elif isinstance(before[0], float) and name != "lr":
                most = 0 if name == "reward" else 2**-16
                assert np.allclose(np.float32(before), np.float32(after), rtol=most, atol=0, equal_nan=True), (
                    file,
                    name,
                )
            else:
                assert before == after, (file, name)
    for name in ("config.json", "provenance.json"):
        assert json.loads((recorded / name).read_text()) == json.loads((unpacked / name).read_text())


def test_runs_that_are_not_packed_whole_keep_their_texts(folder, tmp_path):
    pack.pack(folder, whole=[])
    unpacked = pack.unpack(folder, IP.id, tmp_path / "out")
    files = sorted((folder / IP.id / "turns").iterdir())
    for file in files:
        before, after = pd.read_parquet(file), pd.read_parquet(unpacked / "turns" / file.name)
        assert after["text"].tolist() == before["text"].tolist()
        assert "tokens" not in after or after["tokens"].isna().all()
        assert "".join(describe_turn(after.iloc[0].to_dict())["pieces"]) == before["text"].iloc[0]
    assert files and set(pack.read(folder, "turns", [IP.id], ["text"])["text"]) >= set(before["text"])


def test_packed_runs_can_be_unpacked(folder, tmp_path):
    assert sorted(pack.pack(folder)) == [f"own/{IP.id}", IP.id]
    for name in (IP.id, f"evaluations/own/{IP.id}"):
        unpacked = pack.unpack(folder, name.removeprefix("evaluations/"), tmp_path / "out")
        assert unpacked == tmp_path / "out" / name and is_done(unpacked)
        equal(folder / name, unpacked)
    with pytest.raises(ValueError, match="holds no run 'x'"):
        pack.unpack(folder, "x", tmp_path)


def test_the_index_has_settings_and_checksums(folder):
    pack.pack(folder)
    row = pack.index(folder).set_index("run").loc[IP.id]
    assert (row["kind"], row["workflow"], row["policy"], row["task"], row["seed"]) == ("run", "voting", "ip", "math", 0)
    assert Cell(**json.loads(row["settings"])) == IP
    checksums = json.dumps(json.loads((folder / IP.id / "DONE").read_text()))
    assert row["done"] == hashlib.sha256(checksums.encode()).hexdigest()


def test_packing_again_adds_new_runs_and_replaces_changed_ones(folder):
    pack.pack(folder)
    before = {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
    assert pack.pack(folder) == []
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
    write_done(folder / SP.id)
    assert pack.pack(folder) == [SP.id]
    old = pack.read(folder, "eval", [IP.id])
    table = folder / SP.id / "eval.parquet"
    pd.read_parquet(table).assign(correct=True).to_parquet(table)
    write_done(folder / SP.id)
    assert pack.pack(folder) == [SP.id]
    assert pack.read(folder, "eval", [SP.id])["correct"].all()
    pd.testing.assert_frame_equal(pack.read(folder, "eval", [IP.id]), old)
    (folder / SP.id / "cosines.parquet").unlink()
    write_done(folder / SP.id)
    assert len(pack.read(folder, "cosines", [SP.id])) and pack.pack(folder) == [SP.id]
    assert not len(pack.read(folder, "cosines", [SP.id]))
    assert len(pack.read(folder, "eval")) == 2 * len(old) and len(pack.index(folder)) == 3


def test_rows_that_a_killed_packing_left_behind_are_not_packed_twice(folder):
    pack.pack(folder)
    index = (folder / "runs.parquet").read_bytes()
    write_done(folder / SP.id)
    pack.pack(folder)
    (folder / "runs.parquet").write_bytes(index)  # which is written last
    assert pack.pack(folder) == [SP.id]
    assert len(pack.read(folder, "eval")) == 2 * len(pack.read(folder, "eval", [IP.id]))


def test_runs_of_another_folder_are_added_and_stay_there(folder, tmp_path):
    pack.pack(folder)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / SP.id, elsewhere / SP.id)
    write_done(elsewhere / SP.id)
    before = sorted(elsewhere.rglob("*"))
    assert pack.pack(folder, elsewhere) == [SP.id] and pack.pack(folder, elsewhere) == []
    assert sorted(elsewhere.rglob("*")) == before and set(pack.index(folder)["run"]) == {IP.id, f"own/{IP.id}", SP.id}


def test_a_new_folder_gets_the_grid_of_the_runs(folder, tmp_path):
    Grid("tiny-r", seeds=[0], tasks=["math"], parameters=SETTINGS).write(tmp_path)
    new = tmp_path / "results" / "other" / "tiny-r"
    assert command([str(new), "--runs", str(folder)]) == 0
    assert Grid.read(new) == Grid.read(folder) and IP.id in set(pack.index(new)["run"])


def test_a_study_that_has_changed_since_the_first_packing_is_named(folder, tmp_path, capsys):
    """As with a learning rate that is chosen between two packings: the tables would say that its runs are missing."""
    Grid("tiny-r", seeds=[0], tasks=["math"], parameters=SETTINGS).write(tmp_path)
    record, new = folder / "rates.json", tmp_path / "results" / "tiny-r"
    record.write_text('{"chosen": {}}')
    assert command([str(new), "--runs", str(folder)]) == 0
    assert "declares other runs" not in capsys.readouterr().out
    record.write_text('{"chosen": {"Voting-IP": 0.004}}')
    assert command([str(new), "--runs", str(folder)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{new / 'rates.json'} declares other runs than {record}, ")
    assert (new / "rates.json").read_text() == '{"chosen": {}}'


def test_a_text_is_kept_where_its_tokens_do_not_add_up_to_it(folder, tmp_path):
    path = folder / IP.id / "turns" / "step_00005.parquet"
    turns = pd.read_parquet(path)
    turns["tokens"] = [[text[:1], text[1:]] for text in turns["text"]]
    turns.at[0, "text"] += "\N{SNOWMAN}"
    turns.to_parquet(path)
    write_done(folder / IP.id)
    pack.pack(folder)
    packed = pq.read_table(
        folder / "turns.parquet", columns=["text"], filters=[("run", "==", IP.id), ("step", "==", 5)]
    )
    assert packed["text"].null_count == len(turns) - 1
    stored = pack.read(folder, "turns", [IP.id], ["step", "text"])
    assert stored.columns.tolist() == ["step", "text"]
    assert stored.loc[stored["step"] == 5, "text"].tolist() == turns["text"].tolist()


def test_a_reward_is_kept_where_it_does_not_follow_from_the_answer(folder):
    path = folder / IP.id / "eval.parquet"
    table = pd.read_parquet(path)
    table["reward"] = table["correct"].astype(float)
    table.loc[:2, "reward"] = [-0.1, np.nan, 1.0 - table["correct"][2]]
    table.to_parquet(path)
    write_done(folder / IP.id)
    pack.pack(folder)
    packed = pq.read_table(folder / "eval.parquet", columns=["reward"], filters=[("run", "==", IP.id)])
    assert packed["reward"].null_count == len(table) - 3
    outcomes = pack.read(folder, "eval", [IP.id], ["reward"])
    assert outcomes.columns.tolist() == ["reward"]
    assert np.array_equal(outcomes["reward"], np.float32(table["reward"]).astype(float), equal_nan=True)


def test_packed_runs_stay_when_their_folders_are_removed(folder):
    pack.pack(folder)
    shutil.rmtree(folder / IP.id)
    write_done(folder / SP.id)
    pack.pack(folder)
    assert set(pack.index(folder)["run"]) == {IP.id, f"own/{IP.id}", SP.id}
    assert set(pack.read(folder, "cosines")["run"]) == {SP.id}


def test_what_was_measured_after_training_is_no_part_of_a_packed_run(folder):
    """Neither DONE nor the packed tables have it; the effects of turns are for the run's own page."""
    for name in MEASUREMENTS:
        pd.DataFrame([{"step": 5, "role": "generator"}]).to_parquet(folder / IP.id / name)
    assert IP.id in pack.pack(folder)
    assert not {path.name for path in folder.glob("*.parquet")} & set(MEASUREMENTS)
    columns = json.loads(pack.index(folder).set_index("run").loc[IP.id, "columns"])
    assert not {Path(name).stem for name in MEASUREMENTS} & set(columns)


def test_a_folder_that_does_not_match_its_done_is_refused_by_name(folder):
    table = folder / IP.id / "roles.parquet"
    pd.read_parquet(table).assign(reward=1.0).to_parquet(table)
    with pytest.raises(ValueError, match=rf"{IP.id}/roles\.parquet .* does not match the checksum"):
        pack.pack(folder)
    assert not list(folder.glob("*.parquet"))


def test_a_log_prob_out_of_range_is_the_least_that_can_be_stored(folder, tmp_path):
    path = folder / IP.id / "turns" / "step_00005.parquet"
    turns = pd.read_parquet(path)
    turns.at[0, "logprobs"] = np.float32([-100, -0.004, -0.006])
    turns.to_parquet(path)
    write_done(folder / IP.id)
    pack.pack(folder)
    unpacked = pd.read_parquet(pack.unpack(folder, IP.id, tmp_path / "out") / "turns" / "step_00005.parquet")
    assert unpacked["logprobs"][0].tolist() == pytest.approx([-32.76, 0, -0.01])


def test_the_command_prints_what_it_packed_and_which_measurements_it_did_not(folder, capsys):
    assert command([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"packed 2 runs and evaluations; {folder} holds 2"
    pd.DataFrame([{"run": IP.id, "step": 5, "value": 1.5}]).to_parquet(folder / IP.id / "role_value.parquet")
    assert command([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The runs' role_value are packed with --measurements."
    assert not (folder / "role_value.parquet").exists()


RETIRED = {
    "diagnostics": True,
    "on_alarm": "log",
    "rollback_rate": 0.5,
    "coherence_penalty": 0.0,
    "balance_roles": 0.0,
    "slot_scaling": 0.0,
}
"""Options in the records of committed runs that have been removed since, at the values that changed nothing."""


def cell_of(settings: str) -> Cell:
    held = json.loads(settings)
    held = held.get("cell", held)
    held.pop("code_rows", None)  # which rows of DeepCoder; the embedded tasks have one kind
    assert all(held.pop(name, value) == value for name, value in RETIRED.items())
    return Cell.from_record(held)


COMMITTED = ("tiny-r", "smollm2", "vain/tiny-r", "clock/tiny-r", "credit/tiny-r", "programs/smollm2")


@pytest.mark.parametrize("folder", COMMITTED)
def test_every_committed_run_is_named_by_its_settings(folder):
    """A changed default would train other runs under the names of these."""
    runs = pack.index(ROOT / "results" / folder)
    assert runs["run"].is_unique and "run" in set(runs["kind"])
    for run in runs.itertuples():
        cell = cell_of(run.settings)
        assert run.run.split("/")[-1] == cell.id and len(cell.id) <= 60
        policy = cell.policy_name if cell.policy_name in ("ip", "sp") else "map"
        assert (run.workflow, run.policy, run.task, run.scale, run.seed) == (
            cell.workflow, policy, cell.task, cell.scale, cell.seed,
        )  # fmt: skip


def test_the_committed_tables_hold_all_rows():
    """Every iteration and every validation problem that a run's settings ask for."""
    folder = ROOT / "results/tiny-r"
    runs = pack.index(folder).set_index("run")
    for path in folder.glob("*.parquet"):
        if path.stem not in ("runs", *pack.MEASUREMENTS):  # which may be of runs that are not packed
            assert set(pq.read_table(path, columns=["run"])["run"].to_pylist()) <= set(runs.index), path.stem
    metrics = pd.read_parquet(folder / "metrics.parquet", columns=["run"])["run"].value_counts()
    evaluated = pd.read_parquet(folder / "eval.parquet", columns=["run", "step"]).groupby("run", observed=True)["step"]
    n_steps, n_rows = evaluated.nunique(), evaluated.size()
    for run, settings in runs[runs["kind"] == "run"]["settings"].items():
        cell = cell_of(settings)
        n = 1 + cell.max_steps // cell.eval_steps
        assert metrics[run] == cell.max_steps, run
        assert (n_steps[run], n_rows[run]) == (n, n * cell.n_validation), run
    assert sum(path.stat().st_size for path in folder.glob("*.parquet")) < 12e6


def test_measurements_of_runs_are_added_by_run_and_step(tmp_path):
    """A run's measured table has a column `run` already. New rows replace those of the same run and step."""
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()

    def measured(run, step, value):
        folder = runs / run
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame([{"run": run, "step": step, "value": value}]).to_parquet(folder / "gradient_signal.parquet")

    measured("a", 30, 1.5)
    assert pack.add_measurements(results, runs) == [results / "gradient_signal.parquet"]
    measured("a", 60, 2.5)
    measured("b", 30, 3.5)
    pack.add_measurements(results, runs)
    measured("b", 30, 4.5)
    pack.add_measurements(results, runs)
    rows = pd.read_parquet(results / "gradient_signal.parquet").sort_values(["run", "step"])
    assert rows.to_numpy().tolist() == [["a", 30, 1.5], ["a", 60, 2.5], ["b", 30, 4.5]]
