"""`benchmarks/bench_gpu.py` on a CPU: a hanging step ends, calls add up, and the order and the table are what docs/gpu_measurements.md says."""

import json
import random
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from multirole_study import hours
from multirole_study import plan as planner
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch

ROOT = Path(__file__).parents[2]
SETTINGS = {"scales": ["1.7b", "4b"], "problems": 8, "rehearse": True}


@pytest.fixture
def bench(monkeypatch):
    """The module of the runner."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_gpu

    return bench_gpu


@pytest.fixture
def steps(monkeypatch):
    """The module of the measurements."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_steps

    return gpu_steps


@pytest.fixture
def make_step(bench):
    """Build a step whose process runs some Python; `sys.argv[1]` is the file of its result."""
    return lambda name, code, limit=60.0, needs=(): bench.Step(name, needs, limit, (sys.executable, "-c", code))


WRITES = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"rows": [{"measured": "part one", "seconds": 2.0}]}\')\n'


def run(bench, steps, out, record=None, budget=None):
    record = record or {"settings": SETTINGS, "steps": {}}
    return bench.run_steps(steps, out, record, {}, budget), json.loads(out.read_text())["steps"]


def test_a_hanging_step_is_killed_with_its_children_and_what_it_measured_is_kept(bench, make_step, tmp_path):
    pid = tmp_path / "pid"
    hangs = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "print('compiling graphs', flush=True); child.wait()"
    )
    _, done = run(bench, [make_step("machine", WRITES + hangs, limit=3.0)], tmp_path / "gpu.json")
    assert (
        done["machine"]["status"] == "time limit"
        and "killed after 3 s; its last line was: compiling graphs" in done["machine"]["error"]
    )
    assert done["machine"]["result"]["rows"] == [{"measured": "part one", "seconds": 2.0}]
    stat = Path("/proc", pid.read_text(), "stat")
    for _ in range(100):  # the kernel needs a moment to remove it
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the step is still running and would keep the GPU's memory")


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (
            "import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(3)",
            "out of memory",
            "CUDA out of memory",
        ),
        ("import os; os.kill(os.getpid(), 9)", "out of memory", "The system killed the process"),
        ("raise ValueError('no such kernel')", "failed", "ValueError: no such kernel"),
        (WRITES, "done", None),
    ],
)
def test_how_a_step_ended_is_recorded_and_the_next_one_runs(bench, make_step, tmp_path, code, status, error):
    first, second = make_step("machine", code), make_step("publish", WRITES)
    _, done = run(bench, [first, second], tmp_path / "gpu.json")
    assert done["machine"]["status"] == status and (error or "") in done["machine"].get("error", "")
    assert done["publish"]["status"] == "done"


def test_the_error_is_the_exception_and_not_a_later_warning(bench, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "[rank0]: ModuleNotFoundError: No module named 'flashinfer'\n[rank0]:[W1] Warning: not destroyed\n\n"
    )
    assert bench.last_line(log) == "[rank0]: ModuleNotFoundError: No module named 'flashinfer'"
    log.write_text("loading\ncompiling\n")
    assert bench.last_line(log) == "compiling"


def test_a_terminated_runner_ends_its_step(bench, tmp_path):
    """A step left behind would keep the GPU's memory from the next call."""
    pid, out = tmp_path / "pid", tmp_path / "gpu.json"
    hang = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import bench_gpu\n"
        f"bench_gpu.make_step = lambda name, options: bench_gpu.Step(name, (), 600.0, (sys.executable, '-c', {hang!r}))\n"
        f"sys.argv = ['bench_gpu.py', 'machine', '--rehearse', '--out', {str(out)!r}]; sys.exit(bench_gpu.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as runner:
        for _ in range(600):
            if pid.exists() and pid.read_text():
                break
            time.sleep(0.05)
        runner.terminate()
        assert runner.wait(30) != 0
    assert not Path("/proc", pid.read_text()).exists()


def test_updates_are_measured_with_gradient_checkpointing(steps, tmp_path):
    """As `train` enables it; without it micro-batches are not cut to what a GPU can hold."""
    from multirole.update.passes.recomputation import recomputed_layers

    bench = steps.Bench("1.7b", 2, True, tmp_path, tmp_path / "result.json")
    trainer = steps.updating_trainer(bench)
    assert len(recomputed_layers(trainer.passes.base)) == steps.TOY.layers


def test_replies_are_compared_as_far_as_their_tokens_are_equal(steps):
    assert steps.common_length([1, 2, 3], [1, 2, 4]) == 2
    assert steps.common_length([1, 2], [1, 2, 3]) == steps.common_length([1, 2], [1, 2]) == 2
    assert steps.common_length([], [1]) == 0


