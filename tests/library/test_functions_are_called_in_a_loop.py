"""`call(role, messages, tools=[function])` runs what the role calls and asks again, until it calls nothing more.

Every reply is a turn with a round and a seed of its own, results are part of prompts only, and descriptions stay the workflow's.
"""

import asyncio
import json
import logging
import random

import pytest
from chat_tokenizers import byte_level, template, wrap
from scripted_engine import ScriptedEngine
from trainers import rows_of

from multirole.engines.protocol import Sampling
from multirole.inputs.problems import INDEX
from multirole.metrics.iteration import role_metrics
from multirole.rollout import tool_loop
from multirole.rollout.errors import WorkflowError
from multirole.rollout.replay import Fork, replays_of
from multirole.rollout.rollout import Rollout
from multirole.rollout.seeds import turn_seed
from multirole.types import Answer, Problem, Tool, user


def weather(city: str, days: int = 1) -> dict:
    """Say how the weather will be.

    Args:
        city: where.
        days: how far ahead.
    """
    if city == "nowhere":
        raise LookupError("there is no city nowhere")
    return {"city": city, "days": days}


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


SUBMIT = {"type": "function", "function": {"name": "submit", "description": "Submit.", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    raw = byte_level(
        r"\w+|\W+", ["<|im_start|>", "<|im_end|>", "<eos>"], ("<tool_call>", "</tool_call>", "<think>", "</think>")
    )
    return wrap(raw, template("qwen3"), eos_token="<eos>")


def calls(*pairs):
    """The text of a reply that makes these calls."""
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in pairs
    )


class Run:
    """A workflow that is one function, and what its turns were."""

    name = "tools"

    def __init__(self, run, roles):
        self.function, self.roles = run, roles

    async def run(self, problem, call):
        return Answer((await self.function(call)).text)


def play(tokenizer, run, replies, roles=None, **options):
    """The episode of a workflow whose n-th reply is `replies[n]`, and the engine that played it."""
    texts = iter(replies)

    def reply(key, request):
        return [*tokenizer.encode(next(texts), add_special_tokens=False), tokenizer.eos_token_id], 1

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    roles = roles or {"solver": 1}
    rollout = Rollout(Run(run, roles), engine, tokenizer, dict.fromkeys(roles), bool, 0, 9000, **options)
    (episode,) = rollout.run([(Problem("0", "", "Ask.", None), 0)], 0, Sampling(300, 1.0))
    return episode, engine


def ask(*tools, **options):
    return lambda call: call("solver", [user("Ask.")], tools=[*tools], **options)


def test_each_reply_is_a_turn_with_a_round_and_the_seed_of_it(tokenizer):
    replies = [calls(("weather", {"city": "Ulm"})), calls(("weather", {"city": "Bonn", "days": 3})), "Sun."]
    episode, engine = play(tokenizer, ask(weather), replies)
    assert [(turn.role, turn.slot, turn.round) for turn in episode.turns] == [("solver", 0, n) for n in range(3)]
    assert [request.seed for request in engine.requests] == [turn_seed(0, 0, "0", 0, "solver", 0, n) for n in range(3)]
    assert [turn.outcome for turn in episode.turns] == ["called", "called", "answered"]
    assert [turn.reply.results for turn in episode.turns] == [
        ["{'city': 'Ulm', 'days': 1}"],
        ["{'city': 'Bonn', 'days': 3}"],
        [],
    ]
    assert episode.answer == Answer("Sun.")


def test_results_stand_in_the_next_prompt_and_in_no_completion(tokenizer):
    replies = [f"Hm. {calls(('weather', {'city': 'Ulm'}), ('wait', {'seconds': 0}))}", "Sun."]
    episode, _ = play(tokenizer, ask(weather, wait), replies)
    first, last = (tokenizer.decode(turn.prompt_ids) for turn in episode.turns)
    as_trl = tokenizer.apply_chat_template([user("Ask.")], tools=[weather, wait], add_generation_prompt=True, tokenize=False, enable_thinking=False)  # fmt: skip
    assert first == as_trl
    assert '"name": "weather"' in first and '"description": "how far ahead."' in first and "tool_response" not in first
    (said, *_), results = last.partition("Hm.")[2].split("<|im_end|>")[:2], last.split("<tool_response>\n")[1:]
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in said and said.index("weather") < said.index("wait")
    assert [text.partition("\n</tool_response>")[0] for text in results] == ["{'city': 'Ulm', 'days': 1}", "waited 0"]
    assert [tokenizer.decode(turn.completion_ids) for turn in episode.turns] == [reply + "<eos>" for reply in replies]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("weather", {"city": "nowhere"}, "Error: LookupError: there is no city nowhere"),
        ("weather", {"town": "Ulm"}, "Error: TypeError: weather() got an unexpected keyword argument 'town'"),
        ("wether", {}, "Error: there is no tool 'wether'. The tools are weather, wait."),
        ("wait", {"seconds": "x"}, "Error: TypeError: "),
    ],
)
def test_the_role_reads_why_its_call_failed(tokenizer, name, arguments, text, caplog):
    tool_loop._failed.clear()
    with caplog.at_level(logging.WARNING):
        episode, _ = play(tokenizer, ask(weather, wait), [calls((name, arguments))] * 2 + ["Sun."])
    assert [turn.reply.failures for turn in episode.turns] == [1, 1, 0]
    assert all(turn.reply.results[0].startswith(text) for turn in episode.turns[:2])
    assert text in tokenizer.decode(episode.turns[1].prompt_ids).replace("\\'", "'")
    assert caplog.text.count("raised, and the role") == (name != "wether")


