"""vLLM on CUDA, as far as it can be tested without a GPU: its settled configuration, the order of calls, its thread, and publishing."""

import gc
import json
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from trainers import build_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from multirole.engines import vllm_colocate as vllm_engine
from multirole.engines.protocol import Request
from multirole.engines.vllm_colocate import (
    VLLMEngine,
    check_class,
    check_unchanged,
    checked_configs,
    folder_with_room,
    llm_options,
)


def test_float32_is_refused_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="half precision only"):
        llm_options(1, 8, 256, torch.float32)


def test_flat_logprobs_are_those_of_a_dict_per_token():
    logprobs = pytest.importorskip("vllm.logprobs")
    flat, dicts = logprobs.create_sample_logprobs(flat_logprobs=True), logprobs.create_sample_logprobs(False)
    sampled, values = [9, 4, 9], [-0.1, -2.5, -0.3000000119]
    for token, value in zip(sampled, values, strict=True):
        for container in (flat, dicts):
            logprobs.append_logprobs_for_next_position(container, [token], [value], [None], 1, num_logprobs=0)
    best = SimpleNamespace(token_ids=sampled, logprobs=flat, finish_reason="stop")
    done = vllm_engine._completion(SimpleNamespace(outputs=[best]))
    assert done.logprobs == [chosen[token].logprob for chosen, token in zip(dicts, sampled, strict=True)] == values
    best.token_ids = [9, 4]
    with pytest.raises(RuntimeError, match="log-probs of 3 tokens.*2 sampled"):
        vllm_engine._completion(SimpleNamespace(outputs=[best]))


@pytest.mark.parametrize(
    "options",
    [
        {"lora_bias": True}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}, {"use_dora": True}, {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1]}, {"layer_replication": [[0, 2], [0, 2]]}, {"init_lora_weights": "pissa"},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_adapters_that_vllm_would_serve_in_part_are_refused(options):
    """vLLM loads an adapter with `lora_bias` without a word, and samples without the bias."""
    model = SimpleNamespace(peft_config={"a": LoraConfig(task_type="CAUSAL_LM", **options)})
    with pytest.raises(ValueError, match=f"the `LoraConfig` has {next(iter(options))}=.*engine='generate'"):
        checked_configs(model, ["a"])
    model.peft_config["a"] = LoraConfig(use_rslora=True, init_lora_weights="gaussian")
    assert checked_configs(model, ["a"]) == [model.peft_config["a"]]


