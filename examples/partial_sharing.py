"""Which roles should share weights? Train three policy maps of one workflow on the same problems. It takes two minutes on a CPU.

    python examples/partial_sharing.py

Orch-Workers has three roles. The policies are Shared-Policy (one adapter), Isolated-Policy (three), and a map in between, in which
the worker, which fills three slots, has its own adapter and the two other roles share one.
"""

from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, OrchWorkers, RoleDiagnostics
from multirole_study.tasks.tiny_chain import PROMPTS, TinyChain

HERE = Path(__file__).parent
POLICIES = {"shared": "sp", "isolated": "ip", "worker apart": "orchestrator=rest,worker=own,synthesizer=rest"}


def correct(prompts, completions, answer, **kwargs):
    boxes = [TinyChain().extract(text) for text in completions]
    return [float(box == str(right)) for box, right in zip(boxes, answer, strict=True)]


def train(policy: str, iterations: int = 5) -> MultiRoleGRPOTrainer:
    rows = load_dataset("json", data_dir=str(HERE / "data"))
    rows = rows.map(lambda row: {"prompt": row["prompt"].removeprefix("Compute left to right: ")})
    trainer = MultiRoleGRPOTrainer(
        model=str(HERE / "../src/multirole_study/models/tiny-r"),
        workflow=OrchWorkers(max_workers=3, prompts=PROMPTS),
        reward_funcs=correct,
        args=MultiRoleGRPOConfig(
            f"out/{policy}", policy=policy, per_device_train_batch_size=64, num_generations=8, max_steps=iterations,
            max_completion_length=272, learning_rate=2e-3, logging_steps=1, save_strategy="no", bf16=False,
            gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
        callbacks=[RoleDiagnostics()],  # chi2, entropy, gradient share and more, for every role
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    for name, policy in POLICIES.items():
        trainer = train(policy)
        last = next(row for row in reversed(trainer.state.log_history) if "worker/grad_share" in row)
        reward = trainer.evaluate()["eval_reward"]
        shares = {role: round(last[f"{role}/grad_share"], 2) for role in trainer.policy}
        print(f"{name}: {len(trainer.adapters)} adapters, validation reward {reward:.3f}, share of its adapter's gradient {shares}")
