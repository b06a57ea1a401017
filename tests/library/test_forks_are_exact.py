"""A fork changes the turns that it names and what follows from them, and its mean is the effect that enumeration gives."""

import asyncio

import pytest
from scripted_engine import ScriptedEngine
from two_tokens import (
    BASE,
    PROBLEM,
    SAMPLING,
    Relay,
    beside,
    close_to,
    expectation,
    is_right,
    last_chance,
    mean,
    relay,
    trainer_of,
)

from multirole.rollout.errors import WorkflowError
from multirole.rollout.forks import fork, play_forks
from multirole.rollout.replay import Fork, same_turn
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, user
from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting


def test_the_effect_of_a_role_is_that_of_enumeration(tokenizer):
    n, rollout = 1000, relay(tokenizer)
    episodes = rollout.run([(PROBLEM, i) for i in range(n)], 3, SAMPLING)
    assert mean(map(is_right, episodes)) == close_to(expectation((0.6, 0.6), last_chance), n)

    def played(at, how):
        return mean(map(is_right, play_forks(trainer_of(rollout), [Fork(e, at, how) for e in episodes], 3)))  # fmt: skip

    assert played("first", "base") == close_to(expectation((BASE, BASE), last_chance), n)
    assert played("last", "base") == close_to(BASE, n)
    assert played(("first", "last"), "base") == close_to(BASE, n)
    assert played("first", "resample") == close_to(expectation((0.6, 0.6), last_chance), n)
    assert played("last", "twin") == close_to(0.6, n)  # the twin repeats slot 0


@pytest.mark.slow
def test_the_effect_of_a_turn_with_all_other_seeds_held(tokenizer):
    """The exact effect averages over the replies of one turn by probability; the other turns keep their seeds."""
    n, rollout = 1000, relay(tokenizer)
    engine = rollout.engine
    for index in range(3):
        (episode,) = rollout.run([(PROBLEM, index)], 3, SAMPLING)
        last_seed = engine.requests[-1].seed / 2**63
        slot_0, slot_1, last = episode.turns
        k = (slot_1.text == "x") + 0
        exact = 0.6 * (last_seed < last_chance(k + 1)) + 0.4 * (last_seed < last_chance(k))
        forks = fork(trainer_of(rollout), episode, slot_0, n=n, iteration=3)
        assert mean(map(is_right, forks)) == close_to(exact, n)
        assert all(replayed.turns[1] == slot_1 for replayed in forks)
        forks = fork(trainer_of(rollout), episode, last, n=n, iteration=3)
        assert mean(map(is_right, forks)) == close_to(last_chance(k + (slot_0.text == "x")), n)


# ---- the workflows of the package, and one whose calls have no slots

VERDICTS = [r"\boxed{Correct}", r"\boxed{Incorrect}"]
SAYS = {
    "generator": [rf"\boxed{{{i}}}" for i in range(9)], "worker": [rf"\boxed{{{i}}}" for i in range(9)],
    "evaluator": VERDICTS, "aggregator": [rf"\boxed{{{i}}}" for i in (1, 2, 3)],
    "synthesizer": [rf"\boxed{{{i}}}" for i in range(9)],
    "orchestrator": ["STRATEGY 1: add\nSTRATEGY 2: count", "STRATEGY 1: guess"],
    "talker": list("abcdefgh"), "closer": list("stuvwxyz"),
}  # fmt: skip


class Talk:
    """Concurrent calls without slots, which are placed by their prompts, and one that reads them."""

    name, roles = "talk", {"talker": 2, "closer": 1}

    async def run(self, problem, call):
        asked = [user("same"), user("same"), user("other")]
        said = await asyncio.gather(*(call("talker", [one], slot=None) for one in asked))
        return Answer((await call("closer", [user("".join(turn.text for turn in said))], slot=None)).text)


WORKFLOWS = [Single(), EvalOpt(), Voting(), OrchWorkers(), Talk()]


