"""A run ends with the iteration that spends its budget of sampled tokens, its schedule runs over the budget, and a resume continues the count."""

import logging
import math

import pytest
import torch
from datasets import Dataset
from scripted_engine import ScriptedEngine
from trainers import SUMS
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from multirole.callbacks import MultiRoleCallback
from multirole.options import MultiRoleGRPOConfig
from multirole.workflows import Voting

EPISODES, TURNS, REPLY = 8, 4, 3
TOKENS = EPISODES * TURNS * REPLY
"""An iteration of Voting: 8 episodes of 4 turns of 3 tokens."""
RATE = 1e-3


class Seen(TrainerCallback):
    """Notes the learning rate and the counts that every iteration logs, and where the run is evaluated."""

    def __init__(self) -> None:
        self.logs, self.evaluated = [], []

    def on_log(self, args, state, control, logs, **_):
        if "learning_rate" in logs:
            self.logs.append(logs)

    def on_evaluate(self, args, state, control, **_):
        self.evaluated.append(state.global_step)


@pytest.fixture
def make(make_library_trainer, tokenizer):
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    assert len(reply) == REPLY

    def make(folder="", **config):
        engine = ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id)
        usual = {
            "generation_batch_size": EPISODES,
            "num_generations": 4,
            "learning_rate": RATE,
            "logging_steps": 1,
            "max_steps": 100,
        }
        trainer = make_library_trainer(Voting(), engine, reward_funcs=rewards, callbacks=[Seen()], **usual | config)
        trainer.lr_scheduler = trainer.optimizer = None  # `train` makes its own
        return trainer, next(c for c in trainer.callback_handler.callbacks if isinstance(c, Seen))

    return make


def rewards(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for name, p in trainer.peft_model.named_parameters() if "lora_" in name])


