"""The paper's workflows, one file each. A workflow is any object with `name`, `roles` and `async def run(problem, call)`.

If a row's prompt is a conversation, its system messages and earlier turns come before every role's messages, as instructions
and context for all roles. A role's template wraps only the last user message.
"""

from multirole.workflows.eval_opt import EvalOpt
from multirole.workflows.orch_workers import OrchWorkers
from multirole.workflows.single import Single
from multirole.workflows.voting import Voting

WORKFLOWS = {cls.name: cls for cls in (Single, EvalOpt, Voting, OrchWorkers)}
