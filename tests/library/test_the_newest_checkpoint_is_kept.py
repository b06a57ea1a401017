"""`save_total_limit` removes old checkpoints by their step, whatever the clock and an earlier run in the folder say."""

import json
import os
import time

import pytest
from scripted_engine import ScriptedEngine

from multirole import MultiRoleCallback, Single
from multirole.saving.checkpoints import remove_oldest
from multirole.saving.layout import last_checkpoint, numbered_checkpoints


class Clock(MultiRoleCallback):
    """Sets the times of the checkpoints by `time_of(step)`, and looks whether each is there after it was saved."""

    def __init__(self, time_of):
        self.time_of, self.kept = time_of, []

    def on_save(self, args, state, control, **_):
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        self.kept.append(os.path.isdir(folder))
        if self.kept[-1]:
            os.utime(folder, (self.time_of(state.global_step),) * 2)


@pytest.fixture
def train(make_library_trainer, tokenizer, tmp_path):
    """train(time_of, **options) -> steps of the checkpoints that are left, after each was there when it had been saved."""

    def run(time_of=lambda step: time.time(), resume=None, **options):
        engine, clock = (
            ScriptedEngine(lambda key, _: ([5, tokenizer.eos_token_id], 1), tokenizer.eos_token_id),
            Clock(time_of),
        )
        usual = {
            "generation_batch_size": 4, "num_generations": 4, "max_steps": 5, "save_strategy": "steps", "save_steps": 1,
            "save_total_limit": 2, "disable_tqdm": True,
        }  # fmt: skip
        rewards = lambda completions, **_: [float(i) for i in range(len(completions))]
        trainer = make_library_trainer(Single(), engine, rewards, 8, [clock], **usual | options)
        trainer.train(resume_from_checkpoint=resume)
        assert all(clock.kept)
        return list(numbered_checkpoints(tmp_path / "library"))

    return run


@pytest.mark.parametrize(
    "time_of",
    [lambda step: time.time() + 3600 * (step <= 2), lambda step: 1e9, lambda step: 2e9 - 100 * step],
    ids=["set back", "equal", "backwards"],
)
def test_the_clock_does_not_matter(train, time_of):
    """huggingface/transformers#26961."""
    assert train(time_of) == [4, 5]


def test_checkpoints_of_a_longer_earlier_run_are_removed_first(train, tmp_path):
    """huggingface/transformers#11769."""
    assert train(max_steps=6, save_steps=2, save_total_limit=None) == [2, 4, 6]
    (tmp_path / "library" / "checkpoint-2" / "adapter_of_the_earlier_run").mkdir()
    (tmp_path / "library" / "checkpoint-6-best").mkdir()
    assert train(max_steps=3) == [2, 3]
    assert not (tmp_path / "library" / "checkpoint-2" / "adapter_of_the_earlier_run").exists()
    assert (tmp_path / "library" / "checkpoint-6-best").exists()


def test_a_resume_of_the_last_checkpoint_is_one_of_the_same_run(train, tmp_path):
    train(max_steps=4, save_steps=2, save_total_limit=None)
    folder = tmp_path / "library"
    train(max_steps=5, resume=True)
    assert last_checkpoint(folder) == folder / "checkpoint-5"
    train(max_steps=2, save_total_limit=None)
    with pytest.raises(
        ValueError,
        match=r"holds those of 2 runs: the last of each are checkpoint-2, checkpoint-5. Pass the folder of one",
    ):
        train(max_steps=4, resume=True)
    assert train(max_steps=3, resume=str(folder / "checkpoint-2"), save_total_limit=1) == [3]


def test_a_checkpoint_whose_saving_was_interrupted_is_not_resumed_from(train, tmp_path, caplog):
    train(max_steps=4, save_steps=2, save_total_limit=None)
    killed = tmp_path / "library" / "checkpoint-4"
    (killed / "trainer_state.json").unlink()
    for options in ({}, {"max_sampled_tokens": 1000}):
        with pytest.raises(ValueError, match="checkpoint-4 holds no trainer_state.json, which is written last"):
            train(max_steps=5, resume=str(killed), **options)
    assert train(max_steps=3, resume=True, save_total_limit=None) == [2, 3, 4]
    assert "saving was interrupted: checkpoint-4" in caplog.text
    assert json.loads((killed.with_name("checkpoint-3") / "trainer_state.json").read_text())["global_step"] == 3


def test_the_best_checkpoint_is_kept(tmp_path):
    for step in (2, 4, 6, 9, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_oldest(6, str(tmp_path), 3, str(tmp_path / "checkpoint-2"))
    assert list(numbered_checkpoints(tmp_path)) == [2, 4, 6]
    for limit, left in ((0, [2, 4, 6]), (1, [2, 6])):  # the best and the newest, as in transformers
        remove_oldest(6, str(tmp_path), limit, str(tmp_path / "checkpoint-2"))
        assert list(numbered_checkpoints(tmp_path)) == left


def test_a_checkpoint_of_an_older_version_names_no_run(tmp_path):
    for step, started in ((1, None), (2, "2026-11-28"), (3, "2026-11-28")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        args = {"policy": {}} | ({"started": started} if started else {})
        state = {"stateful_callbacks": {"PolicyMap": {"args": args}}}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-3" and last_checkpoint(tmp_path / "none") is None
