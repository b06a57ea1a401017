"""Give roles the tools of an MCP server (`MCPTools`), such as a search engine or a file system.

search = MCPTools(StdioServerParameters(command="python", args=["server.py"]))

class Ask:
    name, roles = "ask", {"solver": 1}

    async def run(self, problem, call):
        return Answer((await call("solver", problem.messages, tools=search.tools)).text)
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from mcp import Client, MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as ServerTool

from multirole.types import Tool, ToolUnavailable

FAULTS = {
    CONNECTION_CLOSED: ("",), REQUEST_TIMEOUT: ("",), INTERNAL_ERROR: ("Server returned an error response",),
    INVALID_REQUEST: ("Session terminated", "Unexpected content type", "Redirect to ", "server answered a request with 202"),
    METHOD_NOT_FOUND: ("Not Found",), PARSE_ERROR: ("Failed to parse",),
}  # fmt: skip
"""The codes under which mcp's client reports that a server did not answer, and how its messages begin: a server may use some of the codes, too."""

CLOSING = 10.0
"""Seconds that a server which did not start may take to end."""
MISFITS = "Invalid structured content", "Invalid schema for tool", "Tool "
"""How the messages of mcp's client begin about an answer that does not fit the tool's own output schema."""


class ToolError(RuntimeError):
    """A tool of a server says that a call failed. The role that made the call reads it."""


class MCPTools:
    """The tools of an MCP server, for `call(role, messages, tools=server.tools)` in a workflow.

    A thread keeps the connection until `close`, so that all episodes of all rollouts share one server; what it remembers, they share, too. A call
    that the server answers with an error, or with what its own schema forbids, is text that the role reads. A connection that is lost, or no answer within `timeout`, fails the
    episode with `ToolUnavailable`.

    Args:
        server: what `mcp.Client` takes: `mcp.StdioServerParameters(command=..., args=[...])` to start a server, or the URL of one.
        timeout: the most seconds that the server may take to start, or to answer a call.

    Raises:
        ConnectionError: if the server does not start or does not list its tools.
    """

    tools: list[Tool]

    def __init__(self, server: Any, timeout: float = 30.0) -> None:
        self._server, self._timeout = server, timeout
        self._stop: Callable[[], object] = lambda: None
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Client, list[ServerTool]]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep_connection()), daemon=True)
        self._thread.start()
        try:
            self._loop, self._is_closing, self._client, described = self._started.result(timeout)
        except Exception as error:
            with suppress(RuntimeError):  # the loop has ended
                self._stop()
            self._thread.join(CLOSING)
            is_late = isinstance(error, TimeoutError) and not str(error)
            why = f" in {timeout:g} s (`timeout`)" if is_late else f": {type(error).__name__}: {error}"
            raise ConnectionError(f"The MCP server {_shown(server)} did not start and list its tools{why}") from error
        self.tools = [self._tool(each) for each in described]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and the server if it was started here. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_closing.set)
            self._thread.join(self._timeout)

    async def _keep_connection(self) -> None:
        """Connect, tell the constructor what tools there are, and wait for `close`. Errors before that are the constructor's."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            async with Client(self._server, read_timeout_seconds=self._timeout) as client:
                page, is_closing = await client.list_tools(), asyncio.Event()
                tools = [*page.tools]
                while page.next_cursor is not None:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                self._started.set_result((loop, is_closing, client, tools))
                await is_closing.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _tool(self, described: ServerTool) -> Tool:
        """Return a server's tool as a function with the server's own description."""
        description = {
            "type": "function",
            "function": {
                "name": described.name, "description": described.description or "", "parameters": described.input_schema
            },
        }  # fmt: skip
        return Tool(self._function(described.name), description)

    def _function(self, name: str) -> Callable[..., Awaitable[str]]:
        async def ask_server(**arguments: Any) -> str:
            if not self._thread.is_alive():
                raise ToolUnavailable(f"the connection to the MCP server of the tool {name!r} is closed.")
            asked = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop)
            answer = asyncio.wrap_future(asked)
            try:
                while (
                    not answer.done()
                ):  # the client's own timeout ends it; a timer tells the rollout that somebody waits
                    await asyncio.wait({answer}, timeout=self._timeout)
                return text_of(await answer)
            except MCPError as error:
                if not error.message.startswith(FAULTS.get(error.code, ())):
                    raise
                raise _unanswered(name, str(error)) from error
            except ToolError:
                raise
            except ValueError as error:  # pydantic's, of an answer that is none of the protocol
                raise ToolError(str(error)) from error
            except RuntimeError as error:
                if not str(error).startswith(MISFITS):
                    raise _unanswered(name, f"{type(error).__name__}: {error}") from error
                raise ToolError(str(error)) from error
            except Exception as error:  # of the transport: a broken pipe, a closed stream, a refused connection
                raise _unanswered(name, f"{type(error).__name__}: {error}") from error
            finally:
                answer.cancel()  # if the caller was

        return ask_server


def _unanswered(name: str, why: str) -> ToolUnavailable:
    return ToolUnavailable(f"the MCP server did not answer a call of the tool {name!r}: {why}")


def _shown(server: Any) -> str:
    """Return a server's command or its URL, without the environment and the query, which may hold keys."""
    if isinstance(server, str):
        url = urlsplit(server)
        return repr(urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", "")))
    if hasattr(server, "command"):
        return repr(" ".join([server.command, *server.args]))[:300]
    return type(server).__name__


def text_of(result: CallToolResult) -> str:
    """Return a result as text: its parts of text, the kind of each other part, or its structured content as JSON. ToolError for an error."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    if result.is_error:
        raise ToolError("\n".join(parts))
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return part.resource.text
    return f"[{part.type} {part.uri}]" if isinstance(part, ResourceLink) else f"[{part.type}]"
