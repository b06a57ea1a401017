"""Voting: three independent candidates, one aggregator that selects (paper sec 3).

The aggregator only selects: its own prose is never graded. A reply without a valid `\\boxed{N}` is recorded as
"unparsed" and candidate 1 is used (the released code takes any digit instead: `fallback="first_digit"`).
"""

import asyncio
import re

from multirole.core.types import Answer, Call, Duty, Edge, Problem, Structure, user
from multirole.workflows.prompts import render


def parse_selection(text: str, n: int, fallback: str = "candidate_1") -> tuple[int, str]:
    """The selected candidate (0-based) and the outcome: "1".."n", "digit:k" (fallback="first_digit") or "unparsed"."""
    boxed = re.search(r"\\boxed\{(\d+)\}", text)
    if boxed and 1 <= int(boxed[1]) <= n:
        return int(boxed[1]) - 1, boxed[1]
    digit = re.search(r"(?<!\d)[1-9](?!\d)", text)
    if fallback == "first_digit" and digit and int(digit[0]) <= n:
        return int(digit[0]) - 1, f"digit:{digit[0]}"
    return 0, "unparsed"


def list_candidates(texts: list[str]) -> str:
    """The candidates as an aggregator sees them: in full, under 1-based headers."""
    return "\n".join(f"--- Solution {i} ---\n{text}" for i, text in enumerate(texts, start=1))


class Voting:
    """`n_voters` generators answer the same prompt; the aggregator picks one of them. `prompts` is a set of templates."""

    name = "voting"
    structure = Structure(
        duties={"generator": Duty("solves"), "aggregator": Duty("selects", "generator")},
        twins={
            "candidate 1": lambda slots: slots[0],
            "most candidates right": lambda slots: 2 * sum(slots) > len(slots),
        },
        edges=(
            Edge("question", "generator"),
            Edge("generator", "aggregator", "all candidates"),
            Edge("aggregator", "answer", "the candidate it picks"),
        ),
    )

    def __init__(self, n_voters: int = 3, fallback: str = "candidate_1", prompts: str | None = None) -> None:
        self.roles = {"generator": n_voters, "aggregator": 1}
        self.fallback, self.prompts = fallback, prompts

    async def run(self, problem: Problem, call: Call) -> Answer:
        prompt = [user(render(self.prompts or problem.task, "generator", question=problem.question))]
        voters = await asyncio.gather(*(call("generator", prompt, slot=s) for s in range(self.roles["generator"])))
        candidates = list_candidates([turn.text for turn in voters])
        question = render(self.prompts or problem.task, "aggregator", question=problem.question, candidates=candidates)
        selection = await call("aggregator", [user(question)])
        chosen, selection.outcome = parse_selection(selection.text, len(voters), self.fallback)
        return Answer(voters[chosen].text)
