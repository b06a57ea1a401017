"""With `report_to="trackio"` and `log_completions`, each episode that TRL's table shows is a trace: a message per turn, under its role's name.

The module trackio is replaced by the names that are used.
"""

import sys

import pytest
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_base
from trl.extras import profiling
from trl.trainer import grpo_trainer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.metrics.episode_traces import EpisodeTraces, messages_of, metadata_of
from multirole.types import Answer, Episode, Problem, Reward, Turn, user

ROWS = Dataset.from_list([{"prompt": f"{i}+1"} for i in range(2)])
FAKE = """
from types import SimpleNamespace

__version__ = "0"
logged = []
context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None), current_project=SimpleNamespace(get=lambda: None))

class Trace:
    def __init__(self, messages, metadata=None):
        self.messages, self.metadata = messages, metadata

class Table:
    def __init__(self, dataframe):
        self.dataframe = dataframe

class Config(dict):
    def update(self, values, allow_val_change=False):
        pass

config = Config()

def init(project, name=None, space_id=None, resume="never", private=None, bucket_id=None):
    logged.append("init")

def log(metrics, step=None):
    logged.append(metrics)

def finish():
    logged.append("finish")
"""


class Pair:
    name, roles = "pair", {"writer": 2, "judge": 1}

    async def run(self, problem, call):
        drafts = [(await call("writer", [user(problem.question)], slot)).text for slot in range(2)]
        return Answer((await call("judge", [user("".join(drafts))])).text)


def by_index(episodes, **_):
    return [float(episode.index % 2) for episode in episodes]


def trainer_of(folder, **options) -> MultiRoleGRPOTrainer:
    usual = {
        "use_cpu": True, "bf16": False, "generation_batch_size": 4, "num_generations": 2, "max_steps": 2, "max_completion_length": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "trackio", "disable_tqdm": True, "save_strategy": "no", "policy": "ip",
        "gradient_checkpointing": False, "log_completions": True, "eval_strategy": "steps", "eval_steps": 2, "run_name": "pairs",
    }  # fmt: skip
    return MultiRoleGRPOTrainer(
        toy_base(), Pair(), by_index, MultiRoleGRPOConfig(str(folder), **usual | options), ROWS, ROWS.select([0]),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip


@pytest.fixture
def fake_trackio(tmp_path, monkeypatch):
    """A module trackio with the names that are used, which keeps what is logged."""
    (tmp_path / "modules" / "trackio").mkdir(parents=True)
    (tmp_path / "modules" / "trackio" / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    import trackio

    for module in (grpo_trainer, profiling):  # which import it only if it is installed
        monkeypatch.setattr(module, "trackio", trackio, raising=False)
    yield trackio
    del sys.modules["trackio"]


def traces_in(logged: list) -> dict[str, list[list]]:
    """Return name -> the lists of traces that were logged under it, in their order."""
    traces: dict[str, list[list]] = {}
    for metrics in logged:
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if name.endswith("/episodes"):
                traces.setdefault(name, []).append(value)
    return traces


def test_every_logged_episode_is_a_trace(fake_trackio, tmp_path):
    trainer = trainer_of(tmp_path / "out", log_unique_prompts=False)
    trainer.predict(ROWS)  # whose episodes are in no table
    trainer.train()
    logged = fake_trackio.logged
    assert logged.count("init") == 1 and logged[-1] == "finish"
    traces = traces_in(logged)
    assert traces.keys() == {"train/episodes", "eval/episodes"}
    assert [len(each) for each in traces["train/episodes"]] == [4, 4], "the episodes of two iterations"
    assert [len(each) for each in traces["eval/episodes"]] == [1]
    assert [{t.metadata["iteration"] for t in each} for each in traces["train/episodes"]] == [{1}, {2}]
    roles = [message["role"] for message in traces["train/episodes"][0][0].messages]
    assert roles == ["user", "writer", "writer", "judge", "assistant"]
    rewards = [trace.metadata["reward"] for trace in traces["train/episodes"][0]]
    assert rewards == [0.0, 1.0] * 2
    advantages = [trace.metadata["advantage"] for trace in traces["train/episodes"][0]]
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, abs=1e-3)
    tables = [metrics["completions"].dataframe for metrics in logged if "completions" in metrics]
    assert [len(table) for table in tables] == [4, 4, 1, 4], "TRL's tables, which are logged again when training ends"


def test_unique_prompts_are_a_trace_each(fake_trackio, tmp_path):
    trainer_of(tmp_path / "out", log_unique_prompts=True, max_steps=1, eval_strategy="no").train()
    ((first, second),) = traces_in(fake_trackio.logged)["train/episodes"]
    assert (first.metadata["attempt"], second.metadata["attempt"]) == (0, 0)
    assert first.metadata["problem"] != second.metadata["problem"]


@pytest.mark.parametrize("options", [{"log_completions": False}, {"report_to": "none"}])
def test_no_traces_without_either_option(fake_trackio, tmp_path, options):
    trainer_of(tmp_path / "out", max_steps=1, eval_strategy="no", **options).train()
    assert traces_in(fake_trackio.logged) == {}


def test_trackio_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError, match='`report_to="trackio"` needs the package trackio'):
        EpisodeTraces(is_unique=False)


def turn(role, slot, tokens, text):
    return Turn(role, slot, 0, [1], [2] * tokens, [0.0] * tokens, text, "stop", "answered")


def test_a_message_has_the_reward_and_the_advantage_of_its_turn():
    turns = [turn("writer", 0, 3, "a"), turn("judge", 0, 2, "b")]
    history = [{"role": "system", "content": "be brief"}]
    episode = Episode(
        Problem("p1", "task", "why?", None, history), 3, turns, Answer("b"), Reward(0.5, "scored", True, (1.0, float("nan"))), 0.0,
        turn_advantages=[0.25, -0.25],
    )  # fmt: skip
    messages = messages_of(episode)
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "be brief"), ("user", "why?"), ("writer", "a"), ("judge", "b"), ("assistant", "b"),
    ]  # fmt: skip
    assert [(m["tokens"], m["reward"], m["advantage"]) for m in messages[2:4]] == [(3, 1.0, 0.25), (2, None, -0.25)]
    facts = metadata_of(episode, 7)
    assert (facts["iteration"], facts["problem"], facts["attempt"], facts["turns"], facts["tokens"]) == (
        7,
        "p1",
        3,
        2,
        5,
    )
    assert (facts["reward"], facts["status"]) == (0.5, "right")


def test_a_failed_episode_says_so():
    episode = Episode(Problem("p", "task", "why?", None), 0, failure="KeyError: 'x'")
    assert [m["role"] for m in messages_of(episode)] == ["user"]
    facts = metadata_of(episode, 1)
    assert (facts["status"], facts["failure"], "reward" in facts) == ("failed", "KeyError: 'x'", False)
