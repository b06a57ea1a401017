"""Orch-Workers: an orchestrator proposes strategies, workers follow one each, a synthesizer answers (paper sec 3)."""

import asyncio
import re

from multirole.types import Answer, Call, Duty, Edge, Problem, Structure, user
from multirole.workflows.prompts import read_again, render

_MARKUP = r"(?:^[ \t]{0,8}(?:[-+*•]|\d{1,3}[.)])[ \t]{1,4})?(?:[*_#>~`]|\\(?:text(?:bf|it|rm)?|mathbf|underline|emph)\{){0,6}[ \t]{0,4}"
_END = r"[ \t]{0,4}[*_}]{0,3}[ \t]{0,4}"
HEADER = re.compile(
    rf"{_MARKUP}\bSTRATEGY\s{{1,8}}(?:#|NO\.?|NUMBER)?[ \t]{{0,4}}\(?(?P<number>\d+)\)?{_END}:{_END}"
    rf"|^[ \t]{{0,8}}{_MARKUP}STRATEGY[ \t]{{0,4}}#?[ \t]{{0,4}}(?P<heading>\d+){_END}(?:[.)–—-]{_END}|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""The line that starts a strategy: "STRATEGY 1:", also styled ("**Strategy 1:**", "### Strategy 2 -")."""
ITEM = re.compile(r"^[^\S\n]*(?:[*_]{1,3})?\d+[.)]\s*(.+)$", re.MULTILINE)


def parse_strategies(text: str, limit: int) -> tuple[list[str], str]:
    """Parse at most `limit` strategies; return them and their format: "strategies", "list", "lines" or "unparsed" (the whole reply)."""
    headers = list(HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    bodies = [text[header.end() : end].strip() for header, end in zip(headers, ends, strict=False)]
    numbered = sorted(
        (
            (int((header["number"] or header["heading"])[:9]), body)
            for header, body in zip(headers, bodies, strict=True)
            if body
        ),
        key=lambda pair: pair[0],
    )
    if numbered:
        return [body for _, body in numbered][:limit], "strategies"
    if items := ITEM.findall(text):
        return [item.strip() for item in items][:limit], "list"
    if lines := [line.strip() for line in text.splitlines() if len(line.strip()) > 10]:
        return lines[:limit], "lines"
    return [text.strip()], "unparsed"


class OrchWorkers:
    """Orch-Workers with at most `max_workers` strategies, one worker each. Every worker solves the whole problem; the synthesizer answers."""

    name = "orch_workers"
    templates = ("orchestrator", "worker", "synthesizer")
    structure = Structure(
        duties={
            "orchestrator": Duty("plans", "worker"),
            "worker": Duty("solves"),
            "synthesizer": Duty("merges", "worker"),
        },
        trivial_workflows={"worker 1": lambda slots: slots[0]},
        edges=(
            Edge("question", "orchestrator"),
            Edge("orchestrator", "worker", "one strategy each"),
            Edge("worker", "synthesizer", "all solutions"),
            Edge("synthesizer", "answer"),
        ),
        chats=(("user",),),
    )

    def __init__(self, max_workers: int = 3, prompts: str | None = None) -> None:
        self.roles = {"orchestrator": 1, "worker": max_workers, "synthesizer": 1}
        self.prompts = read_again(prompts, *self.templates)

    async def run(self, problem: Problem, call: Call) -> Answer:
        prompts, question = self.prompts or problem.task, problem.question
        start = problem.history
        plan = await call("orchestrator", [*start, user(render(prompts, "orchestrator", question=question))])
        strategies, plan.outcome = parse_strategies(plan.text, self.roles["worker"])
        asks = [user(render(prompts, "worker", question=question, strategy=strategy)) for strategy in strategies]
        workers = await asyncio.gather(*(call("worker", [*start, ask], slot=s) for s, ask in enumerate(asks)))
        solutions = "\n".join(
            f"--- Solution {i} (Strategy: {strategy}) ---\n{turn.text}"
            for i, (strategy, turn) in enumerate(zip(strategies, workers, strict=True), start=1)
        )
        final = await call(
            "synthesizer", [*start, user(render(prompts, "synthesizer", question=question, candidates=solutions))]
        )
        return Answer(final.text)
