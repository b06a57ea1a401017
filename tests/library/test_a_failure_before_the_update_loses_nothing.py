"""What fails in an iteration before its update, also after the rollout: the iterations before it are saved, and a resumed run equals a whole one."""

import json
from pathlib import Path

import pytest
import torch
from trainers import library_trainer

from multirole.engines.protocol import EngineError
from multirole.saving.layout import last_checkpoint
from multirole.types import Reward
from multirole.workflows import Voting


def by_length(completions, episodes, **_):
    for episode, text in zip(episodes, completions, strict=True):
        episode.reward = Reward(len(text) % 3, is_correct=len(text) % 3 == 1)
    return [episode.reward.value for episode in episodes]


@pytest.fixture
def make(tokenizer, tmp_path):
    def make(folder):
        trainer = library_trainer(
            Voting(), tokenizer, tmp_path / folder, reward_funcs=by_length, credit="leave_one_out", credit_branches=2, num_generations=2,
            generation_batch_size=2, max_completion_length=4, max_steps=3, logging_steps=1, save_steps=100, disable_tqdm=True,
        )  # fmt: skip
        trainer.lr_scheduler = trainer.optimizer = None  # `train` makes its own
        return trainer

    return make


def lose_the_engine(trainer):
    """Fail while episodes are replayed."""
    play = trainer.play

    def fails_in_the_second_iteration(*args, replays=None):
        if replays is not None and trainer.state.global_step == 1:
            raise EngineError("The cable is cut.")
        return play(*args, replays=replays)

    trainer.play = fails_in_the_second_iteration


def lose_the_judge(trainer):
    """Fail in a reward function."""
    reward = trainer.reward_funcs[0]

    def fails_in_the_second_iteration(*args, **columns):
        if trainer.state.global_step == 1:
            raise RuntimeError("The judge does not answer: The cable is cut.")
        return reward(*args, **columns)

    trainer.reward_funcs[0] = fails_in_the_second_iteration


@pytest.mark.parametrize("lose", [lose_the_engine, lose_the_judge])
def test_the_iterations_before_it_are_saved(make, lose):
    whole, cut = make("whole"), make("cut")
    whole.train()
    lose(cut)
    with pytest.raises(RuntimeError, match="The cable is cut"):
        cut.train()
    checkpoint = last_checkpoint(Path(cut.args.output_dir))
    assert checkpoint.name == "checkpoint-1"
    counted = json.loads((checkpoint / "trainer_state.json").read_text())["num_input_tokens_seen"]
    logged = [row["num_tokens"] for row in whole.state.log_history if "num_tokens" in row]
    assert counted == logged[0], "the interrupted iteration counts when it is trained"

    resumed = make("cut")
    resumed.train(resume_from_checkpoint=True)
    assert [row["num_tokens"] for row in resumed.state.log_history if "num_tokens" in row] == logged
    for (name, a), (_, b) in zip(
        whole.peft_model.named_parameters(), resumed.peft_model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
