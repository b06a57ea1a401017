"""The planned memory agrees with what a run uses, and cells that cannot fit are refused."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

import multirole_study.plan as planner
from multirole.engines.generate import GenerateEngine
from multirole.options import MultiRoleGRPOConfig
from multirole_cpu import attention_head
from multirole_cpu import engine as transformers_engine
from multirole_cpu.engine import TransformersEngine
from multirole_study.__main__ import plan as command
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.presets import MODELS
from multirole_study.experiment.settings import UserError
from multirole_study.paper.grid import Grid
from multirole_study.plan import (
    GIB,
    adapters,
    disk_need,
    plan,
    report,
    settled,
    verdict,
    vllm_batch,
)

FAKE = [  # scale, policy, tokens of a micro-batch, of a row, checkpointed, packed
    ("4b", "sp", 40960, 1280, True, False),
    ("0.6b", "sp", 10240, 1024, False, False),
    ("1.7b", "ip", 10240, 2048, False, True),
    ("1.7b", "ip", 40960, 2048, True, True),
]


@pytest.mark.slow
def test_the_estimate_is_within_15_percent_of_fake_tensors_at_the_papers_shapes():
    """Compares a micro-batch on a GPU: the base, the adapters, the gradients and the activations only."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "memory_on_fake_cuda.py"), json.dumps(FAKE)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for job, line in zip(FAKE, done.stdout.splitlines(), strict=True):
        (scale, policy, tokens, length, recomputes, _), measured = job, json.loads(line)
        cell = Cell(
            "voting",
            policy,
            scale=scale,
            max_prompt_tokens=length - 8,
            max_completion_length=8,
        )
        parts = by_name(plan(cell, Launch(gradient_checkpointing=recomputes, micro_batch_tokens=tokens), 1000 * GIB))
        held = ("frozen base, bfloat16", "adapters, float32", "gradients, float32")
        activations = planner.activations(cell, planner.shape_of(cell), tokens, True, recomputes)
        activations += parts["layers with the adapter joined"][1]
        adapter_bytes = adapters(cell) // len(set(cell.policy.values()))
        sys.stdout.write(f"{job}: {measured}, planned activations {activations}\n")
        assert sum(parts[name][1] for name in held) - adapter_bytes == pytest.approx(measured["before"], rel=0.01), job
        assert activations + adapter_bytes == pytest.approx(measured["peak"] - measured["before"], rel=0.15), job


def test_constants_equal_those_of_the_code_they_describe():
    assert chunked_logprob.TOKEN_CHUNK_SIZE == planner.HEAD_TOKENS
    assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == planner.HEAD_COLUMNS
    assert attention_head.TILE == planner.HEAD_TILE
    assert inspect.signature(TransformersEngine).parameters["max_rows"].default == planner.ENGINE_ROWS
    assert (transformers_engine.PREFIX_BYTES, transformers_engine.PREFIX_PARAMETERS) == (
        planner.PREFIX_BYTES,
        planner.PREFIX_PARAMETERS,
    )
    assert inspect.signature(GenerateEngine).parameters["max_rows"].default == planner.GENERATE_ROWS
    defaults = MultiRoleGRPOConfig  # whose attributes they are
    assert (defaults.vllm_max_num_seqs, defaults.vllm_max_num_batched_tokens) == (
        planner.MAX_GRAPH_ROWS,
        planner.STEP_TOKENS[1],
    )


def by_name(memory) -> dict[str, tuple[int, int]]:
    return {part.name: (part.rollout, part.update) for part in memory.parts}


def test_the_cpu_engine_by_hand():
    """SmolLM2 in bfloat16: 64 validation problems of three voters are more rows than an iteration's 96."""
    cell = Cell("voting", "sp", scale="smollm2", dtype="bfloat16", n_validation=64)
    parts = by_name(plan(cell))
    row = (cell.max_prompt_tokens + cell.max_completion_length) * 2 * (2 * 30 * 3 * 64)  # keys and values in 2 bytes
    assert parts["engine's KV cache, at most"] == (64 * 3 * row, 0)
    assert parts["engine's prefix cache, at most"] == (GIB, 0)
    head, adapter = 49152 * 576, MODELS["smollm2"].shape.adapter_parameters(cell.lora_r)
    body = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
    assert parts["engine's weights"] == (4 * head + 2 * head + 2 * body + 2 * adapter, 0)
    few = by_name(plan(Cell("voting", "sp", scale="smollm2", dtype="bfloat16", n_validation=16)))
    assert few["engine's KV cache, at most"] == (96 * row, 0)


