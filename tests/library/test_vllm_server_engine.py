"""Rollouts on vLLM's servers: each request is answered once, even if servers fail, and what cannot work is refused first.

The server is a fake one over real sockets. `test_vllm_server_equals_vllm.py` has vLLM's own.
"""

import json
import logging
import socket
import threading
import time
from collections import defaultdict

import pytest
import torch
from fake_vllm_server import BASE, FakeServer, canned, running_servers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from toy_qwen3 import toy_model
from trainers import library_trainer, slow_but

from multirole.engines import vllm_server as vllm_server_engine
from multirole.engines import vllm_server_client
from multirole.engines.protocol import Completion, Request
from multirole.engines.vllm_server import ServerOptions, VLLMServerEngine, run_token
from multirole.engines.vllm_server_client import ServerError, check_servers, checked_urls, completion_body
from multirole.inputs.adapters import add_adapters
from multirole.options import MultiRoleGRPOConfig
from multirole.workflows import WORKFLOWS

OPTIONS = ServerOptions(BASE, timeout=20.0, request_timeout=20.0)
ADAPTERS = ["generator", "aggregator"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(vllm_server_engine, "BACKOFF", 0.01)
    monkeypatch.setattr(vllm_server_client, "WAIT", 0.02)


@pytest.fixture
def servers():
    with running_servers(2) as servers:
        yield servers


@pytest.fixture
def server(servers):
    return servers[0]


@pytest.fixture
def connect():
    """connect(urls, **options) -> an engine, closed at the end."""
    engines = []

    def make(*servers: FakeServer, run: str = "aa", stop_ids: tuple[int, ...] = (), **options) -> VLLMServerEngine:
        urls, settled = [s.url for s in servers], OPTIONS._replace(**options)
        engines.append(VLLMServerEngine(urls, ADAPTERS, 256, settled, stop_ids=stop_ids, run=run))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.close()


def two_adapters(tokenizer) -> PeftModel:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return add_adapters(toy_model(tokenizer), lora, ADAPTERS)


@pytest.fixture(scope="module")
def model(tokenizer):
    return two_adapters(tokenizer)


def requests(n: int, n_problems: int = 4) -> list[Request]:
    return [
        Request([5, 6, 7 + i % 3], ADAPTERS[i % 2], i * 2**58 + i, 1 + i % 9, 1.0, f"problem {i % n_problems}")
        for i in range(n)
    ]


def run(engine: VLLMServerEngine, asked: list[Request]) -> list[Completion]:
    """The replies in the order of the requests; fails where a key is answered twice."""
    for key, request in enumerate(asked):
        engine.add(key, request)
    done: dict[int, Completion] = {}
    while len(done) < len(asked):
        for key, completion in engine.step():
            assert key not in done
            done[key] = completion
    assert engine.step() == []
    return [done[key] for key in range(len(asked))]


def expected(engine: VLLMServerEngine, asked: list[Request]) -> list[Completion]:
    """What the fake servers answer."""
    bodies = [completion_body(engine.lora[r.adapter], r.prompt_ids, r.seed, r.max_tokens, 1.0, []) for r in asked]
    return [Completion(*canned(body), "length") for body in bodies]


# ---- one reply per request


def test_requests_carry_ids_and_seeds_and_replies_come_back_exactly(server, connect, model):
    engine, asked = connect(server), requests(40)
    engine.publish(model, 3)
    assert run(engine, asked) == expected(engine, asked)
    body = next(body for body in server.asked if body["seed"] == asked[3].seed % 2**63)  # they arrive in any order
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([5, 6, 7], 4, "multirole:aa:1:aggregator@3")
    assert (body["top_p"], body["top_k"], body["n"], body["logprobs"]) == (1.0, 0, 1, 0)  # the whole distribution
    engine.add(0, Request([5], None, 1, 2, 1.0))
    while not engine.step():
        pass
    assert server.asked[-1]["model"] == BASE


def test_a_request_samples_the_whole_distribution_whatever_the_servers_defaults_are(server, connect, model):
    engine = connect(server, stop_ids=(7, 8))
    engine.publish(model, 0)
    run(engine, [Request([5], "generator", 1, 4, 0.7)])
    assert server.asked == [
        {
            "model": "multirole:aa:1:generator@0", "prompt": [5], "seed": 1, "max_tokens": 4, "temperature": 0.7,
            "stop_token_ids": [7, 8], "ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "watermarking": False, "n": 1, "stream": False,
            "logprobs": 0, "return_tokens_as_token_ids": True,
        }
    ]  # fmt: skip


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_request_that_fails_is_sent_again_with_its_seed_and_counted_once(server, connect, model, status):
    engine, asked = connect(server), requests(1)
    engine.publish(model, 0)
    server.statuses = [status, status]
    assert run(engine, asked) == expected(engine, asked)
    assert len(server.asked) == 3 and len(server.answered) == 1
    assert server.asked[0] == server.asked[1] == server.asked[2]


def test_a_request_that_always_fails_ends_the_rollout_after_its_retries(server, connect, model):
    engine = connect(server, max_retries=2)
    engine.publish(model, 0)
    server.statuses = [500] * 9
    with pytest.raises(ServerError, match=r"did not answer a request 3 times.*overloaded"):
        run(engine, requests(1))
    assert len(server.asked) == 3


def test_a_request_that_the_server_calls_wrong_is_not_sent_again(server, connect, model):
    engine = connect(server)
    engine.publish(model, 0)
    server.statuses = [400]
    with pytest.raises(ServerError, match="HTTP status 400: overloaded"):
        run(engine, requests(1))
    assert len(server.asked) == 1


def test_after_an_error_the_engine_has_no_request_left(server, connect, model):
    engine, asked = connect(server), requests(4)
    engine.publish(model, 0)
    server.seconds, server.statuses = 0.1, [400]
    with pytest.raises(ServerError, match="HTTP status 400: overloaded"):
        run(engine, asked)
    engine.publish(model, 1)
    assert run(engine, asked) == expected(engine, asked)  # under the same keys


def test_a_reply_that_does_not_come_is_asked_for_again(server, connect, model):
    engine, asked = connect(server, request_timeout=0.3), requests(6)
    engine.publish(model, 0)
    server.hangs = 2
    assert run(engine, asked) == expected(engine, asked)
    assert len(server.asked) == 8 and len(server.answered) == 6


def test_a_slow_server_is_waited_for(server, connect, model):
    engine, asked = connect(server, max_retries=0), requests(6)
    engine.publish(model, 0)
    server.seconds = 0.5
    assert run(engine, asked) == expected(engine, asked)
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (([3, 4], [-1.0]), "2 tokens with 1 log-probs"),
        (([], []), "0 tokens with 0 log-probs"),
        (([3] * 9, [-1.0] * 9), "9 tokens with 9 log-probs, but 1 to 1 of both"),
        ((["x"], [-1.0]), "cannot be read"),
    ],
    ids=["lengths", "nothing", "too many", "no token"],
)  # fmt: skip
def test_a_malformed_reply_ends_the_rollout(server, connect, model, answer, message):
    engine = connect(server)
    engine.publish(model, 0)
    server.answer = lambda body: answer
    with pytest.raises(ServerError, match=message):
        run(engine, [Request([5], "generator", 0, 1, 1.0)])


