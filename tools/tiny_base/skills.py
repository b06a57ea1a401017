"""What a base can do in each role: the real workflows on validation problems, every turn scored against the truth."""

import itertools
import math
from collections.abc import Iterable
from statistics import fmean

from transformers import PreTrainedTokenizerFast

from multirole.core.engine import Engine, Sampling
from multirole.core.rollout import Rollout
from multirole.core.types import Episode, Problem, Turn
from multirole.workflows import WORKFLOWS
from multirole.workflows.orch_workers import parse_strategies
from tiny_base.dialogues import AUTHORS, Draft, Own
from tiny_base.train import MAX_LENGTH

RESPONSE_TOKENS = 96
ANSWERING = ("generator", "worker", "synthesizer")


def play(
    workflow: str,
    problems: list[Problem],
    n: int,
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    temperature: float = 1.0,
) -> list[Episode]:
    """`n` episodes per problem of one workflow, every role on the base model."""
    flow, task = WORKFLOWS[workflow](), AUTHORS[problems[0].task].task
    rollout = Rollout(
        workflow=flow,
        engine=engine,
        tokenizer=tokenizer,
        policy=dict.fromkeys(flow.roles),
        is_answer=lambda text: task.extract(text) is not None,
        seed=seed,
        max_prompt_tokens=MAX_LENGTH - RESPONSE_TOKENS,
    )
    attempts = [(problem, index) for problem in problems for index in range(n)]
    return rollout.run(attempts, iteration=0, sampling=Sampling(RESPONSE_TOKENS, temperature))


def grade(episodes: list[Episode]) -> list[dict[int, bool]]:
    """Per episode: position of an answering turn -> whether its text is right."""
    places = [
        (e, t) for e, episode in enumerate(episodes) for t, turn in enumerate(episode.turns) if turn.role in ANSWERING
    ]
    task = AUTHORS[episodes[0].problem.task].task
    rewards = task.score([episodes[e].problem for e, _ in places], [episodes[e].turns[t].text for e, t in places])
    graded: list[dict[int, bool]] = [{} for _ in episodes]
    for (e, t), reward in zip(places, rewards, strict=True):
        graded[e][t] = reward.is_correct
    return graded


def measure(
    task: str, count: int, engine: Engine, tokenizer: PreTrainedTokenizerFast, seed: int, temperature: float = 1.0
) -> dict[str, dict[str, float]]:
    """Skills (fractions; lengths in tokens) of every role on `count` validation problems, one episode per workflow."""
    problems = AUTHORS[task].task.problems("validation", count)
    skills: dict[str, dict[str, float]] = {}
    for name, judge in (("voting", _voting), ("eval_opt", _eval_opt), ("orch_workers", _orch_workers)):
        played = play(name, problems, 1, engine, tokenizer, seed, temperature)
        episodes = [e for e in played if e.answer.reason is None]  # an overflowing prompt ends an episode early
        if not episodes:
            continue
        skills |= judge(episodes, grade(episodes))
    return {
        role: {key: round(v, 4) for key, v in sorted(facts.items()) if not math.isnan(v)}
        for role, facts in skills.items()
    }


def _mean(values: Iterable[float]) -> float:
    """Mean; nan when a role had no such turn."""
    values = list(values)
    return fmean(values) if values else math.nan


def _about(turns: Iterable[Turn]) -> dict[str, float]:
    turns = list(turns)
    return {
        "n": len(turns),
        "parsed": _mean(turn.outcome != "unparsed" for turn in turns),
        "truncated": _mean(turn.finish_reason == "length" for turn in turns),
        "prompt_tokens": _mean(len(turn.prompt_ids) for turn in turns),
        "reply_tokens": _mean(len(turn.completion_ids) for turn in turns),
    }


def _turns(episodes: list[Episode], role: str) -> list[Turn]:
    return [turn for episode in episodes for turn in episode.turns if turn.role == role]


