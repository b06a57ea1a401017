"""What a role is worth, against enumeration with a policy of two tokens."""

from functools import partial
from statistics import stdev

import pytest
from datasets import Dataset
from two_tokens import BASE, CHANCE, SAMPLING, close_to, expectation, last_chance, relay, score, trainer_of

from multirole.roles.value import RoleValue, effect_of, role_values, turn_effects
from multirole.types import Episode, Problem, Reward
from multirole.workflows import Voting


def episode(problem, right):
    return Episode(Problem(problem, "", "", None), 0, reward=None if right is None else Reward(right, "", bool(right)))


def test_an_effect_is_a_mean_over_problems_of_means_over_their_episodes():
    """Problem a: 1 -> (1 + 0) / 2 and 0 -> 1. Problem b: 1 -> 0, its other replay having no reward."""
    played = [episode("a", 1), episode("a", 0), episode("b", 1)]
    replays = [[episode("a", 1), episode("a", 0)], [episode("a", 1), episode("a", 1)], [episode("b", 0), episode("b", None)]]  # fmt: skip
    effect = effect_of("judge", "base", played, replays)
    assert (effect.before, effect.after) == (0.75, 0.375)  # a: .5 and .75, b: 1 and 0
    assert (effect.changes, effect.moves) == ((0.25, -1.0), (0.75, 1.0))
    assert (effect.change, effect.moved) == (-0.375, 0.875)
    assert (effect.problems, effect.replays) == (2, 6)


def test_role_values_are_those_of_enumeration(tokenizer):
    n, rollout = 500, relay(tokenizer)
    episodes = rollout.run([(Problem(str(i), "general", "q", None), 0) for i in range(n)], 3, SAMPLING)
    score(episodes)
    effects = {(e.role, e.how): e for e in role_values(trainer_of(rollout), episodes, 3)}
    assert set(effects) == {("first", "resample"), ("first", "base"), ("last", "resample"), ("last", "base"), ("last", "twin")}  # fmt: skip
    as_played = expectation((0.6, 0.6), last_chance)
    exact = {
        ("first", "resample"): as_played,
        ("first", "base"): expectation((BASE, BASE), last_chance),
        ("last", "resample"): as_played,
        ("last", "base"): BASE,
        ("last", "twin"): 0.6,
    }
    for key, effect in effects.items():
        assert effect.after == close_to(exact[key], n) and effect.before == close_to(as_played, n), key
        assert abs(effect.change - (exact[key] - as_played)) < 4 * stdev(effect.changes) / n**0.5, key
    # given how many of the first two said x, the last turn and its redraw are two draws with probability p
    differ = expectation((0.6, 0.6), lambda k: 2 * CHANCE["last", k] * (1 - CHANCE["last", k]))
    assert effects["last", "resample"].moved == close_to(differ, n)


def test_the_effect_of_a_turn_counts_the_replays_with_another_outcome(tokenizer):
    """If k of the first two turns said x, redrawing the last turn changes the outcome with probability p_k or 1 - p_k."""
    n, rollout = 120, relay(tokenizer)
    episodes = rollout.run([(Problem(str(i), "general", "q", None), 0) for i in range(n)], 3, SAMPLING)
    score(episodes)
    effects = turn_effects(trainer_of(rollout), episodes, 3, n_draws=4)
    assert len(effects) == n * (2 * 2 + 3)  # the first role has no twin
    last = [one for one in effects if one.role == "last" and one.how == "resample"]
    assert all(one.replays == 4 and 0 <= one.changed <= 4 for one in last)
    x = rollout.engine.x
    expected = []
    for episode in episodes:
        p = CHANCE["last", episode.turns[2].prompt_ids.count(x)]
        expected.append(1 - p if episode.turns[2].text == "x" else p)
    changed = sum(one.changed for one in last) / (4 * n)
    assert changed == close_to(sum(expected) / n, 4 * n)
    for one, episode in zip([e for e in effects if e.how == "twin"], episodes, strict=True):
        differs = (episode.turns[0].text == "x") != (episode.answer.text == "x")  # the twin repeats slot 0
        assert (one.changed, one.replays, one.problem) == (int(differs), 1, episode.problem.id)
        assert one.after == (1 - one.before if differs else one.before)


def recorded(calls, name, method, *args):
    calls.append(name)
    return method(*args)


def test_the_callback_measures_at_an_evaluation(make_library_trainer, monkeypatch):
    def reward(completions, episodes, **_):
        for episode in episodes:
            is_odd = bool(len(episode.turns[-1].completion_ids) % 2)
            episode.reward = Reward(is_odd, "", is_odd)
        return [episode.reward.value for episode in episodes]

    value = RoleValue(n_problems=3)
    trainer = make_library_trainer(Voting(), reward_funcs=reward, callbacks=[value], max_completion_length=8)
    rows = Dataset.from_dict({"prompt": [f"q {i}" for i in range(4)], "task": ["general"] * 4})
    calls = []
    for name in ("publish", "sleep"):
        monkeypatch.setattr(trainer.engine, name, partial(recorded, calls, name, getattr(trainer.engine, name)))
    metrics = trainer.evaluate(rows)
    assert calls == ["publish", "sleep", "publish", "sleep"], "the engine rests again after the replays"
    assert [(e.role, e.how, e.problems) for e in value.effects] == [
        ("generator", "resample", 3), ("generator", "base", 3),
        ("aggregator", "resample", 3), ("aggregator", "base", 3), ("aggregator", "twin", 3),
    ]  # fmt: skip
    first = [value.effects[0].before, *(e.change for e in value.effects)]
    assert metrics["eval_aggregator_twin_change"] == value.effects[-1].change
    assert 0 <= metrics["eval_generator_resample_moved"] <= 1
    trainer.evaluate(rows)
    assert [value.effects[0].before, *(e.change for e in value.effects)] == first  # the same seeds


def test_the_base_plays_no_role_if_an_adapter_took_over_a_part_of_it(make_library_trainer):
    """The rest of the base that PiSSA leaves is not the untrained model."""
    trainer = make_library_trainer(Voting(), callbacks=[RoleValue()])
    trainer.peft_model.peft_config["shared"].init_lora_weights = "pissa_niter_4"
    message = "`init_lora_weights='pissa_niter_4'` moved a part of the base's weights into adapter 'shared'"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_what_cannot_work_is_refused(tokenizer):
    rollout = relay(tokenizer)
    with pytest.raises(ValueError, match="None of the given episodes has a reward"):
        role_values(trainer_of(rollout), [episode("a", None)])
    with pytest.raises(ValueError, match="`n_problems` must be at least 2"):
        RoleValue(n_problems=1)
    with pytest.raises(ValueError, match="`how` must be among"):
        RoleValue(how=["removed"])
    assert RoleValue(how=(kind for kind in ("base", "twin"))).how == ("base", "twin")
