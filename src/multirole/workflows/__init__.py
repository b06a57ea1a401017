"""The paper's workflows, one file each. A workflow is any object with `name`, `roles` and `async def run(problem, call)`.

If a row's prompt is a conversation, its system messages and earlier turns come before every role's messages, as instructions
and context for all roles. A role's template wraps only the last user message.
"""

from typing import Any

from multirole.workflows.eval_opt import EvalOpt
from multirole.workflows.orch_workers import OrchWorkers
from multirole.workflows.prompts import read_again
from multirole.workflows.single import Single
from multirole.workflows.voting import Voting

WORKFLOWS = {cls.name: cls for cls in (Single, EvalOpt, Voting, OrchWorkers)}


def check_sets(workflow: Any, *datasets: Any) -> None:
    """Raise ValueError if a workflow of the paper would read templates of a set, named by a row's "task", that lacks them.

    Rows of streams, and those that a transform makes, are not read here.
    """
    from datasets import Dataset  # slow to import, and the command line reads this package

    if type(workflow) not in WORKFLOWS.values() or workflow.prompts:
        return
    for dataset in datasets:
        is_read = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
        if is_read and "task" in dataset.column_names:
            for prompts in sorted({str(name or "") for name in dataset["task"]}):
                read_again(prompts, *workflow.templates)
