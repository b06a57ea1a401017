"""Random-weight trainers and canned episodes for the tests: the smallest useful Qwen3, adapters with non-zero effect."""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from toy_qwen3 import toy_model
from transformers import PreTrainedTokenizerBase

from multirole.engines.protocol import Engine
from multirole.inputs.adapters import add_adapters
from multirole.options import MultiRoleGRPOConfig
from multirole.policy import adapter_names, parse_policy
from multirole.roles.diagnostics import RoleDiagnostics
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.types import Answer, Episode, Problem, Reward, Turn, Workflow
from multirole.update import adapter_gradient as adapter_update
from multirole.update.rows import Row, episode_rows

SUMS = str(Path(__file__).parents[1] / "data" / "sums")
"""Prompts of the toy task, sums: a folder with a template for each role of the paper's workflows."""


def slow_but(always: Iterable, cases: Iterable) -> list:
    """Return the cases of a parametrized test; those not in `always` are marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if case in always else pytest.mark.slow)
        for case in cases
    ]


BUILT: dict[tuple, tuple[PeftModel, torch.Tensor]] = {}
"""Models by what they were built of, with the state of torch's generator afterwards: a copy takes a third of the time."""


def build_model(tokenizer: PreTrainedTokenizerBase, policy: dict[str, str], seed: int = 0) -> PeftModel:
    key = len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed, *adapter_names(policy)
    if key not in BUILT:
        BUILT[key] = _built(tokenizer, policy, seed), torch.get_rng_state()
    model, state = BUILT[key]
    torch.set_rng_state(state)
    return deepcopy(model)


def _built(tokenizer: PreTrainedTokenizerBase, policy: dict[str, str], seed: int) -> PeftModel:
    lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    base = toy_model(tokenizer, seed, head_dim=16, max_position_embeddings=1024)
    model = add_adapters(base, lora, adapter_names(policy))
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # every adapter gets the same A and B: policies can be compared
            generator = torch.Generator().manual_seed(seed + (1 if "lora_B" in name else 2))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def library_trainer(
    workflow: Workflow, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine | None = None, reward_funcs=None,
    n_prompts: int = 64, callbacks=None, **config,
) -> MultiRoleGRPOTrainer:  # fmt: skip
    """Build a trainer without the study's callbacks, as TRL's is built."""
    usual = {
        "generation_batch_size": 16, "num_generations": 8, "max_completion_length": 96, "epsilon_high": 0.28,
        "learning_rate": 1e-3, "max_grad_norm": 1e9, "max_steps": 60, "micro_batch_tokens": 1024, "bf16": False, "use_cpu": True,
    }  # fmt: skip
    args = MultiRoleGRPOConfig(str(folder / "library"), report_to="none", **usual | config)
    trainer = MultiRoleGRPOTrainer(
        build_model(tokenizer, parse_policy(args.policy, list(workflow.roles))), workflow, reward_funcs or no_reward, args,
        Dataset.from_dict({"prompt": [f"question {i}" for i in range(n_prompts)], "task": [SUMS] * n_prompts}),
        processing_class=tokenizer, engine=engine, callbacks=callbacks,
    )  # fmt: skip
    return ready(trainer)


def no_reward(completions: list, **_: object) -> list[float]:
    return [0.0] * len(completions)


def ready(trainer: MultiRoleGRPOTrainer) -> MultiRoleGRPOTrainer:
    """Do what `train` and `update` do before the first optimizer step."""
    trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
    trainer.state.max_steps = trainer.args.max_steps
    for callback in trainer.multirole_callbacks:
        if isinstance(callback, RoleDiagnostics):
            callback.on_update_begin(trainer, [], {})
    return trainer


def diagnostics_of(trainer: MultiRoleGRPOTrainer) -> RoleDiagnostics:
    (diagnostics,) = [callback for callback in trainer.multirole_callbacks if isinstance(callback, RoleDiagnostics)]
    return diagnostics


def rows_of(trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> list[Row]:
    """Return one row per turn with its episode's advantage, in the order of the episodes."""
    return episode_rows(episodes, trainer.policy, masks_truncated=False)


def episodes_of(
    roles: dict[str, int],
    n_episodes: int = 8,
    n_problems: int = 2,
    vocab: int = 64,
    seed: int = 0,
    rounds: int = 1,
    logprob: float = -5.6,
) -> list[Episode]:
    """Return finished episodes with random tokens: every role and slot of the workflow speaks in each round.

    Sampled log-probs are near `logprob`, by default that of a uniform draw from the toy tokenizer's 261 tokens, as a random model's are.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, vocab, (n,), generator=generator).tolist()

    episodes = []
    for p in range(n_problems):
        for index in range(n_episodes):
            episode = Episode(Problem(str(p), SUMS, f"question {p}", None), index, answer=Answer(""))
            for round in range(rounds):
                for role, slots in roles.items():
                    for slot in range(slots):
                        prompt, completion = tokens(3, 30), tokens(1, 20)
                        noise = torch.randn(len(completion), generator=generator)
                        logprobs = (0.3 * noise + logprob).tolist()
                        episode.turns.append(
                            Turn(role, slot, round, prompt, completion, logprobs, "text", "stop", "answered")
                        )
            value = float(torch.randint(0, 2, (1,), generator=generator))
            episode.reward = Reward(value, "", bool(value))
            episode.advantage = float(torch.randn(1, generator=generator))
            episodes.append(episode)
    return episodes


def conversation(workflow: Workflow, n_episodes: int = 4) -> list[Episode]:
    """Return episodes whose prompts share a beginning and quote earlier replies."""
    episodes = episodes_of(workflow.roles, n_episodes, rounds=3)
    for episode in episodes:
        said = [5, 6, 7, int(episode.problem.id) + 8] * 5
        for turn in episode.turns:
            turn.prompt_ids = said + [9, 10] * (turn.role == "evaluator")
            if turn.slot == workflow.roles[turn.role] - 1:
                said = said + turn.completion_ids
    episodes[1].turns[0].completion_ids = list(episodes[0].turns[0].completion_ids)  # the same reply twice
    episodes[1].turns[0].logprobs = list(episodes[0].turns[0].logprobs)
    return episodes


def updated(trainer: MultiRoleGRPOTrainer, episodes: list[Episode], monkeypatch) -> list[torch.Tensor]:
    """Take the optimizer steps of an iteration; return the applied gradients of the first steps of every adapter."""
    applied, plain_set = [], adapter_update.set_gradient
    monkeypatch.setattr(
        adapter_update,
        "set_gradient",
        lambda params, gradient: applied.append(gradient.clone()) or plain_set(params, gradient),
    )
    trainer.update(trainer.model, rows_of(trainer, episodes))
    monkeypatch.setattr(adapter_update, "set_gradient", plain_set)
    return applied


def table(folder: Path, name: str) -> pd.DataFrame:
    """Read one table of a run's folder."""
    return pd.read_parquet(folder / f"{name}.parquet")