# ---- servers that are lost


def test_a_problem_stays_with_one_server_and_the_servers_share_the_problems(servers, connect, model):
    engine = connect(*servers)
    engine.publish(model, 0)
    run(engine, requests(60, n_problems=6))
    problems = [{body["seed"] % 2**58 % 6 for body in server.answered} for server in servers]
    assert len(problems[0]) == len(problems[1]) == 3 and not problems[0] & problems[1]


def test_the_problems_of_a_killed_server_go_to_the_other_one(servers, connect, model, caplog):
    engine, asked = connect(*servers), requests(60, n_problems=6)
    engine.publish(model, 0)
    servers[0].kill_after, servers[0].seconds = 7, 0.05
    assert run(engine, asked) == expected(engine, asked)
    (lost,) = [record.message for record in caplog.records if "Lost a vLLM server" in record.message]
    assert f"{servers[0].url} does not answer" in lost and lost.endswith("Its problems go to the other servers.")
    servers[0].kill_after = None
    engine.publish(model, 1)  # one is still down
    assert run(engine, asked) == expected(engine, asked)
    servers[0].start()
    engine.publish(model, 2)  # it is up again
    servers[0].answered.clear()
    assert run(engine, asked) == expected(engine, asked)
    assert servers[0].answered and set(servers[0].adapters) == set(servers[1].adapters) == set(engine.lora.values())


