"""Train a proposer and a solver on opposed rewards. It takes a minute or two on a CPU.

    python examples/proposer.py
    python examples/proposer.py frozen      # the base model solves, and only the proposer is trained

The proposer says how long a sum is to be, and four solvers compute it. A solver is paid for being right, the proposer for a sum that half of
the solvers get right: a sum that is always or never right teaches nothing. So each reply has a reward of its own, which the reward function
returns as a list with a number per turn.
"""

import asyncio
import random
import re

from multirole import Answer, user

LONGEST = 12


def boxed(text):
    numbers = re.findall(r"\\boxed\{(\d+)\}", text)
    return int(numbers[-1]) if numbers else None


def length_of(text):
    """The number of steps that the proposer asks for: 1 for a reply of 0 to 3, 2 for 4 to 7, and so on; None if it names no number."""
    number = boxed(text)
    return None if number is None else min(1 + number // 4, LONGEST)


def sum_of(seed, n_steps):
    """A sum of so many steps between 0 and 49, and its result. The same seed gives the same sum."""
    draw = random.Random(f"{seed} {n_steps}")
    total = draw.randint(5, 30)
    text = str(total)
    for _ in range(n_steps):
        step = draw.choice([n for n in range(-9, 10) if n and 0 <= total + n < 50])
        total, text = total + step, f"{text}{step:+d}"
    return text, total


class Propose:
    """A proposer chooses how many steps a sum has, and four solvers compute it."""

    name = "propose"
    roles = {"proposer": 1, "solver": 4}  # noqa: RUF012

    async def run(self, problem, call):
        proposal = await call("proposer", [user(problem.question)])
        n_steps = length_of(proposal.text)
        if n_steps is None:
            proposal.outcome = "unparsed"
            return Answer("")
        ask = [user(f"Compute left to right: {sum_of(problem.reference['seed'], n_steps)[0]}")]
        tries = await asyncio.gather(*(call("solver", ask, slot=i) for i in range(4)))
        return Answer(tries[0].text)


def halves(completions, episodes, seed, log_metric, **kwargs):
    """One number per turn: 1 or 0 for a solver, and for the proposer 1 if half of them are right, 0 if all or none are."""
    rewards = []
    for episode, start in zip(episodes, seed, strict=True):
        proposal, *tries = episode.turns
        n_steps = length_of(proposal.text)
        right = [float(boxed(turn.text) == sum_of(start, n_steps)[1]) for turn in tries]
        share = sum(right) / len(right) if right else 0.0
        rewards.append([1 - abs(2 * share - 1), *right])
    asked = [n for n in (length_of(episode.turns[0].text) for episode in episodes) if n]
    log_metric("steps", sum(asked) / len(asked))
    return rewards


if __name__ == "__main__":
    import sys

    from datasets import Dataset
    from peft import LoraConfig

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
    from multirole_study import embedded_model

    args = MultiRoleGRPOConfig(
        "out/proposer", policy={"proposer": "a", "solver": "frozen" if "frozen" in sys.argv else "b"}, generation_batch_size=48, num_generations=16, max_steps=12, max_completion_length=192,
        learning_rate=2e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        embedded_model(), Propose(), halves, args, Dataset.from_list([{"prompt": "Compute left to right: ", "seed": i} for i in range(200)]),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    for name in ("proposer/reward", "solver/reward", "steps"):
        print(f"{name}: {[round(line[name], 2) for line in trainer.state.log_history if name in line]}")
