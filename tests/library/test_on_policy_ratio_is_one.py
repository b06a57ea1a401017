"""The first optimizer step has a ratio of 1 whatever noise the model or the configuration asks for (huggingface/trl#3234)."""

import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_model
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def qwen3(tokenizer):
    return toy_model(tokenizer, head_dim=16, attention_dropout=0.3)


def gpt2(tokenizer):
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=512))


def opt(tokenizer):  # drops within its checkpointed layers, and whole layers
    sizes = {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 512, "layerdrop": 0.5}
    return OPTForCausalLM(OPTConfig(**SMALL | {"vocab_size": len(tokenizer)} | sizes))


def falcon(tokenizer):  # reads its configuration in the forward pass
    return FalconForCausalLM(
        FalconConfig(**SMALL | {"vocab_size": len(tokenizer)}, hidden_dropout=0.2, attention_dropout=0.2)
    )


NOISY = {  # base, LoRA options, GRPO options, message
    "lora": (lambda tokenizer: toy_model(tokenizer, head_dim=16), {"lora_dropout": 0.1}, {}, "lora_dropout=0.1: sw"),
    "attention": (qwen3, {}, {}, "attention_dropout=0.3: sw"),
    "attention and TRL's switch": (qwen3, {}, {"disable_dropout": True}, "attention_dropout=0.3: sw"),
    "neftune": (
        lambda tokenizer: toy_model(tokenizer, head_dim=16), {}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0",
    ),
    "recomputed": (qwen3, {"lora_dropout": 0.1}, {"old_logprobs": "recomputed"}, "lora_dropout=0.1"),
    "gpt2": (gpt2, {}, {"old_logprobs": "recomputed", "gradient_checkpointing": True}, "attn_dropout=0.1"),
    "opt": (opt, {}, {"old_logprobs": "recomputed", "gradient_checkpointing": True}, "layerdrop=0.5"),
    "falcon": (falcon, {}, {"old_logprobs": "recomputed", "gradient_checkpointing": True}, "hidden_dropout=0.2"),
    "none": (lambda tokenizer: toy_model(tokenizer, head_dim=16), {}, {}, ""),
}  # fmt: skip


class Ratios(MultiRoleCallback):
    """The ratios of all tokens of the first micro-batch."""

    def __init__(self, seen):
        self.seen = seen

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        ratio = (logps - batch["old_per_token_logps"]).exp()
        self.seen.append(ratio[batch["completion_mask"].bool()])


@pytest.mark.parametrize("case", NOISY)
def test_ratios_of_the_first_step_are_one(case, tokenizer, tmp_path, caplog):
    make, lora, options, said = NOISY[case]
    torch.manual_seed(0)
    args = MultiRoleGRPOConfig(
        str(tmp_path), generation_batch_size=8, num_generations=4, max_steps=1, max_completion_length=8, logging_steps=1,
        learning_rate=1e-3, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        **{"gradient_checkpointing": False} | options,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "multirole"):
        trainer = MultiRoleGRPOTrainer(
            make(tokenizer), Single(), lambda completions, **_: [float(len(c) % 3) for c in completions], args,
            Dataset.from_dict({"prompt": [f"{i}+1" for i in range(4)]}), processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **lora),
        )  # fmt: skip
    assert [said in record.message for record in caplog.records if "switched off" in record.message] == [True] * bool(
        said
    )
    seen = []
    trainer.callback_handler.add_callback(Ratios(seen))
    trainer.train()
    ratios = torch.cat(seen)
    assert (ratios - 1).abs().max() < 1e-5
    row = trainer.state.log_history[0]
    assert row["grad_norm"] > 0 and row["clip_ratio/region_mean"] == 0