def test_the_last_server_is_waited_for_and_gets_its_adapters_again(server, connect, model, caplog):
    engine, asked = connect(server), requests(30)
    engine.publish(model, 0)
    server.kill_after, server.seconds = 5, 0.02
    revive = threading.Timer(1.0, server.start)
    revive.start()
    assert run(engine, asked) == expected(engine, asked)
    assert set(server.adapters) == set(engine.lora.values())
    assert "The run waits 20 s (`vllm_server_timeout`) for it." in caplog.text
    assert f"{server.url} answers again and has the adapters." in caplog.text


def test_of_several_lost_servers_the_first_that_answers_goes_on(servers, connect, model):
    engine, asked = connect(*servers, timeout=8.0), requests(8)
    engine.publish(model, 0)
    for server in servers:
        server.stop()
    threading.Timer(0.3, servers[1].start).start()
    began = time.monotonic()
    assert run(engine, asked) == expected(engine, asked)
    assert time.monotonic() - began < 6


def test_a_server_that_was_started_anew_between_two_requests_gets_its_adapters(server, connect, model):
    engine, asked = connect(server), requests(4)
    engine.publish(model, 0)
    server.stop()
    server.start()
    assert run(engine, asked) == expected(engine, asked)


def test_servers_that_do_not_come_back_end_the_rollout(servers, connect, model):
    engine = connect(*servers, timeout=0.3)
    engine.publish(model, 0)
    for server in servers:
        server.kill_after = 3
    with pytest.raises(ConnectionError, match=r"does not answer .*Waited 0.3 s \(`vllm_server_timeout`\)"):
        run(engine, requests(60))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.27.1"}, r"runs vLLM 0\.27\.1"),
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 20}, "takes sequences of 20 tokens"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("notices", ["the loss", "another process's loss", "nothing"])
def test_a_server_that_was_started_anew_with_other_options_is_refused(server, connect, model, change, message, notices):
    """This includes a server that was away between two publications, while it got no requests."""
    other, engine = connect(server), connect(server)
    other.rank, other.folder, other._together = 1, engine.folder, lambda _: [server.url]
    engine.publish(model, 0)
    other.publish(model, 0)
    server.stop()
    vars(server).update(change)
    if notices == "nothing":
        server.start()
        with pytest.raises(ValueError, match=message):
            engine.publish(model, 1)
        return
    threading.Timer(0.5, server.start).start()
    with pytest.raises(ValueError, match=message):
        run(engine if notices == "the loss" else other, requests(3))


# ---- adapters


def test_each_publication_has_new_names_and_paths_and_the_old_ones_are_removed(server, connect, model):
    engine, seen = connect(server), set()
    for version in (0, 0, 1):  # the same version twice, as after an evaluation
        engine.publish(model, version)
        assert set(server.adapters) == set(engine.lora.values()) and not set(server.adapters.items()) & seen
        seen |= set(server.adapters.items())
        assert len(list(engine.folder.iterdir())) == 1
    assert len({name for name, _ in seen}) == len({path for _, path in seen}) == 6
    folder = engine.folder
    engine.close()
    assert not server.adapters and not folder.exists()


def test_each_adapter_is_published_with_its_own_weights(server, connect, tokenizer):
    model, engine, values = two_adapters(tokenizer), connect(server), {"generator": 1.0, "aggregator": 2.0}
    for name, parameter in model.named_parameters():
        for adapter, value in values.items():
            if f"lora_B.{adapter}." in name:
                parameter.data.fill_(value)
    engine.publish(model, 0)
    for adapter, value in values.items():
        tensors = load_file(f"{engine.paths[engine.lora[adapter]]}/adapter_model.safetensors")
        written = [tensor.unique().tolist() for name, tensor in tensors.items() if "lora_B" in name]
        assert written and all(one == [value] for one in written)


def test_publish_and_sleep_while_running_are_refused(server, connect, model):
    engine = connect(server)
    engine.publish(model, 0)
    engine.sleep()
    server.seconds = 0.1
    engine.add(0, requests(1)[0])
    for work in (lambda: engine.publish(model, 1), engine.sleep):
        with pytest.raises(RuntimeError, match="1 unfinished requests"):
            work()
    while not engine.step():
        pass


