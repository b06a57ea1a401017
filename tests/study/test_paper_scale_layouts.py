"""Combinations that only the paper's scales have: bfloat16, vLLM, several processes, the doctor, waiting."""

import json
import re
from pathlib import Path

import pandas as pd
import processes
import pytest
import torch
from fsdp2_on_cpu import be_a_gpus_process
from toy_qwen3 import toy_model, toy_tokenizer
from trainers import table

from multirole_study import doctor
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch, spawn
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

FIELDS = {
    "workflow": "eval_opt", "policy": "ip", "task": "math", "max_steps": 2, "n_problems": 2, "num_generations": 4, "n_validation": 3,
    "n_train": 8, "eval_steps": 2, "save_steps": 2, "warmup_steps": 1, "learning_rate": 5e-3, "old_logprobs": "recomputed",
}  # fmt: skip

pytestmark = pytest.mark.slow


def examine(parameters: dict) -> None:
    """Run `multirole doctor`'s checks in one of several processes; raise if a check fails."""
    cell, launch = Cell.from_parameters(parameters)
    if launch.is_sharded:
        be_a_gpus_process()
    assert doctor.run(cell, launch) == 0


def same_rollouts(one: Path, other: Path, logprobs: float) -> None:
    """Check that the first iteration's texts are equal, and its perplexities nearly so: processes add floats in another order."""
    a, b = (table(folder, "roles").query("iteration == 1").reset_index() for folder in (one, other))
    pd.testing.assert_series_equal(a["tokens"], b["tokens"])
    assert (a["perplexity"] - b["perplexity"]).abs().max() < logprobs


def test_two_processes_with_vllm(tmp_path):
    pytest.importorskip("vllm")
    fields = FIELDS | {"engine": "vllm"}
    one = run_cell(Cell(**fields), tmp_path / "one")
    spawn(Cell(**fields).parameters(), Launch(results_dir=str(tmp_path), n_processes=2))
    other = tmp_path / "tiny-r" / one.name
    assert is_done(other) and json.loads((other / "provenance.json").read_text())["processes"] == 2
    same_rollouts(one, other, 1e-3)


SHARDED = {"sharding": "fsdp2", "dtype": "bfloat16", "gradient_checkpointing": True, "temperature": 0.7}


@pytest.mark.parametrize(
    "layout", [{}, {"sharding": "fsdp2"}, SHARDED], ids=["data-parallel", "fsdp2", "fsdp2-bfloat16"]
)
def test_the_doctor_examines_two_processes_and_reports_once(layout, tmp_path):
    log = tmp_path / "log"
    codes = processes.run_together(2, log, examine, FIELDS | layout)
    texts = [Path(f"{log}.{rank}").read_text() for rank in (0, 1)]
    assert codes == [0, 0], texts[0][-3000:]
    assert [text.count(" pass ") for text in texts] == [len(doctor.CHECKS), 0]
    assert ["disk" in text for text in texts] == [True, False]


def test_the_doctor_passes_vllm_in_bfloat16(tmp_path):
    """Here engine and trainer round differently, as on a GPU, so that the doctor's margins are tested."""
    pytest.importorskip("vllm")
    log, fields = tmp_path / "log", FIELDS | {"engine": "vllm", "dtype": "bfloat16", "temperature": 0.7}
    code = processes.run(log, examine, fields, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert code == 0, log.read_text()[-3000:]


def run_aloud(parameters: dict) -> None:
    """Run a cell as `multirole train` does at a paper scale."""
    cell, launch = Cell.from_parameters(parameters)
    if launch.is_sharded:
        be_a_gpus_process()
    run_cell(cell, launch)


@pytest.mark.parametrize(("n_processes", "sharding"), [(1, "none"), (2, "none"), (2, "fsdp2")])
def test_every_layout_prints_what_takes_its_first_minutes(n_processes, sharding, tmp_path):
    """Each slow action prints a line when it begins and its seconds when it ends; other processes print nothing."""
    tokenizer = toy_tokenizer()
    toy_model(tokenizer).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    fields = FIELDS | {
        "scale": "0.6b", "model": str(tmp_path / "model"), "data": str(Path(__file__).parents[1] / "data" / "dapo_rows.jsonl"),
        "max_completion_length": 16, "max_prompt_tokens": 3000, "lora_r": 4, "n_validation": 2, "num_generations": 2,
        "engine": "transformers", "results_dir": str(tmp_path), "sharding": sharding,
    }  # fmt: skip
    log = tmp_path / "log"
    if n_processes == 1:
        codes, texts = [processes.run(log, run_aloud, fields)], [log.read_text()]
    else:
        codes = processes.run_together(n_processes, log, run_aloud, fields)
        texts = [Path(f"{log}.{rank}").read_text() for rank in range(n_processes)]
    assert set(codes) == {0}, texts[0][-3000:]
    lines = [
        r"  loading the model and the rollout engine \.\.\.", r"  loading the model and the rollout engine took \d+ s",
        r"validation at iteration 0 .*", r"iteration 1/2 .*",
    ]  # fmt: skip
    matches = [re.search(rf"^{line}$", texts[0], re.MULTILINE) for line in lines]
    assert all(matches), texts[0]
    assert [match.start() for match in matches] == sorted(match.start() for match in matches)
    assert re.search(r"^  validating on 2 problems before the first iteration \.\.\.$", texts[0], re.MULTILINE)
    assert not any("loading the model" in text or "iteration 1/2" in text for text in texts[1:])
