"""Agents of fourteen frameworks train unmodified, each in at most 40 lines of its own idiom, as docs/frameworks.md says."""

import importlib.util
import logging
import os
import re
import runpy
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pandas as pd
import processes
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from multirole import MultiRoleCallback
from multirole.openai_api.workflow import OpenAIWorkflow
from multirole_cpu.engine import TransformersEngine
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.inspector import inspect_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
EXAMPLES = {
    "openai_voting": ("openai", {"solver": {3}, "judge": {1}}),
    "langgraph_review": ("langgraph", {"writer": {2}, "critic": {1}}),
    "agents_sdk_pipeline": ("openai-agents", {"planner": {1}, "solver": {1}}),
    "ag2_dialogue": ("ag2", {"student": {2}, "teacher": {1}}),
    "smolagents_tool": ("smolagents", {"coder": {1, 2, 3}}),
    "pydantic_ai_review": ("pydantic-ai-slim", {"solver": {2}, "critic": {1}}),
    "autogen_team": ("autogen-agentchat", {"writer": {2}, "critic": {1}}),
    "crewai_crew": ("crewai", {"planner": {1, 2, 3}, "solver": {1, 2, 3}}),
    "dspy_program": ("dspy", {"planner": {1}, "solver": {0, 1}}),
    "llama_index_workflow": ("llama-index-core", {"writer": {2}, "critic": {1}}),
    "haystack_pipeline": ("haystack-ai", {"planner": {1}, "solver": {1}}),
    "semantic_kernel_sequence": ("semantic-kernel", {"solver": {1}, "editor": {1}}),
    "instructor_extraction": ("instructor", {"solver": {1}, "extractor": {1}}),
    "google_adk_sequence": ("google-adk", {"planner": {1}, "solver": {1}}),
}
"""script -> the package that it needs, and the possible numbers of turns of each role in an episode."""


class Record(MultiRoleCallback):
    """Keeps the turns of all episodes by role, the replies that the engine sampled, those that the loss was computed on, and gradients."""

    def __init__(self) -> None:
        self.turns, self.sampled, self.trained, self.grad_norms = [], [], [], Counter()

    def on_rollout_end(self, trainer, episodes):
        self.turns += [Counter(turn.role for turn in episode.turns) for episode in episodes]

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
            self.trained.append(ids[mask.bool()].tolist())

    def on_adapter_step(self, trainer, step):
        self.grad_norms[step.adapter] += step.grad_norm

    def sampling(self, step):
        def recorded(engine):
            done = step(engine)
            self.sampled += [completion.token_ids for _, completion in done]
            return done

        return recorded


def train_three_iterations(name: str, folder: Path, turns: dict[str, set[int]]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(FOLDER))  # as `python FILE` does
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("multirole").addHandler(handler)
    module = runpy.run_path(str(FOLDER / f"{name}.py"))
    (workflow,) = (value for value in module.values() if isinstance(value, OpenAIWorkflow))
    record, train = Record(), importlib.import_module("train")
    TransformersEngine.step = record.sampling(TransformersEngine.step)
    train.correct = lambda completions, **_: [float(len(text) % 7) for text in completions]  # differs within groups
    train.train(workflow, 3, [record])
    assert len(record.turns) == 3 * 16
    wrong = [counts for counts in record.turns if any(counts[role] not in number for role, number in turns.items())]
    assert not wrong, wrong
    assert record.sampled and sorted(record.sampled) == sorted(record.trained)
    assert all(record.grad_norms[f"adapter_{role}"] > 0 for role in turns), record.grad_norms
    assert not warnings, warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_agent_of_a_framework_trains_on_the_tokens_of_its_calls(name, tmp_path):
    package, turns = EXAMPLES[name]
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here: make frameworks ARGS={environment_of(package)[0]}")
    code = processes.run(tmp_path / "log", train_three_iterations, name, tmp_path, turns)
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed[-6000:]
    assert all(f"'{role}/rows'" in printed for role in turns)
    (saved,) = (tmp_path / "out").iterdir()
    assert {f"adapter_{role}" for role in turns} <= {path.name for path in saved.iterdir()}


def test_an_agent_trains_as_a_cell_and_is_recorded(tmp_path):
    """Named by its file, as in a shell or a notebook."""
    sizes = {"max_steps": 2, "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8, "eval_steps": 1}
    cell = Cell(f"{FOLDER / 'openai_voting.py'}:voting", "ip", max_completion_length=24, warmup_steps=0, **sizes)
    folder = run_cell(cell, tmp_path)
    turns = pd.read_parquet(folder / "turns" / "step_00002.parquet")
    assert set(turns["role"]) == {"solver", "judge"} and set(turns[turns["role"] == "solver"]["slot"]) == {0, 1, 2}
    assert {"solves", "selects"} <= set(pd.read_parquet(folder / "skills.parquet")["measure"])
    assert inspect_run(folder).stat().st_size > 10_000


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_framework_needs_few_lines(name):
    lines = (FOLDER / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40


def pins(lock: Path) -> dict[str, str]:
    requirements = [Requirement(line) for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in requirements}


def environment_of(package: str) -> tuple[str, str]:
    """Return the environment that was made for a framework, and the framework's version."""
    for lock in FOLDER.glob("requirements/*.lock"):
        if package in {
            canonicalize_name(Requirement(one).name) for one in lock.read_text().splitlines()[0].split()[3:]
        }:
            return lock.stem, pins(lock)[package]
    return ".venv", pins(ROOT / "requirements-cpu.lock")[package]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of a section's table."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in table[2:]]


def test_the_page_shows_the_lines_versions_and_environments_of_the_examples():
    page = (ROOT / "docs" / "frameworks.md").read_text()
    examples, passed = rows(page, "Examples"), rows(page, "How a framework reaches the endpoint")
    assert sorted(re.findall(r"/(\w+)\.py\)", " ".join(row[0] for row in examples))) == sorted(EXAMPLES)
    sources = {}
    for link, _, framework, environment in examples:
        name = re.search(r"\[(\w+)\.py\]", link)[1]
        place, version = environment_of(EXAMPLES[name][0])
        assert environment.strip("`") == place and f" {version} " in f"{framework} ", name
        sources[re.sub(r" [\d.]+.*", "", framework)] = squeezed((FOLDER / f"{name}.py").read_text())
    for framework, model, options, _ in passed:
        (source,) = (text for name, text in sources.items() if name == framework.partition(",")[0])
        for code in [*re.findall("`(.+?)`", model), *re.findall("`(.+?)`", options)]:
            assert squeezed(code) in source, f"{framework}: {code}"
        assert ("use_socket" in source, "ignore=" in source) == ("use_socket" in options, "ignore=" in options), (
            framework
        )
    assert len(passed) == len(sources)


def squeezed(code: str) -> str:
    """Return code without white space, which may be broken into lines."""
    return re.sub(r"\s", "", code).replace(",)", ")")