def test_a_step_that_runs_out_of_device_memory_says_so(bench, steps, monkeypatch, tmp_path):
    def exhaust(measurement) -> None:
        measurement.add("the part before", 1.0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(steps.STEPS, "machine", exhaust)
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", "machine", "--scratch", str(tmp_path), "--result", str(result)])
    assert steps.main() == bench.OUT_OF_MEMORY
    assert json.loads(result.read_text())["rows"][0]["measured"] == "the part before"


def test_calls_add_up(bench, make_step, tmp_path):
    """A second call runs the remaining steps: those that were skipped because a package was missing, but none that finished or failed."""
    log, out = tmp_path / "log", tmp_path / "gpu.json"
    count = f"pathlib.Path({str(log)!r}).open('a').write(NAME)\n"
    codes = {"machine": "", "publish": "raise SystemExit(1)", "plan": "", "tiny": ""}
    limits = {"machine": 20.0, "publish": 20.0, "plan": 90.0, "tiny": 20.0}
    all_steps = [
        make_step(
            name,
            WRITES + count.replace("NAME", repr(name + " ")) + code,
            limits[name],
            ("no_such_module",) if name == "tiny" else (),
        )
        for name, code in codes.items()
    ]
    left, done = run(bench, all_steps, out, budget=60.0)
    assert {name: step["status"] for name, step in done.items()} == {
        "machine": "done",
        "publish": "failed",
        "tiny": "skipped",
    }
    assert left == ["plan"], "its limit is cut to the 60 s of a call, of which the first two used a part"
    assert done["tiny"]["error"] == "no_such_module is not installed"
    assert log.read_text() == "machine publish "

    all_steps[3] = make_step(
        "tiny", WRITES + count.replace("NAME", "'tiny '"), 20.0
    )  # the package has been installed since
    left, done = run(bench, all_steps, out, bench.load(out, SETTINGS, resumes=True), budget=60.0)
    assert left == [] and log.read_text() == "machine publish plan tiny "
    with pytest.raises(SystemExit, match="exists. Write --resume"):
        bench.load(out, SETTINGS, resumes=False)
    with pytest.raises(SystemExit, match="Name another file"):
        bench.load(out, SETTINGS | {"problems": 64}, resumes=True)


def test_the_order_begins_with_what_needs_no_vllm(bench, steps):
    names = bench.order(["1.7b", "4b"])
    assert names[:4] == ["machine", "doctor-1.7b", "packed-1.7b", "update-1.7b"]
    needs_vllm = ["vllm" in bench.make_step(name).needs for name in names]
    assert needs_vllm == sorted(needs_vllm), "a step with vLLM comes before one without"
    assert names.index("row-1.7b") < names.index("doctor-4b") < names.index("padded-1.7b") < names.index("vllm-1.7b")
    with_vllm = [name for name, needs in zip(names, needs_vllm, strict=True) if needs]
    assert with_vllm == ["vllm-1.7b", "doctor-vllm-1.7b", "vllm-4b", "doctor-vllm-4b"]
    assert {bench.kind_of(name) for name in names} == set(steps.STEPS) == set(bench.LIMITS)
    assert max(limit for limit, _ in bench.LIMITS.values()) <= 540, "each must fit in a call of ten minutes"


def test_the_table(bench):
    peaks = {"rollout": 48.125, "sleep": 6.5}
    part = {
        "measured": "iteration 2",
        "seconds": 61.26,
        "tokens_per_second": 12345.6,
        "mfu": 0.2514,
        "tflops": 248.7,
        "peaks_gib": peaks,
    }
    record = {"settings": SETTINGS, "steps": {
        "vllm-1.7b": {"status": "done", "seconds": 99.0, "result": {"device": "NVIDIA H100 80GB HBM3", "rows": [part]}},
        "machine": {"status": "done", "seconds": 9.0, "result": {"device": "NVIDIA H100 80GB HBM3", "rows": [{"measured": "copy", "seconds": 0.00125, "notes": "3.35 TB/s"}]}},
        "row-4b": {"status": "out of memory", "seconds": 30.0, "result": {"rows": []}, "error": "CUDA | out of memory"},
    }}  # fmt: skip
    lines = bench.table(record).splitlines()
    assert lines[0] == "Measured on: NVIDIA H100 80GB HBM3 (a rehearsal with toy shapes)."
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[3:]]
    assert len({len(row) for row in cells}) == 1, "a Markdown table has as many cells in every line"
    assert cells[2] == ["machine", "copy", "0.00125", *[""] * 7, "3.35 TB/s"]
    assert cells[3] == ["row-4b", "**out of memory**", *[""] * 8, "CUDA / out of memory"]
    assert cells[4] == ["vllm-1.7b", "iteration 2", "61.3", "12,346", "249", "25.1%", "48.12", "6.50", "", "", ""]