def test_adapters_are_written_where_the_servers_look_and_copied_where_they_do_not(server, connect, model, tmp_path):
    engine = connect(server, adapter_dir=str(tmp_path / "shared"))
    engine.publish(model, 0)
    assert all(path.startswith(str(tmp_path / "shared" / "multirole-aa-")) for path in server.adapters.values())
    engine.close()
    note, command = tmp_path / "note", "sh -c 'echo $1 $2 >> $0' NOTE {host} {folder}"
    engine = connect(server, adapter_dir=str(tmp_path / "copied"), copy_command=command.replace("NOTE", str(note)))
    engine.publish(model, 0)
    assert note.read_text() == f"127.0.0.1 {engine.folder}\n"
    failing = connect(
        server, adapter_dir=str(tmp_path), copy_command="sh -c 'echo no route to {host} >&2; exit 3' {folder}"
    )
    with pytest.raises(
        ServerError, match=r"`vllm_server_copy_command` failed with exit code 3.*\n.*no route to 127\.0\.0\.1"
    ):
        failing.publish(model, 0)


def test_servers_on_other_machines_need_a_folder(connect):
    with pytest.raises(
        ValueError, match=r"servers \['http://node7:8000'\] are on other machines.*`vllm_server_adapter_dir`"
    ):
        vllm_server_engine.adapter_folder(["http://127.0.0.1:1", "http://node7:8000"], OPTIONS, "aa")


# ---- what is refused before anything is sampled


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"version": "0.27.1"}, ValueError, r"runs vLLM 0\.27\.1, but only 0\.31\.0.* is accepted"),
        ({"version": None}, ValueError, "runs vLLM None"),
        ({"max_model_len": 100}, ValueError, "sequences of 100 tokens, but this run needs 256.*--max-model-len 256"),
        ({"processed": False}, ValueError, "--logprobs-mode processed_logprobs"),
        ({"key": "sesame"}, ValueError, r"refuses the key \(HTTP status 401\).*VLLM_API_KEY"),
        ({"max_loras": 1}, ValueError, "holds 1 adapters at once, but this run needs 2. Start it with --max-loras 4"),
    ],
    ids=["version", "no version", "length", "log-probs", "key", "slots"],
)  # fmt: skip
def test_a_server_that_does_not_fit_is_refused(server, connect, settings, error, message):
    vars(server).update(settings)
    with pytest.raises(error, match=message):
        connect(server)
    assert not server.asked


def test_adapters_that_others_have_loaded_need_slots_too(server, connect):
    server.adapters, server.max_loras = {"mine": "/elsewhere"}, 2
    with pytest.raises(ValueError, match="holds 2 adapters at once, but this run needs 3, with the 1 that others have"):
        connect(server)
    server.max_loras = 3
    connect(server)


def test_one_server_of_several_that_does_not_fit_is_refused(servers, connect):
    servers[1].version = "0.30.0"
    with pytest.raises(ValueError, match=f"{servers[1].url} runs vLLM 0.30.0"):
        connect(*servers)


def test_another_base_model_is_refused_with_the_names_that_are_served(server, connect):
    with pytest.raises(
        ValueError, match=rf"serves \['{BASE}'\], but this run's base model is 'other'.*`vllm_server_model`"
    ):
        connect(server, model="other")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2.*--max-lora-rank"),
        ({"most_adapters": 1}, "No free adapter slot"),
        ({"has_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"),
    ],
    ids=["rank", "full", "no LoRA"],
)
def test_adapters_that_the_server_does_not_take_are_refused(server, connect, model, settings, message):
    vars(server).update(settings)
    with pytest.raises(ValueError, match=message):
        connect(server).publish(model, 0)


def test_a_path_that_the_server_does_not_see_is_refused(server, connect, model, monkeypatch):
    monkeypatch.setattr(vllm_server_engine, "save_adapter", lambda *_: None)
    with pytest.raises(ValueError, match="must find the adapter's files at .*`vllm_server_adapter_dir`"):
        connect(server).publish(model, 0)


def test_a_second_trainer_on_a_server_is_refused_until_the_first_has_closed(server, connect, model):
    first = connect(server, run="aa")
    first.publish(model, 5)
    with pytest.raises(
        ValueError, match="holds adapters of another run: .*multirole:aa:1:aggregator@5.*`vllm_server_evict=True`"
    ):
        connect(server, run="bb")
    assert set(server.adapters) == set(first.lora.values())
    first.close()
    connect(server, run="bb").publish(model, 0)
    assert {name.split(":")[1] for name in server.adapters} == {"bb"}


