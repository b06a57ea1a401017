"""What the paper's scales combine and the embedded scale does not: bfloat16, checkpointing, shards, vLLM, several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import processes
import pytest
import torch
from conftest import table
from fsdp2_on_cpu import run_sharded
from toy_qwen3 import toy_model, toy_tokenizer

from multirole.doctor.checks import CHECKS
from multirole.experiment.cell import Cell
from multirole.experiment.folders import is_done
from multirole.experiment.launch import Launch, spawn
from multirole.experiment.presets import MODELS
from multirole.experiment.run import run_cell

HERE = Path(__file__).parent
ROWS = str(HERE / "data" / "dapo_rows.jsonl")
FIELDS = {
    "workflow": "eval_opt", "policy": "ip", "task": "math", "iterations": 2, "n_problems": 2, "n_episodes": 4, "n_validation": 3,
    "n_train": 8, "eval_every": 2, "save_every": 2, "warmup_iterations": 1, "learning_rate": 5e-3, "old_logprobs": "recomputed",
}  # fmt: skip

pytestmark = pytest.mark.slow


def torchrun(script: str, parameters: dict, folder: Path) -> str:
    """Two processes on this machine; their standard output."""
    path = folder / "parameters.json"
    path.write_text(json.dumps(parameters))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(HERE / script),
        str(path),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same_rollouts(one: Path, other: Path, logprobs: float) -> None:
    """The first iteration's texts are equal and its perplexities nearly: processes add floats in another order."""
    a, b = (table(folder, "roles").query("iteration == 1").reset_index() for folder in (one, other))
    pd.testing.assert_series_equal(a["tokens"], b["tokens"])
    assert (a["perplexity"] - b["perplexity"]).abs().max() < logprobs


def test_shards_in_bfloat16_with_checkpointing(tmp_path):
    fields = FIELDS | {"dtype": "bfloat16"}
    one = run_cell(Cell(**fields), tmp_path / "one")
    given = fields | {"results_dir": str(tmp_path), "sharding": "fsdp2", "gradient_checkpointing": True}
    assert processes.run_together(2, tmp_path / "log", run_sharded, given) == [0, 0], (tmp_path / "log.0").read_text()[
        -3000:
    ]
    other = tmp_path / "tiny-s" / one.name
    assert is_done(other)
    same_rollouts(one, other, 5e-3)


def test_two_processes_with_vllm(tmp_path):
    pytest.importorskip("vllm")
    fields = FIELDS | {"engine": "vllm"}
    one = run_cell(Cell(**fields), tmp_path / "one")
    spawn(Cell(**fields).parameters(), Launch(results_dir=str(tmp_path), n_processes=2))
    other = tmp_path / "tiny-s" / one.name
    assert is_done(other) and json.loads((other / "provenance.json").read_text())["processes"] == 2
    same_rollouts(one, other, 1e-3)


def test_the_doctor_examines_two_processes(tmp_path):
    found = [
        json.loads(line) for line in torchrun("examine_here.py", FIELDS, tmp_path).splitlines() if line.startswith("{")
    ]
    assert {(one["rank"], one["check"]) for one in found} == {(rank, check) for rank in (0, 1) for check in CHECKS}
    assert [one for one in found if not one["holds"]] == []


def test_the_doctor_passes_vllm_in_bfloat16(tmp_path):
    """The first sight of its margins where engine and trainer round apart from each other, as on a GPU."""
    pytest.importorskip("vllm")
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(FIELDS | {"engine": "vllm", "dtype": "bfloat16", "temperature": 0.7}))
    done = subprocess.run(
        [sys.executable, str(HERE / "examine_here.py"), str(path)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(CHECKS), done.stderr[-3000:]
    assert [one for one in found if not one["holds"]] == []


def test_a_cell_with_the_real_widths_and_words(tmp_path):
    """Qwen3-0.6B with 4 of its 28 layers, one iteration; the peak of the resident set, which has no other layer's activations."""
    s, tokenizer = MODELS["0.6b"].shape, toy_tokenizer()
    shape = {
        "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.intermediate, "num_hidden_layers": 4,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
    }  # fmt: skip
    toy_model(tokenizer, **shape).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    fields = {
        "workflow": "voting", "policy": "ip", "scale": "0.6b", "model": str(tmp_path / "model"), "data": ROWS, "iterations": 1,
        "n_problems": 2, "n_episodes": 2, "n_voters": 1, "n_validation": 1, "n_train": 4, "max_prompt_tokens": 2000,
        "max_response_tokens": 8, "eval_every": 1, "save_every": 1, "warmup_iterations": 0, "results_dir": str(tmp_path), "doctor": "off",
    }  # fmt: skip
    (tmp_path / "parameters.json").write_text(json.dumps(fields))
    code = "import resource, sys\nfrom multirole.__main__ import train\n"
    code += "train(['--parameters', sys.argv[1]])\nprint('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "parameters.json")], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) / 2**20 < 12, "GiB"
    assert len(list(tmp_path.glob("0.6b/*/DONE"))) == 1
