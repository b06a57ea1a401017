"""Every credit estimator against its paper's formula, on numbers worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trainers import episodes_of
from two_tokens import (
    BASE,
    CHANCE,
    PROBLEM,
    SAMPLING,
    TwoTokens,
    beside,
    close_to,
    expectation,
    last_chance,
    relay,
    score,
    trainer_of,
)

from multirole import MultiRoleCallback, MultiRoleGRPOConfig
from multirole.credit import ESTIMATORS, estimators, load_estimator, with_credit
from multirole.credit.estimators.branches import BranchCredit
from multirole.credit.estimators.critic import CriticCredit
from multirole.credit.estimators.leave_one_out import LeaveOneOutCredit
from multirole.credit.estimators.mean_over_turns import MeanOverTurnsCredit
from multirole.credit.estimators.shapley import ShapleyCredit, shapley_values
from multirole.credit.process_reward import ProcessReward
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
        rows += [Row(episode, one, role, advantage) for one, role in zip(episode.turns, roles, strict=True)]
    return rows


def iteration(n=4, number=3, structure=None):
    """The parts of a trainer that estimators over rows read: `num_generations`, the iteration's number and the workflow's structure."""
    return SimpleNamespace(
        args=SimpleNamespace(num_generations=n),
        state=SimpleNamespace(global_step=number),
        workflow=SimpleNamespace(structure=structure or Structure()),
    )


def estimated(name, rows, number=3):
    return load_estimator(name)().advantages(iteration(number=number), rows)


ROOT = 3**-0.5  # the standard deviation of 1, 1, 0, whose mean is 2/3
BY_HAND = {
    "agent": [1.5, ROOT, ROOT, -0.5, -2 * ROOT, -0.5, -0.5],  # b: (1 - 2/3) / ROOT = ROOT, and (0 - 2/3) / ROOT
    "agent_turn": [1.5, 0.5**0.5, 0.0, -0.5, -(0.5**0.5), -0.5, -0.5],  # b in round 0: 1 and 0; in round 1 it is alone
    "joint_return": [0.75, 0.75, 0.75, -0.25, -0.25, -0.25, -0.25],
    "mean_over_turns": [0.875, 0.875, 0.875, -0.4375, -0.4375, -0.875, -0.875],  # 7 rows of 4 episodes: A 7/4 / T
}


@pytest.mark.parametrize("name", BY_HAND)
def test_estimators_over_rows_by_hand(name):
    assert estimated(name, rows_of()) == pytest.approx(BY_HAND[name], abs=1e-5)


@pytest.mark.parametrize("name", BY_HAND)
def test_problems_are_not_compared_with_each_other(name):
    other = rows_of(rewards=[0.0, 0.5, 0.0, 0.0], problem="q")
    both = [*rows_of(), *other]
    assert estimated(name, both)[:7] == pytest.approx(BY_HAND[name], abs=1e-5)


@pytest.mark.parametrize("name", ["agent", "agent_turn", "joint_return"])
def test_an_episode_without_a_reward_is_left_out_of_its_group(name):
    values = estimated(name, rows_of(["a"] * 4, [1.0, 0.0, None, None]))
    expected = [0.5, -0.5] if name == "joint_return" else [0.5**0.5, -(0.5**0.5)]
    assert values == pytest.approx([*expected, 0.0, 0.0], abs=1e-5)


def test_the_estimator_that_the_docs_show_takes_an_episode_without_a_reward(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    assert estimated("own_credit:BestOfGroup", rows_of(["ab", "a", "a", "a"], [0.5, 1.0, None, 0.0])) == [
        -0.5,
        -0.5,
        0.0,
        0.0,
        -1.0,
    ]


def test_an_episode_without_a_reward_is_left_out_of_the_placebo():
    """The values of the others are permuted among themselves, in whatever order."""
    for seed in range(20):
        values = estimated("permuted", rows_of(["a"] * 4, [1.0, 0.0, 0.0, None]), seed)
        assert sorted(values[:3]) == [-0.5, -0.5, 1.5] and values[3] == 0.0


def test_a_role_that_took_a_single_turn_keeps_its_reward_or_gets_nothing():
    """Dr. MAS keeps the reward, as its authors' code does; a group of one has no advantage in AT-GRPO."""
    rows = rows_of(["abbc", "ab", "a", "a"])
    (lone,) = [i for i, row in enumerate(rows) if row.turn.role == "c"]
    assert estimated("agent", rows)[lone] == pytest.approx(1.0, abs=1e-5)
    assert estimated("agent_turn", rows)[lone] == 0.0