def test_leftover_adapters_are_removed_when_their_run_resumes_or_with_evict(server, connect, model):
    server.adapters = {"multirole:aa:7:generator@6": "/gone", "mine": "/elsewhere"}
    connect(server, run="aa").publish(model, 6)
    assert len(server.adapters) == 3 and "multirole:aa:7:generator@6" not in server.adapters
    server.adapters = {"multirole:cc:7:generator@6": "/gone", "mine": "/elsewhere"}
    connect(server, run="bb", evict=True)
    assert set(server.adapters) == {"mine"}


def test_the_token_of_a_run_follows_from_its_folder(tmp_path):
    assert run_token(str(tmp_path / "a")) == run_token(str(tmp_path / "a")) != run_token(str(tmp_path / "b"))


def test_a_server_that_is_not_there_is_refused(server, connect):
    url = server.url
    server.stop()
    with pytest.raises(ConnectionError, match=f"{url} does not answer.*`vllm_server_base_url`"):
        connect(server, timeout=0.2)
    with pytest.raises(ConnectionError, match="does not answer"):
        check_servers(url, 0.0)


def test_a_server_that_is_lost_while_it_is_checked_is_reported(server, connect):
    server.complete = lambda body: None  # the connection closes without an answer
    with pytest.raises(ConnectionError, match=f"{server.url} was lost while it was checked"):
        connect(server)


def test_the_preflight_checks_the_servers(servers):
    check_servers(",".join(server.url for server in servers), 1.0)
    servers[1].version = "0.22.0"
    with pytest.raises(ValueError, match=r"vLLM 0\.22\.0"):
        check_servers(",".join(server.url for server in servers), 1.0)


@pytest.mark.parametrize(
    "text", ["", "node1:8000", "ftp://node1", "http://", "http://a:port", "http://u:pass@a:1", "http://a,http://a/v1", "http://a?k=pass"]
)  # fmt: skip
def test_invalid_addresses_are_refused(text):
    with pytest.raises(ValueError, match="`vllm_server_base_url`") as error:
        checked_urls(text)
    assert "pass" not in str(error.value)


def test_addresses_are_read_with_or_without_the_path_of_openais_api():
    assert checked_urls(" http://a:1/v1, https://b/ ") == ["http://a:1", "https://b"]


# ---- the key


