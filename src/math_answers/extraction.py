r"""Find the answer in a reply: `extract(text)` returns the content of the last `\boxed{...}`."""

import re

from math_answers.replies import ends_in_broken_box, find_boxes, text_outside_thoughts

MAX_UNWRAPPED = 20_000
"""The longest box content that is searched for inner boxes; longer answers are "too_long" anyway."""
MAX_NESTING = 5
"""Boxes inside of boxes that are replaced by their content."""
_JOINT = re.compile(
    r"(?:[\s$&.*]|\\[,;:! ()\[\]]|~|\\q?quad|\\text\s*\{|\\(?:mathrm|textrm|mbox)\s*\{|\})*"
    r"(?:,|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|(?:,\s*)?(?:and|or)(?![A-Za-z]))"
    r"(?:[\s$&]|\\[,;:! ()\[\]]|~|\\q?quad|and|or|\\text\s*\{|\})*"
    r"(?P<name>[A-Za-z](?:_\w|_\{\w+\})?\s*=\s*)?[\s$]*"
)
"""Matches the text between boxes of one answer: a comma, "and" or "or", and optionally the next value's name."""
_NAME_BEFORE = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\w|_\{\w+\})?)\s*=\s*\$?\s*$")


def extract(text: str) -> str | None:
    """Return the content of the last box in linear time; None without a box or with unbalanced braces.

    Adjacent boxes ("\\boxed{3} and \\boxed{5}", "x=\\boxed{1}, y=\\boxed{2}") are one answer, "3, 5". The last
    box decides even if it is truncated or has no braces and an earlier box is complete (the released code's rule). Text
    inside thoughts is ignored.
    """
    text = text_outside_thoughts(text)
    boxes = find_boxes(text)
    if not boxes or ends_in_broken_box(text, boxes[-1].end):
        return None
    while len(boxes) > 1 and not boxes[-1].content:  # "inside \\boxed{}" is a mention
        boxes.pop()
    contents, names = [boxes[-1].content], []
    for box, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        joint = _JOINT.fullmatch(text[box.end : after.start]) if after.start - box.end <= 60 else None
        if joint is None or not box.content:
            break
        contents.append(box.content)
        names.append(joint["name"] or "")
    first = boxes[len(boxes) - len(contents)]
    name = _NAME_BEFORE.search(text, max(0, first.start - 40), first.start)
    labels = [f"{name[1]}=" if name and any(names) else "", *reversed(names)]
    if (
        len(set(contents)) == 1 and len({label.strip() for label in labels} - {""}) < 2
    ):  # said again, not a second value
        return _unwrapped(contents[0])
    parts = [label.strip() + _unwrapped(content) for label, content in zip(labels, reversed(contents), strict=True)]
    return ", ".join(dict.fromkeys(parts))


def _unwrapped(content: str) -> str:
    """Return a box's content with inner boxes replaced by their content."""
    for _ in range(MAX_NESTING):
        inner = find_boxes(content) if len(content) <= MAX_UNWRAPPED else []
        for box in reversed(inner):
            content = content[: box.start] + box.content + content[box.end :]
        if not inner:
            break
    return content
