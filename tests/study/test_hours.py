"""The estimate of hours follows by hand from its stated inputs, and docs/scaling.md shows the estimates."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from multirole_study import hours
from multirole_study import plan as planner
from multirole_study.__main__ import plan
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.presets import MODELS
from multirole_study.experiment.settings import UserError
from multirole_study.paper.grid import Grid

ROOT = Path(__file__).parents[2]
GIB = 2**30
H100 = hours.GPUS["h100"]
VOTING = Cell("voting", "ip", scale="1.7b")
SHAPE = MODELS["1.7b"].shape
WEIGHTS = 1_720_574_976  # of Qwen3-1.7B
ADAPTER = 28 * 64 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
KV_BYTES = 2 * 28 * 8 * 128 * 2  # of a token


def test_a_voting_rollout_by_hand():
    """512 episodes: 3 replies of 1,250 tokens to 150, and one to 150 + 3 x 1,250; 304 requests at once."""
    read = 512 * 1250 * (3 * (150 + 625) + (3900 + 625)) * KV_BYTES
    steps = 512 * 4 * 1250 / 304
    flops = 512 * 3 * 150 * (2 * (WEIGHTS + ADAPTER) + 4 * 75 * 28 * 2048)
    flops += 512 * 3900 * (2 * (WEIGHTS + ADAPTER) + 4 * 1950 * 28 * 2048)
    bandwidth = 0.75 * (1 - 0.16) * 3.35e12  # the adapters cost a sixth of decoding's speed
    packed = (read + steps * 2 * WEIGHTS) / bandwidth + flops / (0.4 * 989e12)
    assert sum(hours.rollout_parts(VOTING, SHAPE, H100, 1, 512, 304).values()) == pytest.approx(packed)
    chain = 2 * 5120 * (2 * WEIGHTS / bandwidth + 0.0015)
    on_eight = hours.rollout_parts(VOTING, SHAPE, H100, 8, 512, 304)
    assert sum(on_eight.values()) == pytest.approx(packed / 8 + chain * 7 / 8)


def test_a_voting_update_by_hand():
    """Old log-probs 1; then 40 % of rows forward only, 60 % forward, backward and once more forward: 3.2 passes."""
    assert WEIGHTS == SHAPE.parameters and ADAPTER == SHAPE.adapter_parameters(64)
    of_voters = 512 * 3 * 1400 * (2 * (WEIGHTS + ADAPTER) + 4 * 700 * 28 * 2048) / (0.25 * 989e12)
    of_aggregator = 512 * 5150 * (2 * (WEIGHTS + ADAPTER) + 4 * 2575 * 28 * 2048) / (0.25 * 989e12)
    forward = of_voters + of_aggregator
    assert sum(hours.update_parts(VOTING, SHAPE, H100, 1, True).values()) == pytest.approx(3.2 * forward)
    assert sum(hours.update_parts(VOTING, SHAPE, H100, 2, False).values()) == pytest.approx(2.6 * forward / 2 * 1.1)
    frozen = VOTING.replace(policy={"generator": "frozen", "aggregator": "judge"})
    assert sum(hours.update_parts(frozen, SHAPE, H100, 1, True).values()) == pytest.approx(3.2 * of_aggregator)


@pytest.mark.parametrize(
    ("workflow", "calls"),
    [
        ("single", [(1, 0)]),
        ("orch_workers", [(1, 0), (3, 1 / 3), (1, 4)]),
        ("eval_opt", [(1, 0), (1, 1), (0.4, 2), (0.4, 3), (0.16, 4), (0.16, 5)]),
        ("examples/debate.py:Debate", [(2, 0), (1, 2)]),
    ],
)
def test_the_calls_of_an_episode(workflow, calls):
    name = workflow if "/" not in workflow else str(ROOT / workflow)
    rounds = hours.calls_of(Cell(name, "sp", scale="1.7b"))
    assert rounds == [pytest.approx(one) for one in calls]


def test_hours_count_the_first_validation_and_one_every_ten_iterations():
    made = hours.Estimate(
        H100, 2, 500, 51, {"decoding": 90.0, "prefill": 10.0}, {"passes": 50.0}, {"grading": 10.0}, 72.0
    )
    assert made.largest == ("decoding", pytest.approx(500 * 90 / (500 * 160 + 51 * 72)))
    assert made.hours == pytest.approx((500 * 160 + 51 * 72) / 3600) and made.gpu_hours == 2 * made.hours
    assert planner.estimate(VOTING, Launch(), 80 * GIB).validations == 51
    many = planner.estimate(VOTING.replace(n_validation=1412), Launch(), 80 * GIB)
    few = planner.estimate(VOTING, Launch(), 80 * GIB)
    assert few.validation < many.validation and few.iteration == many.iteration


def test_a_smaller_cache_decodes_fewer_requests_at_once_and_takes_longer():
    fast = planner.estimate(VOTING, Launch(vllm_gpu_memory_utilization=0.6), 80 * GIB)
    slow = planner.estimate(VOTING, Launch(vllm_gpu_memory_utilization=0.2), 80 * GIB)
    assert slow.rollout > fast.rollout and slow.update == fast.update


def scaling_table() -> str:
    """The table of docs/scaling.md."""
    machines = (("24 GB", 24, 1), ("80 GB", 80, 1), ("8 x 80 GB", 80, 8), ("two nodes of 8 x 80 GB", 80, 16))
    lines = [
        "| scale | machine | one cell of Eval-Opt / Voting / Orch-Workers, hours | its GPU-hours | grid, a GPU per cell: GPU-hours | wall days |",
        "|---|---|---|---|---|---|",
    ]
    for scale in ("0.6b", "1.7b", "4b"):
        cells = [Cell(name, "ip", scale=scale) for name in ("eval_opt", "voting", "orch_workers")]
        for machine, gib, n in machines:
            size, launch = gib * GIB, Launch(n_processes=n)
            fit = all(planner.plan(c, planner.settled(c, launch, size), size).fits for c in cells)
            if not fit:
                lines.append(f"| {scale} | {machine} | does not fit | | | |")
                continue
            made = [planner.estimate(cell, launch, size) for cell in cells]
            times = [planner.estimate(cell, Launch(), size) for cell in Grid(scale).cells()]
            total = sum(time.gpu_hours for time in times)
            days = planner.wall_hours([time.hours for time in times], n) / 24
            wall = " / ".join(f"{estimated.hours:.0f}" for estimated in made)
            spent = " / ".join(f"{estimated.gpu_hours:.0f}" for estimated in made)
            lines.append(f"| {scale} | {machine} | {wall} | {spent} | {total:.0f} | {days:.1f} |")
    return "\n".join(lines)


def constants_table() -> str:
    """The constants of docs/scaling.md."""
    rows = [f"| {value} | {meaning} |" for value, meaning, _ in hours.ASSUMED.rows()]
    return "\n".join(["| assumed | meaning |", "|---|---|", *rows])


def test_the_page_shows_the_estimates():
    """If this fails, paste the expected text into docs/scaling.md."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scaling_table() in page
    assert constants_table() in page
    times = [
        planner.estimate(VOTING, Launch(), 80 * GIB, planner.Assumptions(reply=n)).hours for n in (625, 1250, 2500)
    ]
    assert f"{' / '.join(f'{time:.0f}' for time in times)} hours with replies of 625 / 1,250 / 2,500 tokens" in page
    a100 = planner.estimate(VOTING, Launch(), 80 * GIB, planner.Assumptions(hours.GPUS["a100"])).hours
    assert f"takes {a100:.0f} hours" in page


