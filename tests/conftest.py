"""Shared fixtures: a random-weight Qwen3 of the smallest useful shape, adapters with non-zero effect, canned episodes."""

import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from multirole.core.policy import adapter_names
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Problem, Reward, Turn
from multirole.experiment.cell import Cell
from multirole.experiment.models import locate

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: their sums must round as ours do


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(Cell("single", "sp")))


@pytest.fixture
def make_model(tokenizer):
    """make_model(policy_map) -> PEFT model with one randomly initialised, effective adapter per name; same seed, same weights."""

    def make(policy: dict[str, str], seed: int = 0) -> PeftModel:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=1024,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        first, *others = adapter_names(policy)
        model = get_peft_model(Qwen3ForCausalLM(config), lora, adapter_name=first)
        for name in others:
            model.add_adapter(name, lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(seed + 1)  # every adapter gets the same B: policies can be compared
                parameter.data = torch.randn_like(parameter) * 0.1
            elif "lora_A" in name:
                torch.manual_seed(seed + 2)
                parameter.data = torch.randn_like(parameter) * 0.1
        return model

    return make


@pytest.fixture
def make_trainer(make_model, tokenizer, tmp_path):
    """make_trainer(cell, engine=None) -> a trainer over the random model, its optimizer and schedule created."""

    def make(cell: Cell, engine=None, **kwargs) -> MultiRoleGRPOTrainer:
        problems = [Problem(str(i), cell.task_name, f"question {i}", None) for i in range(64)]
        trainer = MultiRoleGRPOTrainer(
            cell, make_model(cell.policy), tokenizer, engine, problems, problems[:4], str(tmp_path / "out"), **kwargs
        )
        trainer.create_optimizer_and_scheduler(cell.iterations)
        return trainer

    return make


def make_episodes(cell: Cell, n_problems: int = 2, vocab: int = 64, seed: int = 0, rounds: int = 1) -> list[Episode]:
    """Finished episodes with random tokens: every role and slot of the workflow speaks in each round."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, vocab, (n,), generator=generator).tolist()

    episodes = []
    for p in range(n_problems):
        for index in range(cell.n_episodes):
            episode = Episode(Problem(str(p), cell.task_name, f"question {p}", None), index, answer=Answer(""))
            for round in range(rounds):
                for role, slots in cell.make_workflow().roles.items():
                    for slot in range(slots):
                        prompt, completion = tokens(3, 30), tokens(1, 20)
                        logprobs = (
                            0.3 * torch.randn(len(completion), generator=generator) - 6.2
                        ).tolist()  # ~ -log 510
                        episode.turns.append(
                            Turn(role, slot, round, prompt, completion, logprobs, "text", "stop", "answered")
                        )
            value = float(torch.randint(0, 2, (1,), generator=generator))
            episode.reward = Reward(value, "", bool(value))
            episode.advantage = float(torch.randn(1, generator=generator))
            episodes.append(episode)
    return episodes
