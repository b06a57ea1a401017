"""The names inside TRL, transformers and PEFT that `trl_parts` lists exist, and their sources are the ones that were read.

When a pin moves: read the diff of each name that fails, adapt `trl_parts.py` if need be, then renew its digest
(`python -m multirole.trl_parts --digests`).
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from trl.kernels import chunked_logprob
from trl.trainer import utils

import multirole
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.trl_parts import PRIVATE, StockHooks, digest, owner_of, private_table
from multirole.workflows import Voting


def test_the_sources_are_the_ones_we_read():
    changed = [f"{p.owner}.{p.name}" for p in PRIVATE if p.digests and digest(p) not in p.digests.split()]
    assert not changed, "read what changed in these, then renew their digests"


def test_every_private_name_exists(make_library_trainer):
    """Attributes without a source of their own are looked up in their class, its source or a trainer."""
    trainer = make_library_trainer(Voting())
    for private in PRIVATE:
        owner = owner_of(private)
        for name in private.name.split(", "):
            is_there = hasattr(owner, name) or hasattr(trainer, name) or name in inspect.getsource(owner)
            assert is_there, f"{private.owner}.{name}"


@pytest.mark.parametrize("owner", [MultiRoleGRPOTrainer, StockHooks])
def test_every_override_is_among_them(owner):
    """Checks the method of the nearest class of another package that defines it."""
    overridden = {(p.owner.rpartition(".")[2], p.name) for p in PRIVATE if p.use == "overridden"}
    others = [parent for parent in owner.__mro__[1:-1] if not parent.__module__.startswith("multirole")]
    for name, value in vars(owner).items():
        parents = [parent for parent in others if name in vars(parent)]
        if inspect.isfunction(value) and parents:
            assert (parents[0].__name__, name) in overridden, f"{parents[0].__name__}.{name}"


OF_OTHERS = {
    "_C", "_accelerator_setAllocatorSettings", "_DropoutNd", "_softmax_backward_data",  # torch
    "_adapter_manager",  # vLLM
    "_platform",  # openai
    "_current_frames",  # sys
}  # fmt: skip


def test_no_private_name_is_missing():
    """Whatever the package reads or sets with a leading underscore, and defines nowhere, is in the list."""
    used, defined = {}, set()
    for path in (Path(multirole.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                    | ast.Name(id=name, ctx=ast.Store())
                ):
                    defined.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                    used.setdefault(name, f"{path.name}:{node.lineno}")
    listed = {name for private in PRIVATE for name in private.name.split(", ")} | OF_OTHERS
    assert {name: place for name, place in used.items() if name not in defined | listed} == {}


def test_the_page_has_the_table_of_private_names():
    page = Path(__file__).parents[2] / "docs" / "extending_trl.md"
    assert private_table() in page.read_text(encoding="utf-8"), "python -m multirole.trl_parts prints it"


def test_trl_itself_is_left_as_it_was():
    """TRL's kernel is replaced only while rows are scored."""
    assert utils._use_triton is chunked_logprob._use_triton


USE_OF_VLLM = """
import sys
import multirole.trl_parts
assert "vllm" not in sys.modules
from trl import import_utils
from trl.generation import vllm_generation
assert vllm_generation.is_vllm_available is import_utils.is_vllm_available
from trl.trainer import grpo_trainer
assert grpo_trainer.VLLMGeneration is multirole.trl_parts.vllm_generation
assert isinstance(vllm_generation.VLLMGeneration, type)
if import_utils.is_vllm_available():
    assert vllm_generation.SamplingParams(temperature=0.5).temperature == 0.5
    assert sys.modules["vllm"].SamplingParams is type(vllm_generation.SamplingParams(temperature=0.5))
"""


@pytest.mark.slow
def test_importing_trl_neither_imports_vllm_nor_keeps_trl_from_it():
    subprocess.run([sys.executable, "-c", USE_OF_VLLM], check=True)
