"""Every setting of a cell reaches the workflow, the task or the trainer that it is about: a run's name and record say nothing about that."""

from itertools import product

import pytest
import torch
from cells import SMALL_RUN

from multirole.credit.process_reward import ProcessReward
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import load_model, make_trainer, update_rules
from multirole_study.experiment.presets import MODELS
from multirole_study.experiment.released_code import RENDERERS, RowCuts


def test_the_sizes_and_rules_of_workflows():
    voting = Cell("voting", "sp", n_voters=5, aggregator_fallback="first_digit").make_workflow()
    assert (voting.roles["generator"], voting.fallback, voting.box_rule) == (5, "first_digit", "first_literal")
    eval_opt = Cell("eval_opt", "sp", rounds=4).make_workflow()
    assert (eval_opt.rounds, eval_opt.box_rule) == (4, "first_literal")
    assert Cell("orch_workers", "sp", n_workers=2).make_workflow().roles["worker"] == 2
    for scale in MODELS.keys() - {"smollm2"}:
        assert Cell("voting", "ip", scale=scale).make_workflow().box_rule == "last_box", scale


@pytest.mark.parametrize(
    ("scale", "preset", "task"), list(product(["tiny-r", "0.6b", "smollm2"], ["paper", "released_code"], ["math"]))
)
def test_the_reward_of_a_malformed_answer(scale, preset, task):
    cell = Cell("single", "sp", task, scale, preset=preset)
    assert cell.make_task().malformed_reward == cell.malformed_reward == (0.0 if preset == "released_code" else -0.1)


@pytest.mark.parametrize("scale", ["tiny-r", "0.6b", "smollm2"])
def test_the_reward_of_a_program(scale):
    assert Cell("single", "sp", "code", scale).make_task().reward == "fraction"
    assert Cell("single", "sp", "code", scale, preset="released_code").make_task().reward == "all_pass"


def test_an_answer_of_smollm2_without_a_box_earns_half():
    task = Cell("single", "sp", scale="smollm2").make_task()
    assert (task.fallback, task.unboxed_reward) == ("last_number", 0.5)


def test_the_update_rules_of_the_released_code():
    released = update_rules(Cell("voting", "ip", scale="0.6b", preset="released_code"))
    assert released == [RowCuts("mountain", "sequential")]
    assert update_rules(Cell("voting", "ip", "code", "0.6b", preset="released_code")) == released
    assert update_rules(Cell("voting", "ip", scale="0.6b")) == []
    assert update_rules(Cell("voting", "ip", minibatch_split="sequential")) == [RowCuts("shuffled", "sequential")]


def test_the_seed_draws_the_adapters():
    def weights(seed):
        model, _ = load_model(SMALL_RUN.replace(seed=seed))
        return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "lora_A" in name])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(0))


def test_the_process_reward_and_the_renderer(tmp_path):
    trainer = make_trainer(SMALL_RUN.replace(process_reward=0.5, renderer="released_code"), str(tmp_path))
    (reward,) = [callback for callback in trainer.multirole_callbacks if isinstance(callback, ProcessReward)]
    assert reward.weight == 0.5
    assert trainer.rollout.render is RENDERERS["released_code"]
