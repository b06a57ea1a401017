"""What the planner says before a download is what a run then uses, and what cannot fit is refused."""

import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

import multirole.plan as planner
from multirole import plan_memory
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.plan import Device, Stage, _group_limits, main, plan, stages, this_device
from multirole.plan_memory import GIB

SHAPE = {
    "num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 6144,
}  # fmt: skip
JOBS = [  # kind, dtype, policy, checkpointed, rank
    ("update", "float32", "sp", False, 16),
    ("update", "float32", "ip", True, 16),
    ("update", "bfloat16", "ip", False, 16),
    ("update", "bfloat16", "sp", True, 16),
    ("update", "float32", "sp", True, 0),
    ("update", "bfloat16", "ip", False, 0),
    ("rollout", "float32", "ip", False, 16),
    ("rollout", "bfloat16", "sp", False, 16),
]
UPDATE = {"max_prompt_tokens": 384, "max_response_tokens": 128, "micro_batch_tokens": 1024, "n_problems": 2}
ROLLOUT = {"max_prompt_tokens": 256, "max_response_tokens": 48, "n_problems": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """dtype -> a folder with a random Qwen3 of a medium shape."""
    config = Qwen3Config(
        **SHAPE, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model, found = Qwen3ForCausalLM(config), {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = tmp_path_factory.mktemp(dtype)
        model.to(getattr(torch, dtype)).save_pretrained(found[dtype])
        tokenizer.save_pretrained(found[dtype])
    return found


def fields(folders: dict[str, Path], kind: str, dtype: str, policy: str, rank: int) -> dict[str, object]:
    sizes = UPDATE if kind == "update" else ROLLOUT
    workflow = "eval_opt" if kind == "update" else "single"  # one slot per role, as in the measured step
    given = {"workflow": workflow, "policy": policy, "scale": "0.6b", "model": str(folders[dtype]), "dtype": dtype,
             "lora_rank": rank, "engine": "transformers", "old_logprobs": "sampled"}  # fmt: skip
    return given | sizes


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory) -> list[dict[str, int]]:
    """Bytes before and at the peak of each job, from one process."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the resident set's peak is read from Linux's /proc")
    path = tmp_path_factory.mktemp("jobs") / "jobs.json"
    jobs = [{"kind": k, "checkpointed": c, "cell": fields(folders, k, d, p, r)} for k, d, p, c, r in JOBS]
    path.write_text(json.dumps(jobs))
    quiet = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_run.py")), str(path)],
        env=os.environ | quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("at", range(len(JOBS)), ids=["-".join(map(str, job)) for job in JOBS])
def test_the_estimate_is_within_15_percent_of_a_measured_run(folders, measured, monkeypatch, at):
    """Against the resident set of a real `optimizer_step`, or of a real rollout: what the model adds to the process."""
    kind, dtype, policy, checkpointed, rank = JOBS[at]
    monkeypatch.setattr(plan_memory, "is_checkpointed", lambda cell: checkpointed)
    monkeypatch.setitem(planner.QUESTION_TOKENS, "math", ROLLOUT["max_prompt_tokens"])
    monkeypatch.setattr(planner, "this_device", lambda: Device("CPU", 10**12))
    found = plan(Cell(**fields(folders, kind, dtype, policy, rank)))
    absent = {"process", "changes of two iterations, float32"}  # a step is no iteration
    if kind == "rollout":  # it has no optimizer
        absent.add("AdamW moments, float32")
    if kind == "update":  # it has no engine
        absent |= {name for name in found.parts if name.startswith("transformers engine")}
    column = ("rollout", "update").index(kind)
    expected = sum(phases[column] for name, phases in found.parts.items() if name not in absent)
    used = measured[at]["peak"] - measured[at]["before"]
    assert used > 150 * 2**20, "too small to tell the model's parts from noise"
    assert expected == pytest.approx(used, rel=0.15)
    assert expected + plan_memory.CPU_PROCESS == pytest.approx(measured[at]["peak"], rel=0.15)


def test_constants_of_other_code_are_still_its_own():
    assert chunked_logprob.TOKEN_CHUNK_SIZE == plan_memory.HEAD_TOKENS
    assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == plan_memory.HEAD_COLUMNS
    assert inspect.signature(TransformersEngine).parameters["max_rows"].default == plan_memory.MAX_ROWS


@pytest.mark.parametrize(
    ("workflow", "task", "expected"),
    [
        ("single", "math", {"generator": (1, 1)}),
        ("voting", "math", {"generator": (3, 3), "aggregator": (1, 1)}),
        ("eval_opt", "math", {"generator": (1, 3), "evaluator": (1, 3)}),
        ("eval_opt", "code", {"generator": (1, 2), "evaluator": (1, 2)}),
        ("orch_workers", "code", {"orchestrator": (1, 1), "worker": (1, 3), "synthesizer": (1, 1)}),
    ],
)
def test_sequences_tokens_and_steps_of_an_iteration(workflow, task, expected):
    """512 episodes an iteration; caps and optimizer steps counted by hand."""
    cell = Cell(workflow, "ip", task, "1.7b")
    found = plan(cell, device_bytes=80 * GIB)
    table = found.tokens()
    assert list(table.index) == list(expected)
    for role, (least, most) in expected.items():
        row = table.loc[role]
        assert (row["sequences at least"], row["sequences at most"]) == (512 * least, 512 * most)
        assert row["prompt tokens at most"] == 512 * most * cell.max_prompt_tokens
        assert row["completion tokens at most"] == 512 * most * cell.max_response_tokens
        assert row["completion tokens expected"] == 512 * most * cell.max_response_tokens // 4
        assert row["prompt tokens expected"] <= row["prompt tokens at most"]
    assert found.optimizer_steps() == expected  # 512 rows are one step, and IP has one adapter per role
    shared = plan(Cell(workflow, "sp", task, "1.7b"), device_bytes=80 * GIB).optimizer_steps()["shared"]
    assert shared == tuple(map(sum, zip(*expected.values(), strict=True)))


def test_prompts_quote_what_was_said_before():
    assert stages(Cell("voting", "sp", scale="1.7b"), 100)[1] == Stage("aggregator", 1, 1, 160 + 300, 1)
    prompts = [stage.prompt for stage in stages(Cell("eval_opt", "sp", scale="1.7b"), 100)]
    assert prompts == [160, 260, 360, 460, 560, 660]


def test_arithmetic_of_one_short_run_by_hand():
    """One role, one row per episode: 2 per weight and token forward, 2 backward (frozen), 2 again (checkpointed)."""
    cell = Cell("single", "sp", scale="0.6b", n_problems=1, n_episodes=2, max_prompt_tokens=100, old_logprobs="sampled")
    found = plan(cell, device_bytes=80 * GIB, mean_response=60)
    linear, lora, head = 28 * 15_728_640, 28 * 64 * 22_528, 151_936 * 1024
    attention = 2 * 28 * 2048 * 160**2
    forward = 2 * (linear + lora) * 160 + attention
    assert found.operations["rollout"] == 2 * (forward + 2 * head * 60)
    assert found.operations["update"] == 2 * (
        2 * forward + (2 * linear + 4 * lora) * 160 + 2.5 * attention + 6 * head * 60
    )


def test_sharding_divides_the_base_and_nothing_that_a_process_owns():
    cell = Cell("voting", "ip", scale="4b")
    whole = plan(cell, Launch(n_processes=2), device_bytes=80 * GIB).parts
    shards = plan(cell, Launch(n_processes=2, sharding="fsdp2"), device_bytes=80 * GIB).parts
    base, act = "frozen base, bfloat16", "activations of 40960 tokens"
    assert shards[base][1] == whole[base][1] // 2 and shards[act] == whole[act]
    assert whole[base][1] == 2 * 4_022_468_096  # Qwen3-4B


def test_the_sleeping_engine_and_the_activations_do_not_add_up():
    found = plan(Cell("voting", "ip", scale="1.7b"), Launch(vllm_memory=0.4), device_bytes=80 * GIB)
    engine, act = found.parts["vLLM, 40% of the GPU"], found.parts["activations of 40960 tokens"]
    assert engine[0] == 32 * GIB and engine[1] < 4 * GIB and act[0] == 0
    assert found.need == max(found.peaks.values()) < engine[0] + act[1] + engine[1]


@pytest.mark.parametrize(
    ("cell", "launch", "gib", "advice"),
    [
        ({"scale": "4b"}, {}, 24, "fsdp2"),
        ({"scale": "1.7b", "micro_batch_tokens": 400_000}, {}, 80, "micro_batch_tokens below 400000"),
        ({"scale": "1.7b"}, {"vllm_memory": 0.98}, 80, "vllm_memory below 0.98"),
        ({"scale": "4b"}, {"vllm_memory": 0.1}, 80, "larger vllm_memory"),
    ],
)
def test_what_cannot_fit_is_refused_and_told_what_to_lower(cell, launch, gib, advice):
    found = plan(Cell("voting", "ip", **cell), Launch(**launch), device_bytes=gib * GIB)
    with pytest.raises(ValueError, match="does not fit") as error:
        found.check()
    assert advice in str(error.value) and "Write" in str(error.value)
    assert found.verdict().endswith(".") and not found.fits


def test_the_papers_cells_fit_the_papers_two_gpus():
    for workflow in ("voting", "eval_opt", "orch_workers"):
        for scale in ("0.6b", "1.7b", "4b"):
            found = plan(Cell(workflow, "ip", scale=scale), n_devices=2, device_bytes=80 * GIB)
            found.check()
            assert " fits" in found.verdict()


@pytest.mark.parametrize(("scale", "unit"), [("tiny-s", "MiB"), ("1.7b", "GiB")])
def test_the_table_adds_up_and_names_its_units(scale, unit):
    found = plan(Cell("voting", "sp", scale=scale))
    table = found.table()
    memory = table[table.index.str.endswith(f"({unit})")]
    parts, total = memory.iloc[:-1].sum(), memory.iloc[-1]
    assert all(math.isclose(parts[phase], total[phase], abs_tol=0.06) for phase in ("rollout", "update"))
    assert all("(" in name for name in table.index)


def test_the_machine_grants_what_its_control_groups_leave(tmp_path):
    (tmp_path / "self").write_text("9:memory:/a/b\n0::/c\n3:cpu:/a\n")
    for path, text in {"memory/a/memory.limit_in_bytes": "3000", "c/memory.max": "max", "memory.max": "2000"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert sorted(_group_limits(tmp_path, tmp_path / "self")) == [2000, 3000]
    assert this_device().size > 0


def test_the_command_line(capsys):
    cell = ["-p", "workflow", "voting", "-p", "policy", "ip", "-p", "scale", "1.7b"]
    assert main([*cell, "--devices", "2", "--memory-gib", "80"]) == 0
    out = capsys.readouterr().out
    assert "frozen base, bfloat16 (GiB)" in out and "generator 3, aggregator 1" in out and " fits" in out
    assert main([*cell, "--memory-gib", "8"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["-p", "worklow", "voting"]) == 2
    assert "worklow" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--unknown"])
