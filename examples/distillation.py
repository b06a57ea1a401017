"""Teach two roles by teachers of their own, without an outcome. It takes a minute or two on a CPU.

    python examples/distillation.py

Two roles compute a long sum: the first one its first half, the second one the rest. GRPO trains both on whether the result is right, and saves their
adapters. These are the teachers of new adapters, whose rewards count nothing: the loss is the KL of each role from its teacher on the role's own
tokens.
"""

import random
import re

from multirole import Answer, user


def boxed(text):
    numbers = re.findall(r"\\boxed\{(-?\d+)\}", text)
    return int(numbers[-1]) if numbers else None


def steps_of(draw, total, n):
    """n steps as text, and the result, which stays between 0 and 49."""
    text = ""
    for _ in range(n):
        step = draw.choice([n for n in range(-9, 10) if n and 0 <= total + n < 50])
        total, text = total + step, f"{text}{step:+d}"
    return text, total


def problem(seed, n):
    draw = random.Random(seed)
    start = draw.randint(5, 30)
    first, total = steps_of(draw, start, n)
    second, result = steps_of(draw, total, n)
    return {"prompt": f"Compute left to right: {start}{first}", "rest": second, "result": result}


class Halves:
    """One role computes the first half of a sum, and the other goes on from its result."""

    name = "halves"
    roles = {"first": 1, "second": 1}  # noqa: RUF012

    async def run(self, problem, call):
        half = boxed((await call("first", [user(problem.question)])).text)
        if half is None:
            return Answer("")
        return Answer((await call("second", [user(f"Compute left to right: {half}{problem.reference['rest']}")])).text)


def is_right(completions, result, **columns):
    return [float(boxed(text) == expected) for text, expected in zip(completions, result, strict=True)]


if __name__ == "__main__":
    from datasets import Dataset
    from peft import LoraConfig

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
    from multirole_study import embedded_model

    rows = [problem(seed, 5) for seed in range(400)]
    train, test = Dataset.from_list(rows[:336]), Dataset.from_list(rows[336:])

    def trainer_of(folder, **options):
        args = MultiRoleGRPOConfig(
            folder, policy="ip", generation_batch_size=96, num_generations=8, max_steps=12, max_completion_length=96, learning_rate=3e-3,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
        return MultiRoleGRPOTrainer(embedded_model(), Halves(), is_right, args, train, test, peft_config=lora)

    def right_answers(trainer):
        return trainer.evaluate()["eval_rewards/is_right/mean"]  # `eval_reward` is weighted, and so 0 for the taught roles

    teachers = trainer_of("out/teachers")
    before = right_answers(teachers)
    teachers.train()
    teachers.save_model("out/teachers")
    taught = trainer_of(
        "out/taught", reward_weights=[0.0],
        teacher={"first": "frozen:out/teachers/adapter_first", "second": "frozen:out/teachers/adapter_second"},
    )  # fmt: skip
    taught.train()
    print(f"right answers: base {before:.2f}, teachers {right_answers(teachers):.2f}, taught {right_answers(taught):.2f}")
    for role in Halves.roles:
        kl = [round(line[f"{role}/teacher_kl"], 4) for line in taught.state.log_history if f"{role}/teacher_kl" in line]
        print(f"{role}: KL from its teacher, in nats per token: {kl}")