def test_the_key_is_sent_and_never_shown(server, connect, model, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    server.key = "sesame"
    engine = connect(server, max_retries=0)
    engine.publish(model, 0)
    run(engine, requests(3))
    assert set(server.headers) == {"Bearer sesame"}
    server.statuses = [500]
    with pytest.raises(ServerError) as error:
        run(engine, requests(1))
    config = MultiRoleGRPOConfig("unused", use_cpu=True, report_to="none", bf16=False, engine="vllm_server")
    for text in (
        caplog.text,
        repr(error.value),
        repr(error.value.__cause__),
        json.dumps(config.to_dict(), default=str),
    ):
        assert "sesame" not in text


def test_what_does_not_speak_http_is_reported_without_the_key(connect, monkeypatch):
    """The `repr` of aiohttp's error for it has the request's headers."""
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ServerError, match="the answer is not one of HTTP") as error:
            check_servers(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.0)
    assert "sesame" not in repr(error.value) + repr(error.value.__cause__)


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch):
    for key in ("open sesame", "s\u00e9same", "se\nsame"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(ValueError, match="openssl rand -hex 16") as error:
            check_servers("http://127.0.0.1:9", 0.0)
        assert "same" not in str(error.value)


# ---- settings


def config(**options) -> MultiRoleGRPOConfig:
    return MultiRoleGRPOConfig("unused", use_cpu=True, report_to="none", bf16=False, **options)


def test_trls_server_mode_is_this_engine():
    args = config(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a:1")
    assert args.engine == "vllm_server" and not args.use_vllm
    assert config(use_vllm=True).engine == "vllm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_mode": "server"}, "`vllm_mode='server'` is for rollouts on vLLM's servers, but `engine` is 'auto'"),
        ({"vllm_server_base_url": "http://a:1"}, "`vllm_server_base_url='http://a:1'` is for rollouts on vLLM's servers"),
        ({"vllm_server_evict": True}, "`vllm_server_evict=True` is for rollouts on vLLM's servers"),
        ({"use_vllm": True, "vllm_server_max_retries": 9}, "`vllm_server_max_retries=9` is for rollouts on vLLM's servers"),
        ({"use_vllm": True, "vllm_mode": "remote"}, "must be 'colocate' or 'server'"),
        ({"vllm_server_timeout": 0.0}, "`vllm_server_timeout` must be a positive number"),
        ({"vllm_server_request_timeout": -1.0}, "`vllm_server_request_timeout` must be a positive number"),
        ({"vllm_server_max_retries": -1}, "`vllm_server_max_retries` must be 0 or more"),
        ({"vllm_server_copy_command": "rsync {folder}/ {host}:{folder}/"}, "`vllm_server_adapter_dir`"),
        ({"vllm_server_copy_command": "rsync", "vllm_server_adapter_dir": "/a"}, "{folder}"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_every_setting_reaches_the_engine(tokenizer, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(VLLMServerEngine, "__init__", lambda self, *options: made.append(options))
    monkeypatch.setattr(VLLMServerEngine, "publish", lambda *_: None)
    trainer = library_trainer(
        WORKFLOWS["voting"](), tokenizer, tmp_path, policy="ip", max_prompt_tokens=100, max_completion_length=50,
        use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a:1,http://b:2", vllm_server_model="m",
        vllm_server_timeout=11.0, vllm_server_request_timeout=12.0, vllm_server_max_retries=13,
        vllm_server_adapter_dir="/d", vllm_server_copy_command="cp {folder} {host}", vllm_server_evict=True,
        vllm_max_num_seqs=14,
    )  # fmt: skip
    trainer.eos_token_ids = [3, 4]
    VLLMServerEngine.from_trainer(trainer)
    options = ServerOptions("m", 11.0, 12.0, 13, "/d", "cp {folder} {host}", True, 14)
    run = run_token(trainer.args.output_dir)
    assert made[1] == (["http://a:1", "http://b:2"], ADAPTERS, 150, options, torch.float32, [3, 4], run)


# ---- a whole run


class CannedEngine:
    """The fake servers' replies without a server."""

    def __init__(self) -> None:
        self.queue, self.version = [], 0

    def add(self, key, request):
        name = f":{request.adapter}@{self.version}"
        body = completion_body(name, request.prompt_ids, request.seed, request.max_tokens, request.temperature, [])
        self.queue.append((key, Completion(*canned(body), "length")))

    def step(self):
        queue, self.queue = self.queue, []
        return queue

    def publish(self, model, version):
        self.version = version

    def sleep(self):
        pass

    def close(self):
        pass


def train(tokenizer, folder, engine=None, **options) -> dict[str, torch.Tensor]:
    """The adapters' weights after two iterations of Voting-IP."""
    rewards = lambda completions, **_: [float(len(text) % 2) for text in completions]
    trainer = library_trainer(
        WORKFLOWS["voting"](), tokenizer, folder, engine, rewards, policy="ip", max_steps=2, logging_steps=1, **options
    )
    trainer.train()
    trainer.engine.close()
    return {name: p.detach().clone() for name, p in trainer.peft_model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("fault", slow_but(["killed"], ["none", "errors", "killed"]))
def test_the_weights_of_a_run_are_those_of_an_engine_in_process_whatever_becomes_of_the_servers(
    servers, tokenizer, tmp_path, fault
):
    for server in servers:
        server.seconds = 0.01
    if fault == "errors":
        servers[0].statuses = [500, 429, 503]
    if fault == "killed":
        servers[1].kill_after = 9
    options = {"vllm_server_base_url": ",".join(s.url for s in servers), "vllm_server_model": BASE}
    weights = train(tokenizer, tmp_path / "a", use_vllm=True, vllm_mode="server", **options)
    twin = train(tokenizer, tmp_path / "b", CannedEngine())
    assert weights.keys() == twin.keys() and all(torch.equal(weights[name], twin[name]) for name in weights)
    answered = [body for server in servers for body in server.answered]
    by_turn = defaultdict(int)
    for body in answered:
        by_turn[body["seed"]] += 1
    assert len(by_turn) == 2 * 16 * 4  # iterations x episodes x turns
    assert (servers[1].http is None) == (fault == "killed")
    assert not servers[0].adapters  # the run has cleared what it published
