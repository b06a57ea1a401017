"""Results of grading: `Verdict`, and `SandboxError` for failures of the sandbox itself."""

from dataclasses import dataclass

RULES = ("fraction", "all_pass")


class SandboxError(RuntimeError):
    """The sandbox failed, or it does not confine programs. This says nothing about the graded program."""


@dataclass(frozen=True)
class Verdict:
    """The result of grading one program. `reason` is "passed", or the reason of the first failed test.

    Each test has one of the `reasons` passed, wrong_answer, error, timeout, memory, output_limit, violation and no_code.
    """

    reward: float
    reason: str
    reasons: tuple[str, ...]