def test_a_text_of_random_ids_is_encoded_to_as_many_tokens(steps):
    n_ids = steps.MODELS["1.7b"].shape.vocab
    tokenizer = steps.tokenizer_of(n_ids)
    assert len(tokenizer) == n_ids and max(tokenizer.get_vocab().values()) == n_ids - 1
    words = [random.Random(0).randrange(256, n_ids - 3) for _ in range(5000)]
    assert tokenizer.encode(tokenizer.decode(words), add_special_tokens=False) == words
    replies = [random.Random(1).randrange(n_ids) for _ in range(5000)]
    quoted = tokenizer.apply_chat_template([{"role": "user", "content": tokenizer.decode(replies)}], return_dict=False)
    assert len(quoted) == pytest.approx(5000, rel=0.02)


def test_flops_by_hand(steps):
    """A layer of 2 x 2 weights in each of seven modules, an adapter of rank 1, and a head of 3 words."""
    shape = steps.Shape(layers=1, hidden=2, intermediate=2, heads=1, kv_heads=1, head_dim=2, vocab=3)
    assert steps.layer_flops(shape, 5, [], rank=0) == 2 * 28 * 5
    assert steps.layer_flops(shape, 5, [], rank=1) == 2 * (28 + 28) * 5
    assert steps.layer_flops(shape, 0, [10], rank=0) == 4 * 2 * (10 * 10 / 2), (
        "each token attends to half of the row: q k and p v"
    )
    assert steps.head_flops(shape, 4) == 2 * 6 * 4


def test_replies_have_the_mean_that_the_estimate_of_hours_assumes(steps):
    lengths, rng = steps.Lengths(is_toy=False), random.Random(0)
    drawn = [steps.reply_length(rng, lengths) for _ in range(20000)]
    assert sum(drawn) / len(drawn) == pytest.approx(hours.REPLY_SHARE * lengths.reply, rel=0.03)
    assert max(drawn) <= lengths.reply and lengths.question == hours.ASSUMED.question_tokens


def test_a_phase_has_the_peak_of_its_duration_only(steps):
    phases = steps.Phases()
    with phases.phase("rollout"):
        held = torch.ones(2**26)  # 256 MiB
        del held
    with phases.phase("sleep"):
        time.sleep(0.1)
    report = phases.report()
    assert report["peaks_gib"]["rollout"] > report["peaks_gib"]["sleep"] + 0.1
    assert report["after_gib"]["rollout"] < report["peaks_gib"]["rollout"] - 0.1
    assert set(report["phase_seconds"]) == {"rollout", "sleep"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "measured"),
    [
        ("machine", ["matrix products", "copy", "varlen_attn"]),
        ("passes-1.7b", ["forward, without head", "forward and backward", "the same, layers recomputed"]),
    ],
)
def test_some_steps_need_torch_and_transformers_only(bench, tmp_path, step, measured):
    """On a machine without TRL, PEFT, pydantic, pandas and vLLM."""
    result = tmp_path / "result.json"
    arguments = ["gpu_steps.py", step, "--rehearse", "--scratch", str(tmp_path), "--result", str(result)]
    blocked = sorted(set(bench.STUDY) - set(bench.BASE) | {"vllm", "datasets"})
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); sys.argv = {arguments}\n"
        "import gpu_steps; sys.exit(gpu_steps.main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    done = json.loads(result.read_text())
    assert [row["measured"] for row in done["rows"]] == measured
    if step == "machine":
        assert done["varlen"]["has_varlen"] is None and done["varlen"]["reason"].startswith("not tried: ")
    else:
        assert all(row["tokens_per_second"] > 0 and "update" in row["peaks_gib"] for row in done["rows"])


def test_wheels_that_do_not_fit_are_named_and_left_out(bench, tmp_path):
    """Before anything is unpacked: on a machine that one has for half an hour, pip's refusal would cost a call."""
    core = "pydantic_core-2.50.4-{0}-{0}-manylinux_2_17_x86_64.whl"
    fits = {"trl-1.16.0-py3-none-any.whl", "dill-0.4.1-py3-none-any.whl"}
    others = [core.format("cp311"), "xxhash-4.1.0-cp312-cp312-win_amd64.whl"]
    for name in (*fits, *others, "dill-0.3.9-py3-none-any.whl", "notes.whl"):
        (tmp_path / name).touch()
    chosen, left_out = bench.fitting_wheels(tmp_path, (3, 12))
    assert {path.name for path in chosen} == fits
    assert left_out[0] == "dill-0.3.9-py3-none-any.whl is left out for dill-0.4.1-py3-none-any.whl."
    assert {f"{name} is not for Python 3.12 on this platform." for name in others} < set(left_out)
    assert any(line.startswith("notes.whl: ") for line in left_out) and len(left_out) == 4
    with pytest.raises(SystemExit, match="has no file"):
        bench.fitting_wheels(tmp_path / "nowhere", (3, 12))