def test_sharding_divides_the_base_and_not_the_activations():
    cell = Cell("voting", "ip", scale="4b")
    whole = by_name(plan(cell, Launch(n_processes=2), 24 * GIB))  # where all activations are recomputed
    shards = by_name(plan(cell, Launch(n_processes=2, sharding="fsdp2"), 24 * GIB))
    base, act = "frozen base, bfloat16", "activations of 40960 tokens"
    assert shards[base][1] == whole[base][1] // 2 and shards[act] == whole[act]
    assert whole[base][1] == 2 * 4_022_468_096  # Qwen3-4B
    buckets = "buckets of DDP, float32"
    assert whole[buckets] == whole["adapters, float32"]
    assert not {buckets} & {*shards, *by_name(plan(cell, Launch(), 24 * GIB))}


def test_the_sleeping_engine_and_the_activations_do_not_add_up():
    memory = plan(Cell("voting", "ip", scale="1.7b"), Launch(vllm_gpu_memory_utilization=0.4), 80 * GIB)
    parts = by_name(memory)
    kept_tokens = planner.tokens_kept(memory.cell, Launch(), 80 * GIB)
    engine, act = parts["vLLM, 40% of the GPU"], parts[f"activations of {kept_tokens} tokens, kept"]
    assert engine[0] == 32 * GIB and engine[1] < 4 * GIB and act[0] == 0
    assert max(memory.peaks.values()) < engine[0] + act[1] + engine[1]


def test_tiny_scales_are_planned_for_the_transformers_engine_on_a_gpu_too():
    assert plan(Cell("voting", "ip"), gpu_bytes=8 * GIB).cache is None
    assert plan(Cell("voting", "ip", engine="vllm"), gpu_bytes=8 * GIB).cache > 1


@pytest.mark.parametrize(
    ("cell", "launch", "gib", "advice"),
    [
        ({"scale": "4b"}, {}, 24, "fsdp2"),
        ({"scale": "1.7b"}, {"micro_batch_tokens": 400_000}, 80, "lower micro_batch_tokens"),
        ({"scale": "1.7b"}, {"vllm_gpu_memory_utilization": 0.98}, 80, "lower vllm_gpu_memory_utilization below 0.98"),
        ({"scale": "4b"}, {"vllm_gpu_memory_utilization": 0.1}, 80, "Raise vllm_gpu_memory_utilization"),
    ],
)
def test_a_cell_that_cannot_fit_is_refused_with_what_to_lower(cell, launch, gib, advice):
    memory = plan(Cell("voting", "ip", **cell), Launch(**launch), gib * GIB)
    assert not memory.fits and "does not fit" in verdict(memory) and advice in verdict(memory)


def test_a_tenth_of_a_gpu_stays_free_and_passes_are_as_small_as_that_needs():
    """An RTX 4090 reports 23.5 GiB. 40960 tokens of a 1.7B fill 21.5 of them, and the longest row has 25600."""
    cell, gpu = Cell("voting", "ip", scale="1.7b"), round(23.5 * GIB)
    whole = plan(cell, Launch(), gpu)
    assert 21.15 * GIB < whole.need[0] < gpu and not whole.fits and "10% of it must stay free" in verdict(whole)
    launch = settled(cell, Launch(), gpu)
    assert launch.micro_batch_tokens == 25600 and plan(cell, launch, gpu).need[0] <= 0.9 * gpu
    assert settled(cell, Launch(micro_batch_tokens=40960), gpu).micro_batch_tokens == 40960, "as it is written"
    assert settled(cell, Launch(), 80 * GIB).micro_batch_tokens is None
    assert not plan(
        Cell("voting", "ip", scale="4b"), settled(Cell("voting", "ip", scale="4b"), Launch(), gpu), gpu
    ).fits


