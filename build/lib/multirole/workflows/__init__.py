"""The paper's workflows, one file each. A workflow is any object with `name`, `roles` and `async def run(problem, call)`.

Where a row's prompt is a conversation, its system messages and earlier turns stand in front of every role's messages: they are
instructions and context for whoever works on the question. A role's template wraps the last user message alone.
"""

from multirole.workflows.eval_opt import EvalOpt
from multirole.workflows.orch_workers import OrchWorkers
from multirole.workflows.single import Single
from multirole.workflows.voting import Voting

WORKFLOWS = {cls.name: cls for cls in (Single, EvalOpt, Voting, OrchWorkers)}
