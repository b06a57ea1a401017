"""The math reward: which box counts, what equals the reference, and that no answer can hang, corrupt or bypass grading."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from paper_rows import DAPO

import multirole_sandbox as sandbox
from multirole.types import Problem
from multirole_sandbox import SandboxError
from multirole_study.tasks import math_answer
from multirole_study.tasks.math import Math
from multirole_study.tasks.math_answer import extract_boxed, grade_answers

DATA = Path(__file__).parents[1] / "data"
HEADER, *ROWS = [line.split("\t") for line in (DATA / "math_pairs.tsv").read_text(encoding="utf-8").splitlines()]
REPORTED_HEADER, *REPORTED = [
    line.split("\t") for line in (DATA / "reported_pairs.tsv").read_text(encoding="utf-8").splitlines()
]
PLAIN_ROWS = [
    row for row in ROWS if row[0] != "tower"
]  # towers of powers run into the time limit, which takes seconds each
TOWER = (r"9^{9^{9^{9}}}", "1")


@pytest.fixture(scope="module", autouse=True)
def shorter_limits():
    """Half the time per comparison, so that towers end sooner, and one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_answer, "LIMITS", dataclasses.replace(math_answer.LIMITS, test_seconds=1.0, workers=1))
        yield
    sandbox.close()


def verdicts_of(rows: list[list[str]]) -> dict[tuple[str, ...], str]:
    pairs = [(row[1], row[2]) for row in rows]
    return dict(zip(pairs, grade_answers(pairs), strict=True))


def grader_pid() -> int:
    (worker,) = sandbox._running(str(math_answer.MODULE)).idle
    return worker.process.pid


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# ---- the table


def test_table_is_well_formed() -> None:
    assert HEADER == ["kind", "answer", "reference", "right", "given", "note"] and len(ROWS) >= 70
    for _, answer, reference, right, verdict, note in ROWS:
        is_right = (verdict == "correct") == (right == "yes")
        assert right in {"yes", "no"} and is_right != note.startswith("known limit: "), (answer, reference)
    assert len({(answer, reference) for _, answer, reference, *_ in ROWS}) == len(ROWS)


def check(rows: list[list[str]]) -> None:
    """The column `given` has the current verdicts, so that any change by an upgrade of math-verify is noticed."""
    assert verdicts_of(rows) == {(row[1], row[2]): row[4] for row in rows}


def test_verdicts_of_a_tenth_of_the_table() -> None:
    check([*PLAIN_ROWS[::10], next(row for row in ROWS if row[0] == "tower")])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(dict.fromkeys(row[0] for row in ROWS)))
def test_verdicts_of_the_table(kind: str) -> None:
    check([row for row in ROWS if row[0] == kind])


def test_table_of_reports_is_well_formed() -> None:
    assert (
        REPORTED_HEADER == ["report", "kind", "answer", "reference", "right", "given", "math_verify", "note"]
        and len(REPORTED) >= 300
    )
    assert len({(row[2], row[3]) for row in REPORTED}) == len(REPORTED)
    for report, _, answer, reference, right, verdict, math_verify, note in REPORTED:
        assert re.fullmatch(r"(kind of )?[\w.-]+/[\w.-]+(#\d+| tests/\w+\.py)", report), report
        is_right = (verdict == "correct") == (right == "yes")
        assert {right, math_verify} <= {"yes", "no"}, (answer, reference)
        assert is_right != note.startswith("known limit: "), (answer, reference)
    assert sum(not row[0].startswith("kind of ") for row in REPORTED) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(dict.fromkeys(row[1] for row in REPORTED)))
def test_verdicts_of_reported_pairs(kind: str) -> None:
    rows = [row for row in REPORTED if row[1] == kind]
    verdicts = grade_answers([(row[2], row[3]) for row in rows])
    assert [(*row[2:4], verdict) for row, verdict in zip(rows, verdicts, strict=True)] == [
        (*row[2:4], row[5]) for row in rows
    ]


