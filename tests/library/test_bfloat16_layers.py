"""bfloat16 layers: log-probs and gradients near those of float32, all parts in one pass, adapters that a merged weight would lose."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from toy_qwen3 import toy_model
from trainers import build_model, episodes_of, library_trainer, rows_of

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole.callbacks import MultiRoleCallback
from multirole.update.gradients import PartSums, gradient_of
from multirole.update.passes import model_passes
from multirole.update.passes.bfloat16_layers import half_layers
from multirole.update.reference import Reference
from multirole.workflows import Voting
from multirole_cpu.half_decoder import join, norm_backward, norm_forward
from multirole_cpu.half_model import cpu_has_bfloat16, half_model


class Parts(MultiRoleCallback):
    """Keeps the parts of a gradient, the log-probs, and the number of passes that computed them."""

    def __init__(self) -> None:
        self.passes, self.logps = 0, {}

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        self.passes += 1
        for row, mine in zip(rows, logps, strict=True):
            self.logps[id(row.turn)] = mine[: len(row.turn.completion_ids)]

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        self.parts, self.gradients = parts, gradients.clone()


def gradients(tokenizer, tmp_path, bf16: bool, merges: bool = True, packs: bool = False):
    seen = Parts()
    trainer = library_trainer(
        Voting(), tokenizer, tmp_path, updates="one", bf16=bf16, callbacks=[seen], micro_batch_tokens=16384
    )
    trainer.passes.can_merge_adapters, trainer.passes.can_share_prompts = merges, packs
    episodes = episodes_of(trainer.workflow.roles)
    trainer.compute_gradient(trainer.model, "shared", rows_of(trainer, episodes), 64)
    return seen, [seen.logps[id(turn)] for episode in episodes for turn in episode.turns], trainer


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


@pytest.mark.parametrize("packs", [False, True])
def test_gradients_by_part_are_those_of_float32(tokenizer, tmp_path, monkeypatch, packs):
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
    exact, expected, _ = gradients(tokenizer, tmp_path, bf16=False)
    seen, logps, trainer = gradients(tokenizer, tmp_path, bf16=True, packs=packs)
    assert trainer.passes.is_half and seen.parts == exact.parts
    for one, other in zip(seen.gradients, exact.gradients, strict=True):
        assert cosine(one, other) > 0.999
        assert one.norm() == pytest.approx(other.norm().item(), rel=0.02)
    assert max((one - other).abs().max() for one, other in zip(logps, expected, strict=True)) < 0.05


def test_angles_of_positions_that_bfloat16_cannot_count(tokenizer):
    """Angles are products of positions with frequencies, and must not be rounded like other products."""
    base = toy_model(tokenizer)
    positions = torch.arange(5000)[None]
    expected = base.model.rotary_emb(torch.zeros(1), positions)
    with half_model(base, None, None):
        angles = base.model.rotary_emb(torch.zeros(1), positions)
    for one, other in zip(angles, expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=2**-8, rtol=0)


def test_all_parts_come_from_one_pass(tokenizer, tmp_path):
    one, _, _ = gradients(tokenizer, tmp_path, bf16=True)
    several, _, _ = gradients(tokenizer, tmp_path, bf16=True, merges=False)
    assert len(one.parts) == 4 and 4 * one.passes == several.passes
    for part, gradient in zip(one.parts, one.gradients, strict=True):
        assert cosine(gradient, several.gradients[several.parts.index(part)]) > 0.999  # autocast's


def test_the_base_is_unchanged_and_the_layers_are_restored(tokenizer, tmp_path):
    _, _, trainer = gradients(tokenizer, tmp_path, bf16=True)
    fresh = build_model(tokenizer, trainer.policy)
    for (name, one), (_, other) in zip(trainer.peft_model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    layers = trainer.peft_model.get_base_model().model
    assert not [name for name, module in layers.named_modules() if "forward" in vars(module)]
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_an_update_is_not_merged_into_rounded_weights(tokenizer):
    """Each number of the joined weight is one of W or of B, so an update smaller than W's last digit keeps its own digits."""
    model = build_model(tokenizer, {"a": "shared"})
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    layer.lora_B["shared"].weight.data.mul_(1e-4)
    whole = join([layer], "shared", None).whole
    n_in = layer.base_layer.in_features
    assert torch.equal(whole[:, :n_in], layer.base_layer.weight.bfloat16())
    update = whole[:, n_in:].float() / layer.scaling["shared"]
    torch.testing.assert_close(update, layer.lora_B["shared"].weight.detach(), atol=0, rtol=2**-8)


IDS = torch.arange(1, 15).view(2, 7)


def model_with_lora(tokenizer, target_modules: list[str] | str) -> tuple[PeftModel, list[LoraLinear]]:
    """A model whose adapter has an effect and a scaling of 2, and its layers."""
    model = get_peft_model(toy_model(tokenizer), LoraConfig(r=4, lora_alpha=8, target_modules=target_modules))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, [module for module in model.modules() if isinstance(module, LoraLinear)]