def test_the_papers_cells_fit_the_papers_two_gpus():
    for workflow in ("voting", "eval_opt", "orch_workers"):
        for scale in ("0.6b", "1.7b", "4b"):
            memory = plan(Cell(workflow, "ip", scale=scale), Launch(n_processes=2), 80 * GIB)
            assert memory.fits and " fits" in verdict(memory)


def test_the_table_adds_up():
    launch = Launch(n_processes=2)
    memory = plan(Cell("voting", "sp", scale="1.7b"), launch, 80 * GIB)
    lines = report(memory, launch).splitlines()[2:]
    table = [[float(number) for number in line.split()[-2:]] for line in lines[: len(memory.parts) + 1]]
    for phase, *parts, total in zip(memory.peaks, *table, strict=True):
        assert sum(parts) == pytest.approx(total, abs=0.01)
        assert total == pytest.approx(memory.peaks[phase] / GIB, abs=0.001)


def test_a_run_that_this_machine_cannot_hold_is_refused(monkeypatch, tmp_path):
    cell, launch = Cell("voting", "ip"), Launch(results_dir=str(tmp_path / "not" / "made"))
    planner.check(cell, launch)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(ValueError, match="1 MiB free"):
        planner.check(cell, launch)
    need = planner.disk_need(cell)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=need - 1))
    with pytest.raises(ValueError, match="MiB free") as error:  # a byte too few: the two numbers must differ
        planner.check(cell, launch)
    free, needed = map(int, re.findall(r"(\d+) MiB", str(error.value)))
    assert free < needed
    monkeypatch.setattr(planner, "this_device", lambda: ("CPU", 2**28))
    with pytest.raises(ValueError, match="does not fit"):
        planner.check(cell, launch)


def test_disk_by_hand():
    """Qwen3-0.6B: two adapters; three checkpoints of weights and two moments; steps 10, 20 … 500 of 500 in bfloat16."""
    adapter_bytes = 2 * 4 * 28 * 64 * 22_528
    assert disk_need(Cell("voting", "ip", scale="0.6b")) == (3 * 3 + 50 / 2) * adapter_bytes
    assert disk_need(Cell("voting", "ip", scale="0.6b", eval_steps=120)) == (3 * 3 + 5 / 2) * adapter_bytes


def test_copies_for_past_selves_are_planned_and_saved():
    """The trained adapter and four copies: the engine merges a body for each and one for the base; only one has moments."""
    cell = Cell("voting", "generator=a,aggregator=past:a", scale="qwen-0.5b", dtype="float32")
    s = MODELS["qwen-0.5b"].shape
    body, adapter_bytes = 4 * s.layers * s.linear, 4 * s.adapter_parameters(cell.lora_r)
    parts = by_name(plan(cell))
    assert parts["engine's merged weights"][0] == 8 * s.vocab * s.hidden + (1 + 5) * body
    assert parts["adapters, float32"][0] == 5 * adapter_bytes
    assert parts["AdamW moments, float32"][0] == 2 * adapter_bytes
    n_evaluated = -(-cell.max_steps // cell.eval_steps)
    assert disk_need(cell) == (3 * (5 + 2) + n_evaluated * 5) * adapter_bytes


def test_a_budget_may_end_a_run_before_its_disk_is_full(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**20))
    planner.check_disk(Cell("voting", "ip", max_steps=5000, max_sampled_tokens=10**6), tmp_path)
    assert "1 MiB free" in caplog.text and "max_sampled_tokens=1000000" in caplog.text
    with pytest.raises(ValueError, match="1 MiB free"):
        planner.check_disk(Cell("voting", "ip", max_steps=5000), tmp_path)


def test_activations_are_kept_if_they_fit_and_recomputed_otherwise():
    cell, small = Cell("voting", "sp", scale="0.6b"), Launch(micro_batch_tokens=10240)
    assert not settled(cell, small, 141 * GIB).recomputes("0.6b")
    assert settled(cell, small, 24 * GIB).recomputes("0.6b")
    assert settled(cell, small.replace(gradient_checkpointing=True), 141 * GIB).recomputes("0.6b")
    assert not settled(Cell("voting", "sp"), Launch(), 8 * GIB).recomputes("tiny-r")


