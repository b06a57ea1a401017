"""Single-agent control: one generator call (paper sec 4, the SA baseline)."""

from multirole.types import Answer, Call, Duty, Edge, Problem, Structure, user
from multirole.workflows.prompts import read_again, render


class Single:
    """Workflow with one generator, whose text is the answer."""

    name = "single"
    templates = ("generator",)
    structure = Structure(
        duties={"generator": Duty("solves")},
        edges=(Edge("question", "generator"), Edge("generator", "answer")),
        chats=(("user",),),
    )

    def __init__(self, prompts: str | None = None) -> None:
        self.roles = {"generator": 1}
        self.prompts = read_again(prompts, *self.templates)

    async def run(self, problem: Problem, call: Call) -> Answer:
        turn = await call(
            "generator",
            [*problem.history, user(render(self.prompts or problem.task, "generator", question=problem.question))],
        )
        return Answer(turn.text)
