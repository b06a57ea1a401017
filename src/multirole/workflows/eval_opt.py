"""Eval-Opt: a generator drafts, an evaluator judges, the generator refines (paper sec 3).

The roles share one conversation: only their replies enter the history, never the critique or refine prompts, so later
contexts hold consecutive assistant messages. The loop stops on a "Correct" verdict or after `rounds` verdicts.
"""

import re

from multirole.chat.replies import find_boxes, last_line, plain_words
from multirole.types import Answer, Call, Duty, Edge, Problem, Structure, assistant, user
from multirole.workflows.prompts import read_again, render

VERDICT = re.compile(
    r"(?:(?:the|my|final|this|last|previous|proposed|given|it|verdict|judge?ment|evaluation|assessment|decision|conclusion|result"
    r"|answer|solution|draft|response|is|as)(?![a-z])[\s:=-]*)*"
    r"(?P<verdict>correct|incorrect|in-correct|not correct|isn ?t correct|wrong)"
)
"""A verdict in plain words, after a label such as "Verdict:" or "The solution is"."""


def parse_verdict(text: str, box_rule: str = "box_or_line") -> str:
    """Return "correct", "incorrect" or "unparsed": the verdict in the last box that holds one, in any style.

    Without such a box the last line counts if it is nothing but a verdict ("**Verdict:** Correct."); "Correct ❌" is none. With
    `box_rule="last_box"` only boxes count. `box_rule="first_literal"` is the released code's: the first literal `\\boxed{Correct}` or `\\boxed{Incorrect}`, in any case.
    """
    if box_rule == "first_literal":
        literal = re.search(r"\\boxed\{(correct|incorrect)\}", text, re.IGNORECASE)
        return literal[1].lower() if literal else "unparsed"
    words = [plain_words(box.content) for box in reversed(find_boxes(text))]
    words += [last_line(text)] if box_rule == "box_or_line" else []
    is_crossed = False
    for content in words:
        verdict = VERDICT.fullmatch(content.replace("✗", "").strip())
        if verdict and verdict["verdict"] != "correct":
            return "incorrect"
        if verdict and "✗" not in content:
            return "unparsed" if is_crossed else "correct"
        is_crossed = is_crossed or verdict is not None
    return "unparsed"


class EvalOpt:
    """Eval-Opt with at most `rounds` drafts and verdicts; the answer is the last draft, even if it was judged incorrect."""

    name = "eval_opt"
    templates = ("generator", "evaluator", "refine")
    structure = Structure(
        duties={
            "generator": Duty("solves"),
            "evaluator": Duty("judges", "generator", lambda turns: r"\boxed{Correct}"),
        },
        trivial_workflows={"first draft": lambda slots: slots[0]},
        edges=(
            Edge("question", "generator"),
            Edge("generator", "evaluator", "draft"),
            Edge("generator", "answer", "the last draft"),
            Edge("evaluator", "generator", "critique, until correct", is_loop=True),
        ),
        chats=(("user",), ("user", "assistant", "user"), ("user", "assistant", "assistant", "user")),
    )

    def __init__(self, rounds: int = 3, prompts: str | None = None, box_rule: str = "box_or_line") -> None:
        self.roles = {"generator": 1, "evaluator": 1}
        self.rounds, self.prompts, self.box_rule = rounds, read_again(prompts, *self.templates), box_rule

    async def run(self, problem: Problem, call: Call) -> Answer:
        prompts = self.prompts or problem.task
        history = [*problem.history, user(render(prompts, "generator", question=problem.question))]
        critique, refine = user(render(prompts, "evaluator")), user(render(prompts, "refine"))
        draft = await call("generator", history)
        for round in range(self.rounds):
            history.append(assistant(draft.text))
            verdict = await call("evaluator", [*history, critique], round=round)
            verdict.outcome = parse_verdict(verdict.text, self.box_rule)
            if verdict.outcome == "correct" or round == self.rounds - 1:
                break
            history.append(assistant(verdict.text))
            draft = await call("generator", [*history, refine], round=round + 1)
        return Answer(draft.text)
