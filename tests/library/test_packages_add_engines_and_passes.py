"""Installed packages add engines and faster passes by entry points, and without them the library trains with its own."""

import logging
import shutil
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trainers import build_model, episodes_of, library_trainer, rows_of

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, engines
from multirole.engines import check_engine, load_engine
from multirole.engines.generate import GenerateEngine
from multirole.policy import parse_policy
from multirole.update.gradients import gradient_of
from multirole.update.passes import fast_passes
from multirole.workflows import Voting
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.passes import CPUPasses

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine"


def register(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write what an installer leaves of a distribution."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def example(tmp_path, monkeypatch) -> None:
    """The engine of examples/engine, as it is after its installation."""
    site = tmp_path / "site"
    site.mkdir()
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    register(site, "one_by_one", project["entry-points"])
    shutil.copy(EXAMPLE / "one_by_one.py", site)
    monkeypatch.syspath_prepend(site)


def trained(tokenizer, folder: Path, engine: str) -> tuple[MultiRoleGRPOTrainer, list[str]]:
    """Train one iteration; return the trainer and the answers."""
    args = MultiRoleGRPOConfig(
        str(folder), engine=engine, policy="ip", max_steps=1, max_completion_length=6, generation_batch_size=4, num_generations=2,
        learning_rate=1e-3, save_strategy="no", report_to="none", bf16=False, use_cpu=True,
    )  # fmt: skip
    workflow, answers = Voting(2), []

    def reward(completions: list[str], **_: object) -> list[float]:
        answers.extend(completions)
        return [float(len(text) % 3) for text in completions]

    trainer = MultiRoleGRPOTrainer(
        build_model(tokenizer, parse_policy("ip", list(workflow.roles))), workflow, reward, args,
        Dataset.from_dict({"prompt": ["1+1", "2+2"]}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer, answers


def test_an_engine_that_a_package_registers_trains_by_its_name(example, tokenizer, tmp_path):
    """It samples by the library's sampler, so the seeds give the replies that `generate` gives."""
    trainer, answers = trained(tokenizer, tmp_path, "one_by_one")
    assert type(trainer.engine).__module__ == "one_by_one" and len(set(answers)) == 4
    assert answers == trained(tokenizer, tmp_path, "generate")[1]
    start = dict(build_model(tokenizer, trainer.policy).named_parameters())
    moved = {
        name.split(".")[-2] for name, p in trainer.peft_model.named_parameters() if not torch.equal(p, start[name])
    }
    assert moved == set(trainer.adapters)


def test_a_name_that_two_packages_register_is_refused(example, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    register(tmp_path / "more", "another", {"multirole.engines": {"one_by_one": "json:JSONDecoder"}})
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.raises(ValueError, match=r"'one_by_one' is registered twice, as '(one_by_one|json):.*Rename one"):
        check_engine("one_by_one")


def test_an_engine_that_cannot_be_imported_is_refused_by_name(tmp_path, monkeypatch):
    register(tmp_path, "broken", {"multirole.engines": {"broken": "no_such_module:Engine"}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="`engine='broken'` cannot be loaded: .*no_such_module"):
        check_engine("broken")
    with pytest.raises(ValueError, match="one of .*'broken', 'generate'.* got 'brokn'"):
        check_engine("brokn")


@pytest.fixture
def without_packages(monkeypatch) -> None:
    """As where the library alone is installed."""
    monkeypatch.setattr(engines, "_entry_points", lambda path: [])
    monkeypatch.setattr(fast_passes, "installed", list)


def test_auto_selects_the_quick_engine_where_it_is_installed_and_says_what_to_install_elsewhere(
    tokenizer, tmp_path, monkeypatch, caplog, request
):
    trainer = library_trainer(Voting(2), tokenizer, tmp_path)
    assert type(trainer.engine) is TransformersEngine
    request.getfixturevalue("without_packages")
    with caplog.at_level(logging.INFO):
        trainer = library_trainer(Voting(2), tokenizer, tmp_path)
    assert type(trainer.engine) is GenerateEngine
    (said,) = [record.getMessage() for record in caplog.records if "multirole_cpu" in record.getMessage()]
    assert "needs the package multirole_cpu, which is not installed: run `pip install '.[cpu]'`" in said
    with pytest.raises(ValueError, match=r"got 'transformers'.*pip install '\.\[cpu\]'"):
        check_engine("transformers")
    assert load_engine("auto", trainer.peft_model, is_float32=True) is GenerateEngine


def gradient(tokenizer, folder: Path, bf16: bool) -> torch.Tensor:
    trainer = library_trainer(Voting(), tokenizer, folder, updates="one", bf16=bf16, micro_batch_tokens=16384)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    parameters, _ = trainer.compute_gradient(trainer.model, "shared", rows, 64)
    return gradient_of(parameters)


@contextmanager
def counted(seen: list[str], name: str):
    seen.append(name)
    yield


class Counting(CPUPasses):
    """Says which of its contexts passes ran in."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def head(self, base):
        return counted(self.seen, "head")

    def bfloat16_model(self, base, adapter, sums):
        self.seen.append(f"model with {adapter}")
        return super().bfloat16_model(base, adapter, sums)


@pytest.mark.parametrize("bf16", [False, True])
def test_passes_that_a_package_registers_are_used_and_plain_ones_give_the_same_gradient(
    tokenizer, tmp_path, monkeypatch, bf16
):
    passes = Counting()
    monkeypatch.setattr(fast_passes, "installed", lambda: [passes])
    fast = gradient(tokenizer, tmp_path, bf16)
    assert set(passes.seen) == {"head"} | ({"model with shared"} if bf16 else set())
    monkeypatch.setattr(fast_passes, "installed", list)
    plain = gradient(tokenizer, tmp_path, bf16)
    if bf16:
        assert torch.nn.functional.cosine_similarity(fast.flatten(), plain.flatten(), dim=0) > 0.999
        assert not torch.equal(fast, plain)
    else:
        assert torch.equal(fast, plain)


def test_the_passes_for_cpus_are_registered():
    assert [type(passes) for passes in fast_passes.installed()] == [CPUPasses]
