"""The same seed gives the same weights and metrics, and so does a run that was killed with SIGKILL and resumed."""

import os
import shutil
import signal
from pathlib import Path

import processes
import pytest
from kill_run import same
from trainers import table
from transformers import TrainerCallback

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

FIELDS = {
    "workflow": "voting", "policy": "generator=1,aggregator=default", "task": "code", "max_steps": 5, "n_problems": 2, "num_generations": 4,
    "save_steps": 2, "eval_steps": 5, "n_validation": 4, "n_train": 6, "warmup_steps": 1, "learning_rate": 5e-3,
    "max_completion_length": 40,
}  # fmt: skip  # 6 problems, 2 per iteration: it resumes within the second pass


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(results_dir: Path) -> None:
    run_cell(Cell(**FIELDS), results_dir, callbacks=[Kill()])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_cell(Cell(**FIELDS), tmp_path_factory.mktemp("unbroken"))


def test_a_killed_run_resumes_to_the_same_weights_and_metrics(unbroken, tmp_path):
    assert processes.run(tmp_path / "log", killed, tmp_path) == -signal.SIGKILL
    folder = tmp_path / "tiny-r" / unbroken.name
    assert not is_done(folder) and (folder / "checkpoints" / "checkpoint-4" / "checksums.json").exists()
    assert run_cell(Cell(**FIELDS), tmp_path) == folder and is_done(folder)
    assert same(unbroken, folder) == ""


def test_another_seed_gives_another_run(unbroken, tmp_path):
    other = run_cell(Cell(**FIELDS | {"seed": 1, "max_steps": 1, "save_steps": 1, "eval_steps": 1}), tmp_path)
    first = table(unbroken, "roles").query("iteration == 1")
    assert not table(other, "roles")["entropy"].equals(first["entropy"])


def test_a_finished_run_is_not_trained_again(unbroken):
    before = (unbroken / "DONE").stat().st_mtime_ns
    assert run_cell(Cell(**FIELDS), unbroken.parents[1]) == unbroken
    assert (unbroken / "DONE").stat().st_mtime_ns == before


def test_a_run_killed_between_its_last_checkpoint_and_done_only_finishes(unbroken, tmp_path):
    shutil.copytree(unbroken.parents[1], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "tiny-r" / unbroken.name
    (folder / "DONE").unlink()
    assert run_cell(Cell(**FIELDS), tmp_path) == folder and is_done(folder)
    assert same(unbroken, folder) == ""


def test_an_altered_table_is_not_done(unbroken, tmp_path):
    assert is_done(unbroken)
    path = unbroken / "ledger.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert not is_done(unbroken)
    path.write_bytes(content)