def test_a_language_model_that_vllm_serves_within_a_larger_one_is_refused(tmp_path):
    """`AutoModelForCausalLM` takes Qwen3.5's language model out of the checkpoint, and names its modules differently."""
    base = type("Qwen3_5ForCausalLM", (SimpleNamespace,), {})(name_or_path=str(tmp_path), config=SimpleNamespace())
    trainer = SimpleNamespace(model_options={}, peft_model=SimpleNamespace(get_base_model=lambda: base))
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"loaded as a Qwen3_5ForCausalLM, .*Load it as a Qwen3_5ForConditionalGeneration, or use"
    ):
        check_class(trainer)
    for names in (["Qwen3_5ForCausalLM"], [], None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
        check_class(trainer)
    base.name_or_path = ""
    check_class(trainer)


@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_a_base_that_was_changed_after_it_was_loaded_is_refused(base, tmp_path, max_shard_size):
    """Its name is still that of the folder that vLLM would load."""
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)

    def trainer_of(base) -> SimpleNamespace:
        return SimpleNamespace(model_options={}, peft_model=get_peft_model(base, lora))

    check_unchanged(trainer_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    merged = get_peft_model(loaded, lora).merge_and_unload()
    assert merged.name_or_path == str(tmp_path)
    merged.save_pretrained(tmp_path / "merged")
    with pytest.raises(ValueError, match=r"self_attn.q_proj.weight' has other values.*`save_pretrained`"):
        check_unchanged(trainer_of(merged))
    check_unchanged(trainer_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")))


class FakeLLM:
    """Records the name and the thread of every call that VLLMEngine makes, and the files that are published."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.published: list[tuple[str, dict[str, torch.dtype], int]] = []
        self.llm_engine = SimpleNamespace(
            add_request=lambda *_, **__: self.note("generate"), add_lora=self.add_lora, step=self.step,
            collective_rpc=lambda *_, **__: [[]], engine_core=SimpleNamespace(shutdown=lambda: self.note("shutdown")),
        )  # fmt: skip

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())

    def add_lora(self, request) -> None:
        self.note("publish")
        path = Path(request.lora_path) / "adapter_model.safetensors"
        with safe_open(path, "pt") as file:
            dtypes = {file.get_tensor(key).dtype for key in list(file.keys())[:2]}
        self.published.append((str(path), dtypes, path.stat().st_size))

    def step(self) -> list:
        self.note("step")
        logprobs = SimpleNamespace(token_ids=[7], logprobs=[-1.0])
        best = SimpleNamespace(token_ids=[7], logprobs=logprobs, finish_reason="stop")
        return [SimpleNamespace(request_id="0", finished=True, outputs=[best])]

    def sleep(self, level: int) -> None:
        assert level == 1
        self.note("sleep")

    def wake_up(self) -> None:
        self.note("wake")


@pytest.fixture
def fake(monkeypatch) -> FakeLLM:
    """The vLLM of every engine that is built in this test."""
    pytest.importorskip("vllm")
    llm = FakeLLM()

    def build(model_path, options):
        llm.note("build")
        return llm

    monkeypatch.setattr(vllm_engine, "build_llm", build)
    return llm


def rollout(engine: VLLMEngine) -> None:
    """Run a rollout from a separate thread, as `core.rollout` does."""

    def play() -> None:
        engine.add(0, Request([1, 2], "a", 0, 1, 1.0))
        assert engine.step()[0][1].token_ids == [7]

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()


def test_one_thread_makes_every_call_in_the_recorded_order(fake, tokenizer, monkeypatch):
    engine, model = VLLMEngine("unused", ["a", "b"], 4, 64), build_model(tokenizer, {"x": "a", "y": "b"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version in range(2):
        engine.publish(model, version)
        rollout(engine)
        engine.sleep()
        engine.sleep()
    engine.publish(model, 2)
    engine.sleep()
    engine.close()
    engine.close()
    once = ["publish", "publish", "generate", "step", "sleep"]
    assert fake.calls == ["build", *once, "wake", *once, "wake", "publish", "publish", "sleep", "wake", "shutdown"]
    assert len(fake.threads) == 1 and threading.get_ident() not in fake.threads
    assert not [path for path, _, _ in fake.published if Path(path).exists()]
    assert len({path for path, _, _ in fake.published}) == 6, "a path used twice would be served from its cache"


def test_a_closed_engine_is_collected(monkeypatch):
    """vLLM's CUDA allocator refuses a second engine in a process while the first one's model is alive."""
    kept = []

    def build(model_path, options):
        try:
            raise ImportError("av")
        except ImportError as error:
            kept.append(error)  # as vLLM does, with the frames that called it
        return FakeLLM()

    monkeypatch.setattr(vllm_engine, "build_llm", build)
    engine = VLLMEngine("unused", ["a"], 4, 64)
    llm = weakref.ref(engine.llm)
    engine.close()
    gc.collect()
    assert llm() is None


def test_a_container_that_only_names_its_number_has_no_launcher(monkeypatch):
    """Kubernetes' PyTorchJob sets WORLD_SIZE and RANK for one process, and vLLM's external launcher needs LOCAL_RANK."""
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "distributed_executor_backend" not in llm_options(1, 8, 256, torch.float32)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert llm_options(1, 8, 256, torch.float32)["distributed_executor_backend"] == "external_launcher"


def adapter_of_qwen3_06b() -> PeftModel:
    """Build a rank-64 adapter "a" in memory, on a base of the 0.6B shape without any memory."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
    )  # fmt: skip
    with torch.device("meta"):
        lora = LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(Qwen3ForCausalLM(config), lora, adapter_name="a")
    for name, module in model.named_modules():
        if name.endswith((".lora_A.a", ".lora_B.a")):
            module.to_empty(device="cpu")
    return model


def test_an_adapter_is_published_even_if_shared_memory_is_too_small(fake, monkeypatch, tmp_path):
    """At the 0.6B shape, with the 64 MB of shared memory that containers have, it is written to the temporary folder in half precision."""
    model, size = adapter_of_qwen3_06b(), 28 * 64 * 22_528  # parameters
    usage = {vllm_engine.SHARED_MEMORY: 64 * 2**20}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=usage.get(path, 2**40)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = VLLMEngine("unused", ["a"], 64, 64, dtype=torch.bfloat16)
    engine.publish(model, 0)
    usage[vllm_engine.SHARED_MEMORY] = 4 * size
    assert folder_with_room(2 * size) == vllm_engine.SHARED_MEMORY
    assert folder_with_room(2 * size + 1) == tmp_path
    ((path, dtypes, n_bytes),) = fake.published
    assert (
        Path(path).is_relative_to(tmp_path)
        and dtypes == {torch.bfloat16}
        and n_bytes == pytest.approx(2 * size, rel=0.01)
    )
    engine.close()