def test_the_placebo_draws_another_order_in_every_iteration():
    def advantages(number):
        return estimated("permuted", [row for name in "pqrstu" for row in rows_of(problem=name)], number)

    first = advantages(1)
    assert first == advantages(1) != advantages(2)


def test_the_placebo_permutes_the_advantages_of_a_group():
    def rows_of(problem, advantages):
        rows = []
        for index, advantage in enumerate(advantages):
            episode = Episode(Problem(problem, "", "", None), index, reward=Reward(0.0), advantage=advantage)
            episode.turns = [Turn("a", slot, 0, [1], [2], [0.0], "", "stop") for slot in range(2)]
            rows += [Row(episode, turn, "a") for turn in episode.turns]
        return rows

    rows = [*rows_of("p", [1.0, 2.0, 3.0, 4.0]), *rows_of("q", [5.0, 6.0, 7.0, 8.0])]
    drawn = [estimated("permuted", rows, seed) for seed in range(400)]
    for values in drawn:
        assert sorted(values[:8:2]) == [1, 2, 3, 4] and sorted(values[8::2]) == [5, 6, 7, 8]
        assert values[::2] == values[1::2]  # one value for all turns of an episode
    unchanged = sum(values[0] == 1.0 for values in drawn) / 400
    assert abs(unchanged - 1 / 4) < 4 * (0.1875 / 400) ** 0.5 and estimated("permuted", rows, 7) == drawn[7]


def test_the_mean_over_turns_is_the_objective_with_one_over_the_number_of_turns():
    """1/G sum_i 1/T_i sum_t A_i l_it, for any losses l, is the mean over rows that the trainer takes of the weighted ones."""
    rows = rows_of()
    losses = [0.3, -1.2, 0.7, 2.0, 0.1, -0.4, 1.9]
    as_trained = sum(a * x for a, x in zip(estimated("mean_over_turns", rows), losses, strict=True)) / 7
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
    rows = [Row(episode, one, "a", 0.25) for one in episode.turns]
    values = CriticCredit().advantages(iteration(structure=DEBATE), rows)
    assert values[4] == pytest.approx(advantage) and values[0] == 0.25
    right, n = sum(generators), 3
    spread = (right / n * (1 - right / n) * n / (n - 1)) ** 0.5
    expected = [(flag - right / n) / spread if spread else 0.0 for flag in generators]
    assert values[1:4] == pytest.approx(expected, abs=1e-5) and values[5] == 0.0


def test_a_critic_of_an_unjudged_draft_keeps_the_advantage_of_its_episode():
    episode = Episode(Problem("p", "", "", None), 0, reward=Reward(1.0), advantage=0.25)
    episode.turns = [turn("generator", 0, 0, True), turn("generator", 1, 0, None), turn("critic")]
    rows = [Row(episode, one, "a", 0.25) for one in episode.turns]
    assert CriticCredit().advantages(iteration(structure=DEBATE), rows)[1:] == [0.25, 0.25]


# ---- forks


def test_leave_one_out_and_branches_by_hand():
    leave_one_out, branches = LeaveOneOutCredit.compare, BranchCredit.compare
    assert leave_one_out([1, 0, 0, 1]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out([0.5, 0.1]) == pytest.approx([0.4, -0.4]) and leave_one_out([1.0]) == [0.0]
    assert branches([1, 0, 0, 1]) == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], abs=1e-5)
    assert branches([1.0]) == [0.0] and branches([0.3, 0.3]) == [0.0, 0.0]


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