def test_a_checkout_that_is_not_installed_has_the_engine_of_its_cpu_package(bench, tmp_path):
    """The cells of steps `tiny` and `smollm2` play on it, and an engine is found by the metadata of an installed package only."""
    bench.declare_entry_points(tmp_path / "packages")
    (declared,) = metadata.distributions(path=[str(tmp_path / "packages")])
    installed = metadata.distribution("multirole-cpu")
    assert (declared.name, declared.version) == (installed.name, installed.version)
    assert set(declared.entry_points) == set(installed.entry_points) and declared.entry_points


def test_what_was_measured_is_copied_and_changes_the_plan(bench, make_step, tmp_path):
    """The folder that a borrowed machine returns is emptied before each command; the record stays in the repository, and --resume finds it."""
    part = {"measured": "update of Voting, IP", "seconds": 9.0, "constants": {"update_mfu": 0.5, "lora_cost": None}}
    writes = f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({json.dumps({'device': 'NVIDIA H200', 'rows': [part]})!r})"
    out, back, record = (
        tmp_path / "gpu.json",
        tmp_path / "back",
        {"settings": SETTINGS | {"rehearse": False}, "steps": {}},
    )
    back.mkdir()
    bench.run_steps([make_step("update-1.7b", writes), make_step("update-4b", writes)], out, record, {}, copy=back)
    assert {path.name for path in back.iterdir()} == {"gpu.json", "gpu.md", "gpu.measured.json"}
    for path in back.iterdir():
        path.unlink()
    record = bench.load(out, SETTINGS | {"rehearse": False}, resumes=True)
    bench.run_steps(
        [make_step("update-1.7b", "raise SystemExit(1)"), make_step("machine", WRITES)], out, record, {}, copy=back
    )
    measured = back / "gpu.measured.json"
    assert json.loads(measured.read_text()) == {
        "device": "NVIDIA H200", "constants": {"update_mfu": {"value": 0.5, "step": "update-1.7b"}}
    }  # fmt: skip
    constants, cell = hours.Constants.from_file(measured), Cell("voting", "ip", scale="1.7b")
    assumed, planned = (
        planner.estimate(cell, Launch(), 80 * planner.GIB, planner.Assumptions(constants=by))
        for by in (hours.ASSUMED, constants)
    )
    assert planned.update == pytest.approx(assumed.update / 2) and planned.hours < assumed.hours


def test_an_estimate_with_the_measured_arithmetic_gives_the_measured_seconds(steps, monkeypatch):
    """`update_mfu` is counted as the estimate counts it: rows of equal lengths, old log-probs, forward, backward and recomputation."""
    monkeypatch.setattr(steps, "peak_flops", lambda: (H100.flops, ""))
    shape = steps.MODELS["1.7b"].shape
    cell = Cell("single", "sp", scale="1.7b", old_logprobs="recomputed", n_problems=2, num_generations=8)
    (stage,) = hours.rows_of(cell, 16)
    rows = [SimpleNamespace(length=stage.prompt + stage.reply)] * 16
    counter = SimpleNamespace(recomputed=3, micro_batches=4)
    mfu = steps.update_mfu(shape, rows, 7.0, counter)
    constants = replace(hours.ASSUMED, update_mfu=mfu, silent_rows=0.0)
    parts = hours.update_parts(cell, shape, H100, 1, True, None, constants)
    assert parts["old log-probs"] + parts["forward and backward"] + 0.75 * parts["recomputing layers"] == pytest.approx(
        7.0
    )


H100 = hours.GPUS["h100"]


@pytest.fixture
def rehearsed(steps, monkeypatch, tmp_path):
    """Run one step with toy shapes in this process and return the parts that it measured."""

    def run_one(step: str) -> list[dict]:
        result = tmp_path / f"{step}.json"
        arguments = ["gpu_steps.py", step, "--rehearse", "--scratch", str(tmp_path), "--result", str(result)]
        monkeypatch.setattr(sys, "argv", arguments)
        assert steps.main() == 0
        return json.loads(result.read_text())["rows"]

    return run_one


