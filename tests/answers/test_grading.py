"""No answer can hang, corrupt or bypass grading."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import multirole_sandbox as sandbox
from math_answers import grade, grading
from math_answers.decide import MAX_CHARACTERS, decide
from math_answers.pairs import read_pairs
from multirole_sandbox import SandboxError

FOLDER, MODULE = grading.COMPARE
TOWER = (r"9^{9^{9^{9}}}", "1")


@pytest.fixture(scope="module", autouse=True)
def shorter_limits():
    """Half the time per comparison, so that towers end sooner, and one new worker."""
    sandbox.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "LIMITS", dataclasses.replace(grading.LIMITS, test_seconds=1.0, workers=1))
        yield
    sandbox.close()


def grader_pid() -> int:
    (worker,) = sandbox._running(MODULE, str(FOLDER)).idle
    return worker.process.pid


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_line_breaks_and_strange_characters() -> None:
    answers = ["4\n2", "\n42\n", "4\x002", "\ud800", "42\u200b", "\u202f42"]
    expected = ["wrong", "correct", "unparsable", "unparsable", "correct", "correct"]
    assert grade([(answer, "42") for answer in answers]) == expected


# ---- limits


def test_long_answers_are_refused_by_their_length() -> None:
    limit = MAX_CHARACTERS
    lengths = [("1" * limit, "wrong"), ("1" * (limit + 1), "too_long"), ("9^{" * 10**6, "too_long")]
    assert grade([(answer, "42") for answer, _ in lengths]) == [verdict for _, verdict in lengths]
    with pytest.raises(ValueError, match="at most 1000 characters"):
        grade([("42", "1" * (limit + 1))])


@pytest.mark.parametrize("deep", ["(" * 450 + "1" + ")" * 450, r"\sqrt{" * 140 + "2" + "}" * 140, "\\frac1" * 160])
def test_deep_nesting_ends(deep: str) -> None:
    assert grade([(deep, r"\pi"), ("2/4", r"\frac12")])[1] == "correct"


@pytest.mark.parametrize("unit", ["(", "[", r"\{", "x^", "C_1^"])
def test_one_text_again_and_again_is_no_answer(unit: str) -> None:
    """The parser took all of the time of a comparison."""
    assert grade([(unit * 240, "42"), (f"{unit * 200}1", "42")]) == ["unparsable"] * 2


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
    assert set(grade(HUGE)) <= {"timeout", "wrong", "unparsable"}
    assert grade([(r"\frac{1}{2006!}", r"\frac{1}{2004!}"), (r"\frac{2!}{100!}", r"\frac{2}{100!}")]) == [
        "wrong",
        "correct",
    ]


def test_after_a_tower_the_next_pairs_are_graded() -> None:
    grade([("x+1", "x-1")])
    pid = grader_pid()
    pairs = [("2x", "x+x"), TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("3x", "x+x")]
    assert grade(pairs) == ["correct", "timeout", "correct", "wrong"]
    assert grader_pid() == pid  # the process itself was not lost with the tower


def test_no_answer_is_executed(tmp_path, monkeypatch) -> None:
    target = tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    codes = [f"__import__('os').system('touch {target}')", f"open('{target}','w')", "open('x','w').write('x')"]
    shapes = ["{}", r"\text{{{}}}", r"\operatorname{{{}}}", "x={}", r"\frac{{{}}}{{2}}", "{{{}}}", "({},2)", "eval({})"]
    answers = [shape.format(code) for code in codes for shape in shapes]
    assert "correct" not in grade(
        [(answer, reference) for answer, reference in zip(answers, ["42", "(1,2)"] * 12, strict=True)]
    )
    assert list(tmp_path.iterdir()) == []


# ---- the process


@pytest.mark.slow
def test_a_grader_that_dies_is_replaced_and_the_batch_is_still_graded() -> None:
    pid = grader_pid()

    def kill() -> None:
        wait_until(lambda: children_of(pid))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert grade([TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("x+2", "x+3")]) == ["timeout", "correct", "wrong"]
    killer.join()
    assert pid not in [worker.process.pid for worker in sandbox._running(MODULE, str(FOLDER)).idle]


def test_any_thread_may_grade() -> None:
    verdicts = {}

    def work(i: int) -> None:
        verdicts[i] = grade([(f"{i}z", f"z+{i - 1}z"), (f"{i}z", "z^2"), (str(i), "3")])

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
        f"import json, sys\nsys.path.append({str(FOLDER)!r})\nfrom math_answers import compare\ncompare.preload()\n"
        "before = set(sys.modules)\n"
        "for answers, *rest in json.load(sys.stdin):\n    for answer in answers:\n        compare.compare(answer, *rest)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    expected = [decide(pair.answer, pair.reference) for pair in read_pairs()[::20] if pair.kind != "tower"]
    pairs = [item for item in expected if not isinstance(item, str)]
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], input=json.dumps(pairs), text=True, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param("raise SystemExit('no parser here')", "no parser here", marks=pytest.mark.slow),
        (
            "def preload(): pass\ndef judge(*texts): return 'broken: ImportError'",
            "could not be run .*ImportError",
        ),
    ],
)
def test_a_parser_that_cannot_be_run_is_never_a_verdict(script, message, tmp_path, monkeypatch) -> None:
    module = tmp_path / "broken_compare.py"
    module.write_text(script)
    with monkeypatch.context() as patch, pytest.raises(SandboxError, match=message):
        patch.setattr(grading, "COMPARE", (tmp_path, module.stem))
        grade([("x+5", "x+6")])
    assert grade([("x+5", "x+6")]) == ["wrong"]


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
    assert decide(reply, "42") not in ("correct", "too_long")


def test_quantities_of_several_parts_are_read() -> None:
    for reply in ("3 m 20 cm", "3 m and 20 cm", "3m, 20cm", r"3\text{ m and }20\text{ cm}"):
        assert decide(reply, "320 cm") == decide("3 m 20 cm", "320 cm"), reply


@pytest.mark.parametrize("answer", ["¢" * 994 + "5", "¢" * 300 + "5", "€" * 500 + "5", "5" + "¢" * 900])
def test_an_answer_of_currencies_is_refused_at_once(answer: str) -> None:
    """One of 995 characters took 15 seconds in the trainer and ended in a RecursionError."""
    start = time.process_time()
    assert "correct" not in grade([(answer, "5"), (answer, "42")])
    assert time.process_time() - start < 5


def test_several_letters_are_no_choice() -> None:
    assert "correct" not in grade([(answer, "A") for answer in (r"\text{A and B}", "A) 5 B) 6", "A or B")])
