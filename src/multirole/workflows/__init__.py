"""The paper's workflows, one file each. A workflow is any object with `name`, `roles` and `async def run(problem, call)`."""

from multirole.workflows.eval_opt import EvalOpt
from multirole.workflows.orch_workers import OrchWorkers
from multirole.workflows.single import Single
from multirole.workflows.voting import Voting

WORKFLOWS = {cls.name: cls for cls in (Single, EvalOpt, Voting, OrchWorkers)}
