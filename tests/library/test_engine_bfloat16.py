"""A model in bfloat16 is sampled in bfloat16 where the processor multiplies it; its log-probs stay near those of float32.

On another processor, packed products are replaced by float32 products of the same factors, rounded once, which
`test_packed_products_round_once` compares with oneDNN's.
"""

from dataclasses import replace

import pytest
import torch
from engine_checks import POLICY, make_requests, reference_logprobs, run_all
from peft import LoraConfig
from torch import nn
from toy_families import with_biases
from trainers import slow_but
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from multirole.inputs.adapters import add_adapters
from multirole_cpu import kernels, packed_products
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.half_model import cpu_has_bfloat16, products_in
from multirole_cpu.qwen3 import make_weights
from multirole_cpu.sampling_head import RoundedHead

needs_bfloat16 = pytest.mark.skipif(
    not cpu_has_bfloat16(), reason="this processor does not multiply bfloat16 (AVX512-BF16 or AMX)"
)


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Compute in bfloat16 on any processor."""
    if cpu_has_bfloat16():
        return

    def product(x, weight, addend=None, bias=None):
        exact = x.float() @ weight.float().t()
        return (exact + (0 if bias is None else bias) + (0 if addend is None else addend)).to(x.dtype)

    monkeypatch.setattr(kernels, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(packed_products, "pack", lambda weight: weight.clone())
    monkeypatch.setattr(packed_products, "product", product)


@needs_bfloat16
@pytest.mark.parametrize("n_rows", [1, 5, 64])
def test_packed_products_round_once(n_rows):
    """oneDNN's packed product is the float32 product of the same factors, with the addend, rounded to bfloat16 once."""
    torch.manual_seed(0)
    x, weight = torch.randn(n_rows, 96).bfloat16(), torch.randn(160, 96).bfloat16()
    addend, bias = torch.randn(n_rows, 160).bfloat16(), torch.randn(160).bfloat16()
    packed = packed_products.pack(weight)
    exact = x.double() @ weight.double().t()
    for product, expected in (
        (packed_products.product(x, packed), exact),
        (packed_products.product(x, packed, addend), exact + addend),
        (packed_products.product(x, packed, addend, bias), exact + addend + bias),
        (packed_products.product(x, packed, bias=bias), exact + bias),
    ):
        assert product.dtype == torch.bfloat16
        assert ((product - expected).abs() <= expected.abs() * 2**-8 + 1e-3).all()
    with products_in("bf16"):
        assert (x.float() @ weight.float().t() - exact).abs().max() < 1e-4
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def decoder(model: type, config_class: type, tokenizer, gqa: int) -> nn.Module:
    config = config_class(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=2 * gqa, num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return with_biases(model(config))


FAMILIES = {
    "qwen3": lambda tokenizer, make_model: make_model(POLICY).unload(),
    "llama": lambda tokenizer, make_model: decoder(LlamaForCausalLM, LlamaConfig, tokenizer, 3),
    "qwen2": lambda tokenizer, make_model: decoder(Qwen2ForCausalLM, Qwen2Config, tokenizer, 3),
}


def adapted(base: nn.Module, lora) -> nn.Module:
    """Two adapters in float32 of visible effect, on a base in bfloat16 with norms that are not 1."""
    torch.manual_seed(3)
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    model = add_adapters(base.bfloat16(), lora, ["generator", "aggregator"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    return model.eval()


SOME = ["q_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "attention", "head"),
    slow_but(  # every family and every kernel once
        [
            ("llama", "all-linear", "heads", "plain"),
            ("qwen3", SOME, "groups", "bfloat16"),
            ("qwen2", "all-linear", "groups", "packed"),
        ],
        [
            *((family, "all-linear", "heads", "plain") for family in FAMILIES),
            *((family, SOME, "groups", "bfloat16") for family in FAMILIES),
            ("qwen2", "all-linear", "groups", "packed"),
        ],
    ),
)
def test_logprobs_are_near_those_of_float32(in_bfloat16, make_model, tokenizer, family, targets, attention, head):
    """Mean within 0.02 and largest within 0.15 nats of a float32 pass with the same weights, by every kernel; float32 itself is within 1e-5."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = adapted(FAMILIES[family](tokenizer, make_model), lora)
    chosen = replace(kernels.BFLOAT16, attention=attention, head=head, n_logits=1000)  # few rows at once
    kernels.use(model.get_base_model(), chosen)
    engine = TransformersEngine(tokenizer.eos_token_id, max_rows=30, prefix_bytes=1 << 20)
    engine.publish(model, 0)
    assert engine.empty_kv.dtype == torch.bfloat16
    requests = [request for request in make_requests(30, len(tokenizer)) for _ in range(2)]
    done = run_all(engine, requests)
    model.float()
    differences = torch.cat(
        [
            (reference_logprobs(model, request, reply.token_ids) - torch.tensor(reply.logprobs)).abs()
            for request, reply in zip(requests, done, strict=True)
        ]
    )
    assert 1e-5 < differences.mean() < 0.02 and differences.max() < 0.15, (differences.mean(), differences.max())


def test_small_updates_of_an_adapter_are_not_lost(in_bfloat16, make_model, tokenizer):
    """Changes far below the rounding of the base's weights are served to 1 %: adapters are not merged."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = adapted(make_model(POLICY).unload(), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-4
    attention = model.get_base_model().model.layers[0].self_attn
    changes = [
        module.scaling["generator"] * module.lora_B["generator"].weight @ module.lora_A["generator"].weight
        for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    expected = torch.cat(changes).detach()  # (out, in)
    assert expected.abs().max() < attention.q_proj.weight.abs().max() * 2**-9
    part = make_weights(model, torch.bfloat16)["generator"].adapter[0][0]
    served = (part.a.float() @ part.b.float()).t()
    assert (served - expected).norm() < 0.01 * expected.norm()


def test_a_logit_is_rounded_by_its_distance_to_a_large_one(in_bfloat16):
    """Likely words are within 0.01 of their float32 logits, up to one number for all words of a row; bfloat16 would round 40 by up to 0.125."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 64).bfloat16(), torch.randn(5000, 64).bfloat16()
    weight[:, 0] += 40 / hidden[:, 0].float().abs().mean()
    exact = hidden.float() @ weight.float().t()  # (20, 5000)
    computed = RoundedHead(weight.float()).logits(hidden, torch.empty_like(exact))
    likely = exact > exact.amax(1, keepdim=True) - 4
    gaps = (computed - exact - (computed - exact).median(1, keepdim=True).values)[likely].abs()
    assert gaps.max() < 0.03 and gaps.mean() < 0.01, (gaps.max(), gaps.mean())
    assert (exact.bfloat16() - exact)[likely].abs().mean() > 2 * gaps.mean()


def test_float32_where_the_processor_lacks_it(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr("multirole_cpu.kernels.cpu_has_bfloat16", lambda: False)
    engine = TransformersEngine(tokenizer.eos_token_id)
    engine.publish(make_model(POLICY).bfloat16(), 0)
    assert engine.empty_kv.dtype == torch.float32
    assert all(weight.dtype == torch.float32 for weight in engine.weights["generator"].layers[0])
