"""Letters that the answerer chooses take the reference's names, every other letter keeps its own; formats of one date are one date."""

import pytest

from math_answers.dates import read_date
from math_answers.decide import decide
from math_answers.letters import settle_letters


@pytest.mark.parametrize(
    ("ours", "gold", "settled"),
    [  # numbas/Numbas#572, and kinds of it
        ("x^2+c", "x^2+C", "x^2+C"),
        ("x^2+t", "x^2+C", "x^2+t"),
        ("a+b+k", "a+b+c", "a+b+k"),
        ("y=cx+k", "y=kx+c", "y=cx+k"),
        ("B", "A", "B"),
        (r"2n\pi,n\in\mathbb{Z}", r"2k\pi,k\in\mathbb{Z}", r"2k\pi"),
        (r"2n\pi", r"2k\pi", r"2n\pi"),
        (r"2n\pi,n\in\mathbb{N}", r"2k\pi,k\in\mathbb{Z}", r"2n\pi,n\in\mathbb{N}"),
        (r"\{t\mid t>x\}", r"\{x\mid x>t\}", r"\{t\mid t>x\}"),
        (r"\{t\mid t>2\}", r"\{x\mid x>2\}", r"\{x\mid x>2\}"),
        ("f(t)=2t", "f(x)=2x", "f(x)=2x"),
        ("g(t)=2t", "f(x)=2x", "g(t)=2t"),
        ("f(t)=x+t", "f(x)=2x", "f(t)=x+t"),
        (r"\sin n+n", r"\sin x+x", r"\sin n+n"),
    ],
)
def test_only_chosen_letters_are_renamed(ours: str, gold: str, settled: str) -> None:
    assert settle_letters(ours, gold).answers == (settled,)


def test_several_constants_are_tried_in_every_order() -> None:
    names = settle_letters("y=Ae^x+Be^{-x}", "y=C_1e^x+C_2e^{-x}").answers
    assert set(names) == {"y=C_1e^x+C_2e^{-x}", "y=C_2e^x+C_1e^{-x}"}
    assert settle_letters("y=Ae^x+Ae^{-x}", "y=C_1e^x+C_2e^{-x}").answers == ("y=Ae^x+Ae^{-x}",)


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("March 5, 2024", (2024, 3, 5)),
        (r"\text{Tuesday, the 5th of March, 2024}", (2024, 3, 5)),
        ("2024-03-05", (2024, 3, 5)),
        ("13/5/2024", (2024, 5, 13)),
        ("5 Sept.", (None, 9, 5)),
        ("March 2024", (2024, 3, None)),
        ("3/5/2024", None),  # whose day is 3 or 5
        ("Monday, March 5, 2024", None),  # a Tuesday
        ("February 30, 2024", None),
        ("1/2", None),
        ("1.2", None),
        ("March", None),
    ],
)
def test_dates(text: str, date: tuple | None) -> None:
    assert read_date(text) == date


@pytest.mark.parametrize(
    "part",
    [
        "a , b ",
        r"C_1,\text{and}",
        r"\text{where}k ",
        r"\{a\mid ",
        "(A) x ",
        "March 5, ",
        "with any integer ",
        r"k\in\mathbb{Z},",
    ],
)
def test_long_answers_take_no_exponential_time(part: str) -> None:
    text = (part * 1000)[:1000]
    for answer, reference in ((text, "x^2+C"), ("x^2+C", text), (text + "!", text)):
        assert decide(answer, reference) != "correct"