def credited(tokenizer, estimator, n=8):
    """The rows of `n` episodes of one problem with two tokens, after an estimator."""
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    trainer = trainer_of(rollout, n)
    estimator.on_rollout_end(trainer, episodes)
    rows = [Row(episode, turn, turn.role, episode.reward.value) for episode in episodes for turn in episode.turns]
    return episodes, estimator.on_rows(trainer, rows)


def test_branches_answer_the_same_prompt_and_sum_to_nothing(tokenizer):
    for estimator in (LeaveOneOutCredit(3), BranchCredit(3)):
        episodes, rows = credited(tokenizer, estimator)
        assert len(rows) == 3 * sum(len(episode.turns) for episode in episodes)
        for i in range(0, len(rows), 3):
            group = rows[i : i + 3]
            assert len({(r.turn.role, r.turn.slot, r.turn.round, *r.turn.prompt_ids) for r in group}) == 1
            rewards = [row.episode.reward.value for row in group]
            by_hand = estimator.compare(rewards)
            assert [row.advantage for row in group] == by_hand and sum(by_hand) == pytest.approx(0, abs=1e-9)
        assert {id(row.turn) for row in rows[::3]} == {id(turn) for episode in episodes for turn in episode.turns}


def test_a_branch_that_was_cut_off_is_masked_as_an_episodes_turn_would_be(tokenizer):
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout), BranchCredit(2)
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
        BranchCredit().on_rollout_end(trainer_of(rollout), episodes)
    episodes[0].turns[0].version = 3
    BranchCredit().on_rollout_end(trainer_of(rollout), episodes)


def test_shapley_values_are_compared_within_a_problem(tokenizer):
    """The advantages of each problem's episodes add up to 0."""
    rollout, n = relay(tokenizer), 8
    problems = [replace(PROBLEM, id=name) for name in "pq"]
    episodes = rollout.run([(problem, i) for problem in problems for i in range(n)], 3, SAMPLING)
    score(episodes)
    trainer, callback = trainer_of(rollout, n), ShapleyCredit()
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
    trainer, callback = (
        trainer_of(rollout, 4, score_some),
        {"branches": BranchCredit(3), "shapley": ShapleyCredit()}[name],
    )
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
    trainer, callback = trainer_of(rollout), BranchCredit(3)
    callback.on_rollout_end(trainer, episodes)
    rows = callback.on_rows(trainer, [Row(episodes[0], one, one.role) for one in episodes[0].turns])
    first, last = (
        [row for row in rows if (row.turn.role, row.turn.slot) == place] for place in (("last", 0), ("last", 1))
    )
    assert len(first) == 3 and [row.turn for row in last] == [episodes[0].turns[-1]] and last[0].advantage == 0.0


def test_leave_one_out_has_the_advantage_of_enumeration_as_its_mean(tokenizer):
    """For the last turn Q(x) = 1 and Q(y) = 0, so its advantage is 1 - p and -p, with p the chance of x after k of two said x."""
    _, rows = credited(tokenizer, LeaveOneOutCredit(2), n=600)
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
    n = 800
    rollout = relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    callback = ShapleyCredit()
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
    _, rows = credited(tokenizer, ShapleyCredit())
    for role in ("first", "last"):
        assert sum({id(r.episode): r.advantage for r in rows if r.turn.role == role}.values()) == pytest.approx(0, abs=1e-9)  # fmt: skip


def test_roles_equal_to_the_base_have_shapley_values_that_differ_by_episode(tokenizer, monkeypatch):
    """This is the state at the start of training. The mean is 0, but a right reply is worth more than a wrong one; otherwise nothing would be trained."""
    monkeypatch.setattr(TwoTokens, "chance", lambda self, request: BASE)
    n, rollout = 400, relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    score(episodes)
    callback = ShapleyCredit()
    callback.on_rollout_end(trainer_of(rollout, n), episodes)
    last = [callback.values[id(episode)]["last"] for episode in episodes]
    right = [value for value, episode in zip(last, episodes, strict=True) if episode.reward.value]
    wrong = [value for value, episode in zip(last, episodes, strict=True) if not episode.reward.value]
    assert abs(sum(last) / n) < 4 * (2 * BASE * (1 - BASE) / n) ** 0.5
    assert sum(right) / len(right) > 0.5
    assert sum(wrong) / len(wrong) < 0


