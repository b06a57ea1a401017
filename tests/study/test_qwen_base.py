"""The real base of the scale qwen-0.5b, where it is on this machine: engine and passes compute what transformers does."""

import pytest
import torch
from engine_checks import run_all
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.engines.protocol import Request
from multirole.update.gradients import PartSums, gradient_of, merged
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.half_model import half_model
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell

pytestmark = pytest.mark.slow
QUESTION = "What is 17 + 25? Put the answer in \\boxed{}."


@pytest.fixture(scope="module")
def folder():
    try:
        return locate(Cell("single", "sp", scale="qwen-0.5b"), may_download=False)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(folder):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.002 * torch.randn_like(parameter)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer) -> list[int]:
    chat = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_turns_end_and_are_padded_as_qwen_was_trained(loaded):
    model, tokenizer = loaded
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 151645, 151643)
    assert (
        model.get_base_model().num_parameters() - sum(p.numel() for p in model.parameters() if p.requires_grad)
        == 494_032_768
    )
    text = tokenizer.decode(prompt(tokenizer))
    assert text.startswith("<|im_start|>system\nYou are Qwen") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_engine_samples_what_transformers_scores(loaded):
    """Six replies of one prompt, which share its keys and values, with and without the adapter."""
    model, tokenizer = loaded
    engine = TransformersEngine(tokenizer.eos_token_id, max_length=256, prefix_bytes=1 << 26)
    engine.publish(model, 0)
    ids = prompt(tokenizer)
    requests = [Request(ids, adapter, seed, 12, 0.7) for adapter in (None, "default") for seed in range(5)]
    done = run_all(engine, requests)
    engine.close()
    for request, completion in [*zip(requests, done, strict=True)][::4]:
        with torch.no_grad():
            row = torch.tensor([ids + completion.token_ids])
            if request.adapter is None:
                with model.disable_adapter():
                    logits = model(row).logits
            else:
                logits = model(row).logits
        logps = (logits[0, len(ids) - 1 : -1] / 0.7).log_softmax(-1)
        expected = logps.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "logp_gap", "cosine"), [(torch.float32, 1e-4, 0.999999), (torch.bfloat16, 0.2, 0.99)]
)
def test_gradients_are_those_of_transformers(loaded, dtype, logp_gap, cosine):
    model, tokenizer = loaded
    ids = torch.tensor([[*prompt(tokenizer), *tokenizer.encode("17 + 25 = 42, so \\boxed{42}<|im_end|>")]])
    base, params = model.get_base_model(), [p for p in model.parameters() if p.requires_grad]

    def logps(module) -> torch.Tensor:
        logits = module(ids, use_cache=False).logits[0, -15:-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, -14:, None])[:, 0]

    model.zero_grad()
    expected = logps(model)
    expected.sum().backward()
    values = torch.zeros(1, sum(p.numel() for p in params))
    sums = PartSums(params, values)
    sums.set_tokens([(0, ids.numel())])
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    with merged(layers, "default", sums) if dtype == torch.float32 else half_model(base, "default", sums):
        computed = logps(base)
        computed.sum().backward()
    exact = gradient_of(params)
    gap, angle = (
        (computed - expected).abs().max().item(),
        torch.nn.functional.cosine_similarity(values[0].double(), exact.double(), dim=0),
    )
    ratio = values[0].norm() / exact.norm()
    assert gap < logp_gap and angle > cosine and abs(ratio - 1) < 0.1, (gap, angle, ratio)
