"""An environment of verifiers is a workflow: its agents are roles, their calls turns, its rewards the roles', and its failures no rewards.

verifiers needs an environment of its own: `make frameworks ARGS=verifiers`.
"""

import json

import pytest
from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.errors import WorkflowError
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Episode, Problem

pytest.importorskip("verifiers.v1")
import toy_verifiers
from verifiers.v1 import EvalClientConfig

from multirole.environments.verifiers import from_verifiers

pytestmark = pytest.mark.slow
LETTERS = {"solver": "ab", "checker": "c"}


def environment(**agents):
    return toy_verifiers.Pair(toy_verifiers.PairConfig(taskset={"id": "toy_verifiers"}, **agents))


def rollout_of(workflow, tokenizer):
    def reply(key, request):
        return [*tokenizer.encode(LETTERS[request.adapter] * (1 + request.seed % 3)), tokenizer.eos_token_id], 1

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    return Rollout(workflow, engine, tokenizer, {role: role for role in workflow.roles}, bool, 0, 9000)


def test_agents_are_roles_and_rewards_are_theirs(tokenizer):
    """The reward of the toy environment is the length of an agent's reply. Two rollouts share its servers."""
    workflow = from_verifiers(environment())
    rows = workflow.rows(2, start=1)
    assert rows["prompt"] == ["1+1", "2+1"] and rows["idx"] == [1, 2] and workflow.roles == {"solver": 1, "checker": 1}
    rollout = rollout_of(workflow, tokenizer)
    attempts = [(Problem(str(i), "", row["prompt"], {"idx": row["idx"]}), j) for i, row in enumerate(rows) for j in range(4)]  # fmt: skip
    for iteration in range(2):
        episodes = rollout.run(attempts, iteration, Sampling(99, 1.0))
        for episode, rewards in zip(episodes, workflow.rewards(episodes), strict=True):
            texts = {turn.role: turn.text for turn in episode.turns}
            assert list(texts) == ["solver", "checker"] and {role: set(text) for role, text in texts.items()} == {role: set(letters) for role, letters in LETTERS.items()}  # fmt: skip
            assert rewards == {role: len(text) for role, text in texts.items()}
            assert all(episode.problem.question in tokenizer.decode(turn.prompt_ids) for turn in episode.turns)
    assert len({json.dumps(rewards) for rewards in workflow.rewards(episodes)}) > 1
    assert workflow.rewards([Episode(attempts[0][0], 0, answer=Answer("", reason="prompt_overflow"))]) == [None]


def test_an_agent_with_an_endpoint_is_not_trained_and_a_failure_is_no_reward(tokenizer):
    nowhere = toy_verifiers.HERE.model_copy(update={"client": EvalClientConfig(base_url="http://127.0.0.1:9/v1")})
    workflow = from_verifiers(environment(checker=nowhere))
    assert workflow.roles == {"solver": 1}
    with pytest.raises(WorkflowError, match="the episode failed in verifiers"):
        rollout_of(workflow, tokenizer).run([(Problem("0", "", "0+1", {"idx": 0}), 0)], 0, Sampling(99, 1.0))
    with pytest.raises(ValueError, match="there is none to train"):
        from_verifiers(environment(checker=nowhere, solver=nowhere))
    with pytest.raises(TypeError, match="must be an environment of verifiers"):
        from_verifiers(toy_verifiers.Pair)