@pytest.fixture(params=WORKFLOWS, ids=lambda workflow: workflow.name)
def played(request, tokenizer):
    """A rollout over an engine that speaks by role and seed, and eight of its episodes."""
    workflow = request.param

    def speak(key, one):
        texts = SAYS[one.adapter or "talker"]
        return [*tokenizer(texts[one.seed % len(texts)], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], 1 + key % 4  # fmt: skip

    engine = ScriptedEngine(speak, tokenizer.eos_token_id)
    policy = {role: role for role in workflow.roles}
    rollout = Rollout(workflow, engine, tokenizer, policy, bool, 0, 400)
    episodes = rollout.run([(PROBLEM, i) for i in range(8)], 5, SAMPLING)
    engine.requests.clear()
    return rollout, episodes


def test_a_fork_that_changes_nothing_is_the_episode_and_costs_nothing(played):
    rollout, episodes = played
    again = play_forks(trainer_of(rollout), [Fork(episode, ()) for episode in episodes], 5)
    assert not rollout.engine.requests
    assert [(episode.turns, episode.answer, episode.index) for episode in again] == [
        (e.turns, e.answer, e.index) for e in episodes
    ]
    assert not {id(turn) for episode in again for turn in episode.turns} & {
        id(turn) for e in episodes for turn in e.turns
    }


def test_what_a_fork_generates_is_the_same_as_playing_everything_again(played):
    """This holds at every turn: kept replies equal what the engine would sample, and only turns with a changed prompt are generated."""
    rollout, episodes = played
    for episode in episodes:
        for turn in episode.turns:
            rollout.engine.requests.clear()
            (one,) = fork(trainer_of(rollout), episode, turn, iteration=5)
            known = {(t.role, t.slot, t.round): t for t in episode.turns}
            changed = [
                t for t in one.turns
                if (t.role, t.slot, t.round) not in known or known[t.role, t.slot, t.round].prompt_ids != t.prompt_ids
            ]  # fmt: skip
            assert len(rollout.engine.requests) == 1 + len(changed)
            forked = rollout.engine.requests[0]
            assert (forked.adapter, forked.prompt_ids) == (turn.role, turn.prompt_ids)
            (whole,) = rollout.run([(episode.problem, episode.index)], 5, SAMPLING)
            assert whole.turns == episode.turns and whole.answer == episode.answer
            seeds = {(r.adapter, tuple(r.prompt_ids), r.seed) for r in rollout.engine.requests[1 + len(changed) :]}
            assert (forked.adapter, tuple(forked.prompt_ids), forked.seed) not in seeds
    twice = [fork(trainer_of(rollout), episodes[0], episodes[0].turns[-1], n=3, iteration=5) for _ in range(2)]
    assert [one.turns for one in twice[0]] == [one.turns for one in twice[1]]


def test_later_turns_with_another_prompt_keep_their_seeds(tokenizer):
    rollout = relay(tokenizer)
    (episode,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    seeds = [request.seed for request in rollout.engine.requests]
    rollout.engine.requests.clear()
    fork(trainer_of(rollout), episode, episode.turns[0], n=8, iteration=3)
    again = [request.seed for request in rollout.engine.requests if request.adapter == "last"]
    assert again and set(again) == {seeds[-1]}


def test_draw_0_of_the_base_keeps_the_seed_and_drops_the_adapter(tokenizer):
    rollout = relay(tokenizer)
    (episode,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    seed = rollout.engine.requests[-1].seed
    rollout.engine.requests.clear()
    fork(trainer_of(rollout), episode, "last", how="base", n=3, iteration=3)
    assert [(r.adapter, r.seed == seed) for r in rollout.engine.requests] == [
        (None, True),
        (None, False),
        (None, False),
    ]


@pytest.mark.parametrize(
    ("workflow", "role", "twin"),
    [
        (Voting(), "aggregator", "candidate 1"),
        (EvalOpt(), "evaluator", "first draft"),
        (OrchWorkers(), "synthesizer", "worker 1"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_twin_of_a_role_is_the_trivial_workflow(tokenizer, workflow, role, twin):
    """With the twin in the role's place, the answer is the solver's first turn, as in the declared trivial workflow."""
    engine = ScriptedEngine(lambda key, r: ([*tokenizer(SAYS[r.adapter][r.seed % len(SAYS[r.adapter])], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], 1), tokenizer.eos_token_id)  # fmt: skip
    rollout = Rollout(workflow, engine, tokenizer, {r: r for r in workflow.roles}, bool, 0, 400)
    episodes = rollout.run([(PROBLEM, i) for i in range(8)], 5, SAMPLING)
    engine.requests.clear()
    twins = play_forks(trainer_of(rollout), [Fork(e, role, "twin") for e in episodes], 5)
    solver = workflow.structure.solver
    first = [next(t for t in e.turns if (t.role, t.slot, t.round) == (solver, 0, 0)).text for e in episodes]
    assert [replayed.answer.text for replayed in twins] == first and not engine.requests
    assert [workflow.structure.trivial_workflows[twin]([flag]) for flag in (True, False)] == [True, False]
    assert first != [e.answer.text for e in episodes]


def test_a_reply_that_was_cut_short_is_generated_again_under_another_limit(tokenizer):
    class Limits:
        name, roles = "limits", {"first": 1, "last": 1}

        async def run(self, problem, call):
            first = await call("first", [user("q")])
            return Answer((await call("last", [user("z")], max_tokens=2 if first.text == "x" else 5)).text)

    def speak(key, request):
        text = "xy"[request.seed % 2] if request.adapter == "first" else "abcdefg"[: request.max_tokens]
        return tokenizer(text, add_special_tokens=False)["input_ids"], 1

    engine = ScriptedEngine(speak, tokenizer.eos_token_id)
    rollout = Rollout(Limits(), engine, tokenizer, {"first": "first", "last": "last"}, bool, 0, 100)
    (episode,) = rollout.run([(PROBLEM, 0)], 0, SAMPLING)
    forks = fork(trainer_of(rollout), episode, episode.turns[0], n=8, iteration=0)
    assert {(one.turns[0].text, one.answer.text) for one in forks} == {("x", "ab"), ("y", "abcde")}


# ---- what is refused


def test_forks_that_cannot_work_are_refused(tokenizer):
    rollout = relay(tokenizer)
    episode, other = rollout.run([(PROBLEM, 0), (PROBLEM, 1)], 3, SAMPLING)
    failed = rollout.run([(PROBLEM, 2)], 3, SAMPLING)[0]
    failed.failure = "lost"
    rollout.engine.requests.clear()
    for words, arguments in {
        "`at` must be a turn of the episode, got another: last 0.0": {"at": other.turns[-1]},
        r"`at` must name roles among \['first', 'last'\], got \['judge'\]": {"at": "judge"},
        "`how` must be one of": {"at": "last", "how": "remove"},
        "'first' has no trivial twin": {"at": "first", "how": "twin"},
        "`n` must be 1, because a twin says the same": {"at": "last", "how": "twin", "n": 2},
        "`n` must be 1 or more, got 0": {"at": "last", "n": 0},
    }.items():
        with pytest.raises(ValueError, match=words):
            fork(trainer_of(rollout), episode, **arguments, iteration=3)
    with pytest.raises(ValueError, match="was not played to its end"):
        fork(trainer_of(rollout), failed, "last", iteration=3)
    with pytest.raises(ValueError, match="nothing would be resampled"):
        play_forks(trainer_of(rollout), [Fork(episode, "last", draw=0)], 3)
    assert not rollout.engine.requests


def test_a_replay_may_overflow_before_the_forked_call(tokenizer):
    """The recorded reply to the slow first call takes no time, so that the overflow after it comes before the call after the tool."""
    rollout = beside(tokenizer)
    (episode,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    assert len(episode.turns) == 3 and episode.answer.reason == "prompt_overflow"
    forks = play_forks(trainer_of(rollout), [Fork(episode, turn) for turn in episode.turns], 3)
    assert [forked.answer.reason for forked in forks] == ["prompt_overflow"] * 3
    found = [same_turn(episode, turn, forked) for turn, forked in zip(episode.turns, forks, strict=True)]
    assert [turn is None for turn in found] == [False, False, True]


def test_a_workflow_that_does_not_make_the_same_calls_is_an_error(tokenizer):
    class Moody(Relay):
        n = 0

        async def run(self, problem, call):
            self.n += 1
            return Answer((await call("first", [user(f"attempt {self.n}")])).text)

    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    rollout = Rollout(Moody(), engine, tokenizer, {"first": "first", "last": "last"}, bool, 0, 100)
    (episode,) = rollout.run([(PROBLEM, 0)], 3, SAMPLING)
    with pytest.raises(WorkflowError, match="did not repeat the call that was to be forked"):
        fork(trainer_of(rollout), episode, episode.turns[0], iteration=3)
