"""Every credit estimator against its paper's formula, on numbers worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from test_forks_are_exact import (
    BASE,
    CHANCE,
    PROBLEM,
    SAMPLING,
    TwoTokens,
    beside,
    close_to,
    expectation,
    is_right,
    last_chance,
    relay,
)  # fmt: skip
from trainers import episodes_of

from multirole.credit.estimators import (
    CREDITS,
    ROW_ESTIMATORS,
    RowCredit,
    credit_callback,
    critic_minus_generators,
    leave_one_out,
    normalised,
    permuted,
    shapley_values,
)  # fmt: skip
from multirole.types import Duty, Episode, Problem, Reward, Structure, Turn
from multirole.update.rows import Row
from multirole.workflows import Voting

REWARDS = [1.0, 0.0, 0.0, 0.0]  # mean 1/4, standard deviation 1/2
ADVANTAGES = [1.5, -0.5, -0.5, -0.5]
TURNS = ["abb", "ab", "a", "a"]
"""The roles that speak in each episode, a role's second turn in round 1: two turns of b in episode 0 and one in episode 1."""


def turn(role, slot=0, round=0, is_right=None):
    return Turn(role, slot, round, [1], [2], [0.0], "text", "stop", is_right=is_right)


def rows_of(turns=TURNS, rewards=REWARDS, problem="p"):
    rows = []
    for index, (roles, reward, advantage) in enumerate(zip(turns, rewards, ADVANTAGES, strict=True)):
        reward = None if reward is None else Reward(reward)
        episode = Episode(Problem(problem, "", "", None), index, reward=reward, advantage=advantage)
        episode.turns = [turn(role, round=roles[:i].count(role)) for i, role in enumerate(roles)]
        rows += [Row(episode, one, role) for one, role in zip(episode.turns, roles, strict=True)]
    return rows


ROOT = 3**-0.5  # the standard deviation of 1, 1, 0, whose mean is 2/3
BY_HAND = {
    "agent": [1.5, ROOT, ROOT, -0.5, -2 * ROOT, -0.5, -0.5],  # b: (1 - 2/3) / ROOT = ROOT, and (0 - 2/3) / ROOT
    "agent_turn": [1.5, 0.5**0.5, 0.0, -0.5, -(0.5**0.5), -0.5, -0.5],  # b in round 0: 1 and 0; in round 1 it is alone
    "joint_return": [0.75, 0.75, 0.75, -0.25, -0.25, -0.25, -0.25],
    "mean_over_turns": [0.875, 0.875, 0.875, -0.4375, -0.4375, -0.875, -0.875],  # 7 rows of 4 episodes: A 7/4 / T
}


@pytest.mark.parametrize("name", BY_HAND)
def test_estimators_over_rows_by_hand(name):
    assert ROW_ESTIMATORS[name](rows_of(), 4) == pytest.approx(BY_HAND[name], abs=1e-5)


@pytest.mark.parametrize("name", BY_HAND)
def test_problems_are_not_compared_with_each_other(name):
    other = rows_of(rewards=[0.0, 0.5, 0.0, 0.0], problem="q")
    both = [*rows_of(), *other]
    assert ROW_ESTIMATORS[name](both, 4)[:7] == pytest.approx(BY_HAND[name], abs=1e-5)


@pytest.mark.parametrize("name", ["agent", "agent_turn", "joint_return"])
def test_an_episode_without_a_reward_is_left_out_of_its_group(name):
    values = ROW_ESTIMATORS[name](rows_of(["a"] * 4, [1.0, 0.0, None, None]), 4)
    expected = [0.5, -0.5] if name == "joint_return" else [0.5**0.5, -(0.5**0.5)]
    assert values == pytest.approx([*expected, 0.0, 0.0], abs=1e-5)


def test_an_episode_without_a_reward_is_left_out_of_the_placebo():
    """The values of the others are permuted among themselves, in whatever order."""
    for seed in range(20):
        values = permuted(rows_of(["a"] * 4, [1.0, 0.0, 0.0, None]), 4, seed)
        assert sorted(values[:3]) == [-0.5, -0.5, 1.5] and values[3] == 0.0


def test_a_role_that_took_a_single_turn_keeps_its_reward_or_gets_nothing():
    """Dr. MAS keeps the reward, as its authors' code does; a group of one has no advantage in AT-GRPO."""
    rows = rows_of(["abbc", "ab", "a", "a"])
    (lone,) = [i for i, row in enumerate(rows) if row.turn.role == "c"]
    assert ROW_ESTIMATORS["agent"](rows, 4)[lone] == pytest.approx(1.0, abs=1e-5)
    assert ROW_ESTIMATORS["agent_turn"](rows, 4)[lone] == 0.0


