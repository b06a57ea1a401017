"""The math task rewards the answers that `math_answers` accepts, and has a reward of its own for a reply without a box."""

from paper_rows import DAPO

from multirole.types import Problem, Reward
from multirole_study.tasks.math import Math


def test_the_reference_of_every_math_row_is_correct_and_another_number_is_not():
    everything = Math(DAPO).problems("train") + Math(DAPO).problems("validation")
    right = Math().score(everything, [f"so \\boxed{{{p.reference}}}" for p in everything])
    assert [(r.value, r.reason, r.is_correct) for r in right] == [(1.0, "correct", True)] * 24
    wrong = Math().score(everything, ["\\boxed{31415}"] * 24)
    assert [(r.value, r.reason, r.is_correct) for r in wrong] == [(0.0, "wrong", False)] * 24


def test_a_reply_without_a_box_has_its_own_reward_and_reason() -> None:
    replies = [r"\boxed{\frac{2}{4}}", "the answer is 0.5", r"\boxed{", r"\boxed{2}", r"\boxed{}"]
    problems = [Problem(f"math/{i}", "math", "q", "0.5") for i in range(len(replies))]
    no_box = Reward(-0.25, "no_box", False)
    assert Math(malformed_reward=-0.25).score(problems, replies) == [
        Reward(1.0, "correct", True), no_box, no_box, Reward(0.0, "wrong", False), Reward(0.0, "unparsable", False),
    ]  # fmt: skip
