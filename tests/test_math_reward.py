"""The math reward: which box counts, what equals the reference, and that no answer can hang, spoil or escape grading."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multirole.tasks import math_answer
from multirole.tasks.math_answer import GraderError, extract_boxed, grade_answers

PAIRS = Path(__file__).with_name("data") / "math_pairs.tsv"
HEADER, *ROWS = [line.split("\t") for line in PAIRS.read_text(encoding="utf-8").splitlines()]
PLAIN_ROWS = [row for row in ROWS if row[0] != "tower"]  # towers run into their limit: seconds each
TOWER = (r"9^{9^{9^{9}}}", "1")


@pytest.fixture(scope="module", autouse=True)
def fresh_grader():
    """A grader of this file's own, with half the time per comparison, so that towers end sooner."""
    math_answer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_answer, "_CPU_SECONDS", 1)
        yield
    math_answer.close()


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], str]:
    """Verdicts of the whole table, graded once."""
    pairs = [(answer, reference) for _, answer, reference, *_ in ROWS]
    return dict(zip(pairs, grade_answers(pairs), strict=True))


@pytest.fixture
def cold(verdicts) -> None:
    """A running grader and nothing cached."""
    math_answer._cache.clear()


def grader_pid() -> int:
    grade_answers([("x+1", "x-1")])
    return math_answer._worker.pid


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
    for _, answer, reference, right, given, note in ROWS:
        is_right = (given == "correct") == (right == "yes")
        assert right in {"yes", "no"} and is_right != note.startswith("known limit: "), (answer, reference)
    assert len({(answer, reference) for _, answer, reference, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("kind", list(dict.fromkeys(row[0] for row in ROWS)))
def test_verdicts_of_the_table(kind: str, verdicts) -> None:
    """`given` is what we answer today: an upgrade of math-verify that changes it, for better or worse, shows here."""
    rows = [row for row in ROWS if row[0] == kind]
    assert {tuple(row[1:3]): verdicts[tuple(row[1:3])] for row in rows} == {tuple(row[1:3]): row[4] for row in rows}


def test_order_and_splits_of_a_batch_do_not_matter(cold, verdicts) -> None:
    pairs = [(row[1], row[2]) for row in PLAIN_ROWS[::3]]
    random.Random(0).shuffle(pairs)
    found, start = [], 0
    for size in [1, 2, 70, 7, len(pairs)]:
        found += grade_answers(pairs[start : start + size])
        start += size
    assert found == [verdicts[pair] for pair in pairs]


def test_an_equal_text_is_correct_whatever_it_is() -> None:
    references = [row[2] for row in ROWS] + [r"\overline{AB}", "10:30", "no such \\command", "東京"]
    assert set(grade_answers([(reference, reference) for reference in references])) == {"correct"}


def test_reference_that_cannot_be_parsed_is_matched_by_text_only() -> None:
    assert grade_answers([("10:30", "10:30"), ("10.5", "10:30?"), ("42", r"\frac{")]) == ["correct", "wrong", "wrong"]


def test_line_breaks_and_strange_characters() -> None:
    answers = ["4\n2", "\n42\n", "4\x002", "\ud800", "42\u200b", "\u202f42"]
    expected = ["wrong", "correct", "unparsable", "unparsable", "unparsable", "correct"]
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
        (r"\fbox{42}", None),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think> nothing", None),
        (r"<think>\boxed{1}", "1"),
        (r"</think>\boxed{1}</think>\boxed{2}", "2"),
    ],
)
def test_last_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_megabytes_of_braces_and_boxes() -> None:
    n = 1_000_000
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


def test_after_a_tower_the_next_pairs_are_graded(cold) -> None:
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
    assert "correct" not in grade_answers([(answer, reference) for answer in answers for reference in ("42", "(1,2)")])
    assert list(tmp_path.iterdir()) == []


# ---- the process


