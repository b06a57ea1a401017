"""Train your own workflow (two debaters and a judge) on your own rows with your own reward. It takes a minute on a CPU.

    python examples/debate.py
    multirole train -p workflow examples/debate.py:Debate -p task examples/debate.py:task -p policy debater=a,judge=b
"""

import asyncio
import re
from pathlib import Path

from multirole import Answer, Duty, Edge, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Structure, assistant, user
from multirole_study import Task

HERE = Path(__file__).parent


class Debate:
    """Two debaters answer, each reads the other and answers again; a judge picks one of the two last answers."""

    name = "debate"
    roles = {"debater": 2, "judge": 1}  # noqa: RUF012  (role -> slots in one stage)
    # optional: how each role's skill is measured, and the diagram in the inspector
    structure = Structure(
        duties={"debater": Duty("solves"), "judge": Duty("selects", "debater")},
        edges=(
            Edge("question", "debater"),
            Edge("debater", "debater", "each other's answer", is_loop=True),
            Edge("debater", "judge", "both last answers"),
            Edge("judge", "answer", "the one it picks"),
        ),
        # with `chats`, a chat template that wants turns to alternate is refused before training, not in the first rollout
        chats=(("user",), ("user", "assistant", "assistant", "user")),
    )

    async def run(self, problem, call):
        ask, again = user(problem.question), user("Use the review and compute it again.")
        # gathered calls run concurrently; the engine batches the calls of all episodes together
        first = await asyncio.gather(*(call("debater", [ask], slot=s) for s in (0, 1)))
        heard = [[ask, assistant(first[s].text), assistant(first[1 - s].text), again] for s in (0, 1)]
        last = await asyncio.gather(*(call("debater", heard[s], slot=s, round=1) for s in (0, 1)))
        solutions = "\n".join(f"--- Solution {i} ---\n{turn.text}" for i, turn in enumerate(last, start=1))
        verdict = await call("judge", [user(f"{problem.question}\n{solutions}\nWhich is right? Reply \\boxed{{N}}.")])
        box = re.search(r"\\boxed\{([12])\}", verdict.text)
        verdict.outcome = box[1] if box else "unparsed"  # counted per role, never a silent default
        return Answer(last[int(box[1]) - 1 if box else 0].text)


def correct(prompts, completions, answer, **kwargs):
    """Reward function with TRL's signature: `completions` are the episodes' final answers, `answer` is a column of the rows."""
    boxes = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in completions]
    return [float(box[-1:] == [str(right)]) for box, right in zip(boxes, answer, strict=True)]


task = Task("sums", HERE / "data/train.jsonl", HERE / "data/validation.jsonl", reward=correct)

if __name__ == "__main__":
    from datasets import load_dataset
    from peft import LoraConfig

    rows = load_dataset("json", data_dir=str(HERE / "data"))
    args = MultiRoleGRPOConfig(
        "out/debate", policy={"debater": "a", "judge": "b"}, per_device_train_batch_size=32, num_generations=8, max_steps=8,
        max_completion_length=272, learning_rate=4e-3, eval_strategy="steps", eval_steps=4, logging_steps=1, bf16=False,
        gradient_checkpointing=False, report_to="none", micro_batch_tokens=2048,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        str(HERE / "../src/multirole_study/models/tiny-r"), Debate(), correct, args, rows["train"], rows["validation"],
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()  # a PEFT adapter per folder: out/debate/adapter_a, out/debate/adapter_b
