"""A run that diverges ends: its tables are kept, DONE is written, and the same command does not train it again."""

import json
import shutil

import pytest
import torch
from cells import SMALL_RUN
from trainers import table
from transformers import TrainerCallback

from multirole.types import Reward
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import TaskReward
from multirole_study.experiment.evaluation import Evaluation, steps_of
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import folder_of, is_done, outcome_of

CELL = Cell("voting", "ip", max_steps=4, n_problems=2, num_generations=2, n_validation=4, n_train=8, eval_steps=1, save_steps=2,
            max_completion_length=24, warmup_steps=0, learning_rate=5e-3)  # fmt: skip


class Spoil(TrainerCallback):
    """Puts an infinite weight into an adapter before an iteration."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if ".generator." in name).view(-1)[0] = torch.inf


@pytest.mark.parametrize("done", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_divergence_is_a_recorded_result(done, tmp_path, capsys):
    folder = run_cell(CELL, tmp_path, [Spoil(done)])
    assert is_done(folder) and outcome_of(folder)["state"] == "diverged" and outcome_of(folder)["iteration"] == done + 1
    assert f"{folder.name} diverged in iteration {done + 1}" in capsys.readouterr().out
    metrics = table(folder, "metrics")["iteration"].tolist() if done else []
    assert metrics == list(range(1, done + 1))  # including those after the last checkpoint
    assert sorted(set(table(folder, "eval")["step"])) == list(range(done + 1))
    before = (folder / "DONE").stat().st_mtime_ns
    assert run_cell(CELL, tmp_path) == folder and (folder / "DONE").stat().st_mtime_ns == before
    assert max(steps_of(Evaluation(CELL), tmp_path)) == done and steps_of(
        Evaluation(CELL, checkpoints="0"), tmp_path
    ) == [0]


def test_every_evaluated_step_has_its_adapters_and_a_lost_one_is_not_done(finished, tmp_path):
    shutil.copytree(finished.parents[1], tmp_path, dirs_exist_ok=True)
    folder = folder_of(SMALL_RUN, tmp_path)  # evaluated four times, saved twice
    assert sorted(path.name for path in folder.glob("adapters/*")) == [f"step_0000{i}" for i in (1, 2, 3, 4)]
    listed = json.loads((folder / "DONE").read_text())
    lost = folder / "adapters" / "step_00004" / "generator" / "adapter_model.safetensors"
    content = lost.read_bytes()
    assert str(lost.relative_to(folder)) in listed and outcome_of(folder) is None
    lost.unlink()
    assert not is_done(folder)
    run_cell(SMALL_RUN, tmp_path)  # trains it again from the checkpoint before it
    assert is_done(folder) and lost.read_bytes() == content
    assert json.loads((lost.parent / "adapter_config.json").read_text())["target_modules"][:2] == [
        "down_proj",
        "gate_proj",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
def test_a_reward_that_is_not_a_reasonable_number_is_refused(value):
    class Odd:
        name = "odd"

        def score(self, problems, texts):
            return [Reward(value)]

    problem = CELL.make_task().problems("validation", 1)[0]
    with pytest.raises(ValueError, match=f"The task 'odd' gave problem .* the reward {value}"):
        TaskReward(Odd(), [problem]).score([problem], ["?"])