def test_descriptions_are_the_workflows_and_end_the_loop(tokenizer):
    alone, engine = play(tokenizer, ask(SUBMIT), [calls(("weather", {"city": "Ulm"}))])
    assert len(engine.requests) == 1 and alone.turns[0].reply.calls == [("weather", {"city": "Ulm"})]
    both, _ = play(
        tokenizer,
        ask(weather, SUBMIT),
        [calls(("weather", {"city": "Ulm"})), calls(("weather", {"city": "Bonn"}), ("submit", {}))],
    )
    assert [len(turn.reply.results) for turn in both.turns] == [1, 0] and both.turns[1].reply.calls[1] == ("submit", {})


def test_the_last_round_is_returned_with_its_calls(tokenizer):
    episode, _ = play(tokenizer, ask(weather, max_rounds=2), [calls(("weather", {"city": "Ulm"}))] * 3)
    assert [len(turn.reply.results) for turn in episode.turns] == [1, 0]
    assert episode.turns[1].reply.calls and episode.turns[1].outcome == "answered"


def test_a_tool_may_call_a_role_whose_errors_are_the_episodes(tokenizer):
    """For example an overflow, or a mistake such as a round that was played; the role must not read them as results."""

    def delegating(call, round):
        async def delegate(task: str) -> str:
            """Have a worker do it.

            Args:
                task: what to do.
            """
            return (await call("worker", [user(task)], round=round())).text

        return call("boss", [user("Ask.")], tools=[delegate])

    roles, replies = (
        {"boss": 1, "worker": 1},
        [calls(("delegate", {"task": "a"})), "A", calls(("delegate", {"task": "b"})), "B", "AB"],
    )
    rounds = iter(range(9))
    episode, _ = play(tokenizer, lambda call: delegating(call, lambda: next(rounds)), replies, roles)
    assert [(turn.role, turn.round, turn.text) for turn in episode.turns if turn.role == "worker"] == [("worker", 0, "A"), ("worker", 1, "B")]  # fmt: skip
    assert [turn.reply.results for turn in episode.turns if turn.role == "boss"] == [["A"], ["B"], []]
    with pytest.raises(WorkflowError, match="was made twice"):
        play(tokenizer, lambda call: delegating(call, lambda: 0), replies, roles)


def test_rounds_of_a_call_are_its_own_before_it_needs_them(tokenizer):
    """So a workflow that would fail once the model calls a tool fails at the first episode."""

    async def twice(call, second, **options):
        await call("solver", [user("Ask.")], tools=[weather])
        return await call("solver", [user("Again.")], round=second, **options)

    for options in ({}, {"tools": [weather]}):
        with pytest.raises(WorkflowError, match="has the rounds from `round` to `round . max_rounds - 1`"):
            play(tokenizer, lambda call, options=options: twice(call, 7, **options), ["Sun."] * 2)
        episode, _ = play(tokenizer, lambda call, options=options: twice(call, 8, **options), ["Sun."] * 2)
        assert [turn.round for turn in episode.turns] == [0, 8]


def test_turns_of_a_call_without_a_slot_are_placed_in_their_order(tokenizer):
    replies = [calls(("weather", {"city": "Ulm"})), calls(("weather", {"city": "Bonn"})), "Sun."]
    episode, engine = play(tokenizer, ask(weather, slot=None), replies)
    assert [(turn.round, turn.text.strip()) for turn in episode.turns] == list(enumerate(replies))
    assert len({request.seed for request in engine.requests}) == 3


def test_a_replay_repeats_the_loop(tokenizer):
    """A fork of a later turn keeps the recorded turns and runs the tools again."""
    drawn = random.Random(0)
    replies = [
        calls(("weather", {"city": "Ulm"})),
        calls(("weather", {"city": "Bonn"})),
        *(str(drawn.random()) for _ in range(2)),
    ]
    texts = iter(replies)
    engine = ScriptedEngine(
        lambda *_: ([*tokenizer.encode(next(texts), add_special_tokens=False), tokenizer.eos_token_id], 1),
        tokenizer.eos_token_id,
    )
    workflow = Run(ask(weather), {"solver": 1})
    rollout = Rollout(workflow, engine, tokenizer, {"solver": None}, bool, 0, 9000)
    (episode,) = rollout.run([(Problem("0", "", "Ask.", None), 0)], 0, Sampling(300, 1.0))
    attempts, replays = replays_of(workflow, [Fork(episode, episode.turns[2])])
    (again,) = rollout.run(attempts, 0, Sampling(300, 1.0), replays)
    assert len(engine.requests) == 4 and [turn.completion_ids for turn in again.turns[:2]] == [turn.completion_ids for turn in episode.turns[:2]]  # fmt: skip
    assert again.turns[2].prompt_ids == episode.turns[2].prompt_ids and again.answer != episode.answer