def test_the_iteration_that_spends_the_budget_is_the_last(make, caplog):
    """3.5 iterations' tokens are spent by the fourth; the overshoot is less than an iteration."""
    trainer, seen = make(max_sampled_tokens=int(3.5 * TOKENS), save_strategy="no")
    with caplog.at_level(logging.INFO, "multirole.schedule"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.budget.spent["sampled_tokens"] == 4 * TOKENS and 0 < 4 * TOKENS - int(3.5 * TOKENS) < TOKENS
    assert trainer.budget.spent["optimizer_steps"] == 4 * TURNS  # a step per eight rows
    read = sum(len(r.prompt_ids) for r in trainer.engine.requests)
    assert trainer.budget.spent["read_tokens"] == read > 4 * TOKENS
    assert [log["spent/sampled_tokens"] for log in seen.logs] == [TOKENS * n for n in (1, 2, 3, 4)]
    assert "Training ends after 4 iterations: 384 tokens sampled" in caplog.text and "16 optimizer steps" in caplog.text


def test_an_exact_budget_takes_no_further_iteration(make):
    trainer, _ = make(max_sampled_tokens=2 * TOKENS, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 2


def test_warm_up_and_cosine_run_over_the_budget(make):
    """Eight iterations' tokens, of which warm-up takes a quarter: 0, 1/2, then a cosine at 0, 1/6, ... 5/6 of its length."""
    trainer, seen = make(
        max_sampled_tokens=8 * TOKENS, warmup_steps=0.25, lr_scheduler_type="cosine", save_strategy="no"
    )
    trainer.train()
    cosine = [(1 + math.cos(math.pi * sixths / 6)) / 2 for sixths in range(6)]
    assert [log["learning_rate"] / RATE for log in seen.logs] == pytest.approx([0, 0.5, *cosine], abs=1e-9)


def test_max_steps_is_an_upper_bound(make, caplog):
    trainer, seen = make(max_sampled_tokens=100 * TOKENS, max_steps=2, warmup_steps=0.5, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 2
    assert [log["learning_rate"] / RATE for log in seen.logs] == pytest.approx(
        [0, 0.02]
    )  # of a warm-up of 50 iterations
    assert "`max_steps` ends the run before" in caplog.text


def test_a_resumed_run_ends_where_an_unbroken_one_does(make, tmp_path):
    """Killed after its second iteration, it continues the count and the schedule, bit for bit; resumed at its end, it trains nothing."""
    options = {
        "max_sampled_tokens": int(3.5 * TOKENS),
        "save_steps": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.25,
    }
    unbroken, seen = make(**options)
    unbroken.train()
    rates = [log["learning_rate"] for log in seen.logs]
    for step, left in ((2, rates[2:]), (4, [])):
        resumed, seen = make(**options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "library" / f"checkpoint-{step}"))
        assert resumed.state.global_step == 4 and resumed.budget.spent == unbroken.budget.spent
        assert [log["learning_rate"] for log in seen.logs] == left
        assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.args.max_steps == 100


def test_a_checkpoint_without_counts_is_refused(make, tmp_path):
    make(max_steps=1, save_steps=1)[0].train()
    trainer, _ = make(max_sampled_tokens=5 * TOKENS)
    with pytest.raises(ValueError, match="of a run without `max_sampled_tokens`.*train from the start"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "library" / "checkpoint-1"))


def test_a_part_without_a_budget_is_not_forgotten(make):
    """A run that goes on without a budget has counted no tokens there, so that it is not known what is left of a budget."""
    options = {"save_strategy": "steps", "save_steps": 1}
    first, _ = make(max_sampled_tokens=10 * TOKENS, max_steps=1, **options)
    first.train()
    folder = first.args.output_dir
    second, _ = make(max_steps=2, **options)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    third, _ = make(max_sampled_tokens=20 * TOKENS, **options)
    with pytest.raises(ValueError, match="checkpoint-2 is of a run without `max_sampled_tokens`"):
        third.train(resume_from_checkpoint=f"{folder}/checkpoint-2")


def test_replays_count_and_evaluations_do_not(make, tokenizer):
    counts = {}
    for credit in ("outcome", "branches"):
        trainer, seen = make(max_sampled_tokens=TOKENS, credit=credit, credit_branches=2, save_strategy="no")
        trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 50
        trainer.eval_dataset = Dataset.from_dict({"prompt": ["question"], "task": [SUMS]})
        trainer.train()
        assert seen.evaluated == [1] == [trainer.state.global_step]  # also where `eval_steps` is far away
        counts[credit] = trainer.budget.spent["sampled_tokens"]
    assert counts["outcome"] == TOKENS < counts["branches"]


@pytest.mark.parametrize("options", [{"max_sampled_tokens": 10**6}, {"lr_ticks": 2}], ids=str)
def test_a_schedule_without_a_formula_is_refused_before_anything_is_sampled(make, options):
    trainer, _ = make(**options)
    trainer.args.lr_scheduler_type = "reduce_lr_on_plateau"
    with pytest.raises(TypeError, match="got a ReduceLROnPlateau. Use `lr_scheduler_type='cosine'`"):
        trainer.train()
    assert trainer.rollout.sampled_tokens == 0


def test_asking_for_a_rate_moves_no_clock(make):
    """With two ticks per iteration the second adapter's rate is that of the second, however often a callback asks."""

    class Asks(MultiRoleCallback):
        def __init__(self):
            self.rates = []

        def on_update_begin(self, trainer, rows, steps):
            self.rates += [trainer.adapter_learning_rate(name) for name in trainer.adapters]

        def on_adapter_step(self, trainer, step):
            self.rates.append(step.lr)

    trainer, _ = make(
        policy="ip", updates="one", lr_ticks=2, lr_scheduler_type="linear", max_steps=4, save_strategy="no"
    )
    trainer.add_callback(watch := Asks())
    trainer.train()
    rates = [RATE * (1 - tick / 4) for tick in range(4)] + [0.0] * 4
    assert watch.rates == pytest.approx([rate for i in range(0, 8, 2) for rate in rates[i : i + 2] * 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sampled_tokens": 0}, "`max_sampled_tokens` must be a positive integer, got 0"),
        ({"max_sampled_tokens": 10, "lr_ticks": 2}, "Leave out one of the two"),
        ({"max_sampled_tokens": 10, "max_staleness": 1}, "Leave max_staleness at 0"),
        ({"lr_ticks": 0}, "`lr_ticks` must be a positive integer, got 0"),
        ({"lr_wraps": True}, "needs `lr_ticks` above 1, got 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MultiRoleGRPOConfig("unused", use_cpu=True, **options)