def test_verdicts_of_a_tenth_of_the_reported_pairs() -> None:
    rows = REPORTED[::10]
    assert grade_answers([(row[2], row[3]) for row in rows]) == [row[5] for row in rows]


def test_order_and_splits_of_a_batch_do_not_matter() -> None:
    rows = PLAIN_ROWS[5::12]
    pairs = [(row[1], row[2]) for row in rows]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    verdicts = [
        verdict for part in (order[:1], order[1:3], order[3:]) for verdict in grade_answers([pairs[i] for i in part])
    ]
    assert verdicts == [rows[i][4] for i in order]


def test_an_equal_text_is_correct_whatever_it_is() -> None:
    references = [row[2] for row in ROWS] + [r"\overline{AB}", "10:30", "no such \\command", "東京"]
    assert set(grade_answers([(reference, reference) for reference in references])) == {"correct"}


def test_reference_that_cannot_be_parsed_is_matched_by_text_only() -> None:
    assert grade_answers([("10:30", "10:30"), ("10.5", "10:30?"), ("42", r"\frac{")]) == ["correct", "wrong", "wrong"]


def test_line_breaks_and_strange_characters() -> None:
    answers = ["4\n2", "\n42\n", "4\x002", "\ud800", "42\u200b", "\u202f42"]
    expected = ["wrong", "correct", "unparsable", "unparsable", "correct", "correct"]
    assert grade_answers([(answer, "42") for answer in answers]) == expected


# ---- the box


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
    assert extract_boxed(text) == content


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
    problems = [Problem(f"math/{i}", "math", "q", reference) for i, (_, reference, _) in enumerate(REPLIES)]
    rewards = Math().score(problems, [text for text, *_ in REPLIES])
    assert [(*reply[:2], reward.is_correct) for reply, reward in zip(REPLIES, rewards, strict=True)] == REPLIES


def test_megabytes_of_braces_and_boxes() -> None:
    n = 200_000
    assert extract_boxed("\\boxed{" + "{" * n) is None
    assert extract_boxed("\\boxed{" + "{" * n + "}" * n + "}") == "{" * n + "}" * n
    assert extract_boxed("\\boxed{" * n) is None
    assert extract_boxed("\\boxed{7}" + "\\boxedx" * n) == "7"
    assert extract_boxed("\\boxed" + " " * n) is None


# ---- limits


def test_long_answers_are_refused_by_their_length() -> None:
    limit = math_answer.MAX_CHARACTERS
    lengths = [("1" * limit, "wrong"), ("1" * (limit + 1), "too_long"), ("9^{" * 10**6, "too_long")]
    assert grade_answers([(answer, "42") for answer, _ in lengths]) == [verdict for _, verdict in lengths]
    with pytest.raises(ValueError, match="at most 1000 characters"):
        grade_answers([("42", "1" * (limit + 1))])


@pytest.mark.parametrize("deep", ["(" * 450 + "1" + ")" * 450, r"\sqrt{" * 140 + "2" + "}" * 140, "\\frac1" * 160])
def test_deep_nesting_ends(deep: str) -> None:
    assert grade_answers([(deep, r"\pi"), ("2/4", r"\frac12")])[1] == "correct"


@pytest.mark.parametrize("unit", ["(", "[", r"\{", "x^", "C_1^"])
def test_one_text_again_and_again_is_no_answer(unit: str) -> None:
    """The parser took all of the time of a comparison."""
    assert grade_answers([(unit * 240, "42"), (f"{unit * 200}1", "42")]) == ["unparsable"] * 2


HUGE = [
    (r"10^{10^{10}}", "1"),
    (r"2^{2^{100}}", r"2^{2^{101}}"),
    (r"(10^{8})!", "1"),
    (r"\binom{10^9}{5\cdot10^8}", "1"),
    (r"\sqrt[10^9]{2}", "1"),
    (r"\frac{1}{(10^{9})!}", "0"),
    ("9" * 900 + "!", "1"),
]


