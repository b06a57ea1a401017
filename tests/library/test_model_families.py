"""Decoders of other families: what the fast engine implements, and that it samples as transformers scores."""

import pytest
import torch
from engine_checks import POLICY, TOLERANCE, change_adapters, make_requests, max_error, run_all
from peft import BdLoraConfig, KasaConfig, LoraConfig, VeloraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from toy_families import BIASED, LLAMA3, saved, small
from toy_qwen3 import toy_tokenizer
from trainers import slow_but
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from multirole.engines.protocol import Request
from multirole.inputs.adapters import add_adapters
from multirole.update.gradients import PartSums, gradient_of, merged
from multirole.update.passes.tree_attention import can_share_prefixes
from multirole_cpu import SERVED
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.families import CLASSES
from multirole_cpu.half_model import half_model, is_covered
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


@pytest.mark.parametrize("family", slow_but(["mistral", "qwen2"], BIASED))
def test_biases_and_derived_head_sizes_are_served(family):
    """With adapters, prompts that rows share, and the prefix cache: log-probs are those of transformers."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = add_adapters(BIASED[family](), lora, list(POLICY)).eval()
    change_adapters(model)
    engine = TransformersEngine(toy_tokenizer().eos_token_id, max_rows=16, prefix_bytes=1 << 20)
    engine.publish(model, 0)
    requests = [request for request in make_requests(20, 256) for _ in range(4)]
    for _ in range(2):  # the second time from the cache
        assert max_error(model, requests, run_all(engine, requests)) <= 10 * TOLERANCE


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_biased_layers_are_those_of_transformers(family, dtype):
    """Of the adapters, in the merged pass in float32 and in `half_model`."""
    model = get_peft_model(BIASED[family](), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    change_adapters(model)
    ids, base, params = (
        torch.arange(1, 29).view(2, 14),
        model.get_base_model(),
        [p for p in model.parameters() if p.requires_grad],
    )
    expected = model(ids).logits.log_softmax(-1)[..., 3]
    expected.sum().backward()
    values = torch.zeros(1, sum(p.numel() for p in params))
    sums = PartSums(params, values)
    sums.set_tokens([(0, ids.numel())])
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert is_covered(base) and can_share_prefixes(base)
    with merged(layers, "default", sums) if dtype == torch.float32 else half_model(base, "default", sums):
        computed = base(ids, use_cache=False).logits.log_softmax(-1)[..., 3]
        computed.sum().backward()
    gradient, exact = values[0], gradient_of(params)
    assert (computed - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)
    assert (gradient - exact).norm() < (1e-5 if dtype == torch.float32 else 0.05) * exact.norm()


def test_the_names_of_the_served_families_are_those_of_their_classes():
    assert [served.__name__ for served in CLASSES] == list(SERVED)


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
        ((MistralForCausalLM, MistralConfig), {}, {}, ["it has sliding windows"]),
        (LLAMA, {"attention_bias": True}, {"target_modules": "all-linear"}, []),
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
        "qwen3", "llama", "gemma", "rope", "activation", "windows", "windows of Mistral", "biases under LoRA", "embeddings", "dora",
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
