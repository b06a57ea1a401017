"""The program in a reply, in every form that models write fences in. Each case names its public report where there is one."""

import pytest

from multirole_study.tasks.fences import extract_program

T, P = "```", "print(int(input()) + 1)"
LOOP = "for i in range(3):\n    print(i)"
DOCSTRING = f'def f():\n    """Add.\n\n    {T}python\n    f()\n    {T}\n    """\n    return 1'
MODULE = f'"""Module.\n\n{T}\nf()\n{T}\n"""\nprint(1)'
QUOTED = f"s = '''\n{T}\n'''\n{P}"

MARKED = {  # CommonMark sec 4.5; microsoft/autogen#571, simonw/llm#1695: what may stand behind the backticks
    "python": f"{T}python\n{P}\n{T}",
    "a space before the language": f"{T} python\n{P}\n{T}",
    "spaces around it": f"{T} py \n{P}\n{T} ",
    "capitals": f"{T}PYTHON\n{P}\n{T}",
    "Python3": f"{T}Python3\n{P}\n{T}",
    "a version": f"{T}python3.11\n{P}\n{T}",
    "an attribute": f'{T}python title="a.py"\n{P}\n{T}',
    "braces": f"{T}{{python}}\n{P}\n{T}",
    "pandoc's attributes": f"{T}{{.python .numberLines}}\n{P}\n{T}",
    "a file's name": f"{T}main.py\n{P}\n{T}",
    "language and file": f"{T}python:main.py\n{P}\n{T}",
    "nothing": f"{T}\n{P}\n{T}",
    "CRLF": f"{T}python\r\n{P}\r\n{T}\r\n",
    "a byte order mark": f"\ufeff{T}python\n{P}\n{T}",
    "lines to be marked": f"{T}python {{1,3-5}}\n{P}\n{T}",
    "a class of HTML": f"{T}language-python\n{P}\n{T}",
    "options": f"{T}python,linenos\n{P}\n{T}",
    "another interpreter": f"{T}pypy3\n{P}\n{T}",
    "two words": f"{T}Python 3\n{P}\n{T}",
    "another word": f"{T}code\n{P}\n{T}",
    "four backticks": f"{T}`python\n{P}\n{T}`",
    "a longer closing fence": f"{T}python\n{P}\n{T}``",
    "tildes": f"~~~python\n{P}\n~~~",
    "tildes without a language": f"~~~\n{P}\n~~~",
}
PLACED = {  # stbenjam/skillsaw#122: indented fences; prose on the line of a fence
    "in a list": f"1. The program:\n   {T}python\n   {P}\n   {T}",
    "behind prose": f"Here is it: {T}python\n{P}\n{T}",
    "behind bold text": f"**Solution:**{T}python\n{P}\n{T}",
    "in HTML": f"<details>\n\n{T}python\n{P}\n{T}\n</details>",
    "closed at the end of its last line": f"{T}python\n{P}{T}\nFor the sample:\n{T}text\n3\n{T}",
    "a word behind the closing fence": f"{T}python\n{P}\n{T}Done\nAll cases pass.",
    "behind a draft in the thought": f"<think>{T}python\nprint(0)\n{T}</think>\n{T}python\n{P}\n{T}",
    "with both fences on its line": f"Simply {T}python {P}{T}.",
    "behind inline code": f"use `x` and {T}x{T} here\n{T}Python3\n{P}\n{T}",
    "behind a fence named in prose": f"The symbol {T} is\n{T}python\n{P}\n{T}",
}
OTHER_BLOCKS = {  # LiveCodeBench/LiveCodeBench#118: a last block that is no program
    "sample output": f"{T}python\n{P}\n{T}\nFor the sample it prints\n{T}text\n3\n{T}",
    "unmarked output": f"{T}python\n{P}\n{T}\nOutput:\n{T}\n3\n{T}",
    "unmarked output of an unmarked program": f"{T}\n{P}\n{T}\nOutput:\n{T}\n3\n{T}",
    "how to run it": f"{T}python\n{P}\n{T}\nRun it:\n{T}bash\npython a.py\n{T}",
    "a session": f"{T}python\n{P}\n{T}\n{T}pycon\n>>> f(1)\n{T}",
    "JSON": f'{T}python\n{P}\n{T}\n{T}json\n{{"a": 1}}\n{T}',
    "an empty block": f"{T}python\n{P}\n{T}\n{T}\n \n{T}",
    "a last fence without a partner": f"{T}python\n{P}\n{T}\nThis adds one.\n{T}\n",  # noonghunna/benchlocal-cli#120
    "a first fence without a partner": f"Here:\n{T}\n\n{T}python\n{P}\n{T}",
    "text that is not closed": f"{T}text\n3\n\n{T}python\n{P}\n{T}",
    "the input's format before it": f"Input:\n{T}\nn\na1 a2\n{T}\n{T}python\n{P}\n{T}",
    "apostrophes": f"{T}python\n{P}\n{T}\nIt's right; don't worry.\n{T}text\nit's 3\n{T}",
    "an end of turn": f"{T}python\n{P}\n{T}<|im_end|>",
    "comments": f"{T}python\n{P}\n{T}\nFor example:\n{T}python\n# Input: 1\n# Output: 2\n{T}",
    "an ellipsis": f"{T}python\n{P}\n{T}\nIn this form:\n{T}python\n# your program\n...\n{T}",
    "an empty statement": f"{T}\n{P}\n{T}\n{T}python\npass  # nothing else\n{T}",
    "comments before a program that is cut off": f"{T}python\n# your program\n{T}\n{T}python\n{P}",
    "C++": f"{T}python\n{P}\n{T}\nThe same:\n{T}c++\nint main() {{}}\n{T}",
}
NESTED = {  # AnswerDotAI/fastcore#873
    "Markdown around it": f"{T}markdown\n# Solution\n{T}python\n{P}\n{T}\n{T}",
    "a longer fence around it": f"{T}`markdown\n# Solution\n{T}python\n{P}\n{T}\n{T}`",
    "an unmarked longer fence": f"{T}`\n{T}python\n{P}\n{T}\n{T}`",
    "opened twice": f"{T}\n{T}python\n{P}\n{T}\n{T}",
    "begun again": f"{T}python\nx = 1\n\n{T}python\n{P}\n{T}",
    "the next one closes it": f"{T}python\nprint(0)\n{T} and better {T}python\n{P}{T}",
}


