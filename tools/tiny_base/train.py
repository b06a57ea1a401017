"""Supervised training of a tiny Qwen3 from scratch: Muon for matrices, AdamW for embeddings and norms.

Only replies are trained. Batches have rows of similar length, padded on the right, where causal attention does not look,
so no attention mask is needed.
"""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_base.dialogues import Row
from tiny_base.tokenizer import LONGEST

log = logging.getLogger(__name__)

MAX_LENGTH = 512
"""Longer rows are dropped."""
LAYERS = 4
MICRO_TOKENS, MICRO_BATCHES = 512, 2  # about 1024 tokens per optimizer step
RECORD_EVERY = 100  # steps
SAVE_EVERY_S = 150.0
IGNORED = -100


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build a randomly initialised model of the embedded size."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        head_dim=32,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def make_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Create the optimizers: Muon on the layers' matrices, AdamW on the rest."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def encode(rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """(token ids, prompt length) per row; a reply ends with the end-of-turn token."""
    prompts = [
        tokenizer.apply_chat_template(r.messages, add_generation_prompt=True, tokenize=False) + r.given for r in rows
    ]
    prompt_ids = tokenizer(prompts)["input_ids"]
    reply_ids = tokenizer([row.reply + tokenizer.eos_token for row in rows])["input_ids"]
    pairs = [(prompt + reply, len(prompt)) for prompt, reply in zip(prompt_ids, reply_ids, strict=True)]
    return [pair for pair in pairs if len(pair[0]) <= MAX_LENGTH]


Batch = list[tuple[torch.Tensor, torch.Tensor]]
"""Micro-batches of one optimizer step: (input ids, labels), both (N, T); N and T vary."""


def batches(
    draw_rows: Callable[[], list[Row]], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[Batch]:
    """Yield batches endlessly. A micro-batch has rows of one length, a batch several lengths, so that short habits stay in the mix."""
    while True:
        rows = sorted(encode(draw_rows(), tokenizer), key=lambda pair: (len(pair[0]), rng.random()))
        groups, group = [], []
        for pair in rows:
            if group and len(pair[0]) * (len(group) + 1) > MICRO_TOKENS:
                groups.append(group)
                group = []
            group.append(pair)
        rng.shuffle(groups)
        for start in range(0, len(groups), MICRO_BATCHES):
            yield [_pad(group, tokenizer.pad_token_id) for group in groups[start : start + MICRO_BATCHES]]


def _pad(group: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids) for ids, _ in group)
    inputs = torch.full((len(group), length), pad)  # (N, T)
    labels = torch.full((len(group), length), IGNORED)  # (N, T)
    for n, (ids, prompt_length) in enumerate(group):
        inputs[n, : len(ids)] = torch.tensor(ids)
        labels[n, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return inputs, labels


def schedule(done: float, warmup: float = 0.01, decay_from: float = 0.3, floor: float = 0.02) -> float:
    """Return the learning-rate factor at a fraction `done` of the budget: warm-up, constant, linear decay."""
    if done < warmup:
        return done / warmup
    return 1.0 if done < decay_from else max(floor, (1 - done) / (1 - decay_from))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw_rows: Callable[[], list[Row]],
    budget: int,
    lr: float,
    out: Path,
    phase: str,
    seed: int,
    watch: Callable[[float], None],
    until: float,
) -> None:
    """Train on about `budget` tokens (padding included); append to `out/loss.jsonl`; save from time to time, and at the end.

    `watch` is called from time to time with the fraction of the budget that is used up. The learning rate decays over the whole budget;
    training ends at the fraction `until`.
    """
    optimizers = make_optimizers(model, lr)
    stream = batches(draw_rows, tokenizer, random.Random(seed))
    n_tokens, step, losses, saved, cpu_start = 0, 0, [], time.monotonic(), time.process_time()
    out.mkdir(parents=True, exist_ok=True)
    model.train()
    while n_tokens < until * budget:
        batch = next(stream)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(n_tokens / budget)
        losses.append(_update(model, optimizers, batch))
        n_tokens, step = n_tokens + sum(inputs.numel() for inputs, _ in batch), step + 1
        if step % RECORD_EVERY == 0 or n_tokens >= until * budget:
            cpu_s = round(time.process_time() - cpu_start, 1)
            record = {"phase": phase, "step": step, "tokens": n_tokens, "loss": round(fmean(losses), 4), "cpu_s": cpu_s}
            with open(out / "loss.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            log.info("%s", record)
            losses = []
            watch(n_tokens / budget)
            model.train()
        if time.monotonic() - saved > SAVE_EVERY_S:
            save(model, tokenizer, out)
            saved = time.monotonic()
    save(model, tokenizer, out)


def load_losses(folder: Path) -> list[dict[str, float | str]]:
    """Read the records of a training's `loss.jsonl`."""
    return [json.loads(line) for line in (folder / "loss.jsonl").read_text(encoding="utf-8").splitlines()]


def loss_curves(folder: Path) -> list[tuple[str, list[int], list[float]]]:
    """Return (phase, tokens since the start, losses) per phase of a build."""
    steps, curves, offset = load_losses(folder), [], 0
    for phase in dict.fromkeys(step["phase"] for step in steps):
        part = [step for step in steps if step["phase"] == phase]
        curves.append((phase, [offset + step["tokens"] for step in part], [step["loss"] for step in part]))
        offset += part[-1]["tokens"]
    return curves


def _update(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    """Take one optimizer step; return the mean loss per trained token of the batch, in nats."""
    total, count = 0.0, sum(int((labels != IGNORED).sum()) for _, labels in batch)
    for inputs, labels in batch:
        trained = labels[:, 1:] != IGNORED  # (N, T-1)
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[:, :-1][trained]  # (tokens, hidden)
        loss = F.cross_entropy(model.lm_head(hidden), labels[:, 1:][trained], reduction="sum") / count
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights, configuration and tokenizer; each file is replaced atomically."""
    staged = out / ".staged"
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    for path in staged.iterdir():
        os.replace(path, out / path.name)
    staged.rmdir()