def test_toy_rows_are_packed_and_have_the_gradient_of_rows_apart(rehearsed):
    """Otherwise a rehearsal would not run what a GPU runs at 1.7B."""
    parts = {part["measured"]: part for part in rehearsed("packed-1.7b")}
    apart, packed = parts["each row on its own"], parts["packed"]
    assert apart["packed"] == 0 and packed["packed"] > 0
    assert packed["computed_tokens"] < apart["computed_tokens"]
    assert parts["each row on its own, in float32"]["gap"] == 0.0
    assert packed["gap"] < 2 * apart["gap"] < 0.05, "packing adds no more than rounding to bfloat16"


def planned_gib(steps, share: float | None) -> float:
    """Return the GiB that the plan counts for the process, the model, two adapters and vLLM: its `share`, or what it keeps while asleep."""
    from multirole_study import plan

    shape = steps.MODELS["0.6b"].shape
    asleep = plan.VLLM_GRAPHS + plan.vllm_work(shape, steps.SEQUENCES, steps.STEP_TOKENS)
    held = plan.PROCESS_BYTES + 2 * shape.parameters + 2 * 4 * shape.adapter_parameters(steps.RANK)
    return held / steps.GIB + (asleep / steps.GIB if share is None else share)


def test_the_page_has_the_numbers_that_were_measured(steps):
    page = (ROOT / "docs" / "gpu_measurements.md").read_text()
    record = json.loads((ROOT / "results" / "bench" / "gpu_h100.json").read_text())
    before, *cycles = record["steps"]["cycles-0.6b"]["result"]["rows"]
    for number, row in enumerate(cycles, 1):
        name = f"cycle {number}" + (", other weights" if number == 3 else "")
        sleep, publish, rollout = (row["phase_seconds"][phase] for phase in ("sleep", "publish", "rollout"))
        assert (
            f"| {name} | {sleep} | {publish} | {rollout} | {row['equal_replies']} of 24 | {row['largest_gap']:.3f} |"
            in page
        )
    same = [row for row in cycles if "other weights" not in row["measured"]]
    equal = [row["equal_replies"] for row in same]
    asleep, awake = {round(row["after_gib"]["sleep"], 1) for row in cycles}, round(cycles[0]["after_gib"]["rollout"], 1)
    planned = [round(planned_gib(steps, gib), 1) for gib in (0.6 * 79.2, None)]
    assert len(asleep) == 1 and "differ by 9.2e-03 (mean)" in before["notes"]
    stated = {f"{min(equal)} to {max(equal)} of 24", f"{max(row['largest_gap'] for row in same):.3f}", "0.009"}
    stated |= {f"{asleep.pop()} of {awake} GiB", *(f"{gib} GiB" for gib in planned)}
    prose = " ".join(page.split())
    assert [number for number in stated if number not in prose] == []


@pytest.mark.slow
def test_the_rehearsal_runs_every_step(tmp_path):
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bench_gpu.py"),
        "--rehearse",
        "--scales",
        "1.7b",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True)
    done = json.loads(out.read_text())["steps"]
    assert {name: step["status"] for name, step in done.items() if step["status"] != "done"} == {}
    parts = {row["measured"]: row for row in done["vllm-1.7b"]["result"]["rows"]}
    assert set(parts["iteration 2"]["peaks_gib"]) == {"rollout", "sleep", "update", "publish"}
    assert {
        "voters through our engine",
        "the same by vllm.LLM.generate",
        "Voting, aggregators as their voters end",
    } < set(parts)
    cycles = [row for name, row in parts.items() if name.startswith("cycle ")]
    assert (
        hours.Constants.from_file(out.with_suffix(".measured.json"))
        .sources["update_mfu"]
        .endswith("toy shapes, update-1.7b")
    )
    assert [row["largest_gap"] < 1e-6 and row["equal_replies"] == 24 for row in cycles] == [
        True,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("carried", [["part-aa"], ["part-ab"], []])
def test_a_wheel_of_which_a_part_was_not_carried_is_refused_by_name(steps, tmp_path, carried):
    wheel, parts = tmp_path / "whole.whl", tmp_path / "parts"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model", random.Random(0).randbytes(4000))
    assert steps.is_whole(wheel)
    parts.mkdir()
    data = wheel.read_bytes()
    for name, part in (("part-aa", data[:2000]), ("part-ab", data[2000:])):
        if name in carried:
            (parts / name).write_bytes(part)
    bench = steps.Bench("", 1, True, tmp_path, tmp_path / "result.json", parts)
    with pytest.raises(SystemExit, match=f"^{carried[0] if carried else 'Nothing'} in .*Carry every part"):
        steps.smollm2(bench)