def test_micro_batches_whose_activations_are_kept():
    """The plan uses the trainer's size of micro-batches on such a GPU: it counts their activations, and no recomputation in the time."""
    cell = Cell("voting", "ip", scale="1.7b")
    kept_tokens, s = planner.tokens_kept(cell, Launch(), 80 * GIB), MODELS["1.7b"].shape
    per_token = s.layers * (14 * s.hidden + 6 * s.intermediate) * 2
    expected = 0.5 * (80 * GIB - 4 * s.parameters - 5 * 4 * 2 * s.adapter_parameters(64)) / per_token
    assert kept_tokens == int(expected)
    launch = settled(cell, Launch(), 80 * GIB)
    memory = plan(cell, launch, 80 * GIB)
    assert by_name(memory)[f"activations of {kept_tokens} tokens, kept"][1] == planner.activations(
        cell, s, kept_tokens, True, False
    )
    assert f"Micro-batches have at most {kept_tokens} tokens" in report(memory, launch)
    assert memory.fits and memory.peaks["update"] < 0.6 * 80 * GIB
    small = planner.estimate(cell, Launch(), 24 * GIB)
    assert planner.tokens_kept(cell, Launch(), 24 * GIB) == Launch().pass_tokens("1.7b")
    assert small.update_parts["recomputing layers"] > 0
    assert planner.estimate(cell, Launch(), 80 * GIB).update_parts["recomputing layers"] == 0


