"""docs/scaling.md compares servers on a second node with colocated GPUs, by the model of `multirole plan`."""

from pathlib import Path

from multirole_study import plan as planner
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
H100_BYTES = 80 * 2**30


def second_node_table() -> str:
    """Seconds of an iteration. In turn, two nodes take what one takes; with `max_staleness=1` the longer of rollout and update counts."""
    lines = [
        "| scale | cell | 1 GPU | 8 GPUs of one node | 16 colocated | 8 serve and 8 train, in turn | 8 serve and 8 train, `max_staleness=1` |",
        "|---|---|---|---|---|---|---|",
    ]
    for scale in ("0.6b", "1.7b", "4b"):
        for name, shown in (("eval_opt", "Eval-Opt"), ("voting", "Voting"), ("orch_workers", "Orch-Workers")):
            cell = Cell(name, "ip", scale=scale)
            one, one_node, both = (planner.estimate(cell, Launch(n_processes=n), H100_BYTES) for n in (1, 8, 16))
            ahead = one_node.iteration - min(one_node.rollout, one_node.update)
            seconds = (one.iteration, one_node.iteration, both.iteration, one_node.iteration, ahead)
            lines.append(f"| {scale} | {shown} | " + " | ".join(f"{value:.0f}" for value in seconds) + " |")
    return "\n".join(lines)


def test_the_page_shows_the_estimates():
    """If this fails, paste the expected table into docs/scaling.md, and read its sentences again."""
    assert second_node_table() in PAGE.read_text(encoding="utf-8")