def test_huge_numbers_are_refused_by_their_size() -> None:
    """They are not answers, and none of them runs into the time limit or fills the memory."""
    assert set(grade_answers(HUGE)) <= {"timeout", "wrong", "unparsable"}
    assert grade_answers([(r"\frac{1}{2006!}", r"\frac{1}{2004!}"), (r"\frac{2!}{100!}", r"\frac{2}{100!}")]) == [
        "wrong",
        "correct",
    ]


def test_after_a_tower_the_next_pairs_are_graded() -> None:
    grade_answers([("x+1", "x-1")])
    pid = grader_pid()
    pairs = [("2x", "x+x"), TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("3x", "x+x")]
    assert grade_answers(pairs) == ["correct", "timeout", "correct", "wrong"]
    assert grader_pid() == pid  # the process itself was not lost with the tower


def test_no_answer_is_executed(tmp_path, monkeypatch) -> None:
    target = tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    codes = [f"__import__('os').system('touch {target}')", f"open('{target}','w')", "open('x','w').write('x')"]
    shapes = ["{}", r"\text{{{}}}", r"\operatorname{{{}}}", "x={}", r"\frac{{{}}}{{2}}", "{{{}}}", "({},2)", "eval({})"]
    answers = [shape.format(code) for code in codes for shape in shapes]
    assert "correct" not in grade_answers(
        [(answer, reference) for answer, reference in zip(answers, ["42", "(1,2)"] * 12, strict=True)]
    )
    assert list(tmp_path.iterdir()) == []


def test_the_reference_of_every_math_row_is_correct_and_another_number_is_not():
    everything = Math(DAPO).problems("train") + Math(DAPO).problems("validation")
    right = Math().score(everything, [f"so \\boxed{{{p.reference}}}" for p in everything])
    assert [(r.value, r.reason, r.is_correct) for r in right] == [(1.0, "correct", True)] * 24
    wrong = Math().score(everything, ["\\boxed{31415}"] * 24)
    assert [(r.value, r.reason, r.is_correct) for r in wrong] == [(0.0, "wrong", False)] * 24


# ---- the process


@pytest.mark.slow
def test_a_grader_that_dies_is_replaced_and_the_batch_is_still_graded() -> None:
    pid = grader_pid()

    def kill() -> None:
        wait_until(lambda: children_of(pid))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert grade_answers([TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("x+2", "x+3")]) == ["timeout", "correct", "wrong"]
    killer.join()
    assert pid not in [worker.process.pid for worker in sandbox._running(str(math_answer.MODULE)).idle]


def test_any_thread_may_grade() -> None:
    verdicts = {}

    def work(i: int) -> None:
        verdicts[i] = grade_answers([(f"{i}z", f"z+{i - 1}z"), (f"{i}z", "z^2"), (str(i), "3")])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {i: ["correct", "wrong", "correct" if i == 3 else "wrong"] for i in range(8)}


@pytest.mark.slow
def test_nothing_is_imported_after_the_preload() -> None:
    """A sandboxed process cannot open a file, so a late import would silently become a wrong verdict."""
    script = (
        f"import json, sys\nsys.path.append({str(math_answer.MODULE.parent)!r})\nimport math_compare\nmath_compare.preload()\n"
        "before = set(sys.modules)\n"
        "for item in json.load(sys.stdin):\n    math_compare.compare(*item)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    expected = [math_answer.decide(row[1], row[2]) for row in PLAIN_ROWS[::6]]
    pairs = [item for item in expected if not isinstance(item, str)]
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], input=json.dumps(pairs), text=True, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param("raise SystemExit('no math-verify here')", "no math-verify here", marks=pytest.mark.slow),
        (
            "def preload(): pass\ndef judge(*texts): return 'broken: ImportError'",
            "could not be run .*ImportError",
        ),
    ],
)
def test_a_math_verify_that_cannot_be_run_is_never_a_verdict(script, message, tmp_path, monkeypatch) -> None:
    module = tmp_path / "broken_compare.py"
    module.write_text(script)
    with monkeypatch.context() as patch, pytest.raises(SandboxError, match=message):
        patch.setattr(math_answer, "MODULE", module)
        grade_answers([("x+5", "x+6")])
    assert grade_answers([("x+5", "x+6")]) == ["wrong"]


