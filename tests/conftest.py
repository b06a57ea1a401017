"""Shared fixtures: a random-weight Qwen3 of the smallest useful shape, adapters with non-zero effect, canned episodes."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: the numbers here are a CPU's
os.environ["HF_HUB_OFFLINE"] = "1"

import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from peft import LoraConfig, PeftModel
from toy_qwen3 import toy_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from multirole.core.advantages import set_advantages
from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.engine import Engine
from multirole.core.inputs import add_adapters
from multirole.core.policy import adapter_names, parse_policy
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Problem, Reward, Turn, Workflow
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.experiment import run
from multirole.experiment.cell import Cell
from multirole.experiment.models import locate

if threading.current_thread() is threading.main_thread():
    # a shell's background job ignores SIGINT, one under nohup SIGHUP, and so would the runs that tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: their sums must round as ours do


def slow_but(always: Iterable, cases: Iterable) -> list:
    """The cases of a parametrized test, of which the quick suite runs some."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if case in always else pytest.mark.slow)
        for case in cases
    ]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate(Cell("single", "sp")))


def build_model(tokenizer: PreTrainedTokenizerBase, policy: dict[str, str], seed: int = 0) -> PeftModel:
    lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    base = toy_model(tokenizer, seed, head_dim=16, max_position_embeddings=1024)
    model = add_adapters(base, lora, adapter_names(policy))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(seed + 1)  # every adapter gets the same B: policies can be compared
            parameter.data = torch.randn_like(parameter) * 0.1
        elif "lora_A" in name:
            torch.manual_seed(seed + 2)
            parameter.data = torch.randn_like(parameter) * 0.1
    return model


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, make) -> what `make(folder)` returns, a path: made once, by the first of xdist's workers that asks for it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def get(name: str, make: Callable[[Path], Path]) -> Path:
        note = folder / f"{name}.path"
        with FileLock(f"{note}.lock"):
            if not note.exists():
                note.write_text(str(make(folder / name)))
        return Path(note.read_text())

    return get


@pytest.fixture(scope="session")
def grid_results(shared) -> Path:
    """The made-up results of a finished grid; to be read only."""
    from paper_results import make_results

    return shared("grid", make_results)


@pytest.fixture
def make_model(tokenizer):
    """make_model(policy_map) -> PEFT model with one randomly initialised, effective adapter per name; same seed, same weights."""
    return lambda policy, seed=0: build_model(tokenizer, policy, seed)


@pytest.fixture
def make_trainer(make_model, tokenizer, tmp_path):
    """make_trainer(cell, engine=None) -> the cell's trainer over the random model, ready for `optimizer_step` and `update`."""

    def make(cell: Cell, engine: Engine | None = None, **kwargs) -> run.CellTrainer:
        problems = [Problem(str(i), cell.make_task().name, f"question {i}", None) for i in range(64)]
        trainer = run.make_trainer(
            cell, str(tmp_path / "out"), problems=(problems, problems[:4]), model=(make_model(cell.policy), tokenizer),
            engine=engine, **kwargs,
        )  # fmt: skip
        return ready(trainer)

    return make


@pytest.fixture
def make_library_trainer(make_model, tokenizer, tmp_path):
    """make_library_trainer(workflow, **config) -> a trainer without any callback of ours, built as TRL's is."""

    def make(
        workflow: Workflow, engine: Engine | None = None, reward_funcs=None, n_prompts: int = 64, callbacks=None, **config
    ) -> MultiRoleGRPOTrainer:  # fmt: skip
        usual = {
            "generation_batch_size": 16, "num_generations": 8, "max_completion_length": 96, "epsilon_high": 0.28,
            "learning_rate": 1e-3, "max_grad_norm": 1e9, "max_steps": 60, "micro_batch_tokens": 1024, "bf16": False,
        }  # fmt: skip
        args = MultiRoleGRPOConfig(str(tmp_path / "library"), use_cpu=True, report_to="none", **usual | config)
        trainer = MultiRoleGRPOTrainer(
            make_model(parse_policy(args.policy, list(workflow.roles))), workflow, reward_funcs or no_reward, args,
            Dataset.from_dict({"prompt": [f"question {i}" for i in range(n_prompts)], "task": ["tiny_math"] * n_prompts}),
            processing_class=tokenizer, engine=engine, callbacks=callbacks,
        )  # fmt: skip
        return ready(trainer)

    return make


def no_reward(completions: list, **_: object) -> list[float]:
    return [0.0] * len(completions)


def ready(trainer: MultiRoleGRPOTrainer) -> MultiRoleGRPOTrainer:
    """What `train` and `update` do before the first optimizer step."""
    trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
    trainer.state.max_steps = trainer.args.max_steps
    for watcher in trainer.watchers:
        if isinstance(watcher, RoleDiagnostics):
            watcher.on_update_begin(trainer, [], {})
    return trainer


def diagnostics_of(trainer: MultiRoleGRPOTrainer) -> RoleDiagnostics:
    (found,) = [watcher for watcher in trainer.watchers if isinstance(watcher, RoleDiagnostics)]
    return found


def rows_of(trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> list[Row]:
    """One row per turn with its advantage, in the order of the episodes."""
    rows = [Row(episode, turn, trainer.policy[turn.role]) for episode in episodes for turn in episode.turns]
    set_advantages(rows, trainer.args)
    return rows


def make_episodes(cell: Cell, **kwargs) -> list[Episode]:
    """Finished episodes of a cell, see `episodes_of`."""
    return episodes_of(cell.make_workflow().roles, cell.n_episodes, **kwargs)


def episodes_of(
    roles: dict[str, int], n_episodes: int = 8, n_problems: int = 2, vocab: int = 64, seed: int = 0, rounds: int = 1
) -> list[Episode]:
    """Finished episodes with random tokens: every role and slot of the workflow speaks in each round."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, vocab, (n,), generator=generator).tolist()

    episodes = []
    for p in range(n_problems):
        for index in range(n_episodes):
            episode = Episode(Problem(str(p), "tiny_math", f"question {p}", None), index, answer=Answer(""))
            for round in range(rounds):
                for role, slots in roles.items():
                    for slot in range(slots):
                        prompt, completion = tokens(3, 30), tokens(1, 20)
                        noise = torch.randn(len(completion), generator=generator)
                        logprobs = (0.3 * noise - 6.2).tolist()  # ~ -log 510
                        episode.turns.append(
                            Turn(role, slot, round, prompt, completion, logprobs, "text", "stop", "answered")
                        )
            value = float(torch.randint(0, 2, (1,), generator=generator))
            episode.reward = Reward(value, "", bool(value))
            episode.advantage = float(torch.randn(1, generator=generator))
            episodes.append(episode)
    return episodes


def table(folder: Path, name: str) -> pd.DataFrame:
    """One table of a run's folder."""
    return pd.read_parquet(folder / f"{name}.parquet")