def test_the_placebo_draws_another_order_in_every_iteration(tokenizer):
    trainer = trainer_of(relay(tokenizer), 4)

    def advantages(step):
        trainer.state.global_step = step
        problems = [row for name in "pqrstu" for row in rows_of(problem=name)]
        return [row.advantage for row in RowCredit("permuted").on_rows(trainer, problems)]

    first = advantages(1)
    assert first == advantages(1) != advantages(2)


def test_the_mean_over_turns_is_the_objective_with_one_over_the_number_of_turns():
    """1/G sum_i 1/T_i sum_t A_i l_it, for any losses l, is the mean over rows that the trainer takes of the weighted ones."""
    rows = rows_of()
    losses = [0.3, -1.2, 0.7, 2.0, 0.1, -0.4, 1.9]
    as_trained = sum(a * x for a, x in zip(ROW_ESTIMATORS["mean_over_turns"](rows, 4), losses, strict=True)) / 7
    objective = (1.5 * (0.3 - 1.2 + 0.7) / 3 - 0.5 * (2.0 + 0.1) / 2 - 0.5 * (-0.4) - 0.5 * 1.9) / 4
    assert as_trained == pytest.approx(objective, abs=1e-12)


# ---- MADA-RL

DEBATE = Structure({"generator": Duty("solves"), "critic": Duty("selects", "generator"), "planner": Duty("plans", "generator")})  # fmt: skip


@pytest.mark.parametrize(
    ("generators", "reward", "advantage"),
    [
        ([False, False, False], 1.0, 1.0),  # the critic corrects all generators
        ([True, True, True], 1.0, 0.0),  # the critic repeats all generators' answer
        ([True, False, False], 1.0, 2 / 3),
        ([True, True, False], 0.0, -2 / 3),
        ([True, True, True], 0.0, -1.0),
    ],
)
def test_a_critic_is_compared_with_the_generators_it_read(generators, reward, advantage):
    """The advantage is half of the paper's 2 R_acc - 2 acc_G, without its length reward."""
    episode = Episode(Problem("p", "", "", None), 0, reward=Reward(reward), advantage=0.25)
    episode.turns = [turn("planner")] + [turn("generator", slot, 0, flag) for slot, flag in enumerate(generators)]
    episode.turns += [turn("critic"), turn("generator", 0, 1, True)]  # a later draft, which the critic has not read
    rows = [Row(episode, one, "a") for one in episode.turns]
    values = critic_minus_generators(rows, 4, DEBATE)
    assert values[4] == pytest.approx(advantage) and values[0] == 0.25
    right, n = sum(generators), 3
    spread = (right / n * (1 - right / n) * n / (n - 1)) ** 0.5
    expected = [(flag - right / n) / spread if spread else 0.0 for flag in generators]
    assert values[1:4] == pytest.approx(expected, abs=1e-5) and values[5] == 0.0


def test_a_critic_of_an_unjudged_draft_keeps_the_advantage_of_its_episode():
    episode = Episode(Problem("p", "", "", None), 0, reward=Reward(1.0), advantage=0.25)
    episode.turns = [turn("generator", 0, 0, True), turn("generator", 1, 0, None), turn("critic")]
    assert critic_minus_generators([Row(episode, one, "a") for one in episode.turns], 4, DEBATE)[1:] == [0.25, 0.25]


# ---- forks


def test_leave_one_out_and_normalised_by_hand():
    assert leave_one_out([1, 0, 0, 1]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out([0.5, 0.1]) == pytest.approx([0.4, -0.4]) and leave_one_out([1.0]) == [0.0]
    assert normalised([1, 0, 0, 1]) == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], abs=1e-5)
    assert normalised([1.0]) == [0.0] and normalised([0.3, 0.3]) == [0.0, 0.0]


def test_shapley_values_by_hand():
    """The glove game: a left glove is worth nothing without one of two right ones. The values add up to the value of all players."""
    players = ["left", "right", "other"]
    subsets = [frozenset(p for i, p in enumerate(players) if mask >> i & 1) for mask in range(8)]
    glove = {s: float("left" in s and len(s) > 1) for s in subsets}
    assert shapley_values(glove, players) == pytest.approx({"left": 2 / 3, "right": 1 / 6, "other": 1 / 6})
    uneven = {s: 0.3 + len(s) ** 2 * 0.1 + ("left" in s) for s in subsets}
    values = shapley_values(uneven, players)
    assert sum(values.values()) == pytest.approx(uneven[subsets[7]] - uneven[subsets[0]])
    assert values["left"] - values["right"] == pytest.approx(1.0)


def score(episodes):
    for episode in episodes:
        episode.reward = Reward(float(is_right(episode)))