@pytest.mark.parametrize(
    "reply",
    [
        "1" + " to 1" * 60 + " x",
        r"5\text{m}^2" + r" \text{m}^2" * 70 + "!",
        r"5 \text{ kg}\cdot" + r" \text{m}^2" * 60 + "=7",
        "1 m " * 40 + "1",
        " ".join(f"{i} cm" for i in range(30)) + "!",
        "1 and " * 40,
    ],
)
def test_a_long_reply_of_numbers_and_units_is_read_in_one_pass(reply: str) -> None:
    """With backtracking over spaces and words, 30 of these numbers took longer than a day."""
    assert math_answer.decide(reply, "42") not in ("correct", "too_long")


def test_quantities_of_several_parts_are_read() -> None:
    for reply in ("3 m 20 cm", "3 m and 20 cm", "3m, 20cm", r"3\text{ m and }20\text{ cm}"):
        assert math_answer.decide(reply, "320 cm") == math_answer.decide("3 m 20 cm", "320 cm"), reply


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("AI=5", "5", "correct"),  # a length from the incenter, not an imaginary number to be solved for
        ("I=42", "42", "correct"),
        (r"I = \frac{\pi}{4}", r"\frac{\pi}{4}", "correct"),
        ("e=42", "42", "correct"),
        ("I=42", "43", "wrong"),
        ("2x=42", "42", "wrong"),
        ("5 MW", "5 mW", "wrong"),
        (r"5\text{ mPa}", r"5\text{ MPa}", "wrong"),
        ("5 Mm", "5 mm", "wrong"),
        ("5 mg", "5 mg", "correct"),
        ("3 halves", "3", "wrong"),
        (r"5\text{ hundredths}", "5", "wrong"),
        (r"7\text{ divided by 2}", "7", "wrong"),
        ("(A), (B)", "A", "wrong"),
        ("A B C", "A", "wrong"),
        ("(B) 42", "B", "correct"),
        ("(D) A is greater", "D", "correct"),
        (r"\text{(C) } P(A \cup B)", "C", "correct"),
        (r"(C) \sin(A+B)", "C", "correct"),
        ("(C) (2A)", "C", "correct"),
        ("(A) (B)", "A", "wrong"),
        (r"2 \text{ roots}", "2", "correct"),
        (r"3\text{ quarters}", "3", "correct"),
        (r"100\text{ mhz}", r"100\text{ MHz}", "correct"),
        (r"500\text{ ML}", r"500\text{ mL}", "correct"),
        (r"\pi x = 5", "5", "wrong"),
        ("x=1, y=1", "(1,1)", "correct"),
        (r"\gcd(a,b)=42", "42", "correct"),
        (r"\gcd(n,12)=4", "4", "correct"),
        (r"\gcd(b,a)", r"\gcd(a, b)", "correct"),
        (r"2\gcd(a,b)", r"\gcd(a,b) \cdot 2", "correct"),
        (r"\gcd(12,18)", "6", "correct"),
        ("1", r"\gcd(m,n)", "wrong"),
        (r"\gcd(a,b)", r"\gcd(a,c)", "wrong"),
        ("ab", r"\text{lcm}(a,b)", "wrong"),
    ],
)
def test_answers_that_were_once_graded_wrongly(answer, reference, verdict) -> None:
    assert grade_answers([(answer, reference)]) == [verdict]


