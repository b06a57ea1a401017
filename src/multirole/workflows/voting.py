"""Voting: three independent candidates, one aggregator that selects (paper sec 3).

The aggregator only selects: its prose is never graded. A reply without a valid `\\boxed{N}`, in any
style, and without a last line that only names a candidate, is recorded as "unparsed" and candidate 1 is used (the released code takes any digit: `fallback="first_digit"`).
"""

import asyncio
import re

from multirole.chat.replies import find_boxes, last_line, plain_words
from multirole.types import Answer, Call, Duty, Edge, Problem, Structure, user
from multirole.workflows.prompts import read_again, render

NUMBERS = {
    word: number
    for number, word in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], start=1)
}
_CANDIDATE = (
    "solution|candidate|option|choice|response|proposal|attempt|voter|generator|best|selected|choose|select|pick"
)
_LABEL = f"{_CANDIDATE}|answer|selection|number|no|n|i|would|vote|for|go|with"
SELECTION = re.compile(
    rf"(?:(?:the|my|best|final|selected|correct|is|{_LABEL})(?![a-z])[\s:=.]*)*(?P<number>\d+|{'|'.join(NUMBERS)})(?:\.0+)?"
    r"(?: is (?:the )?(?:best|correct|right)(?: (?:one|solution|answer))?)?"
)
"""A selection in plain words, after a label such as "Solution"."""


def parse_selection(text: str, n: int, fallback: str = "candidate_1", box_rule: str = "box_or_line") -> tuple[int, str]:
    """Return the selected candidate (0-based) and the outcome: "1".."n", "digit:k" or "unparsed".

    The last box that holds the number of a candidate counts, in any style. Without such a box the last line counts if it
    only names a candidate ("I choose **Solution 2**."), or if the whole reply is its number; with `box_rule="last_box"` only boxes
    count, with `box_rule="first_literal"` the first literal `\\boxed{k}`. If there is none, candidate 1 is selected and the outcome is "unparsed". `fallback="first_digit"` is the
    released code's rule: the first literal box, else the first digit from 1 to 9 without another digit next to it ("digit:k").
    """
    if fallback == "first_digit" or box_rule == "first_literal":
        number = _first_literal(text)
    else:
        words = [plain_words(box.content) for box in reversed(find_boxes(text))]
        words += [_naming_line(text)] if box_rule == "box_or_line" else []
        number = next((number for number in map(_number, words) if 1 <= number <= n), 0)
    if 1 <= number <= n:
        return number - 1, str(number)
    digit = re.search(r"(?<!\d)[1-9](?!\d)", text)
    if fallback == "first_digit" and digit and int(digit[0]) <= n:
        return int(digit[0]) - 1, f"digit:{digit[0]}"
    return 0, "unparsed"


def _naming_line(text: str) -> str:
    """Return the last line if it speaks of a candidate or is the whole reply; "The answer is 2" may be a result, and gives ""."""
    line = last_line(text)
    return line if len(text.split()) == 1 or re.search(rf"\b(?:{_CANDIDATE}|selection)\b", line) else ""


def _number(words: str) -> int:
    """Return the number of the candidate that the plain words of a box select, or 0 if they select none."""
    selection = SELECTION.fullmatch(words)
    if selection is None:
        return 0
    return NUMBERS.get(selection["number"]) or int(selection["number"][:9])


def _first_literal(text: str) -> int:
    boxed = re.search(r"\\boxed\{(\d+)\}", text)
    return int(boxed[1][:9]) if boxed else 0


def list_candidates(texts: list[str]) -> str:
    """Format the candidates for an aggregator: in full, under 1-based headers."""
    return "\n".join(f"--- Solution {i} ---\n{text}" for i, text in enumerate(texts, start=1))


class Voting:
    """Voting: `n_voters` generators answer the same prompt and the aggregator picks one answer. `prompts` is a set of templates."""

    name = "voting"
    templates = ("generator", "aggregator")
    structure = Structure(
        duties={"generator": Duty("solves"), "aggregator": Duty("selects", "generator", lambda turns: r"\boxed{1}")},
        trivial_workflows={
            "candidate 1": lambda slots: slots[0],
            "most candidates right": lambda slots: 2 * sum(slots) > len(slots),
        },
        edges=(
            Edge("question", "generator"),
            Edge("generator", "aggregator", "all candidates"),
            Edge("aggregator", "answer", "the candidate it picks"),
        ),
        chats=(("user",),),
    )

    def __init__(
        self,
        n_voters: int = 3,
        fallback: str = "candidate_1",
        prompts: str | None = None,
        box_rule: str = "box_or_line",
    ) -> None:
        self.roles = {"generator": n_voters, "aggregator": 1}
        self.fallback, self.prompts, self.box_rule = fallback, read_again(prompts, *self.templates), box_rule

    async def run(self, problem: Problem, call: Call) -> Answer:
        ask = render(self.prompts or problem.task, "generator", question=problem.question)
        prompt = [*problem.history, user(ask)]
        voters = await asyncio.gather(*(call("generator", prompt, slot=s) for s in range(self.roles["generator"])))
        candidates = list_candidates([turn.text for turn in voters])
        question = render(self.prompts or problem.task, "aggregator", question=problem.question, candidates=candidates)
        selection = await call("aggregator", [*problem.history, user(question)])
        chosen, selection.outcome = parse_selection(selection.text, len(voters), self.fallback, self.box_rule)
        return Answer(voters[chosen].text)
