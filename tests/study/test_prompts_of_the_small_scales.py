"""The prompts of the small scales' tasks have a template for every role, with the fields of the paper's."""

import pytest

from multirole.workflows.prompts import render
from multirole_study.tasks.functions import Functions
from multirole_study.tasks.tiny_chain import TinyChain
from multirole_study.tasks.tiny_pipe import TinyPipe

FIELDS = {
    "generator": {"question"}, "evaluator": set(), "refine": set(), "aggregator": {"question", "candidates"},
    "orchestrator": {"question"}, "worker": {"question", "strategy"}, "synthesizer": {"question", "candidates"},
}  # fmt: skip


@pytest.mark.parametrize("task", [TinyChain(), TinyPipe(), Functions()], ids=lambda task: task.name)
def test_every_role_has_a_template(task):
    (problem,) = task.problems("train", 1)
    for role, fields in FIELDS.items():
        assert render(problem.task, role, **dict.fromkeys(fields, "7+5"))
