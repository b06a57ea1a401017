"""Orch-Workers: an orchestrator proposes strategies, workers follow one each, a synthesizer answers (paper sec 3)."""

import asyncio
import re

from multirole.core.types import Answer, Call, Duty, Edge, Problem, Structure, user
from multirole.workflows.prompts import render


def parse_strategies(text: str, limit: int) -> tuple[list[str], str]:
    """At most `limit` strategies and how they were found: "strategies", "list", "lines" or "unparsed" (the whole reply)."""
    sections = re.findall(r"STRATEGY\s+(\d+):(.*?)(?=STRATEGY\s+\d+:|\Z)", text, re.IGNORECASE | re.DOTALL)
    numbered = sorted(
        ((int(number), body.strip()) for number, body in sections if body.strip()), key=lambda pair: pair[0]
    )
    if numbered:
        return [body for _, body in numbered][:limit], "strategies"
    if items := re.findall(r"^\s*\d+[.)]\s*(.+)$", text, re.MULTILINE):
        return [item.strip() for item in items][:limit], "list"
    if lines := [line.strip() for line in text.splitlines() if len(line.strip()) > 10]:
        return lines[:limit], "lines"
    return [text.strip()], "unparsed"


class OrchWorkers:
    """At most `max_workers` strategies, one worker each; every worker solves the whole problem; the synthesizer answers."""

    name = "orch_workers"
    structure = Structure(
        duties={
            "orchestrator": Duty("plans", "worker"),
            "worker": Duty("solves"),
            "synthesizer": Duty("merges", "worker"),
        },
        twins={"worker 1": lambda slots: slots[0]},
        edges=(
            Edge("question", "orchestrator"),
            Edge("orchestrator", "worker", "one strategy each"),
            Edge("worker", "synthesizer", "all solutions"),
            Edge("synthesizer", "answer"),
        ),
    )

    def __init__(self, max_workers: int = 3, prompts: str | None = None) -> None:
        self.roles = {"orchestrator": 1, "worker": max_workers, "synthesizer": 1}
        self.prompts = prompts

    async def run(self, problem: Problem, call: Call) -> Answer:
        prompts, question = self.prompts or problem.task, problem.question
        plan = await call("orchestrator", [user(render(prompts, "orchestrator", question=question))])
        strategies, plan.outcome = parse_strategies(plan.text, self.roles["worker"])
        asks = [user(render(prompts, "worker", question=question, strategy=strategy)) for strategy in strategies]
        workers = await asyncio.gather(*(call("worker", [ask], slot=s) for s, ask in enumerate(asks)))
        solutions = "\n".join(
            f"--- Solution {i} (Strategy: {strategy}) ---\n{turn.text}"
            for i, (strategy, turn) in enumerate(zip(strategies, workers, strict=True), start=1)
        )
        final = await call(
            "synthesizer", [user(render(prompts, "synthesizer", question=question, candidates=solutions))]
        )
        return Answer(final.text)