@pytest.mark.parametrize("reply", [*MARKED.values(), *PLACED.values(), *OTHER_BLOCKS.values(), *NESTED.values()],
                         ids=[*MARKED, *PLACED, *OTHER_BLOCKS, *NESTED])  # fmt: skip
def test_the_program_is_found_in_every_form_of_fence(reply):
    assert extract_program(reply).strip() == P


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        (f"> Here:\n> {T}python\n> for i in range(3):\n>     print(i)\n> {T}", LOOP),
        (f"- {T}python\n  for i in range(3):\n      print(i)\n  {T}", LOOP),
        (f"1. A\n   1. B\n      {T}python\n      for i in range(3):\n          print(i)\n      {T}", LOOP),
        (f"\t{T}python\n\tfor i in range(3):\n\t    print(i)\n\t{T}", LOOP),
        (f"{T}python\n    for i in range(3):\n        print(i)\n{T}", LOOP),
        (f"{T}python\n{DOCSTRING}\n{T}\nIt returns 1.", DOCSTRING),
        (f"{T}python\n{MODULE}\n{T}", MODULE),
        (f"{T}python\n{QUOTED}\n{T}", QUOTED),
        (f"{T}python\ns = '{T}'\n{P}\n{T}", f"s = '{T}'\n{P}"),
        (f"{T}python\n# it's {T}\n{P}\n{T}", f"# it's {T}\n{P}"),
        (f"~~~py\ns = 1\n# {T}\n{P}\n~~~", f"s = 1\n# {T}\n{P}"),
        (f"~~~python\nx = ~~~1\n{P}\n~~~", f"x = ~~~1\n{P}"),
        (f"{T}python import sys\nprint(1)\n{T}", "import sys\nprint(1)"),
        (f"{T}import sys\nprint(1)\n{T}", "import sys\nprint(1)"),  # EleutherAI/lm-evaluation-harness#3710
        (f"{T}def f(x):\n    return x\n{T}", "def f(x):\n    return x"),
        (f"def f():\n    return 1\n{T}", "def f():\n    return 1"),  # noonghunna/benchlocal-cli#120
        (f"{T}python\n{P}", P),  # cuga-project/cuga-agent#252
        (f"{T}text\nThe sample has 3.\n{T}\n{T}python\n{P}", P),
        (f"{T}python\na\n{T}\n{T}python\ncut off", "a"),
        (f"{T}python\na\n{T}\n{T}python\nb\n{T}", "b"),  # simonw/llm#717: models correct themselves
        (f"{T}python\na\n{T}\nBetter:\n{T}\nn = int(input())\nprint(n)\n{T}", "n = int(input())\nprint(n)"),
        (f"{T}cpp\nint x;\n{T}", "int x;"),
        (f"{T}python\na\n{T}\n{T}python\npassed = 1\n{T}", "passed = 1"),
        (f"{T}python\n# I cannot do it.\n{T}", "# I cannot do it."),
    ],
)
def test_the_program_is_the_text_between_the_fences(reply, program):
    assert extract_program(reply).strip() == program


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize(
    "piece",
    [T, f"{T}python\n", f"{T}x\n'''\n", '"""', "> ", "1. ", "#\n", "a ", "_", "def ", "'", "~~~ ", "~", '\\"', " "],
)
def test_reading_costs_in_proportion_to_the_reply(piece, end):
    """Steps of the pattern matcher cannot be counted; with a quadratic rule this would take hours."""
    for opening in ("", f"{T}python\n", f"{T}text\n", f"{T}bash\n"):
        extract_program(opening + (piece + end) * 20_000)


@pytest.mark.parametrize(
    "reply", ["", "a", P, f"{T}python\n\n{T}", f"{T}\n \n{T}", f"{T}python a\n{T}", f"I cannot do it.\n{T}", f"{T}x{T}"]
)
def test_a_reply_without_a_program_has_none(reply):
    assert extract_program(reply) is None
