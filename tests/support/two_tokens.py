"""A policy of two tokens whose probabilities are known, so that forks can be compared with enumeration, and a stand-in for its trainer."""

import asyncio
import itertools
import math
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Duty, Problem, Reward, Structure, user

SAMPLING = Sampling(64, 1.0)
PROBLEM = Problem("7", "general", "1+1", None)

CHANCE = {("first", 0): 0.6, ("last", 0): 0.1, ("last", 1): 0.5, ("last", 2): 0.8}
"""(adapter, number of "x" in the prompt) -> probability of the reply "x"; else it is "y"."""
BASE = 0.25


class Relay:
    """Two concurrent turns, then one that reads both; the episode is right if its reply is "x"."""

    name, roles = "relay", {"first": 2, "last": 1}
    structure = Structure(
        {"first": Duty("solves"), "last": Duty("merges", "first")}, {"slot 0": lambda slots: slots[0]}
    )

    async def run(self, problem, call):
        said = await asyncio.gather(*(call("first", [user("q")], slot=s) for s in range(2)))
        return Answer((await call("last", [user("".join(turn.text for turn in said))])).text)


class TwoTokens(ScriptedEngine):
    """Replies "x" where the request's seed, as a number from 0 to 1, is below the probability of "x"."""

    def __init__(self, tokenizer):
        (self.x,), (self.y,) = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "xy")
        super().__init__(self.speak, tokenizer.eos_token_id)

    def chance(self, request):
        return BASE if request.adapter is None else CHANCE[request.adapter, request.prompt_ids.count(self.x)]

    def speak(self, key, request):
        return [self.x if request.seed / 2**63 < self.chance(request) else self.y, self.eos_id], 1 + key % 3


def relay(tokenizer):
    return Rollout(Relay(), TwoTokens(tokenizer), tokenizer, {"first": "first", "last": "last"}, bool, 0, 100)


def is_right(episode):
    return episode.answer.text == "x"


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def close_to(exact, n):
    """Compare equal within four standard errors of a mean of `n` draws."""
    return pytest.approx(exact, abs=4 * math.sqrt(max(abs(exact) * (1 - abs(exact)), 0.01) / n))


def expectation(first, last):
    """P(right), enumerated: `first` is P("x") of the first role's slots, `last(k)` of the last role after k of them said "x"."""
    return sum(
        math.prod(p if said else 1 - p for p, said in zip(first, both, strict=True)) * last(sum(both))
        for both in itertools.product((True, False), repeat=2)
    )


def last_chance(k):
    return CHANCE["last", k]


def score(episodes):
    for episode in episodes:
        episode.reward = Reward(float(is_right(episode)))


def trainer_of(rollout, n=1, score=score, max_staleness=0, version=3):
    """Return a stand-in with the parts of a trainer that forks and estimators use, over a rollout; `n` is `num_generations`."""

    def play(attempts, iteration, replays=None):
        return rollout.run(attempts, iteration, SAMPLING, replays)

    def score_played(episodes):
        if played := [episode for episode in episodes if episode.failure is None]:
            score(played)

    policy = {role: role for role in rollout.workflow.roles}
    return SimpleNamespace(
        workflow=rollout.workflow,
        play=play,
        score=score_played,
        args=SimpleNamespace(
            num_generations=n, mask_truncated_completions=False, max_staleness=max_staleness, role_order=None
        ),
        state=SimpleNamespace(global_step=version),
        policy=policy,
        adapters=list(policy),
        peft_model=SimpleNamespace(peft_config={role: LoraConfig() for role in policy}),
    )


class Beside:
    """Two concurrent chains: in one, a second prompt is too long; the other does something else between its calls."""

    name, roles = "beside", {"first": 2, "last": 2}

    async def run(self, problem, call):
        async def ask():
            await call("first", [user("q")], slot=0)
            await call("first", [user("far too long " * 20)], slot=1)

        async def use_a_tool():
            await call("last", [user("q")], slot=0)
            for _ in range(5):
                await asyncio.sleep(0)
            await call("last", [user("then")], slot=1)

        await asyncio.gather(ask(), use_a_tool())


def beside(tokenizer):
    def speak(key, request):
        return [tokenizer.eos_token_id], 3 if request.adapter == "first" else 1

    engine = ScriptedEngine(speak, tokenizer.eos_token_id)
    return Rollout(Beside(), engine, tokenizer, {"first": "first", "last": "last"}, bool, 0, 30)
