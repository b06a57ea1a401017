"""Train the debate of `debate.py` with your own estimator of credit. It takes a minute on a CPU.

    python examples/own_credit.py
"""

from multirole import CreditEstimator


class BestOfGroup(CreditEstimator):
    """A = R - max(R) over the episodes of the problem, the same for every turn."""

    def advantages(self, trainer, rows):
        groups = [row.episode.group(trainer.args.num_generations) for row in rows]
        rewards = [None if row.episode.reward is None else row.episode.reward.value for row in rows]  # None: not scored
        best = {}
        for group, reward in zip(groups, rewards):
            if reward is not None:
                best[group] = max(best.get(group, reward), reward)
        return [0.0 if reward is None else reward - best[group] for group, reward in zip(groups, rewards)]


if __name__ == "__main__":
    from datasets import load_dataset
    from debate import HERE, Debate, correct
    from peft import LoraConfig

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer

    args = MultiRoleGRPOConfig(
        "out/own_credit", credit="own_credit:BestOfGroup", per_device_train_batch_size=32, num_generations=8, max_steps=4,
        max_completion_length=272, learning_rate=4e-3, logging_steps=1, save_strategy="no", bf16=False,
        gradient_checkpointing=False, report_to="none", micro_batch_tokens=2048,
    )  # fmt: skip
    MultiRoleGRPOTrainer(
        str(HERE / "../src/multirole_study/models/tiny-r"), Debate(), correct, args,
        load_dataset("json", data_files=str(HERE / "data/train.jsonl"), split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    ).train()  # fmt: skip