@pytest.mark.parametrize("victim", ["grader", "comparison"])
def test_killed_in_the_middle_of_a_batch(victim: str, cold) -> None:
    pid, towers = grader_pid(), []

    def kill() -> None:
        wait_until(lambda: towers.extend(children_of(pid)[:1]) or towers)
        os.kill(pid if victim == "grader" else towers[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    # whatever is running when the blow falls is graded again, and a tower that was killed by us is still a timeout
    found = grade_answers([TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("x+2", "x+3")])
    killer.join()
    assert found == ["timeout", "correct", "wrong"]
    wait_until(lambda: not is_alive(towers[0]))
    assert (grader_pid() != pid) == (victim == "grader")


def test_kill_9_of_the_trainer_in_the_middle_of_a_batch_leaves_nothing() -> None:
    source = (
        "import threading, time\nfrom multirole.tasks import math_answer\n"
        "math_answer.grade_answers([('x+1', 'x-1')])\n"
        f"threading.Thread(target=math_answer.grade_answers, args=([{TOWER!r}],)).start()\n"
        "print(math_answer._worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    grader = int(trainer.stdout.readline())
    wait_until(lambda: children_of(grader))
    family = [grader, *children_of(grader)]
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ten_thousand_pairs_leave_no_descriptor_open(cold) -> None:
    grader_pid()
    before = len(os.listdir("/proc/self/fd"))
    cheap = [(str(i), str(i % 7)) for i in range(9_000)]
    shared = [(f"x+{i % 50}", "x+1") for i in range(1_000)]  # 50 comparisons by math-verify, the rest from the cache
    found = [
        verdict for start in range(0, 10_000, 2_500) for verdict in grade_answers((cheap + shared)[start:][:2_500])
    ]
    assert found == ["correct" if i < 7 else "wrong" for i in range(9_000)] + [
        "correct" if i % 50 == 1 else "wrong" for i in range(1_000)
    ]
    assert len(os.listdir("/proc/self/fd")) == before
    assert children_of(grader_pid()) == []


def test_cache_is_bounded(cold, monkeypatch) -> None:
    monkeypatch.setattr(math_answer, "_MAX_CACHED", 5)
    grade_answers([(f"y+{i}", "y") for i in range(20)])
    assert len(math_answer._cache) == 5


def test_threads_share_one_grader(cold) -> None:
    pid, found = grader_pid(), {}

    def work(i: int) -> None:
        found[i] = grade_answers([(f"{i}z", f"z+{i - 1}z"), (f"{i}z", "z^2"), (str(i), "3")])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: ["correct", "wrong", "correct" if i == 3 else "wrong"] for i in range(8)}
    assert grader_pid() == pid


def test_a_forked_trainer_gets_its_own_grader_which_ends_with_it(cold) -> None:
    pid, (readable, writable) = grader_pid(), os.pipe()
    copy = os.fork()
    if copy == 0:
        own = grader_pid() if grade_answers([("2q", "q+q")]) == ["correct"] else 0
        os.write(writable, str(own).encode())
        os._exit(0)  # no cleaning up, as after kill -9
    os.close(writable)
    own = int(os.read(readable, 20))
    os.close(readable)
    os.waitpid(copy, 0)
    assert own not in (0, pid)
    wait_until(lambda: not is_alive(own))
    assert grade_answers([("3q", "q+2q")]) == ["correct"] and grader_pid() == pid


def test_nothing_is_imported_after_the_preload() -> None:
    """A locked process cannot open a file, so a late import would turn into a wrong verdict without a sound."""
    script = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('math_worker', {str(math_answer._WORKER)!r})\n"
        "child = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(child)\nchild.preload()\n"
        "before = set(sys.modules)\n"
        "for answer, reference in json.load(sys.stdin):\n    child.compare([answer], reference)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert importlib.util.find_spec("math_verify") is not None
    wanted = [math_answer.decide(row[1], row[2]) for row in PLAIN_ROWS[::2]]
    pairs = [[item[0][0], item[1]] for item in wanted if not isinstance(item, str)]
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], input=json.dumps(pairs), text=True, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_a_comparison_that_is_killed_twice_is_an_error_of_its_own_pair_only(cold) -> None:
    pid, killed = grader_pid(), []

    def kill_towers() -> None:  # the tower is alone after the other two, and is started once more after the first blow
        while len(killed) < 2:
            for child in children_of(pid):
                if child not in killed and (time.sleep(0.4) or is_alive(child)):
                    killed.append(child)
                    os.kill(child, signal.SIGKILL)

    killer = threading.Thread(target=kill_towers)
    killer.start()
    assert grade_answers([TOWER, (r"\sqrt{8}", r"2\sqrt{2}"), ("x+2", "x+3")]) == ["error", "correct", "wrong"]
    killer.join()
    assert grader_pid() == pid and children_of(pid) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('no math-verify here')", "no math-verify here"),
        ("print('[\"corr', flush=True, end='')", "ended twice"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended twice"),
    ],
)
def test_a_math_verify_that_cannot_be_run_is_never_a_verdict(script, message, cold, tmp_path, monkeypatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    math_answer.close()
    monkeypatch.setattr(math_answer, "_WORKER", worker)
    with pytest.raises(GraderError, match=message):
        grade_answers([("x+5", "x+6")])
    assert math_answer._worker is None
    monkeypatch.undo()
    assert grade_answers([("x+5", "x+6")]) == ["wrong"]
