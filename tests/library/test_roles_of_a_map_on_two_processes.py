"""Two processes that share rewards of single roles, a frozen adapter and past selves train what one process trains."""

from pathlib import Path

import processes
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_base
from transformers import AutoModelForCausalLM

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, user
from multirole.inputs.adapters import add_adapters
from multirole.types import Answer

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
STEPS = 3


class Dispute:
    """Two roles argue against past selves, before a frozen judge."""

    name, roles = "dispute", {"asker": 1, "solver": 2, "rival": 1, "judge": 1}

    async def run(self, problem, call):
        asked = await call("asker", [user(problem.question)])
        replies = [(await call("solver", [user(asked.text[:20])], slot)).text[:9] for slot in range(2)]
        rival = await call("rival", [user(asked.text[:20])])
        return Answer((await call("judge", [user("".join(replies) + rival.text[:9])])).text)


def opposed(episodes, **_):
    """Solvers get what the asker loses; the judge and the rival are not trained."""
    gains = [sum(sum(turn.completion_ids) for turn in episode.turns) % 7 for episode in episodes]
    return [{"asker": -float(gain), "solver": float(gain)} for gain in gains]


class Versions(MultiRoleCallback):
    """Keeps which past selves played, and the advantages of turns."""

    def __init__(self):
        self.played, self.advantages = [], []

    def on_rollout_end(self, trainer, episodes):
        self.played.append([t.version for e in episodes for t in e.turns if t.role == "rival"])
        self.advantages.append([e.advantage_of(t) for e in episodes for t in e.turns])


def train(folder: str, judge: str) -> None:
    args = MultiRoleGRPOConfig(
        folder, policy={"asker": "a", "solver": "b", "rival": "past:b", "judge": f"frozen:{judge}"}, past_every=1, past_selves=2,
        generation_batch_size=8, num_generations=4, max_steps=STEPS, max_completion_length=8, learning_rate=1e-2, adam_epsilon=1e-4,
        lr_scheduler_type="constant", bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    watch = Versions()
    rows = Dataset.from_dict({"prompt": [f"{i}+1" for i in range(8)]})
    trainer = MultiRoleGRPOTrainer(toy_base(), Dispute(), opposed, args, rows, peft_config=LORA, callbacks=[watch])
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.peft_model.named_parameters() if "lora" in name}
    logged = [
        {name: value for name, value in line.items() if name.startswith(("asker/", "solver/", "judge/", "rival/"))}
        for line in trainer.state.log_history
    ]
    torch.save(
        (weights, watch.played, watch.advantages, logged), Path(folder) / f"rank{trainer.accelerator.process_index}.pt"
    )


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path):
    torch.manual_seed(5)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(toy_base()), LORA, ["adapter_judge"])
    model.save_pretrained(tmp_path)
    folders = [tmp_path / "one", tmp_path / "two"]
    for n, folder in enumerate(folders, start=1):
        folder.mkdir()
        codes = processes.run_together(n, folder / "log", train, str(folder), str(tmp_path / "adapter_judge"))
        assert codes == [0] * n, (folder / "log.0").read_text()[-3000:]
    one, *two = [torch.load(path, weights_only=False) for folder in folders for path in sorted(folder.glob("rank*.pt"))]
    assert len(two) == 2
    weights, played, advantages, logged = one
    assert {v for versions in played for v in versions} == {0, 1, 2}
    assert any(value for iteration in advantages for value in iteration)
    judges = {name for name in weights if "adapter_frozen" in name}
    assert judges and any("_past_" in name for name in weights)
    for other, other_played, other_advantages, other_logged in two:
        assert other_played == played
        for mine, theirs in zip(advantages, other_advantages, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-5)
        assert all(torch.equal(other[name], weights[name]) for name in judges)
        for name, value in other.items():
            torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=0, msg=name)
        for mine, theirs in zip(logged[:STEPS], other_logged[:STEPS], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-4)
            assert "asker/reward" in mine and "judge/turns" in mine and "judge/rows" not in mine