def trainer_of(rollout, n):
    """Return a stand-in with the parts of a trainer that the estimators use, over a rollout."""

    def play(attempts, iteration, replays=None):
        return rollout.run(attempts, iteration, SAMPLING, replays)

    args = SimpleNamespace(num_generations=n, mask_truncated_completions=False, max_staleness=1)
    state = SimpleNamespace(global_step=3)
    policy = {role: role for role in rollout.workflow.roles}
    model = SimpleNamespace(peft_config={role: LoraConfig() for role in policy})
    return SimpleNamespace(
        workflow=rollout.workflow, play=play, args=args, state=state, policy=policy, peft_model=model
    )


def credited(tokenizer, name, n=8, **options):
    """The rows of `n` episodes of one problem with two tokens, after the callback of `name`."""
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, n), credit_callback(name, score=score, **options)
    callback.on_rollout_end(trainer, episodes)
    rows = [Row(episode, turn, turn.role, episode.reward.value) for episode in episodes for turn in episode.turns]
    return episodes, callback.on_rows(trainer, rows)


def test_branches_answer_the_same_prompt_and_sum_to_nothing(tokenizer):
    for name in ("leave_one_out", "branches"):
        episodes, rows = credited(tokenizer, name, n_branches=3)
        assert len(rows) == 3 * sum(len(episode.turns) for episode in episodes)
        for i in range(0, len(rows), 3):
            group = rows[i : i + 3]
            assert len({(r.turn.role, r.turn.slot, r.turn.round, *r.turn.prompt_ids) for r in group}) == 1
            rewards = [row.episode.reward.value for row in group]
            by_hand = (leave_one_out if name == "leave_one_out" else normalised)(rewards)
            assert [row.advantage for row in group] == by_hand and sum(by_hand) == pytest.approx(0, abs=1e-9)
        assert {id(row.turn) for row in rows[::3]} == {id(turn) for episode in episodes for turn in episode.turns}


def test_a_branch_that_was_cut_off_is_masked_as_an_episodes_turn_would_be(tokenizer):
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, 1), credit_callback("branches", score=score, n_branches=2)
    trainer.args.mask_truncated_completions = True
    callback.on_rollout_end(trainer, episodes)
    for branches in callback.branches.values():
        for one in branches[0].turns:
            one.finish_reason = "length"
    rows = callback.on_rows(trainer, [Row(episodes[0], one, one.role) for one in episodes[0].turns])
    assert [row.is_masked for row in rows] == [False, True] * len(episodes[0].turns)


def test_episodes_of_older_weights_are_not_replayed(tokenizer):
    """The engine has other weights by now, so a replay would mix two policies."""
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    score(episodes)
    episodes[0].turns[0].version = 2
    with pytest.raises(ValueError, match="episodes were played under older weights"):
        credit_callback("branches", score=score).on_rollout_end(trainer_of(rollout, 1), episodes)
    episodes[0].turns[0].version = 3
    credit_callback("branches", score=score).on_rollout_end(trainer_of(rollout, 1), episodes)


def test_shapley_values_are_compared_within_a_problem(tokenizer):
    """The advantages of each problem's episodes add up to 0."""
    rollout, n = relay(tokenizer), 8
    problems = [replace(PROBLEM, id=name) for name in "pq"]
    episodes = rollout.run([(problem, i) for problem in problems for i in range(n)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, n), credit_callback("shapley", score=score)
    callback.on_rollout_end(trainer, episodes)
    rows = callback.on_rows(trainer, [Row(e, one, one.role) for e in episodes for one in e.turns])
    for name in "pq":
        sums = [row.advantage for row in rows if row.episode.problem.id == name and row.turn.role == "last"]
        assert len(sums) == n and sum(sums) == pytest.approx(0, abs=1e-9) and any(sums)


@pytest.mark.parametrize("name", ["branches", "shapley"])
def test_replays_that_fail_or_have_no_reward_are_left_out(tokenizer, name):
    """Every third replay fails, and of the others every second has no reward."""

    def score_some(episodes):
        score(episodes)
        assert not any(episode.failure for episode in episodes)
        for episode in episodes[::2]:
            episode.reward = None

    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(4)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, 4), credit_callback(name, score=score_some, n_branches=3)
    play = trainer.play

    def play_some(attempts, iteration, replays=None):
        played = play(attempts, iteration, replays)
        for episode in played[::3]:
            episode.failure = "it failed"
            episode.turns.clear()
        return played

    trainer.play = play_some
    callback.on_rollout_end(trainer, episodes)
    rows = callback.on_rows(trainer, [Row(e, turn, turn.role, 0.0) for e in episodes for turn in e.turns])
    assert all(math.isfinite(row.advantage) and row.episode.reward is not None for row in rows)
    n_turns = sum(len(episode.turns) for episode in episodes)
    assert len(rows) == n_turns if name == "shapley" else n_turns < len(rows) < 3 * n_turns


