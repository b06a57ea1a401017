"""The tools of an MCP server are functions of roles: they keep its descriptions, its errors are read by the role, and a lost server is none of those."""

import asyncio
import inspect
import json
import sys
import threading

import pytest
from chat_tokenizers import byte_level, template, wrap
from scripted_engine import ScriptedEngine

from multirole import Answer, MCPTools, Problem, user
from multirole.engines.protocol import Sampling
from multirole.rollout import event_loop
from multirole.rollout.errors import WorkflowError
from multirole.rollout.rollout import Rollout
from multirole.types import ToolUnavailable

mcp, mcp_types = pytest.importorskip("mcp"), pytest.importorskip("mcp_types")
streamable_http, lowlevel = (
    pytest.importorskip(f"mcp.{part}") for part in ("client.streamable_http", "server.lowlevel")
)
SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)

@server.tool()
def fail(why: str) -> str:
    "Fail."
    raise ValueError(why)

@server.tool()
def leave() -> str:
    "End the server."
    os._exit(1)
"""


def in_process():
    names: dict = {}
    exec(SERVER, names)  # noqa: S102
    return names["server"]


class Ask:
    name, roles = "ask", {"solver": 1}

    def __init__(self, tools):
        self.tools = tools

    async def run(self, problem, call):
        return Answer((await call("solver", [user(problem.question)], tools=self.tools)).text)


@pytest.fixture(scope="module")
def tokenizer():
    raw = byte_level(
        r"\w+|\W+", ["<|im_start|>", "<|im_end|>", "<eos>"], ("<tool_call>", "</tool_call>", "<think>", "</think>")
    )
    return wrap(raw, template("qwen3"), eos_token="<eos>")


def play(tokenizer, tools, *calls):
    """The episodes of two problems, played together, whose role makes these calls one after the other and then says "Done."."""
    texts = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls] + ["Done."]
    n_asked = {}

    def reply(key, request):
        n = n_asked[request.problem] = n_asked.get(request.problem, -1) + 1
        return [*tokenizer.encode(texts[n], add_special_tokens=False), tokenizer.eos_token_id], 1

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    rollout = Rollout(Ask(tools), engine, tokenizer, {"solver": None}, bool, 0, 9000)
    return rollout.run([(Problem(str(i), "", "Ask.", None), 0) for i in range(2)], 0, Sampling(300, 1.0))


def test_two_rollouts_share_a_server(tokenizer):
    with MCPTools(in_process()) as server:
        assert [tool.description["function"]["name"] for tool in server.tools] == ["add", "fail", "leave"]
        for _ in range(2):
            episodes = play(tokenizer, server.tools, ("add", {"a": 1, "b": 2}), ("fail", {"why": "no"}), ("add", {"a": "x", "b": 2}))  # fmt: skip
            for episode in episodes:
                three, refused, wrong = (turn.reply.results[0] for turn in episode.turns[:3])
                assert three == "3" and refused == "Error: ToolError: Error executing tool fail"
                assert "Error" in wrong and "integer" in wrong and episode.answer.text == "Done."
        assert '"description": "Add two numbers."' in tokenizer.decode(episodes[0].turns[0].prompt_ids)
    with pytest.raises(ToolUnavailable, match="is closed"):
        asyncio.run(server.tools[0].function(a=1, b=2))
    server.close()


def test_a_lost_server_fails_the_episode_and_gives_no_result(tokenizer, tmp_path):
    (tmp_path / "server.py").write_text(f"{SERVER}\nserver.run('stdio')\n")
    with MCPTools(mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "server.py")])) as server:
        assert play(tokenizer, server.tools, ("add", {"a": 2, "b": 2}))[0].turns[0].reply.results == ["4"]
        with pytest.raises(
            WorkflowError, match="ToolUnavailable: the MCP server did not answer a call of the tool 'leave'"
        ):
            play(tokenizer, server.tools, ("leave", {}))


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("hidden"), "Internal server error"), *((mcp.MCPError(code, "none"), "none") for code in (-32603, -32601, -32042))],
    ids=repr,
)  # fmt: skip
def test_an_error_that_a_server_answers_with_is_read_by_the_role(tokenizer, error, said):
    async def tools(context, params):
        return mcp_types.ListToolsResult(tools=[mcp_types.Tool(name="look", input_schema={"type": "object"})])

    async def look(context, params):
        raise error

    with MCPTools(lowlevel.Server("things", on_list_tools=tools, on_call_tool=look)) as server:
        for episode in play(tokenizer, server.tools, ("look", {})):
            assert episode.turns[0].reply.results == [f"Error: MCPError: {said}"] and episode.answer.text == "Done."


def test_errors_that_the_client_makes_of_lost_connections_fail_the_episode(monkeypatch):
    """The text is that of the client, so that a version with other words is noticed."""
    source = inspect.getsource(streamable_http)
    from multirole.environments.mcp import FAULTS

    with MCPTools(in_process()) as server:
        for code, messages in FAULTS.items():
            for message in messages:
                assert message in source

                async def lose(*_, code=code, message=message):
                    raise mcp.MCPError(code, f"{message} ...")

                monkeypatch.setattr(server._client, "call_tool", lose)
                with pytest.raises(ToolUnavailable, match="the MCP server did not answer a call of the tool 'add'"):
                    asyncio.run(server.tools[0].function(a=1, b=2))


def test_a_server_that_does_not_start_is_refused():
    with pytest.raises(ConnectionError, match="did not start and list its tools"):
        MCPTools(mcp.StdioServerParameters(command=sys.executable, args=["-c", "raise SystemExit"]), timeout=20)


def serving(answer, schema=None):
    """A server in this process whose tool "look" answers with `await answer(arguments)`."""

    async def tools(context, params):
        tool = mcp_types.Tool(name="look", input_schema={"type": "object"}, output_schema=schema)
        return mcp_types.ListToolsResult(tools=[tool])

    async def look(context, params):
        return await answer(params.arguments or {})

    return lowlevel.Server("things", on_list_tools=tools, on_call_tool=look)


def test_a_slow_call_is_waited_for(tokenizer, monkeypatch):
    """`ALONE` ends a rollout that waits for what may never come; a call of a server ends at `timeout`."""
    monkeypatch.setattr(event_loop, "ALONE", 0.1)

    async def slow(arguments):
        await asyncio.sleep(0.5)
        return mcp_types.CallToolResult(content=[mcp_types.TextContent(type="text", text="late")])

    with MCPTools(serving(slow)) as server:
        for episode in play(tokenizer, server.tools, ("look", {})):
            assert episode.turns[0].reply.results == ["late"]


def test_an_answer_that_does_not_fit_its_schema_is_read_by_the_role(tokenizer):
    """What a model passes may decide it, and no policy may end its run."""

    async def echo(arguments):
        text = mcp_types.TextContent(type="text", text="ok")
        return mcp_types.CallToolResult(content=[text], structured_content={"n": arguments["n"]})

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    with MCPTools(serving(echo, schema)) as server:
        for episode in play(tokenizer, server.tools, ("look", {"n": 3}), ("look", {"n": "many"})):
            fits, misfit = (turn.reply.results[0] for turn in episode.turns[:2])
            assert fits == "ok" and "ToolError: Invalid structured content" in misfit


def test_the_text_of_resources_is_read():
    async def files(arguments):
        resource = mcp_types.TextResourceContents(uri="file:///a.txt", text="what it says")
        return mcp_types.CallToolResult(content=[
            mcp_types.TextContent(type="text", text="found"), mcp_types.EmbeddedResource(type="resource", resource=resource),
            mcp_types.ResourceLink(type="resource_link", name="b", uri="file:///b.txt"),
        ])  # fmt: skip

    with MCPTools(serving(files)) as server:
        text = asyncio.run(server.tools[0].function())
    assert text == "found\nwhat it says\n[resource_link file:///b.txt]"


def test_a_server_that_starts_too_late_is_ended_and_its_keys_are_not_shown():
    late = mcp.StdioServerParameters(
        command=sys.executable, args=["-c", "import time; time.sleep(60)"], env={"KEY": "secret"}
    )
    before = threading.active_count()
    with pytest.raises(ConnectionError, match=r"did not start and list its tools in 0\.5 s \(`timeout`\)") as refused:
        MCPTools(late, timeout=0.5)
    assert "secret" not in str(refused.value) and sys.executable in str(refused.value)
    assert threading.active_count() == before