def undocumented(city: str):
    return city


def untyped(city):
    """Do it.

    Args:
        city: where.
    """


def unexplained(city: str):
    """Do it."""


class Weather:
    def ask(self, city: str) -> str:
        """Ask.

        Args:
            city: where.
        """
        return f"sun in {city}"


def test_methods_and_tools_with_a_description_are_functions(tokenizer):
    told = Tool(lambda **arguments: arguments["x"] * "\ud800", {"type": "function", "function": {"name": "half", "description": "x", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}})  # fmt: skip
    episode, _ = play(
        tokenizer, ask(Weather().ask, told), [calls(("ask", {"city": "Ulm"}), ("half", {"x": 2})), "Sun."]
    )
    assert episode.turns[0].reply.results == ["sun in Ulm", "??"]  # no tokenizer takes half of a character


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([undocumented], {}, "`undocumented` cannot be described: .*no docstring.*Write a docstring"),
        ([untyped], {}, "`untyped` cannot be described: .*missing a type hint"),
        ([unexplained], {}, "no description for the argument 'city'"),
        ([lambda x: x], {}, "neither a function with a name nor a description"),
        ([Weather], {}, "neither a function with a name nor a description"),
        ([weather, weather], {}, "two tools of the name 'weather'"),
        ([Tool(weather, {"name": "x"})], {}, "the description of a `Tool` must be"),
        (weather, {}, "must be a list of functions or descriptions"),
        ([weather], {"max_rounds": 0}, "Pass an integer of 1 or more"),
        ([SUBMIT], {"max_rounds": 2}, "and a function, or leave it out"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_request(tokenizer, tools, options, message):
    with pytest.raises(WorkflowError, match=message):
        play(tokenizer, lambda call: call("solver", [user("Ask.")], tools=tools, **options), [])


def test_templates_without_results_are_refused_and_those_of_one_call_get_a_message_for_each(tokenizer):
    try:
        tokenizer.chat_template = template("lfm2")
        with pytest.raises(WorkflowError, match="out of the prompt, so a role cannot use functions"):
            play(tokenizer, ask(weather), [])
        tokenizer.chat_template = template("llama3_1")
        both = '{"name": "weather", "parameters": {"city": "Ulm"}}'
        episode, _ = play(tokenizer, ask(weather), [both, "Sun."])
        assert episode.turns[0].reply.results == ["{'city': 'Ulm', 'days': 1}"] and episode.answer.text == "Sun."
    finally:
        tokenizer.chat_template = template("qwen3")
    reply = tool_loop.Reply("Hm.", calls=[("a", {}), ("b", {})], results=["1", "2"])
    assert [message["role"] for message in tool_loop.exchange(reply, 0, True)] == ["assistant", "tool", "tool"]
    messages = tool_loop.exchange(reply, 3, False)
    assert [(m["role"], m["content"]) for m in messages] == [("assistant", "Hm."), ("tool", "1"), ("assistant", ""), ("tool", "2")]  # fmt: skip
    assert [m.get("tool_call_id") for m in messages] == [None, "call00003", None, "call00004"]


def test_every_reply_is_trained_with_the_episodes_advantage(make_library_trainer, tokenizer):
    """Half of the first replies call the tool. The rows are the turns, and the results of tools are in none of their completions."""

    def reply(key, request):
        is_first = "tool_response" not in tokenizer.decode(request.prompt_ids)
        text = calls(("weather", {"city": "Ulm"})) if is_first and request.seed % 2 else "Sun."
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], 1

    class Ask:
        name, roles = "ask", {"solver": 1}

        async def run(self, problem, call):
            return Answer((await call("solver", [user(problem.question)], tools=[weather])).text)

    def index(episodes, **_):
        return [episode.index for episode in episodes]

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    trainer = make_library_trainer(Ask(), engine, index, policy="ip")
    inputs = [{"prompt": "Ask.", "task": "general", INDEX: i // 8} for i in range(16)]
    episodes = trainer._generate_and_score_completions(inputs)
    rows = rows_of(trainer, episodes)
    n_called = sum(len(episode.turns) == 2 for episode in episodes)
    assert {len(episode.turns) for episode in episodes} == {1, 2} and len(rows) == 16 + n_called == len(engine.requests)
    assert all(row.advantage == row.episode.advantage for row in rows) and len({row.advantage for row in rows}) == 8
    metrics = role_metrics(rows, ["solver"])["solver"]
    assert (metrics["tool_calls"], metrics["tool_failures"], metrics["unparsed_rate"]) == (n_called, 0, 0)