# ---- how one is chosen, and what it says that it needs


def graded_by_length(completions, episodes, **_):
    """An odd number of letters is right. The grade of a turn is that of its text, as if it were the answer."""
    for episode, text in zip(episodes, completions, strict=True):
        episode.reward = Reward(len(text) % 4, is_correct=len(text) % 2 == 1)
    return [episode.reward.value for episode in episodes]


def played(trainer, monkeypatch):
    """Play an iteration; return its episodes, its rows, the replays that were played, and the episodes that were scored in addition."""
    replays, scored = [], []
    play, score = trainer.play, trainer.score
    monkeypatch.setattr(
        trainer, "play", lambda *args, **kw: replays.extend(kw.get("replays") or ()) or play(*args, **kw)
    )
    monkeypatch.setattr(trainer, "score", lambda episodes: scored.extend(episodes) or score(episodes))
    n = trainer.args.generation_batch_size
    order = [i // trainer.args.num_generations for i in range(n)]
    episodes = trainer._generate_and_score_completions([dict(trainer.train_rows[i]) for i in order])
    return episodes, trainer.prepare_rows(episodes), replays, scored


def test_every_file_of_the_folder_is_an_estimator():
    assert {path.stem for path in Path(estimators.__file__).parent.glob("*.py")} == {"__init__", *ESTIMATORS}
    assert len({load_estimator(name) for name in ESTIMATORS}) == len(ESTIMATORS) > 1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_needs_what_it_says(make_library_trainer, monkeypatch, name):
    """It grades turns, replays episodes and adds rows if and only if it says so; what is logged is the iteration's alone."""
    trainer = make_library_trainer(
        Voting(), None, graded_by_length, credit=name, credit_branches=3, num_generations=4, generation_batch_size=8,
        max_completion_length=8,
    )  # fmt: skip
    episodes, rows, replays, scored = played(trainer, monkeypatch)
    estimator = load_estimator(name)
    n_turns = sum(len(episode.turns) for episode in episodes)
    assert len(rows) == n_turns * (3 if estimator.has_branches else 1)
    assert len(replays) == (2 * n_turns if estimator.has_branches else 8 * 3 if name == "shapley" else 0)
    assert bool(replays) == estimator.replays_episodes
    graded = [turn.is_right for episode in episodes for turn in episode.turns]
    assert (None not in graded) == any(len(one.turns) == 1 for one in scored) == estimator.needs_grades
    if estimator.needs_grades:
        generators = [turn for episode in episodes for turn in episode.turns if turn.role == "generator"]
        assert [turn.is_right for turn in generators] == [len(turn.text) % 2 == 1 for turn in generators]
    assert all(math.isfinite(row.advantage) for row in rows) and len({row.advantage for row in rows}) > 1
    assert estimator.__doc__.count("eeds ") and "older weights" in estimator.__doc__


@pytest.mark.parametrize("name", ESTIMATORS)
def test_older_weights_are_refused_where_episodes_are_replayed(name):
    args = MultiRoleGRPOConfig("unused", credit=name, max_staleness=1, bf16=False, use_cpu=True)
    if not load_estimator(name).replays_episodes:
        assert type(with_credit(args, [], Voting())[0]) is load_estimator(name)
        return
    with pytest.raises(ValueError, match="replays episodes under the weights that played them, and `max_staleness=1`"):
        with_credit(args, [], Voting())
    with pytest.raises(ValueError, match="replays episodes"):  # also if it is passed as a callback
        with_credit(
            SimpleNamespace(credit="outcome", process_reward=0.0, max_staleness=1), [load_estimator(name)()], Voting()
        )


def test_replays_and_grades_are_scored_as_the_dataset_says_and_not_logged(make_library_trainer):
    """The reward function gets the columns and the prompt of the problem's row, and what it logs is the iteration's."""
    asked = []

    def reward(prompts, completions, episodes, log_metric, answer=(), **_):
        asked.extend(zip(prompts, answer, [type(text) for text in completions], strict=True))
        log_metric("n", len(prompts))
        for i, episode in enumerate(episodes):
            episode.reward = Reward(i % 2, is_correct=bool(i % 2))
        return [episode.reward.value for episode in episodes]

    trainer = make_library_trainer(
        Voting(), None, reward, credit="critic", num_generations=2, generation_batch_size=2, max_completion_length=4,
        max_steps=1, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    trainer.train_dataset = Dataset.from_list([{"prompt": prompt, "answer": "2", "task": "general"}] * 2)
    trainer.train()
    assert len(asked) == 2 + 2 * 3 and {(len(one), answer) for one, answer, _ in asked} == {(2, "2")}
    assert {kind for *_, kind in asked} == {list} and all(one == prompt for one, *_ in asked)
    assert trainer.state.log_history[0]["n"] == 2


def test_roles_that_are_not_trained_get_no_shapley_value(make_library_trainer, monkeypatch):
    """The generators alone are players: each episode is replayed once, with the base in their place."""
    trainer = make_library_trainer(
        Voting(), None, graded_by_length, credit="shapley", policy="generator=a,aggregator=frozen", num_generations=4,
        generation_batch_size=4, max_completion_length=8,
    )  # fmt: skip
    episodes, rows, replays, _ = played(trainer, monkeypatch)
    assert len(replays) == len(episodes) == 4 and {row.turn.role for row in rows} == {"generator"}
    assert len({row.advantage for row in rows}) > 1


@pytest.mark.parametrize("credit", ["branches", "leave_one_out"])
def test_branches_are_played_of_the_role_in_turn_alone(make_library_trainer, monkeypatch, credit):
    """Two branches, so one replay for each of the aggregator's turns; the generators' are not trained in this iteration."""
    trainer = make_library_trainer(
        Voting(), None, graded_by_length, credit=credit, credit_branches=2, policy="ip", role_order=["aggregator", "generator"],
        num_generations=4, generation_batch_size=4, max_completion_length=8,
    )  # fmt: skip
    _, _, replays, _ = played(trainer, monkeypatch)
    assert len(replays) == 4


def test_two_estimators_that_read_grades_have_each_turn_graded_once(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(
        Voting(), None, graded_by_length, credit="critic", process_reward=0.5, num_generations=4, generation_batch_size=4,
        max_completion_length=8,
    )  # fmt: skip
    episodes, _, _, scored = played(trainer, monkeypatch)
    drafts = [turn for episode in episodes for turn in episode.turns if turn.role == "generator"]
    assert sorted(id(one.turns[0]) for one in scored) == sorted(map(id, drafts))


def test_an_estimator_among_the_callbacks_starts_from_what_the_others_have_made():
    """The factor of a mean over turns is applied to the advantages with process rewards."""
    rows = rows_of()
    for row in rows:
        row.turn.is_right = row.episode.index == 0
    ProcessReward(2.0).on_rows(iteration(), rows)
    before = [row.advantage for row in rows]
    assert before != [row.episode.advantage for row in rows]
    MeanOverTurnsCredit().on_rows(iteration(), rows)
    factors = [7 / 4 / len(row.episode.turns) for row in rows]
    assert [row.advantage for row in rows] == pytest.approx([a * f for a, f in zip(before, factors, strict=True)])


@pytest.mark.parametrize("name", ["branches", "leave_one_out"])
def test_branches_have_no_grades_for_a_process_reward(name):
    args = MultiRoleGRPOConfig("unused", credit=name, process_reward=0.5, bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="`process_reward=0.5` grades .* other replies .* not graded"):
        with_credit(args, [], Voting())
    args.credit = "outcome"
    with pytest.raises(ValueError, match="`process_reward=0.5` grades .* other replies .* not graded"):
        with_credit(args, [load_estimator(name)(2)], Voting())


def test_a_process_reward_is_added_after_the_last_estimator():
    """One among the callbacks may start anew, whatever the advantages were."""
    args = MultiRoleGRPOConfig("unused", process_reward=0.5, bf16=False, use_cpu=True)
    watcher = MultiRoleCallback()
    ordered = with_credit(args, [load_estimator("agent")(), watcher], Voting())
    assert [type(callback).__name__ for callback in ordered] == [
        "OutcomeCredit",
        "AgentCredit",
        "ProcessReward",
        "MultiRoleCallback",
    ]
    assert ordered[-1] is watcher


OWN = """
from multirole import CreditEstimator


class Short(CreditEstimator):
    def advantages(self, trainer, rows):
        return [0.0]


class NoEstimator:
    pass
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_baselines.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")


@pytest.mark.usefixtures("own_module")
def test_an_estimator_of_ones_own_trains(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(
        Voting(), None, graded_by_length, credit="own_credit:BestOfGroup", num_generations=4, generation_batch_size=8,
        max_completion_length=8, max_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    episodes, rows, *_ = played(trainer, monkeypatch)
    best = {name: max(e.reward.value for e in episodes if e.problem.id == name) for name in ("0", "1")}
    assert all(row.advantage == row.episode.reward.value - best[row.episode.problem.id] for row in rows)
    assert min(row.advantage for row in rows) < 0 == max(row.advantage for row in rows)
    before = [p.detach().clone() for name, p in trainer.peft_model.named_parameters() if "lora" in name]
    trainer.train()
    after = [p for name, p in trainer.peft_model.named_parameters() if "lora" in name]
    assert any(not (one == other).all() for one, other in zip(before, after, strict=True))


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("dr_mas", ValueError, r"`credit` must be one of \['agent', .*'shapley'\] or 'module:Class', got 'dr_mas'"),
        ("my_baselines:Missing", ValueError, "`credit='my_baselines:Missing'` cannot be loaded: AttributeError"),
        ("no_such_module:Any", ValueError, "cannot be loaded: ModuleNotFoundError"),
        ("my_baselines:NoEstimator", TypeError, "must name a subclass of `multirole.CreditEstimator`"),
    ],
)
def test_a_name_that_is_no_estimator_is_refused(make_library_trainer, name, error, words):
    with pytest.raises(error, match=words):
        make_library_trainer(Voting(), credit=name)


@pytest.mark.usefixtures("own_module")
def test_what_cannot_work_is_refused(make_library_trainer):
    with pytest.raises(ValueError, match="`credit_branches` must be at least 2, .*, got 1"):
        make_library_trainer(Voting(), credit="branches", credit_branches=1)
    with pytest.raises(ValueError, match="`process_reward` must be a weight of 0 or more, got -1"):
        make_library_trainer(Voting(), process_reward=-1)
    trainer = make_library_trainer(Voting(), credit="my_baselines:Short")
    with pytest.raises(ValueError, match="must return one number for each of the 64 rows, got 1 numbers"):
        trainer.prepare_rows(episodes_of(trainer.workflow.roles))


def test_a_critic_needs_a_reward_function_that_says_what_is_right(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(
        Voting(), credit="critic", num_generations=2, generation_batch_size=2, max_completion_length=4
    )
    with pytest.raises(ValueError, match=r"CriticCredit reads which turns are right, .* `episode.reward = Reward\("):
        played(trainer, monkeypatch)


def test_a_critic_needs_roles_with_duties(make_library_trainer):
    """Without them its advantages would be those of `outcome`."""

    class Bare(Voting):
        structure = Structure({"aggregator": Duty("plans", "generator")})

    for options in ({"credit": "critic"}, {"callbacks": [CriticCredit()]}):
        with pytest.raises(ValueError, match="no role of the workflow 'voting' has one, .* `structure = Structure"):
            make_library_trainer(Bare(), **options)


def test_an_instance_among_the_callbacks_sets_the_advantages_that_are_trained(make_library_trainer):
    trainer = make_library_trainer(Voting(), callbacks=[load_estimator("joint_return")()])
    episodes = episodes_of(trainer.workflow.roles)
    for row in trainer.prepare_rows(episodes):
        group = [e.reward.value for e in episodes if e.problem.id == row.episode.problem.id]
        assert row.advantage == pytest.approx(row.episode.reward.value - sum(group) / len(group))