def test_adapters_of_some_projections(tokenizer):
    """Layers without the adapter take part in joint products with rank 0, and the gradient is that of float32."""
    model, _ = model_with_lora(tokenizer, ["k_proj", "up_proj"])
    base, params = model.get_base_model(), [p for p in model.parameters() if p.requires_grad]
    model(IDS).logits.log_softmax(-1)[..., 3].sum().backward()
    values = torch.zeros(2, sum(p.numel() for p in params))
    sums = PartSums(params, values)
    sums.set_tokens([(0, 7), (1, 7)])
    with half_model(base, "default", sums):
        base(IDS, use_cache=False).logits.log_softmax(-1)[..., 3].sum().backward()
    assert cosine(values.sum(0), gradient_of(params)) > 0.999
    assert values[0].norm() > 0 and values[1].norm() > 0


@pytest.fixture
def autocasts(monkeypatch):
    """As on a GPU, where only the LoRA layers are replaced, and autocast computes what is between them."""
    monkeypatch.setattr(model_passes, "bfloat16_model", lambda base, adapter, sums: None)


def test_under_autocast_each_gradient_is_that_of_float32(tokenizer):
    model, layers = model_with_lora(tokenizer, "all-linear")
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    model(IDS).logits.log_softmax(-1)[..., 3].sum().backward()
    gradient = torch.zeros(1, sum(p.numel() for p in params.values()))
    sums = PartSums(list(params.values()), gradient)
    sums.set_tokens([(0, IDS.numel())])
    base = model.get_base_model()
    with half_layers(layers, "default", sums), torch.autocast("cpu", torch.bfloat16):
        base(IDS, use_cache=False).logits.float().log_softmax(-1)[..., 3].sum().backward()
    for name, p in params.items():
        assert p.grad.norm() > 1e-2, name
        assert (sums.by_parameter[p][0] - p.grad).norm() < 0.1 * p.grad.norm(), name


def test_under_autocast_packed_rows_have_the_gradient_of_float32(tokenizer, tmp_path, monkeypatch, autocasts):
    """As on a GPU, and of models that no installed package covers."""
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
    exact, expected, _ = gradients(tokenizer, tmp_path, bf16=False)
    packed, logps, _ = gradients(tokenizer, tmp_path, bf16=True, packs=True)
    for one, other in zip(packed.gradients, exact.gradients, strict=True):
        assert cosine(one, other) > 0.999
    assert max((one - other).abs().max() for one, other in zip(logps, expected, strict=True)) < 0.05


def test_under_autocast_the_base_alone_has_no_adapter(tokenizer):
    model, layers = model_with_lora(tokenizer, "all-linear")
    base = model.get_base_model()
    with torch.no_grad():
        adapted = model(IDS).logits
        with model.disable_adapter():
            expected = base(IDS).logits
        with half_layers(layers, None, None), torch.autocast("cpu", torch.bfloat16):
            computed = base(IDS, use_cache=False).logits
    assert (computed - expected).abs().max() < 0.1 * (adapted - expected).abs().max()


def test_kl_is_measured_from_the_base_in_bfloat16_too(tokenizer, tmp_path):
    logps = {}
    for bf16 in (False, True):
        trainer = library_trainer(Voting(), tokenizer, tmp_path, bf16=bf16)
        trainer.reference = Reference(trainer.peft_model, [])  # as for fresh adapters
        rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
        logps[bf16] = torch.cat(trainer.logprobs_of(rows, base=True))
    policy = torch.cat(trainer.logprobs_of(rows))
    assert (logps[True] - logps[False]).abs().max() < 0.1 < (policy - logps[True]).abs().max()


def test_the_norm_and_its_gradient(tokenizer):
    norm = toy_model(tokenizer).model.norm
    norm.weight.data = torch.rand_like(norm.weight) + 0.5
    x = torch.randn(2, 5, 32, requires_grad=True)
    y, scale = norm_forward(x, norm.weight, norm.variance_epsilon)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x), atol=2e-2, rtol=0)
    grad = torch.randn(2, 5, 32).bfloat16()
    addend = torch.randn_like(x)
    computed = norm_backward(grad, x, scale, norm.weight, addend)
    (expected,) = torch.autograd.grad(norm(x), x, grad.float())
    torch.testing.assert_close(computed, expected + addend, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("capabilities", "is_fast"),
    [
        ({"avx512_f": True}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({}, False),
    ],
)
def test_a_processor_is_fast_if_it_multiplies_bfloat16_itself(monkeypatch, capabilities, is_fast):
    """Torch's own check is also true of plain AVX512, where products of bfloat16 are emulated."""
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert cpu_has_bfloat16() is is_fast


def test_the_model_can_be_used_outside_of_the_trainer(tokenizer, tmp_path):
    """Without autocast, PEFT must cast the inputs of float32 adapters on a bfloat16 base, as it does before training."""
    args = MultiRoleGRPOConfig(
        str(tmp_path), bf16=True, use_cpu=True, report_to="none", generation_batch_size=4, num_generations=2, max_steps=1,
        max_completion_length=4,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        toy_model(tokenizer).to(torch.bfloat16), Single(), lambda completions, **_: [float(len(c)) for c in completions], args,
        Dataset.from_dict({"prompt": ["one", "two"]}), processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.model.eval()
    assert trainer.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2, min_new_tokens=2).shape == (
        1,
        5,
    )
