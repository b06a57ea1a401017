"""The parts of an estimator's mean square, against enumeration with a policy of two tokens."""

import numpy as np
import pytest
from two_tokens import CHANCE, PROBLEM, SAMPLING, beside, relay, trainer_of

from multirole.rollout.errors import WorkflowError
from multirole.types import Problem
from multirole_study.measurements.credit_accuracy import (
    MEASURED,
    SeededReplay,
    Seeds,
    Sizes,
    measure_credit,
    place_of,
    stage_end,
)
from multirole_study.measurements.credit_moments import Moments, moments_of, parts_of
from multirole_study.tasks.tiny_chain import PROMPTS

FIRST, N = 0.6, 8
"""P("x") of both turns of the first role, and the number of episodes of a group."""
P_OF_K = {0: 0.16, 1: 0.48, 2: 0.36}  # of k "x" among the first two turns
LAST = [CHANCE["last", k] for k in range(3)]
RIGHT = sum(p * LAST[k] for k, p in P_OF_K.items())


def test_moments_by_hand():
    draws = np.array([[1.0, 2.0], [3.0, 0.0]])
    exact = np.array([[0.5, 1.0], [0.0, 0.0]])
    # variances are of two replies, the product of deviations over 1: first (-1, 1), second (1, -1), exact (.25, -.25) and (.5, -.5)
    expected = Moments(effect=0.25, shared=np.mean([-0.5, -1.0, 0.5, 1.0]), within=-2.0, between=3.0, square=3.5)
    assert moments_of(draws, exact) == pytest.approx(expected)


def test_parts_by_hand():
    """X = 2 A + noise. The effect has variance 1, so it contributes 4 to the mean square of 10; the bias contributes 1 and the baseline 2."""
    parts = parts_of(Moments(effect=1.0, shared=2.0, within=5.0, between=2.0, square=10.0))
    assert parts == pytest.approx({"effect": 0.4, "bias": 0.1, "baseline": 0.2, "noise": 0.3, "scale": 2.0})
    assert parts_of(Moments(0.0, 0.3, 0.1, 0.1, 1.0))["effect"] == 0.0
    assert np.isnan(parts_of(Moments(1.0, 0.0, 0.0, 0.0, 0.0))["noise"])


@pytest.fixture(scope="module")
def measured(request):
    tokenizer = request.getfixturevalue("tokenizer")
    rollout = relay(tokenizer)
    problems = [Problem(str(i), PROMPTS, "q", None) for i in range(60)]
    return measure_credit(trainer_of(rollout, N), problems, Sizes(4, 6, 4, N))


def estimates(measured, role, name):
    """Return the mean of each moment over the contexts of a role, and its standard error over problems."""
    by_problem: dict[str, list] = {}
    for context in measured.contexts:
        if context.place[0] == role:
            by_problem.setdefault(context.problem, []).append(context.moments[name])
    values = np.array([np.mean(moments, axis=0) for moments in by_problem.values()])
    return Moments(*values.mean(0)), Moments(*values.std(0, ddof=1) / len(values) ** 0.5)


def agrees(measured, role, name, **exact):
    mean, error = estimates(measured, role, name)
    for moment, value in exact.items():
        assert abs(getattr(mean, moment) - value) < 4 * getattr(error, moment) + 1e-9, (role, name, moment)


@pytest.mark.slow
def test_the_last_turn_has_the_moments_of_enumeration(measured):
    """Its reply decides the outcome: given k, Q(x) = 1 and Q(y) = 0, so that Var(A) = p (1 - p)."""
    variance = sum(p * LAST[k] * (1 - LAST[k]) for k, p in P_OF_K.items())
    for name in MEASURED:
        agrees(measured, "last", name, effect=variance)
    # R minus the mean of 3 others of the same prompt
    agrees(measured, "last", "leave_one_out", shared=variance, within=variance, between=0.0, square=variance * 4 / 3)
    # (1 - 1/n) R minus 1/n of 7 episodes of the problem: a baseline that ignores the context
    own = 1 - 1 / N
    between = sum(p * (own * (LAST[k] - RIGHT)) ** 2 for k, p in P_OF_K.items())
    noise = (N - 1) / N**2 * RIGHT * (1 - RIGHT)
    agrees(
        measured, "last", "joint_return", shared=own * variance, within=own**2 * variance, between=between,
        square=own**2 * variance + between + noise,
    )  # fmt: skip
    agrees(measured, "last", "permuted", within=0.0)


