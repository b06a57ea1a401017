"""What comes out of grading: `Verdict`, and `SandboxError` for failures of our own."""

from dataclasses import dataclass

RULES = ("fraction", "all_pass")


class SandboxError(RuntimeError):
    """The sandbox itself failed or does not contain programs; this says nothing about the program that was to be run."""


@dataclass(frozen=True)
class Verdict:
    """The result of grading one program. `reason` is "passed", or that of the first test that did not pass.

    Each test has one of the `reasons` passed, wrong_answer, error, timeout, memory, output_limit, violation and no_code.
    """

    reward: float
    reason: str
    reasons: tuple[str, ...]