def test_vllm_batches_by_hand():
    """Qwen3-0.6B on 10 of 20 GiB: the work space of 16,384 tokens, 384 MiB, is less than a 20th of that."""
    cell = Cell("voting", "sp", scale="0.6b", n_problems=8, num_generations=8)
    graphs, logits, step = GIB, 512 * 151_936 * 8, 16384 * 2 * 3 * (3072 + 1024)
    held = 2 * (596_049_920 + 2 * 64 * (28 * 22_528 + 2 * (151_936 + 1024)))  # two slots, with embeddings and head
    room = (10 * GIB - held - graphs - logits - step) / (2 * 2 * 28 * 8 * 128)  # tokens, at 112 kB each
    asked, fitting = 8 * 8 * 3, int(room / (5120 / 4))
    sizes = Launch(vllm_gpu_memory_utilization=0.5, vllm_max_num_seqs=512, vllm_max_num_batched_tokens=16384)
    assert plan(cell, sizes, 20 * GIB).cache == pytest.approx(
        room / (cell.max_prompt_tokens + cell.max_completion_length)
    )
    chosen = vllm_batch(cell, Launch(vllm_gpu_memory_utilization=0.5), 20 * GIB)
    assert chosen == {"vllm_max_num_seqs": min(asked, fitting) // 8 * 8, "vllm_max_num_batched_tokens": 16384}
    assert fitting < asked
    assert vllm_batch(cell, Launch(vllm_gpu_memory_utilization=0.5), 80 * GIB)["vllm_max_num_seqs"] == asked
    assert (
        vllm_batch(cell, Launch(vllm_gpu_memory_utilization=0.5, n_processes=2), 80 * GIB)["vllm_max_num_seqs"]
        == asked // 2
    )
    assert vllm_batch(Cell("voting", "sp", scale="0.6b"), Launch(), 1000 * GIB)["vllm_max_num_seqs"] == 512
    assert vllm_batch(Cell("voting", "sp", scale="4b"), Launch(), 24 * GIB)["vllm_max_num_batched_tokens"] == 8192
    launch = settled(cell, Launch(vllm_max_num_seqs=7), 80 * GIB)
    assert launch.vllm_sizes() == {"vllm_max_num_seqs": 7, "vllm_max_num_batched_tokens": 16384}
    assert settled(Cell("voting", "sp"), Launch(), 80 * GIB).vllm_sizes() == {}  # the transformers engine


def test_the_command_line(capsys):
    cell = ["-p", "workflow", "voting", "-p", "policy", "ip", "-p", "scale", "1.7b"]
    assert command([*cell, "--devices", "2", "--memory-gib", "80"]) == 0
    out = capsys.readouterr().out
    assert "vLLM runs 304 requests at once" in out and "A step has 16384 tokens" in out
    assert "frozen base, bfloat16" in out and "GiB of disk" in out and " fits" in out
    assert command([*cell, "--memory-gib", "8"]) == 1
    too_small = capsys.readouterr().out
    assert "does not fit" in too_small and "GPU-hours" not in too_small
    assert "Estimated from assumed constants, not measured" in out and "GPU-hours" in out
    assert command([*cell, "--memory-gib", "80", "-p", "engine", "vllm_server"]) == 0
    out = capsys.readouterr().out
    assert "Time is estimated only for" in out and "GPU-hours" not in out
    with pytest.raises(UserError, match="such as --memory-gib 80"):
        command([*cell, "--memory-gib", "0"])
    with pytest.raises(UserError, match="`engine` is 'auto'. Write engine='vllm_server' too"):
        command([*cell, "--memory-gib", "80", "-p", "vllm_server_base_url", "http://node1:8000"])
    with pytest.raises(SystemExit, match="2"):
        command(["--unknown"])


def test_the_grid_is_estimated_on_gpus_that_hold_its_cells(capsys):
    """4B does not fit on one GPU of 24 GiB, and of Orch-Workers' three adapters some need more than Voting's."""
    cell = ["-p", "workflow", "voting", "-p", "scale", "4b"]
    assert command([*cell, "--memory-gib", "80", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "The grid is 14 cells at this scale" in out and "GPU-hours of the grid, a GPU each" in out
    assert command([*cell, "--memory-gib", "24"]) == 1  # no cell of it
    for size, devices in ((24, 4), (32, 8)):
        assert command([*cell, "--memory-gib", str(size), "--devices", str(devices), "-p", "sharding", "fsdp2"]) == 0
        out = capsys.readouterr().out
        launch = Launch(n_processes=devices, sharding="fsdp2")
        memory = [plan(one, settled(one, launch, size * GIB), size * GIB) for one in Grid("4b").cells()]
        assert not plan(Cell("voting", "sp", scale="4b"), Launch(), size * GIB).fits
        are_held = all(one.fits for one in memory)
        assert (f"GPU-hours of the grid, {devices} GPUs each" in out) == are_held, out
        assert ("Its time is not estimated" in out) != are_held


def test_the_plan_remarks_on_what_does_less_than_it_says(capsys):
    assert command(["-p", "iterations", "3"]) == 0
    assert "The warm-up of 5 ticks does not end within the run's 3" in capsys.readouterr().out


def test_a_base_is_not_sharded_over_one_process(capsys, tmp_path):
    for words in (["--devices", "1"], ["-p", "scale", "4b", "--memory-gib", "80"]):
        with pytest.raises(UserError, match="`n_processes` is 1. Write a larger n_processes, or sharding='none'"):
            command([*words, "-p", "sharding", "fsdp2"])
    with pytest.raises(ValueError, match="shards the base model over several processes"):
        planner.check(Cell("voting", "sp"), Launch(sharding="fsdp2", results_dir=str(tmp_path)))
    assert command(["--devices", "2", "-p", "sharding", "fsdp2"]) == 0


def test_without_a_gpu_the_error_asks_for_the_memory_of_one(monkeypatch):
    monkeypatch.setattr(planner, "has_cuda", lambda: False)
    with pytest.raises(UserError, match="scale='1.7b' needs a GPU.*--memory-gib 80"):
        command(["-p", "scale", "1.7b"])


def test_one_process_is_not_told_to_use_fewer(monkeypatch):
    monkeypatch.setattr(planner, "this_device", lambda: ("CPU", 2**28))
    monkeypatch.setattr(planner, "has_cuda", lambda: False)
    cell = Cell("voting", "ip")
    assert "lower n_processes" not in verdict(plan(cell, Launch()))
    assert "lower n_processes" in verdict(plan(cell, Launch(n_processes=2)))


def test_the_report_on_a_cpu_names_ram_and_no_hours(monkeypatch, capsys):
    monkeypatch.setattr(planner, "this_device", lambda: ("CPU", 24 * GIB))
    monkeypatch.setattr(planner, "has_cuda", lambda: False)
    assert command(["-p", "scale", "tiny-r"]) == 0
    out = capsys.readouterr().out
    assert "this machine has 24.00 GiB of RAM" in out and "GPU" not in out


@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_memory_that_is_no_number_is_refused(size):
    with pytest.raises(UserError, match=f"--memory-gib must be a number of GiB, got {size}"):
        command(["--memory-gib", size])


def test_a_setting_that_another_workflow_cannot_have_leaves_it_out(capsys):
    """30 ticks of Orch-Workers' three adapters in 10 iterations; the single agent has 10."""
    words = [
        "scale",
        "1.7b",
        "workflow",
        "orch_workers",
        "policy",
        "ip",
        "lr_clock",
        "update_call",
        "max_steps",
        "10",
        "warmup_steps",
        "25",
    ]
    pairs = [word for name, value in zip(words[::2], words[1::2], strict=True) for word in ("-p", name, value)]
    command(["--memory-gib", "80", *pairs])
    report = capsys.readouterr().out
    assert "hours of orch_workers-ip-math-s0" in report and " instead" not in report


def test_a_rollout_that_a_cpu_cannot_hold_is_refused_or_warned_of(monkeypatch, caplog, tmp_path):
    """A Qwen3-4B on 24 GiB: by hand, the KV cache of 128 rows of full length, and of rows of the assumed length."""
    monkeypatch.setattr(planner, "has_cuda", lambda: False)
    monkeypatch.setattr(planner, "this_device", lambda: ("CPU", 24 * GIB))
    lengths = {"max_prompt_tokens": 1024, "max_completion_length": 256, "n_problems": 4, "num_generations": 8}
    memory = plan(Cell("voting", "ip", scale="4b", dtype="bfloat16", engine="generate", **lengths))
    cache = by_name(memory)["engine's KV cache, at most"][0]
    assert cache == 128 * 1280 * 2 * (2 * 36 * 8 * 128)
    held = sum(part.rollout for part in memory.parts if not part.is_bound)
    reply = 256 * 1250 / 5120
    context = (3 * (150 + reply / 2) + 150 + 3 * reply + reply / 2) / 4
    assert memory.usual_rollout == pytest.approx(held + (memory.peaks["rollout"] - held) * context / 1280)
    assert not memory.fits and "does not fit" in verdict(memory)

    lengths = {"max_prompt_tokens": 900, "max_completion_length": 100}
    cell = Cell("voting", "sp", scale="smollm2", engine="generate", n_validation=64, **lengths)
    need, most = plan(cell).usual_rollout, plan(cell).peaks["rollout"]
    size = round((max(need, plan(cell).need[0]) + most) / 2)
    assert need < size < most
    monkeypatch.setattr(planner, "this_device", lambda: ("CPU", size))
    assert plan(cell).fits and "if every reply had its full length" in verdict(plan(cell))
    planner.check(cell, Launch(results_dir=str(tmp_path)))
    assert "if every reply had its full length" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reply-tokens", "0"], "--reply-tokens must be a number of tokens above 0, got 0"),
        (["--reply-tokens", "nan"], "--reply-tokens must be a number of tokens above 0, got nan"),
        (["--reply-tokens", "6000"], "6000 is more than a reply can have: max_completion_length is 5120"),
        (["--measured", "nowhere.json"], "--measured must name a file that benchmarks/bench_gpu.py wrote"),
    ],
)
def test_an_impossible_assumption_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        command(["-p", "scale", "1.7b", "--gpu", "h100", *words])


def test_the_time_of_replays_is_not_estimated(capsys):
    command(
        [
            "--memory-gib",
            "80",
            "-p",
            "scale",
            "1.7b",
            "-p",
            "workflow",
            "voting",
            "-p",
            "policy",
            "ip",
            "-p",
            "credit",
            "branches",
        ]
    )
    assert "Time is estimated only for the paper's models" in capsys.readouterr().out
