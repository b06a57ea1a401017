"""`max_staleness` on two processes: each plays its share of the episodes ahead, and both stop, fail and resume together."""

import time
from pathlib import Path

import processes
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_base
from trainers import SUMS

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.callbacks import MultiRoleCallback
from multirole.engines.protocol import EngineError
from multirole.rollout.errors import WorkflowError
from multirole.types import Answer, user
from multirole.workflows import Voting
from multirole_cpu.engine import TransformersEngine

N_ITERATIONS = 5


class Notes(MultiRoleCallback):
    """Notes each iteration's episodes and the versions of their turns; stops the run after an iteration."""

    def __init__(self, last=None):
        self.episodes, self.versions, self.last = {}, {}, last

    def on_rollout_end(self, trainer, episodes):
        step = trainer.state.global_step
        self.episodes[step] = [(e.problem.id, e.index, tuple(t.text for t in e.turns)) for e in episodes]
        self.versions[step] = {turn.version for e in episodes for turn in e.turns}

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.last


class UnevenEngine(TransformersEngine):
    """An engine that is slow in one process. In its first process it loses its server in the second iteration if `fails`."""

    fails, n_added, rank = False, 0, 0

    def add(self, key, request):
        self.n_added += 1
        super().add(key, request)

    def step(self):
        time.sleep(0.01 * self.rank)
        if self.fails and self.rank == 0 and self.n_added > 8:  # half of an iteration's calls
            raise EngineError("The cable is cut.")
        return super().step()


class FailsLater:
    """Raises on one problem."""

    name, roles = "fails_later", {"solver": 1}

    async def run(self, problem, call):
        turn = await call("solver", [user(problem.question)])
        if problem.question == "3+1":
            raise KeyError("no such thing")
        return Answer(turn.text)


def uneven(completions, **_):
    return [float(sum(map(ord, text)) % 3) for text in completions]


def build(folder, max_staleness=1, last=None, workflow=None, fails=False, **options):
    args = MultiRoleGRPOConfig(
        str(folder), policy="ip" if workflow is None else "sp", generation_batch_size=4, num_generations=2, max_steps=N_ITERATIONS,
        max_completion_length=8, learning_rate=1e-2, adam_epsilon=1e-4, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
        disable_tqdm=True, max_staleness=max_staleness, **{"save_strategy": "steps", "save_steps": 2} | options,
    )  # fmt: skip
    notes = Notes(last)
    trainer = MultiRoleGRPOTrainer(
        toy_base(), workflow or Voting(2, prompts=SUMS), uneven, args, Dataset.from_dict({"prompt": [f"{i}+1" for i in range(7)]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear"), callbacks=[notes],
    )  # fmt: skip
    engine = UnevenEngine(*trainer.eos_token_ids, max_length=2056)
    engine.rank, engine.fails = trainer.accelerator.process_index, fails
    trainer.rollout.engine = trainer.player.engine = trainer.engine = engine
    return trainer, notes


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.peft_model.named_parameters() if "lora" in name}


def are_equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def train(folder, max_staleness):
    trainer, notes = build(folder, max_staleness)
    trainer.train()
    saved = weights(trainer), notes.episodes, notes.versions
    torch.save(saved, Path(folder) / f"rank{trainer.accelerator.process_index}.pt")
    if trainer.accelerator.num_processes == 1:
        return
    resumed, rest = build(folder, max_staleness)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert are_equal(weights(trainer), weights(resumed)) and rest.versions == {n: notes.versions[n] for n in (2, 3, 4)}


@pytest.mark.parametrize("max_staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_play_and_train_what_one_does_and_resume_exactly(tmp_path, max_staleness):
    runs = []
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        codes = processes.run_together(n, folder / "log", train, str(folder), max_staleness)
        assert codes == [0] * n, [Path(f"{folder / 'log'}.{rank}").read_text()[-2000:] for rank in range(n)]
        runs += [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]
    (one, episodes, versions), *two = runs
    assert versions == {n: {max(0, n - max_staleness)} for n in range(N_ITERATIONS)}
    assert are_equal(two[0][0], two[1][0])
    for values, played, of_turns in two:
        assert of_turns == versions and played == episodes
        assert max((value - one[name]).abs().max().item() for name, value in values.items()) < 1e-5


def stop_early(folder):
    """The quicker process asks to stop while the slower one plays, and both train on."""
    trainer, notes = build(folder, max_staleness=2, last=2)
    trainer.train()
    assert list(notes.episodes) == [0, 1] and not trainer.engine.waiting and not trainer.engine.n_running
    notes.last = None
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert notes.versions == {n: {max(0, n - 2)} for n in range(N_ITERATIONS)}


def fail(folder):
    """An error in one process is the error of both, which save what is trained; a run without the error goes on from there."""
    trainer, _ = build(folder, workflow=FailsLater(), save_strategy="no")
    with pytest.raises(WorkflowError, match="fails_later"):
        trainer.train()
    whole, _ = build(f"{folder}/whole", save_strategy="no")
    whole.train()
    trainer, notes = build(folder, fails=True, save_steps=N_ITERATIONS)
    with pytest.raises(EngineError, match="The cable is cut"):
        trainer.train()
    assert list(notes.episodes) == [0]
    rest, _ = build(folder)
    rest.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert are_equal(weights(whole), weights(rest))


@pytest.mark.parametrize("work", [pytest.param(stop_early, marks=pytest.mark.slow), fail])
def test_processes_end_together(tmp_path, work):
    codes = processes.run_together(2, tmp_path / "log", work, str(tmp_path / "out"))
    assert codes == [0, 0], [Path(f"{tmp_path / 'log'}.{rank}").read_text()[-2000:] for rank in (0, 1)]