NOTATIONS = {  # kind -> (reference, right answers, wrong answers)
    "number words": ("5", [r"5\text{ kV}", "5 MW", "5千米"], ["5 lakh", "5 crore", "5 lakhs", "5 quadrillion", r"5\text{ bn}", r"5\text{ mn}", "5 score", r"5\text{ gross}",
                     r"5\text{ tens}", r"5\text{ doubled}", r"5\text{ ppm}", "5百万", "5万元", "5亿元", "5万"]),
    "number words in another unit": ("500000", ["5 lakh", "50万", r"50\text{万元}", "0.5 million", r"0.0005\text{ bn}", "500 thousand"], ["5 crore", "5百万"]),
    "number words in a list": ("(5,6)", [r"(5\text{ cm},6\text{ cm})"], [r"(5\text{ million},6)", r"(5\text{ bn},6\text{ bn})"]),
    "parts": ("42", [], [r"42\text{ twelfths}", r"42\text{ halved}", r"42\text{ in twelfths}"]),
    "mathematics in text": (r"5\theta", [r"5\text{theta}", r"5\,\mathrm{theta}"], ["5", r"5\text{pi}"]),
    "pi in text": (r"5\pi", [r"5\text{pi}", r"5\text{ pi}", r"5\mathrm{\pi}"], ["5", r"5\text{ cm}"]),
    "units of two letters": ("5", [r"5\text{ ns}", r"5\,\mathrm{dl}", r"5\text{ MΩ}", r"5\text{ μA}", r"5\text{ lx}", r"5\text{ AU}", r"5\text{ Gy}", r"5\text{ PM}", r"5\text{ kr}", "5千牛"], []),
    "products of two letters": ("2mn", ["2nm", r"2\,mn"], ["2", "2000000"]),
    "letters that are also units": ("2", [r"2\text{ ha}", "2 GB"], ["2ha", "2gb", "2pt", "2qt"]),
    "an equation of letters that are also units": ("x=3gb", ["3gb", "3bg"], ["3"]),
    "words that are no unit": ("5", [r"5\text{ mA}", r"5\text{ psi}", r"5\text{ Mg}", r"5\text{ cups of tea}", r"5\text{ pm}"], [r"5\text{pi}", r"5\text{theta}", r"5\mathrm{AB}", r"5\text{xy}", r"5\text{ sqrt}",
                               r"5\text{ incorrect}", r"5\text{ wrong}", r"5\text{ excluded}", r"5\text{ impossible}", r"5\text{ fails}"]),
    "counted nouns": ("8", [r"8\text{ solutions}", "8 solutions", r"8\text{ integers}", r"8\text{ positive integers}", r"8\text{ real solutions}", r"8 \text{ times}", "8 times",
                      r"8\text{ prime numbers}", "8 odd integers", r"8\text{ integer values}", r"8\text{ distinct real roots}", "8个", "8人", r"8\text{ 种}"],
                      ["8折", "8个半", "8以上", r"8\text{ even}", "8 negative", r"8\text{ times }2", r"8\text{ times 2}", r"8\text{ times as many}", r"8\text{ solutions or more}", r"8\text{ real}"]),
    "underscores": ("12345", ["12_345", r"12\_345", "+12_345"], ["12_34", "12_345_6"]),
    "underscores as an index": ("7", ["12_5"], ["12", "12_345", "12_345_678"]),
    "residues": ("2", [r"100 \bmod 7", r"9\pmod 7", r"2\bmod 7", r"x\equiv -5\pmod 7"], [r"100 \bmod 8", r"2\bmod 0", r"-2\pmod 7"]),
    "residues of larger numbers": ("100", [r"100\bmod 101"], [r"100 \bmod 7", r"100\pmod{100}"]),
    "negative residues": ("-1", [r"-1\pmod 7", r"x\equiv-1\pmod 7"], [r"-8\pmod 7", r"1\pmod 7"]),
    "letters with an index": ("15", ["1111_2", "0F_{16}", "17_8"], ["F_{16}", "F_{20}", "f_{16}"]),
    "numerals that begin with a letter": ("131", ["AB_{12}", "83_{16}", "0x83"], ["AB_{13}"]),
    "a hexadecimal digit": ("10", ["0xA", "0A_{16}", "1010_2"], ["A_{16}"]),
    "a residue as the reference": (r"x\equiv 13\pmod{10}", ["13", "3", r"3\pmod{10}"], ["10", r"3\pmod 5"]),
    "hexadecimal digits": ("255", ["FF_{16}", "0xFF"], ["FF_{20}", "a_{255}"]),
    "unions": ("(2,5]", [r"x>2\text{ and }x\le5", "x > 2, x \\le 5"], [r"x>2\text{ or }x\le5", r"x>2\lor x\le5", "x > 2 or x <= 5"]),
    "unions of rays": (r"(-\infty,1)\cup(3,\infty)", [r"x<1\text{ or }x>3", "x > 3 or x < 1", "x<1, x>3", r"x<1 \mathrm{\ or\ } x>3", r"x<1 \operatorname{or} x>3", r"x<1 {\rm or} x>3"], [r"x<1\text{ or }x>4"]),
    "lists of relations": (r"x<1, 2<x<3\text{, or }x>4", ["2<x<3, x>4, x<1", r"x<1\lor x>4\lor 2<x<3"], ["x<1 or x>4"]),
    "percent of a fraction": (r"\frac{3}{4}", [r"75\%", "0.75"], [r"\frac{3}{4}\%", r"\frac34\%", "3/4%"]),
    "coordinates in another order": ("(3,5)", ["(x,y)=(3,5)", "(y,x)=(5,3)", "(a,b)=(3,5)", "(n,k)=(3,5)"], ["(y,x)=(3,5)", "(x,y)=(5,3)"]),
    "sides that are no name": ("42", [r"\text{Area}=42", "A=42"], [r"\emptyset=42", r"\text{false}=42", r"\text{none} = 42"]),
    "styles": ("42", ["42^o", "42^{o}", "42º", r"\begin{array}{c}42\end{array}", "\u200e42", r"\text{Answer: 42}", r"\text{The final answer is 42.}"],
               [r"\begin{array}{c}42\\43\end{array}", r"\text{Answer: 43}", "42^{o}1", r"\text{Answer: not 42}"]),
    "signs before a currency": ("-5", [r"-\$5", r"\$-5", "-$5$"], [r"\$5", r"--\$5"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOTATIONS)
def test_kinds_of_notation(kind: str) -> None:
    reference, right, wrong = NOTATIONS[kind]
    verdicts = grade_answers([(answer, reference) for answer in right + wrong])
    is_correct = {answer: verdict == "correct" for answer, verdict in zip(right + wrong, verdicts, strict=True)}
    assert is_correct == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)


@pytest.mark.parametrize("answer", ["¢" * 994 + "5", "¢" * 300 + "5", "€" * 500 + "5", "5" + "¢" * 900])
def test_an_answer_of_currencies_is_refused_at_once(answer: str) -> None:
    """One of 995 characters took 15 seconds in the trainer and ended in a RecursionError."""
    start = time.process_time()
    (reward,) = Math().score([Problem("math/0", "math", "q", "5")], [f"\\boxed{{{answer}}}"])
    assert reward.value == 0 and math_answer.decide(answer, "42") != "correct"
    assert time.process_time() - start < 5


def test_several_letters_are_no_choice() -> None:
    assert "correct" not in grade_answers([(answer, "A") for answer in (r"\text{A and B}", "A) 5 B) 6", "A or B")])


def test_a_value_that_two_boxes_share_is_kept_if_they_are_two_values() -> None:
    assert extract_boxed(r"x=\boxed{1}, y=\boxed{1}") == "x=1, y=1"
    for again in (
        r"\boxed{5} and \boxed{5}",
        r"\boxed{5}, so \boxed{5}",
        r"is \boxed{5}, x=\boxed{5}",
        r"x=\boxed{5}, x=\boxed{5}",
    ):
        assert extract_boxed(again) == "5"
