"""Train two roles of a language model, SmolLM2-135M-Instruct, on problems of reasoning-gym. It takes ten minutes on a CPU.

    python examples/language_model.py

The first run downloads the base, 93 MB (docs/smollm2.md). To load it from the Hub, write
`"HuggingFaceTB/SmolLM2-135M-Instruct"` instead of `str(fetch())`.
"""

import re

from datasets import Dataset
from peft import LoraConfig

from multirole import Answer, Duty, Edge, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Structure, user
from multirole_study.experiment.smollm2 import fetch
from multirole_study.tasks.gym import parse

SUMS = parse("gym:basic_arithmetic?min_terms=2&max_terms=2&min_digits=1&max_digits=2&operators=['+']&allow_negation=False&allow_parentheses=False")
ASK = "Solve the problem. Think briefly, then write the final answer in \\boxed{}."


class Check:
    """A solver answers, a checker reads the answer and gives the final one."""

    name = "check"
    roles = {"solver": 1, "checker": 1}  # noqa: RUF012
    structure = Structure(
        duties={"solver": Duty("solves"), "checker": Duty("merges", "solver")},
        edges=(Edge("question", "solver"), Edge("solver", "checker", "its answer"), Edge("checker", "answer")),
    )

    async def run(self, problem, call):
        first = await call("solver", [user(f"{problem.question}\n{ASK}")])
        final = await call("checker", [user(f"{problem.question}\nSomebody answered:\n{first.text}\nCheck it. {ASK}")])
        return Answer(final.text)


def score(text, right):
    """Return 1 if the last box is right, or 0.5 if there is no box and the last number is right: an untrained base of this size writes few boxes."""
    if boxes := re.findall(r"\\boxed\{([^{}]*)\}", text):
        return float(boxes[-1].strip() == right)
    return 0.5 * (re.findall(r"-?\d+", text)[-1:] == [right])


def correct(prompts, completions, answer, **columns):
    """Reward function with TRL's signature: `completions` are the episodes' final answers, `answer` is a column of the rows."""
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


def rows(split, count):
    """Return sums of two numbers with one or two digits each; no question is in both splits."""
    return Dataset.from_list([{"prompt": p.question, "answer": p.reference["answer"]} for p in SUMS.problems(split, count)])


if __name__ == "__main__":
    args = MultiRoleGRPOConfig(
        "out/language_model", policy="ip", per_device_train_batch_size=32, num_generations=8, max_steps=12, max_completion_length=64,
        temperature=0.7, learning_rate=2e-4, eval_strategy="steps", eval_steps=6, logging_steps=1, report_to="none",
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        str(fetch()), Check(), correct, args, rows("train", 256), rows("validation", 48),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()  # a PEFT adapter per role: out/language_model/adapter_solver and adapter_checker
