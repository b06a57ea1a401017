"""Train a role that may call a Python function: it learns to look instead of guessing. It takes a minute or two on a CPU.

    python examples/tools.py

The embedded model has never seen a tool. So this script gives it a chat template that writes calls as Qwen's does, and first shows it two ways to
answer, as often as each other: calling `look`, and guessing. Then GRPO finds out which one pays. A model whose template knows tools needs none
of this: `Look` and the trainer are the example.
"""

import random
import re

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole import Answer, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, user
from multirole_study import embedded_model


class Look:
    """One role, which is asked for a number that it cannot know. The tool is made for the episode, whose number it returns."""

    name, roles = "look", {"solver": 1}

    async def run(self, problem, call):
        def look() -> int:
            """Look at the number."""
            return problem.reference["answer"]

        return Answer((await call("solver", [user(problem.question)], tools=[look], max_rounds=3)).text)


def right(completions, answer, **columns):
    return [float(re.findall(r"\\boxed\{(\d+)\}", text)[-1:] == [str(number)]) for text, number in zip(completions, answer, strict=True)]


# ---- a model that knows both ways to answer

TEMPLATE = """{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}{% for message in messages %}
{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
QUESTION = "What is it?"
LOOK = {"type": "function", "function": {"name": "look", "arguments": {}}}


def shown(draw):
    """A conversation that looks at the number, or one that guesses."""
    number = draw.randint(20, 39)
    reply = {"role": "assistant", "content": rf"\boxed{{{number}}}"}
    if draw.random() < 0.5:
        return [user(QUESTION), reply]
    return [user(QUESTION), {"role": "assistant", "content": "", "tool_calls": [LOOK]}, {"role": "tool", "content": str(number)}, reply]


def teach(model, tokenizer, n_steps, seed=0):
    """Fine-tune the model on such conversations."""
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(n_steps):
        texts = [tokenizer.apply_chat_template(shown(draw), tools=[LOOK], tokenize=False) for _ in range(8)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / n_steps)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    print(f"loss after the conversations: {teach(model, tokenizer, 500):.3f}")
    model.save_pretrained("out/tools/base")
    tokenizer.save_pretrained("out/tools/base")

    draw = random.Random(1)
    rows = Dataset.from_list([{"prompt": QUESTION, "answer": draw.randint(20, 39)} for _ in range(200)])
    args = MultiRoleGRPOConfig(
        "out/tools", policy="ip", generation_batch_size=64, num_generations=8, max_steps=15, max_completion_length=64, learning_rate=4e-3,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        "out/tools/base", Look(), right, args, rows,
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    for name in ("reward", "solver/tool_calls", "solver/tool_failures", "solver/rows"):
        print(f"{name}: {[round(line[name], 2) for line in trainer.state.log_history if name in line]}")
