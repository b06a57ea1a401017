"""The answer in a reply: which box counts, and what a reward function for TRL makes of it."""

import pytest

from math_answers import accuracy_reward, extract


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 42 }", "42"),
        (r"\boxed {42}", "42"),
        (r"\\boxed{42}", "42"),
        (r"x = 6 \\\boxed{42}", "42"),
        (r"\\boxed{1} but \\boxed{2", None),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\{1,2)}", r"\{1,2)"),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        ("\\boxed{4\n2}", "4\n2"),
        (r"\boxed{1} } } {", "1"),
        ("no box", None),
        ("", None),
        ("boxed{42}", None),
        (r"\boxed 5", None),
        (r"\boxed", None),
        (r"\boxed{42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{42\}", None),
        (r"\boxed{1} but \boxed{2", None),
        (r"\boxed{1} but \boxed 2", None),
        (r"\boxed{1} \boxedeq{2}", "1"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think> nothing", None),
        (r"<think>\boxed{1}", None),
        (r"</think>\boxed{1}</think>\boxed{2}", "2"),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert extract(text) == content


# what a reply says, the reference, whether it is right; EleutherAI/lm-evaluation-harness#3116 #3477 #3644,
# OpenRLHF/OpenRLHF#1285, THUDM/slime#2150, huggingface/Math-Verify#44 #57, and kinds of them
REPLIES = [
    (r"The answer is $\fbox{42}$.", "42", True),
    (r"\fbox{\frac{1}{2}}", r"\frac{1}{2}", True),
    (r"\framebox{42}", "42", True),
    (r"The roots are \boxed{3}, \boxed{5}.", "3,5", True),
    (r"\boxed{3}, \boxed{5}, \boxed{7}", "7,5,3", True),
    (r"\boxed{3} and \boxed{5}", r"\{3,5\}", True),
    (r"$\boxed{3}$, $\boxed{5}$, and $\boxed{7}$", "3,5,7", True),
    (r"\boxed{3}\text{ or }\boxed{5}", "3,5", True),
    (r"\[\boxed{-2}\quad\text{and}\quad\boxed{1}\]", "1,-2", True),
    (r"$x=\boxed{3}$, $y=\boxed{5}$", "(3,5)", True),
    (r"$y=\boxed{3}$ and $x=\boxed{5}$", "(3,5)", False),
    (r"\boxed{3}, \boxed{5}", "5", False),  # two answers are not one
    (r"\boxed{3}, \boxed{5}", "3", False),
    (r"\boxed{5}, \boxed{5}", "5", True),
    (r"At first \boxed{3}. No: \boxed{5}", "5", True),
    (r"At first \boxed{3}. No: \boxed{5}", "3,5", False),
    (r"\boxed{1}, then \boxed{2}", "2", True),
    (r"therefore \boxed{840}.,but let me explain. **Final Answer** \boxed{840}", "840", True),
    (r"\boxed{\boxed{7}}", "7", True),
    (r"\boxed{\fbox{7}}", "7", True),
    (r"\boxed{\frac{\boxed{1}}{2}}", r"\frac{1}{2}", True),
    (r"\boxed{x=\boxed{7}}", "7", True),
    (r"\boxed{\boxed{7}\text{ cm}}", "7", True),
    (r"\boxed{\textcolor{red}{42}}", "42", True),
    (r"\boxed{\color{red} 42}", "42", True),
    (r"\boxed{\colorbox{yellow}{42}}", "42", True),
    (r"\boxed{\large 42}", "42", True),
    (r"\boxed{\bf 42}", "42", True),
    (r"\boxed{$42$}", "42", True),
    (r"\boxed{**42**}", "42", True),
    (r"\boxed{5}. Mark your solution with \boxed ", "5", True),
    (r"\boxed{5}. It is inside \boxed{}.", "5", True),
    (r"\boxed{7", "7", False),
    (r"\boxed{6} or rather \boxed{7", "6", False),
    (r"<think>\boxed{7}", "7", False),
    (r"<think>\boxed{6}</think>\boxed{7}", "7", True),
    (r"\boxed{7}<think>wait, \boxed{8}", "7", True),
]


def test_rewards_of_replies() -> None:
    texts, references, expected = zip(*REPLIES, strict=True)
    assert accuracy_reward(texts, solution=references) == list(map(float, expected))
    chats = [[{"role": "user", "content": r"\boxed{0}"}, {"role": "assistant", "content": text}] for text in texts]
    boxed = [rf"The answer is $\boxed{{{reference}}}$." for reference in references]
    assert accuracy_reward(completions=chats, answer=boxed, prompts=[""] * len(chats)) == list(map(float, expected))


def test_a_row_without_a_reference_has_no_reward() -> None:
    """The word None is no reference."""
    texts = [r"\boxed{42}", r"\boxed{None}", "no box", r"\boxed{42}"]
    assert accuracy_reward(texts, solution=["42", None, None, None]) == [1.0, None, None, None]


def test_a_message_without_text_has_no_answer_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": r"so \boxed{4"}, {"type": "text", "text": "2}"}]
    chats = [[{"role": "assistant", "content": None, "tool_calls": []}], [{"role": "assistant", "content": parts}]]
    assert accuracy_reward(chats, solution=["42", "42"]) == [0.0, 1.0]


@pytest.mark.parametrize("columns", [{}, {"solution": ["1"], "answer": ["1"]}])
def test_references_come_from_one_column(columns) -> None:
    with pytest.raises(ValueError, match="the column `solution` or the column `answer`"):
        accuracy_reward([r"\boxed{1}"], **columns)


def test_megabytes_of_braces_and_boxes() -> None:
    n = 200_000
    assert extract("\\boxed{" + "{" * n) is None
    assert extract("\\boxed{" + "{" * n + "}" * n + "}") == "{" * n + "}" * n
    assert extract("\\boxed{" * n) is None
    assert extract("\\boxed{7}" + "\\boxedx" * n) == "7"
    assert extract("\\boxed" + " " * n) is None


def test_a_value_that_two_boxes_share_is_kept_if_they_are_two_values() -> None:
    assert extract(r"x=\boxed{1}, y=\boxed{1}") == "x=1, y=1"
    for again in (
        r"\boxed{5} and \boxed{5}",
        r"\boxed{5}, so \boxed{5}",
        r"is \boxed{5}, x=\boxed{5}",
        r"x=\boxed{5}, x=\boxed{5}",
    ):
        assert extract(again) == "5"
