"""Decoders of other families: what the fast engine implements, and that it samples as transformers scores."""

import pytest
import torch
from engine_checks import run_all
from peft import BdLoraConfig, KasaConfig, LoraConfig, VeloraConfig, get_peft_model
from toy_families import LLAMA3, saved, small
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from multirole.engines.protocol import Request
from multirole.update.passes.tree_attention import can_share_prefixes
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.half_model import is_covered
from multirole_cpu.qwen3 import unsupported

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_the_engine_samples_a_llama_as_transformers_scores_it(tmp_path, rope):
    folder = saved(tmp_path / "m", LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False, rope_parameters=rope)
    model = LlamaForCausalLM.from_pretrained(folder)
    engine = TransformersEngine(model.config.eos_token_id)
    engine.publish(model, 0)
    prompts = [list(range(3, 3 + n)) for n in (5, 90)]
    done = run_all(engine, [Request(ids, None, seed, 20, 1.0) for seed, ids in enumerate(prompts)])
    for ids, completion in zip(prompts, done, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + completion.token_ids])).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


LLAMA, QWEN3 = (LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("family", "fields", "lora", "expected"),
    [
        (QWEN3, {}, {}, []),
        (LLAMA, {"rope_parameters": LLAMA3}, {"target_modules": "all-linear"}, []),
        ((GemmaForCausalLM, GemmaConfig), {}, {}, ["it is a GemmaForCausalLM"]),
        (LLAMA, {"rope_parameters": DYNAMIC}, {}, ["rope_type is 'dynamic'"]),
        (LLAMA, {"hidden_act": "gelu"}, {}, ["an activation other than silu"]),
        (QWEN3, WINDOWS, {}, ["it has sliding windows"]),
        (LLAMA, {"attention_bias": True}, {"target_modules": ["down_proj"]}, ["its linear layers have biases"]),
        (LLAMA, {"attention_bias": True}, {"target_modules": "all-linear"}, ["its linear layers have biases"]),
        (QWEN3, {}, {"target_modules": ["embed_tokens", "q_proj"]}, ["embed_tokens has an adapter that is not LoRA on"]),
        (QWEN3, {}, {"target_modules": ["q_proj"], "use_dora": True}, ["uses DoRA or has a LoRA bias"] * 2),
        (QWEN3, {}, {"target_modules": ["q_proj"], "lora_bias": True}, ["uses DoRA or has a LoRA bias"] * 2),
        (QWEN3, {}, {"target_modules": ["q_proj"], "kasa_config": KasaConfig()}, ["a variant of LoRA, KasaLinearVariant"] * 2),
        (QWEN3, {}, {"target_modules": ["q_proj"], "use_bdlora": BdLoraConfig(["q_proj"], nblocks=2)}, ["a variant of LoRA, Bd"] * 2),
        (QWEN3, {}, {"target_modules": ["q_proj"], "velora_config": VeloraConfig()}, []),
        (QWEN3, {}, {"target_modules": ["q_proj"], "init_lora_weights": "mica"}, []),
        (QWEN3, {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, ["an adapter has modules_to_save"]),
    ],
    ids=[
        "qwen3", "llama", "gemma", "rope", "activation", "windows", "biases", "biases under LoRA", "embeddings", "dora",
        "lora bias", "kasa", "bdlora", "velora", "mica", "saved head",
    ],
)  # fmt: skip
def test_the_fast_engine_lists_what_it_does_not_implement(family, fields, lora, expected):
    model = small(*family, tie_word_embeddings=False, **fields)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **lora))
    problems = list(unsupported(model))
    assert len(problems) == len(expected)
    assert all(words in problem for words, problem in zip(expected, problems, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_fast_engine_lists_merged_adapters_and_quantised_weights(dtype):
    model = get_peft_model(small(*QWEN3), LoraConfig(r=2, target_modules=["q_proj"]))
    model.merge_adapter()
    assert [problem.rpartition(" ")[2] for problem in unsupported(model)] == ["merged", "merged"]
    model.unmerge_adapter()
    norm = model.get_base_model().model.norm
    norm.weight = torch.nn.Parameter(norm.weight.to(dtype), requires_grad=False)
    assert list(unsupported(model)) == ["its weights are quantised, such as model.norm.weight"]


class BoundedAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return output.tanh(), weights


def test_a_subclass_with_other_layers_has_no_fast_path():
    """Also under the name of its parent, as code on the Hub may have it."""

    class BoundedLlama(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for i, layer in enumerate(self.model.layers):
                layer.self_attn = BoundedAttention(config, i)

    model, parent = small(BoundedLlama, LlamaConfig), small(*LLAMA)
    assert can_share_prefixes(parent) and is_covered(parent) and not list(unsupported(parent))
    assert not can_share_prefixes(model) and not is_covered(model)
    assert list(unsupported(model)) == ["it is a BoundedLlama"]
    BoundedLlama.__name__ = "LlamaForCausalLM"
    assert list(unsupported(model)) == ["it is a LlamaForCausalLM of other code"]