def test_a_branch_that_overflowed_before_its_turn_is_left_out(tokenizer):
    """It has the outcome of the episode, whatever the turn says."""
    rollout = beside(tokenizer)
    episodes = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, 1), credit_callback("branches", score=score, n_branches=3)
    callback.on_rollout_end(trainer, episodes)
    rows = callback.on_rows(trainer, [Row(episodes[0], one, one.role) for one in episodes[0].turns])
    first, last = (
        [row for row in rows if (row.turn.role, row.turn.slot) == place] for place in (("last", 0), ("last", 1))
    )
    assert len(first) == 3 and [row.turn for row in last] == [episodes[0].turns[-1]] and last[0].advantage == 0.0


def test_leave_one_out_has_the_advantage_of_enumeration_as_its_mean(tokenizer):
    """For the last turn Q(x) = 1 and Q(y) = 0, so its advantage is 1 - p and -p, with p the chance of x after k of two said x."""
    _, rows = credited(tokenizer, "leave_one_out", n=1500, n_branches=2)
    rows = [row for row in rows if row.turn.role == "last"]
    x = relay(tokenizer).engine.x
    for k in range(3):
        p = CHANCE["last", k]
        here = [row for row in rows if row.turn.prompt_ids.count(x) == k]
        for text, exact in (("x", 1 - p), ("y", -p)):
            values = [row.advantage for row in here if row.turn.text == text]
            assert sum(values) / len(values) == close_to(exact, len(values))


def test_the_shapley_value_of_roles_is_that_of_enumeration(tokenizer):
    """Roles outside a coalition play with the base's probabilities."""
    n = 2000
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    callback = credit_callback("shapley", score=score)
    callback.on_rollout_end(trainer_of(rollout, n), episodes)
    base = 0.25
    exact = shapley_values(
        {
            frozenset(): base,
            frozenset({"first"}): base,
            frozenset({"last"}): expectation((base, base), last_chance),
            frozenset({"first", "last"}): expectation((0.6, 0.6), last_chance),
        },
        ["first", "last"],
    )
    for role in ("first", "last"):
        values = [callback.values[id(episode)][role] for episode in episodes]
        mean = sum(values) / n
        error = (sum((value - mean) ** 2 for value in values) / n / n) ** 0.5
        assert abs(mean - exact[role]) < 4 * error
    _, rows = credited(tokenizer, "shapley")
    for role in ("first", "last"):
        assert sum({id(r.episode): r.advantage for r in rows if r.turn.role == role}.values()) == pytest.approx(0, abs=1e-9)  # fmt: skip


def test_roles_equal_to_the_base_have_shapley_values_that_differ_by_episode(tokenizer, monkeypatch):
    """This is the state at the start of training. The mean is 0, but a right reply is worth more than a wrong one; otherwise nothing would be trained."""
    monkeypatch.setattr(TwoTokens, "chance", lambda self, request: BASE)
    n, rollout = 400, relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    callback = credit_callback("shapley", score=score)
    callback.on_rollout_end(trainer_of(rollout, n), episodes)
    last = [callback.values[id(episode)]["last"] for episode in episodes]
    right = [value for value, episode in zip(last, episodes, strict=True) if episode.reward.value]
    wrong = [value for value, episode in zip(last, episodes, strict=True) if not episode.reward.value]
    assert abs(sum(last) / n) < 4 * (2 * BASE * (1 - BASE) / n) ** 0.5
    assert sum(right) / len(right) > 0.5
    assert sum(wrong) / len(wrong) < 0


# ---- how one is chosen


def test_every_name_has_its_callback():
    made = {name: credit_callback(name, judge=lambda e: None, score=lambda e: None) for name in CREDITS}
    assert made["outcome"] is None and sum(isinstance(callback, RowCredit) for callback in made.values()) == 6
    assert None not in [made[name] for name in CREDITS if name != "outcome"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "dr_mas"}, "`credit` must be one of"),
        ({"name": "critic"}, "Pass `judge`"),
        ({"name": "shapley"}, "Pass `score`"),
        ({"name": "branches", "score": score, "n_branches": 1}, "`n_branches` must be at least 2"),
    ],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        credit_callback(**options)


def test_a_callback_sets_the_advantages_that_are_trained(make_library_trainer):
    callback = credit_callback("joint_return")
    trainer = make_library_trainer(Voting(), callbacks=[callback])
    episodes = episodes_of(trainer.workflow.roles)
    rows = trainer.prepare_rows(episodes)
    for row in rows:
        group = [e.reward.value for e in episodes if e.problem.id == row.episode.problem.id]
        assert row.advantage == pytest.approx(row.episode.reward.value - sum(group) / len(group))
