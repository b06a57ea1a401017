"""KL anchors and process rewards equal short references written here."""

import pytest
import torch
from test_gradients import gradient
from test_matching_switches import plain_logprobs
from trainers import episodes_of, rows_of

from multirole.credit.process_reward import ProcessReward
from multirole.credit.turn_grading import grade_by_duty
from multirole.types import Episode, Reward, structure_of
from multirole.update.reference import Reference
from multirole.update.rows import Row
from multirole.workflows import EvalOpt, OrchWorkers, Voting

# ---- KL to the base


def applied(make_library_trainer, **options) -> tuple[torch.Tensor, list[Row], object]:
    """Return the gradient of one step on all rows, without clipping, after `prepare_rows`. KL is measured from the base."""
    trainer = make_library_trainer(Voting(), **options)
    trainer.reference = Reference(trainer.peft_model, [])  # as for fresh adapters
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    return gradient(trainer, trainer.adapters[0], rows), rows, trainer


def k3_gradient(trainer, rows: list[Row], weights: dict[str, float]) -> torch.Tensor:
    """Return the gradient of the weighted mean over rows of token means of exp(q - p) - (q - p) - 1, with q the base's log-probs."""
    total = 0.0
    for row in rows:
        with torch.no_grad(), trainer.model.disable_adapter():
            base = plain_logprobs(trainer.model, row, trainer.args.temperature)
        trainer.model.set_requires_grad(trainer.adapters, True)
        gap = base - plain_logprobs(trainer.model, row, trainer.args.temperature)  # (C,)
        total = total + weights[row.turn.role] * (gap.exp() - gap - 1).mean() / len(rows)
    named = [p for _, p in sorted(trainer.model.named_parameters()) if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, named)])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        pytest.param({"beta": 20.0}, {"generator": 20.0, "aggregator": 20.0}, marks=pytest.mark.slow),
        ({"role_beta": {"aggregator": 20.0}}, {"generator": 0.0, "aggregator": 20.0}),
        ({"beta": 20.0, "role_beta": {"aggregator": 0.0}}, {"generator": 20.0, "aggregator": 0.0}),
    ],
)
def test_the_anchor_adds_the_gradient_of_k3_by_role(make_library_trainer, options, weights):
    plain, rows, trainer = applied(make_library_trainer)
    anchored, _, same = applied(make_library_trainer, **options)
    expected = k3_gradient(trainer, rows, weights)
    assert expected.norm() > 1e-2 and same.beta == 0.0
    torch.testing.assert_close(anchored - plain, expected, atol=1e-5, rtol=1e-4)


def test_the_reference_keeps_the_weights_of_every_adapter(make_library_trainer):
    trainer = make_library_trainer(Voting(), policy="ip", beta=0.1)
    trainable = {id(p) for name, p in trainer.peft_model.named_parameters() if "lora_" in name}
    kept = [id(p) for p, _ in trainer.reference.initial_weights]
    assert len(trainer.adapters) == 2 and len(kept) == len(trainable) and set(kept) == trainable


# ---- process_reward


def score(episodes: list[Episode]) -> None:
    """Grade the word "right" as right."""
    for episode in episodes:
        is_right = episode.answer.text == "right"
        episode.reward = Reward(float(is_right), "", is_right)


def judged(workflow, answers: dict[tuple[str, int, int], str], outcomes: dict[int, str], right: bool) -> dict:
    """(role, slot, round) -> is_right of one episode."""
    episode = episodes_of(workflow.roles, n_problems=1, rounds=2 if workflow.name == "eval_opt" else 1)[0]
    object.__setattr__(episode.reward, "is_correct", right)
    for turn in episode.turns:
        turn.text = answers.get((turn.role, turn.slot, turn.round), "nothing")
        if turn.role == "evaluator":
            turn.outcome = outcomes[turn.round]
    grade_by_duty([episode], score, structure_of(workflow))
    return {(turn.role, turn.slot, turn.round): turn.is_right for turn in episode.turns}


def test_every_kind_of_turn_is_judged_by_its_own_result():
    drafts = {("generator", 0, 0): "wrong", ("generator", 0, 1): "right"}
    turns = judged(EvalOpt(), drafts, {0: "incorrect", 1: "unparsed"}, True)
    assert turns == {
        ("generator", 0, 0): False,
        ("evaluator", 0, 0): True,
        ("generator", 0, 1): True,
        ("evaluator", 0, 1): False,
    }
    turns = judged(EvalOpt(), drafts, {0: "correct", 1: "correct"}, True)
    assert (turns["evaluator", 0, 0], turns["evaluator", 0, 1]) == (False, True)
    turns = judged(Voting(), {("generator", 1, 0): "right"}, {}, False)
    assert [turns["generator", slot, 0] for slot in range(3)] == [False, True, False]
    assert turns["aggregator", 0, 0] is False
    turns = judged(OrchWorkers(), {("worker", 2, 0): "right", ("synthesizer", 0, 0): "right"}, {}, True)
    assert turns["orchestrator", 0, 0] is None and turns["synthesizer", 0, 0] is True
    assert [turns["worker", slot, 0] for slot in range(3)] == [False, False, True]


def process_advantages(trainer, rows: list[Row]) -> list[float]:
    """Return what a process reward of weight 1 adds to the rows' advantages."""
    values = ProcessReward(1.0).advantages(trainer, rows)
    return [value - row.advantage for row, value in zip(rows, values, strict=True)]


def test_process_advantages_are_added_by_role_and_round(make_library_trainer):
    """Of four drafts of round 0 one is right. A second round, which only one episode has, adds no advantage."""
    trainer = make_library_trainer(EvalOpt(), policy="ip", num_generations=4, process_reward=0.5)
    episodes = episodes_of(trainer.workflow.roles, 4, n_problems=1, rounds=2)
    for i, episode in enumerate(episodes):
        episode.turns = episode.turns if i == 0 else episode.turns[:2]
        for turn in episode.turns:
            turn.is_right = i == 0 if turn.role == "generator" else None
    plain = rows_of(trainer, episodes)
    process = dict(zip([id(row.turn) for row in plain], process_advantages(trainer, plain), strict=True))
    first = [process[id(row.turn)] for row in plain if row.turn.role == "generator" and row.turn.round == 0]
    assert first == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # mean 1/4, std 1/2
    rows = trainer.prepare_rows(episodes)
    assert len(rows) == len(plain)
    for row in rows:
        assert row.advantage == pytest.approx(row.episode.advantage + 0.5 * process[id(row.turn)], abs=1e-12)
        if row.turn.round == 1 or row.turn.role == "evaluator":
            assert process[id(row.turn)] == 0.0


def test_an_episode_without_a_reward_gets_no_process_advantage(make_library_trainer):
    """Of the three others, one is right: mean 1/3, standard deviation 1/sqrt(3)."""
    trainer = make_library_trainer(EvalOpt(), num_generations=4)
    episodes = episodes_of(trainer.workflow.roles, 4, n_problems=1)
    for i, episode in enumerate(episodes):
        for turn in episode.turns:
            turn.is_right = i in (0, 3)
    episodes[3].reward = None
    rows = rows_of(trainer, episodes)
    advantages = process_advantages(trainer, rows)
    for episode, expected in zip(episodes, (2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 0.0), strict=True):
        of_episode = [a for row, a in zip(rows, advantages, strict=True) if row.episode is episode]
        assert of_episode == pytest.approx([expected] * len(episode.turns), abs=1e-5)