def test_a_grid_takes_at_least_its_longest_cell():
    """Cells of 5, 4, 3, 3 hours: on two GPUs 5 + 3 and 4 + 3; on four, and on more, the longest."""
    assert [planner.wall_hours([3.0, 5.0, 4.0, 3.0], n_gpus) for n_gpus in (2, 4, 9)] == [8.0, 5.0, 5.0]


WORDS = ["-p", "workflow", "voting", "-p", "policy", "ip", "-p", "scale", "1.7b"]


def rows_of(printed: str) -> dict[str, list[str]]:
    """Return the printed table of times: what -> its value for short, assumed and long replies."""
    return {cells[0]: cells[1:] for line in printed.splitlines() if len(cells := re.split(r" {2,}", line.strip())) == 4}


def test_a_named_gpu_has_its_memory_and_its_speed(capsys, monkeypatch):
    """An A100 has the memory of an H100, and less than two thirds of its bandwidth."""
    monkeypatch.setattr(planner, "_has_model", lambda cell: False)  # whatever this machine has
    a100 = hours.GPUS["a100"]
    assert [hours.gpu_of(gib * GIB).name for gib in (22, 24, 40, 48, 80, 141, 500)] == [
        "RTX 4090", "RTX 4090", "A100 SXM 40 GB", "L40S", "H100 SXM", "H200", "H200"
    ]  # fmt: skip
    named, unknown = (planner.estimate(VOTING, Launch(), 80 * GIB, planner.Assumptions(gpu)) for gpu in (a100, None))
    assert named.rollout > 1.4 * unknown.rollout and named.update > 3 * unknown.update
    assert plan([*WORDS, "--gpu", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "one GPU has 79.10 GiB" in printed and "1 x A100 SXM 80 GB (2.04 TB/s, 312 TFLOP/s):" in printed
    assert "downloads Qwen/Qwen3-1.7B (4.1 GB) and the rows of open-r1/DAPO-Math-17k-Processed (0.007 GB)" in printed
    assert plan([*WORDS, "--gpu", "l4"]) == 0 and "one GPU has 22.00 GiB" in capsys.readouterr().out
    assert plan([*WORDS, "-p", "task", "code", "--gpu", "h100"]) == 0
    assert "the rows of agentica-org/DeepCoder-Preview-Dataset (1.2 GB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A10G", 22.0, None),  # a slower chip than the A10
    ],
)
def test_a_device_is_found_by_the_name_that_torch_reports(device, gib, name):
    assert hours.gpu_named(device, round(gib * GIB)) == (hours.GPUS[name] if name else None)


