"""`scale="0.6b"` fails within seconds if its model, rows or device are missing, and runs from local copies.

The local ones here: a random-weight Qwen3 of a toy shape with the pinned models' chat format, and rows written by us.
"""

import json
import resource
import shutil
import sys
from pathlib import Path

import processes
import pytest
import torch
from paper_shapes import config_of
from toy_qwen3 import toy_model, toy_tokenizer
from trainers import table
from transformers import AutoTokenizer, Qwen3ForCausalLM

from multirole_study import plan
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.preflight import preflight
from multirole_study.experiment.presets import MODELS
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

DATA = Path(__file__).parents[1] / "data"
ROWS = {"math": DATA / "dapo_rows.jsonl", "code": DATA / "deepcoder_rows.jsonl"}
SMALL = {
    "max_steps": 2, "n_problems": 2, "num_generations": 2, "n_validation": 2, "eval_steps": 2, "save_steps": 2,
    "warmup_steps": 1, "lora_r": 4, "max_completion_length": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen3 of two narrow layers over bytes, with Qwen3's special tokens."""
    folder = tmp_path_factory.mktemp("models") / "toy-qwen3"
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("workflow", "policy", "task", "changes"),
    [
        ("voting", "ip", "math", {}),
        pytest.param(
            "eval_opt", "sp", "code", {"preset": "released_code", "max_prompt_tokens": 4096}, marks=pytest.mark.slow
        ),
        pytest.param("orch_workers", "ip", "math", {"dtype": "float32", "engine": "vllm"}, marks=pytest.mark.slow),
    ],
)
def test_the_whole_cell_runs_from_local_files(workflow, policy, task, changes, model_folder, tmp_path):
    lengths = {"max_prompt_tokens": 3000}
    cell = Cell(
        workflow, policy, task, "0.6b", model=str(model_folder), data=str(ROWS[task]), **SMALL | lengths | changes
    )
    folder = run_cell(cell, tmp_path)
    assert is_done(folder) and folder.parent.name == "0.6b"
    roles = table(folder, "roles")
    assert set(roles["role"]) == set(cell.make_workflow().roles)
    first = roles[roles["iteration"] == 1]["max_logprob_gap"].max()  # bfloat16 forward against a float32 engine
    assert first < (0.2 if cell.dtype == "bfloat16" else 5e-4)
    record = json.loads((folder / "provenance.json").read_text())
    assert record["model"]["name"] == "toy-qwen3" and record["model"]["sha256"]
    assert record["cpu"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert record["dataset"]["is_pinned"] is False and record["problems"]["validation"] == 2
    assert str(tmp_path) not in (folder / "config.json").read_text() and str(DATA) not in json.dumps(record)


def test_adapters_are_float32_over_a_bfloat16_base(model_folder):
    from multirole_study.experiment.cell_trainer import load_model

    model, _ = load_model(Cell("voting", "ip", "math", "0.6b", model=str(model_folder)))
    kinds = {("lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_everything_that_is_missing_is_reported_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError) as error:
        run_cell(Cell("voting", "sp", "code", "0.6b"), tmp_path / "runs")
    message = str(error.value)
    pinned = MODELS["0.6b"]
    assert "a GPU" in message and "scale='tiny-r'" in message
    assert f"hf download {pinned.repo} --revision {pinned.revision}" in message
    assert "hf download agentica-org/DeepCoder-Preview-Dataset" in message
    assert not list((tmp_path / "runs").rglob("checkpoint*"))


def test_a_folder_that_is_no_model_is_refused(model_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        preflight(Cell("voting", "sp", "math", "0.6b", model=str(broken), data=str(ROWS["math"])))
    assert AutoTokenizer.from_pretrained(model_folder).chat_template
    with pytest.raises(ValueError, match="not in this machine's cache"):
        locate(Cell("voting", "sp", scale="4b"), may_download=False)


def test_a_run_is_not_continued_with_other_rows(model_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    shutil.copy(ROWS["math"], rows)
    cell = Cell(
        "single", "sp", "math", "0.6b", model=str(model_folder), data=str(rows), max_prompt_tokens=3000,
        **SMALL | {"max_steps": 1, "eval_steps": 1, "save_steps": 1},
    )  # fmt: skip
    folder = run_cell(cell, tmp_path / "runs")
    (folder / "DONE").unlink()
    rows.write_text(
        rows.read_text().replace("solution", "solution", 1) + rows.read_text().splitlines()[0].replace("?", "??") + "\n"
    )
    with pytest.raises(ValueError, match="was started with dataset"):
        run_cell(cell, tmp_path / "runs")


def test_prompts_over_the_cap_are_left_out_of_training_and_counted(model_folder, tmp_path):
    from multirole_study.experiment.preflight import load_problems

    cell = Cell("single", "sp", "math", "0.6b", model=str(model_folder), data=str(ROWS["math"]), n_problems=2,
                max_prompt_tokens=300)  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    train, validation, counts = load_problems(cell, tokenizer)
    assert counts["train"] == len(train) and counts["train"] + counts["train_overlong"] == 21
    assert 0 < counts["train_overlong"] < 21 and len(validation) == 3
    with pytest.raises(ValueError, match="leaves 0 of 21 training problems"):
        load_problems(Cell("single", "sp", "math", "0.6b", model=str(model_folder), data=str(ROWS["math"]), n_problems=2,
                           max_prompt_tokens=10), tokenizer)  # fmt: skip


def run_and_measure(parameters: dict) -> None:
    """Run a cell and print the peak of this process's memory."""
    run_cell(*Cell.from_parameters(parameters))
    sys.stdout.write(f"\n{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\n")
    sys.stdout.flush()


@pytest.mark.slow
def test_an_iteration_with_the_real_widths_and_vocabulary_takes_the_memory_that_was_planned(tmp_path, monkeypatch):
    """The model has four of Qwen3-0.6B's layers, 151,936 tokens and rank 64. The KL anchor gives every row a gradient, whatever its reward."""
    tokenizer, config = toy_tokenizer(), config_of(MODELS["0.6b"].shape)
    config.num_hidden_layers, config.eos_token_id, config.layer_types = (
        4,
        tokenizer.eos_token_id,
        config.layer_types[:4],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {i} + {i}?", "solution": str(2 * i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parameters = {
        "workflow": "voting", "policy": "ip", "scale": "0.6b", "model": str(tmp_path / "model"), "data": str(tmp_path / "rows.jsonl"),
        "max_steps": 1, "n_problems": 1, "num_generations": 2, "n_validation": 1, "eval_steps": 1, "save_steps": 1,
        "warmup_steps": 0, "max_prompt_tokens": 1000, "max_completion_length": 24, "micro_batch_tokens": 2048,
        "beta": 0.1, "engine": "transformers",
    }  # fmt: skip
    log = tmp_path / "log"
    assert processes.run(log, run_and_measure, parameters | {"results_dir": str(tmp_path)}) == 0, log.read_text()[
        -3000:
    ]
    (folder,) = (tmp_path / "0.6b").iterdir()
    assert is_done(folder) and len(table(folder, "ledger")) == 4
    peak = int(log.read_text().splitlines()[-1])
    monkeypatch.setattr(plan, "this_device", lambda: ("CPU", 10**12))
    planned = plan.plan(*Cell.from_parameters(parameters))
    sys.stdout.write(f"peak {peak / plan.GIB:.2f} GiB, required {planned.need}, with all bounds {planned.peaks}\n")
    assert 0.85 * peak <= planned.need[0] <= 1.15 * peak
    assert peak <= max(planned.peaks.values()), "the caches were not full"