@pytest.mark.slow
def test_an_earlier_turn_has_the_effect_of_enumeration(measured):
    """Given the other turn, "x" and "y" differ by Q(x) - Q(y) = the difference of the last turn's chances."""
    variance = FIRST * (1 - FIRST) * sum(p * (LAST[k + 1] - LAST[k]) ** 2 for k, p in {0: 1 - FIRST, 1: FIRST}.items())
    agrees(measured, "first", "leave_one_out", effect=variance, shared=variance, within=variance, between=0.0)
    own = 1 - 1 / N
    agrees(measured, "first", "joint_return", effect=variance, shared=own * variance, within=own**2 * variance)
    squares = (1 - 1 / N) * RIGHT * (1 - RIGHT)  # of a reward minus the mean of its group
    agrees(measured, "first", "joint_return", square=squares)


@pytest.mark.slow
def test_tokens_per_row_count_what_is_sampled(measured):
    """An episode has 3 turns of 2 tokens. A fork of a first turn samples it and the last one, a fork of the last one it alone."""
    costs = measured.tokens_per_row
    assert costs["outcome"] == costs["permuted"] == 2.0
    # of 3 forks of each turn; a replay redraws all later turns, even if their prompts are the same
    assert costs["branches"] == costs["leave_one_out"] == pytest.approx((2 + 3 * (4 + 4 + 2) / 3) / 4)
    # base everywhere: 6 tokens; base first: 4, and 2 where the last prompt has changed; base last: 2
    assert 2 + (6 + 4 + 2) / 3 < costs["shapley"] < 2 + (6 + 4 + 2 + 2) / 3


def test_a_replay_keeps_the_given_turns_and_redraws_the_others(tokenizer):
    rollout = relay(tokenizer)
    (episode,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    slot_0, slot_1, last = episode.turns
    assert [stage_end(episode, turn) for turn in episode.turns] == [2, 2, 3]
    context = frozenset({place_of(slot_1)})

    def replayed(n_tail):
        replay = SeededReplay(episode, Seeds(place_of(slot_0), context, 0, n_tail), context | {place_of(slot_0)})
        (one,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING, [replay])
        assert one.turns[:2] == [slot_0, slot_1] and replay.sampled == {place_of(last)}
        return one.turns[2].text

    k = sum(turn.text == "x" for turn in (slot_0, slot_1))
    said = [replayed(tail) for tail in range(1, 401)]
    assert abs(said.count("x") / 400 - LAST[k]) < 4 * (LAST[k] * (1 - LAST[k]) / 400) ** 0.5
    base = SeededReplay(episode, Seeds(), frozenset(map(place_of, episode.turns)), frozenset({"first"}))
    n_requests = len(rollout.engine.requests)
    rollout.run([(PROBLEM, 0)], 3, SAMPLING, [base])
    adapters = [request.adapter for request in rollout.engine.requests[n_requests:]]
    assert adapters[:2] == [None, None] and set(adapters[2:]) <= {"last"}


def test_an_episode_that_failed_is_not_scored_as_a_wrong_one(tokenizer):
    rollout = relay(tokenizer)
    rollout.max_failed_episodes, speak = 10**6, rollout.engine.speak
    rollout.engine.reply = lambda key, request: speak(key, request) if key % 40 else ([0], 1)
    run, x_or_y = rollout.workflow.run, {"x", "y"}

    async def fails(problem, call):
        answer = await run(problem, call)
        assert answer.text in x_or_y
        return answer

    rollout.workflow.run = fails
    with pytest.raises(WorkflowError, match="1 of 15 measured episodes failed.*AssertionError"):
        measure_credit(trainer_of(rollout, N), [PROBLEM])


def test_a_turn_that_a_replay_did_not_reach_is_left_out(tokenizer):
    """A prompt beside it was too long, and the replay came there sooner."""
    measurement = measure_credit(trainer_of(beside(tokenizer), N), [PROBLEM])
    assert [context.place for context in measurement.contexts] == [("first", 0, 0), ("last", 0, 0)]


def test_too_few_draws_are_refused(tokenizer):
    with pytest.raises(ValueError, match="`sizes` needs 2 replies, 4 tails"):
        measure_credit(trainer_of(relay(tokenizer), N), [PROBLEM], Sizes(tails=2))


def test_turns_that_nobody_trains_are_not_measured(tokenizer):
    trainer = trainer_of(relay(tokenizer), N)
    every = measure_credit(trainer, [PROBLEM])
    trainer.policy = {"first": "frozen", "last": "last"}
    measured = measure_credit(trainer, [PROBLEM])
    assert {context.place[0] for context in measured.contexts} == {"last"}
    assert measured.tokens_per_row["outcome"] == 3 * every.tokens_per_row["outcome"]  # of 3 turns one is trained
