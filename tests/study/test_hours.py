"""The estimate of hours follows by hand from its stated inputs, and docs/scaling.md shows the estimates."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from multirole_study import hours
from multirole_study import plan as planner
from multirole_study.__main__ import plan
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.paper.grid import Grid

ROOT = Path(__file__).parents[2]
GIB = 2**30
H100 = hours.GPUS["h100"]
VOTING = Cell("voting", "ip", scale="1.7b")
WEIGHTS = 1_720_574_976  # of Qwen3-1.7B
ADAPTER = 28 * 64 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
KV_BYTES = 2 * 28 * 8 * 128 * 2  # of a token


def test_a_voting_rollout_by_hand():
    """512 episodes: 3 replies of 1,250 tokens to 150, and one to 150 + 3 x 1,250; 304 requests at once."""
    read = 512 * 1250 * (3 * (150 + 625) + (3900 + 625)) * KV_BYTES
    steps = 512 * 4 * 1250 / 304
    flops = 512 * 3 * 150 * (2 * (WEIGHTS + ADAPTER) + 4 * 75 * 28 * 2048)
    flops += 512 * 3900 * (2 * (WEIGHTS + ADAPTER) + 4 * 1950 * 28 * 2048)
    packed = (read + steps * 2 * WEIGHTS) / (0.75 * 3.35e12) + flops / (0.4 * 989e12)
    assert hours.rollout_seconds(VOTING, H100, 1, 512, 304) == pytest.approx(packed)
    chain = 2 * 5120 * (2 * WEIGHTS / (0.75 * 3.35e12) + 0.0015)
    assert hours.rollout_seconds(VOTING, H100, 8, 512, 304) == pytest.approx(packed / 8 + chain * 7 / 8)


def test_a_voting_update_by_hand():
    """Old log-probs 1; then 40 % of rows forward only, 60 % forward, backward and once more forward: 3.2 passes."""
    assert WEIGHTS == VOTING_SHAPE.parameters and ADAPTER == VOTING_SHAPE.adapter_parameters(64)
    pass_flops = 512 * 3 * 1400 * (2 * (WEIGHTS + ADAPTER) + 4 * 700 * 28 * 2048)
    pass_flops += 512 * 5150 * (2 * (WEIGHTS + ADAPTER) + 4 * 2575 * 28 * 2048)
    assert hours.update_seconds(VOTING, H100, 1, True) == pytest.approx(3.2 * pass_flops / (0.25 * 989e12))
    assert hours.update_seconds(VOTING, H100, 2, False) == pytest.approx(2.6 * pass_flops / (0.25 * 989e12) / 2 * 1.1)


VOTING_SHAPE = planner.shape_of(VOTING)


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
    made = hours.Estimate(H100, 2, 500, 100.0, 50.0, 10.0, 72.0, 51)
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
            total = planner.grid_gpu_hours(Grid(scale).cells(), size)
            days = planner.grid_wall_hours(Grid(scale).cells(), n, size) / 24
            wall = " / ".join(f"{estimated.hours:.0f}" for estimated in made)
            spent = " / ".join(f"{estimated.gpu_hours:.0f}" for estimated in made)
            lines.append(f"| {scale} | {machine} | {wall} | {spent} | {total:.0f} | {days:.1f} |")
    return "\n".join(lines)


def test_the_page_shows_the_estimates():
    """If this fails, paste the expected table into docs/scaling.md."""
    assert scaling_table() in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_a_grid_takes_at_least_its_longest_cell(monkeypatch):
    """Cells of 5, 4, 3, 3 hours: on two GPUs 5 + 3 and 4 + 3; on four, and on more, the longest."""
    times = iter([3.0, 5.0, 4.0, 3.0] * 3)
    monkeypatch.setattr(planner, "estimate", lambda *_: SimpleNamespace(hours=next(times)))
    assert [planner.grid_wall_hours([None] * 4, n_gpus, 0) for n_gpus in (2, 4, 9)] == [8.0, 5.0, 5.0]


def test_a_named_gpu_has_its_own_speed(capsys):
    """An A100 has the memory of an H100, and less than two thirds of its bandwidth."""
    assert hours.gpu_of(80 * GIB).name == "H100 SXM"
    named, unknown = (planner.estimate(VOTING, Launch(), 80 * GIB, gpu) for gpu in (hours.GPUS["a100"], None))
    assert named.rollout > 1.4 * unknown.rollout and named.update > 3 * unknown.update
    words = ["-p", "workflow", "voting", "-p", "policy", "ip", "-p", "scale", "1.7b"]
    assert plan([*words, "--gpu", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "one GPU has 80.00 GiB" in printed and "1 x A100 SXM 80 GB (2.04 TB/s, 312 TFLOP/s), if" in printed
    assert "downloads Qwen/Qwen3-1.7B, about 3.4 GB in bfloat16" in printed and "the rows of DAPO-Math-17K" in printed