def test_three_lengths_of_reply_are_shown_and_the_middle_one_can_be_set(capsys):
    plan([*WORDS, "--gpu", "h100"])
    printed = capsys.readouterr().out
    usual = rows_of(printed)
    assert usual["mean tokens of a reply"] == ["625 (short)", "1250 (assumed)", "2500 (long)"]
    times = [float(text) for text in usual["hours of voting-ip-math-s0, validations included"]]
    assert times == sorted(times) and times[2] > 2 * times[1], "reading the KV cache grows with the square"
    estimated = planner.estimate(VOTING, Launch(), round(79.1 * GIB), planner.Assumptions(reply=2500))
    assert f"{estimated.hours:.1f}" == usual["hours of voting-ip-math-s0, validations included"][2]
    assert "reading the KV cache" in printed, "the largest part is named"
    plan([*WORDS, "--gpu", "h100", "--reply-tokens", "2500"])
    longer = rows_of(capsys.readouterr().out)
    assert longer["mean tokens of a reply"] == ["1250 (short)", "2500 (given)", "5000 (long)"]
    for what in (
        "hours of voting-ip-math-s0, validations included",
        "hours of eval_opt instead",
        "GPU-hours of the grid, a GPU each",
    ):
        assert longer[what][:2] == usual[what][1:]


def test_measured_constants_replace_assumed_ones(capsys, tmp_path):
    """A file as `benchmarks/bench_gpu.py` writes it. Twice the arithmetic halves the update; no cost of adapters shortens decoding by 16 %."""
    path = tmp_path / "gpu.measured.json"
    entry = {"update_mfu": {"value": 0.5, "step": "update-1.7b"}, "lora_cost": {"value": 0.0, "step": "vllm-1.7b"}}
    path.write_text(json.dumps({"device": "NVIDIA H100", "constants": entry}))
    measured = planner.Assumptions(constants=hours.Constants.from_file(path))
    before, after = (planner.estimate(VOTING, Launch(), 80 * GIB, by) for by in (planner.ASSUMED, measured))
    assert after.update == pytest.approx(before.update / 2)
    for part in ("reading the KV cache", "reading the weights"):
        assert after.rollout_parts[part] == pytest.approx(before.rollout_parts[part] * (1 - 0.16))
    assert after.rollout_parts["prefill"] == before.rollout_parts["prefill"] and after.hours < before.hours
    plan([*WORDS, "--gpu", "h100"])
    assumed = capsys.readouterr().out
    plan([*WORDS, "--gpu", "h100", "--measured", str(path)])
    printed = capsys.readouterr().out
    assert rows_of(printed)["GPU-hours"] != rows_of(assumed)["GPU-hours"]
    constants = printed[printed.index("constant ") :].splitlines()[1:]
    n_all = sum(bool(constant.metadata) for constant in fields(hours.Constants))
    assert len(constants) == n_all, "each constant is printed"
    assert sum(line.endswith("  assumed") for line in constants) == n_all - 2
    assert sum(line.endswith("measured: NVIDIA H100, update-1.7b") for line in constants) == 1
    assert assumed.count("  assumed\n") == n_all


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no measured constants"),
        ("{", "holds no measured constants"),
        ('{"device": "x", "constants": {"speed": {"value": 1, "step": "a"}}}', "has the constant 'speed', which the estimate does not use"),
        ('{"device": "x", "constants": {"update_mfu": {"value": 1.5, "step": "a"}}}', "update_mfu must be a number above 0 to below 1, got 1.5"),
        ('{"device": "x", "constants": {"prefill_mfu": {"value": 0, "step": "a"}}}', "prefill_mfu must be a number above 0"),
        ('{"device": "x", "constants": {"update_mfu": {"value": NaN, "step": "a"}}}', "must be a number"),
        ('{"device": "x", "constants": {"switch_seconds": {"value": true, "step": "a"}}}', "must be a number"),
    ],
)  # fmt: skip
def test_a_file_without_measured_constants_is_refused(tmp_path, text, message):
    path = tmp_path / "gpu.measured.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        plan([*WORDS, "--gpu", "h100", "--measured", str(path)])