def _voting(episodes: list[Episode], graded: list[dict[int, bool]]) -> dict[str, dict[str, float]]:
    votes = [list(right.values()) for right in graded]
    chosen = [
        right[int(e.turns[-1].outcome) - 1 if e.turns[-1].outcome != "unparsed" else 0]
        for e, right in zip(episodes, votes, strict=True)
    ]
    accuracy = _mean(_mean(right) for right in votes)
    facts = {"accuracy": _mean(chosen), "candidates_mean": accuracy, "candidates_best": _mean(any(r) for r in votes)}
    return {
        "generator": _about(_turns(episodes, "generator")) | {"accuracy": accuracy},
        "aggregator": _about(_turns(episodes, "aggregator")) | facts | {"gain": facts["accuracy"] - accuracy},
    }


def _eval_opt(episodes: list[Episode], graded: list[dict[int, bool]]) -> dict[str, dict[str, float]]:
    pairs, repairs, finals = [], [], []
    for episode, right in zip(episodes, graded, strict=True):
        verdicts = [turn for turn in episode.turns if turn.role == "evaluator"]
        drafts = [right[t] for t, turn in enumerate(episode.turns) if turn.role == "generator"]
        pairs += [(draft, turn.outcome) for draft, turn in zip(drafts, verdicts, strict=True)]
        repairs += [after for before, after in itertools.pairwise(drafts) if not before]
        finals.append(drafts[-1])
    on_right = _mean(outcome == "correct" for draft, outcome in pairs if draft)
    on_wrong = _mean(outcome == "incorrect" for draft, outcome in pairs if not draft)
    facts = {"balanced_accuracy": (on_right + on_wrong) / 2, "accepts_right": on_right, "rejects_wrong": on_wrong}
    return {
        "evaluator": _about(_turns(episodes, "evaluator")) | facts,
        "refiner": {"n": len(repairs), "repairs_wrong": _mean(repairs), "accuracy": _mean(finals)},
    }


def _orch_workers(episodes: list[Episode], graded: list[dict[int, bool]]) -> dict[str, dict[str, float]]:
    workers = [[right[t] for t, x in enumerate(e.turns) if x.role == "worker"] for e, right in zip(episodes, graded)]
    final = _mean(right[len(e.turns) - 1] for e, right in zip(episodes, graded, strict=True))
    accuracy = _mean(_mean(right) for right in workers)
    habits = AUTHORS[episodes[0].problem.task].habits.STRATEGIES
    careful = [
        is_right
        for episode, right in zip(episodes, workers, strict=True)
        for strategy, is_right in zip(parse_strategies(episode.turns[0].text, 3)[0], right, strict=True)
        if habits.get(strategy) == "careful"
    ]
    three = _mean(len(right) == 3 for right in workers)
    return {
        "orchestrator": _about(_turns(episodes, "orchestrator")) | {"three_strategies": three},
        "worker": _about(_turns(episodes, "worker")) | {"accuracy": accuracy, "careful_accuracy": _mean(careful)},
        "synthesizer": _about(_turns(episodes, "synthesizer")) | {"accuracy": final, "gain": final - accuracy},
    }


def own_answers(
    problems: list[Problem], n: int, engine: Engine, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[tuple[Problem, Own]]:
    """A model's own graded answers: `n` to every question, and those of one Orch-Workers episode per problem."""
    single = play("single", problems, n, engine, tokenizer, seed)
    planned = play("orch_workers", problems, 1, engine, tokenizer, seed)
    own: dict[str, dict[str, list[Draft]]] = {problem.id: {"": []} for problem in problems}
    for episodes in (single, planned):
        for episode, right in zip(episodes, grade(episodes), strict=True):
            for t, is_correct in right.items():
                turn, answers = episode.turns[t], own[episode.problem.id]
                if turn.role != "synthesizer":
                    prompt = tokenizer.decode(turn.prompt_ids)
                    strategy = prompt.partition("\nStrategy: ")[2].removesuffix("<|end|><|assistant|>")
                    answers.setdefault(strategy, []).append(Draft(turn.text, is_correct))
    return [(problem, own[problem.id]) for problem in problems]
