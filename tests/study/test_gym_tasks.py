"""Tasks gym:KIND: disjoint splits, refused options, and scores of the package that no answer can turn against the trainer."""

import dataclasses
import hashlib
import importlib.util
from types import SimpleNamespace

import pytest

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import SMOLLM2_ARITHMETIC
from multirole_study.tasks import gym
from multirole_study.tasks.gym import _score_of, parse
from multirole_study.tasks.gym_score import is_finite, is_right_number, is_right_word, load_gym
from multirole_study.tasks.splits import split_of

if importlib.util.find_spec("reasoning_gym") is None:  # the CUDA lock leaves it out
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)
SMALL = "gym:products?max_digits=1"
SLOW = ("knight_swap", "futoshiki", "sudoku", "arc_agi")


def digest(problems):
    return hashlib.sha256(str([(p.id, p.question, p.reference["answer"]) for p in problems]).encode()).hexdigest()[:12]


@pytest.mark.parametrize("spec", [SMOLLM2_ARITHMETIC, "gym:letter_counting?min_words=2&max_words=4", "gym:products"])
def test_no_question_is_in_both_splits_or_twice_in_one(spec):
    splits = [parse(spec).problems(split, 200) for split in ("train", "validation")]
    questions = [{problem.question for problem in problems} for problems in splits]
    assert [len(one) for one in questions] == [200, 200] and not questions[0] & questions[1]
    assert [problem.id for problem in parse(spec).problems("train", 50)] == [p.id for p in splits[0][:50]]


def test_splits_are_disjoint_even_if_the_seeds_alone_would_not_separate_them():
    """Each of the 100 products of two digits is in one split, and the error of an exhausted split says how many problems it has."""
    train, validation = 92, 8
    assert sum(split_of(f"Solve the following multiplication: {a} * {b}. Give only the result as your final answer.")
               == "validation" for a in range(10) for b in range(10)) == validation  # fmt: skip
    assert len(parse(SMALL).problems("train", train)) == train
    with pytest.raises(ValueError, match=f"about {train} distinct train problems.*n_train={train}"):
        parse(SMALL).problems("train", train + 1)
    assert len(parse(SMALL).problems("validation", validation)) == validation


def test_the_problems_are_the_same_everywhere_and_others_with_another_seed():
    assert digest(parse(SMOLLM2_ARITHMETIC).problems("train", 100)) == "be3c549c140f"
    assert digest(parse(SMOLLM2_ARITHMETIC).problems("validation", 64)) == "42d04fddfde4"
    other = parse(f"{SMOLLM2_ARITHMETIC}&seed=1")
    assert digest(other.problems("train", 100)) != "be3c549c140f"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gym:product", "Did you mean 'products'"),
        ("gym:products?min_digit=2", "'min_digit=2'.*Did you mean 'min_digits'"),
        ("gym:products?min_digits", "is not an option"),
        ("gym:products?size=9", "is not an option"),
        ("gym:products?min_digits=x", "must have the type of its default, 1"),
        ("gym:products?min_digits=True", "must have the type of its default, 1"),
        ("gym:products?min_digits=3&max_digits=2", "max_digits must be >= min_digits"),
        ("gym:products?seed=100", "from 0 to 99"),
        ("gym:composite", "invalid options"),
        ("gym:products?min_digits={'a': 1}", "must be a number, a text, or a list of these"),
    ],
)
def test_unknown_kinds_options_and_values_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        Cell("single", "sp", spec, "smollm2")


def test_options_distinguish_runs_and_their_order_does_not():
    def identity(spec):
        cell = Cell("voting", "sp", spec, "smollm2")
        assert Cell(**cell.to_dict()) == cell
        return cell.id

    plain = identity("gym:products")
    assert plain == "voting-sp-gym_products-s0" == identity("gym:products?")
    one = identity("gym:products?min_digits=1&max_digits=2")
    assert one == identity("gym:products?max_digits=2&min_digits=1") != plain
    assert one != identity("gym:products?max_digits=2")
    assert identity("gym:basic_arithmetic?operators=['+', '-']") == identity(
        "gym:basic_arithmetic?operators=('+', '-')"
    )


def test_long_names_that_begin_alike_are_different_runs():
    kinds = ("string_insertion", "string_splitting", "string_synthesis")
    cells = [Cell("orch_workers", "sp", f"gym:{kind}", preset="released_code", max_steps=10) for kind in kinds]
    assert len({cell.id for cell in cells}) == 3 and all(len(cell.id) <= 60 for cell in cells)


def test_a_box_has_priority_over_the_last_number_which_earns_less():
    task = dataclasses.replace(parse(SMALL), malformed_reward=-0.1, fallback="last_number", unboxed_reward=0.5)
    problem = next(p for p in task.problems("train", 50) if p.reference["answer"] == "12")
    texts = ["It is \\boxed{12}.", "3 and then 12.", "12 is \\boxed{11}", "12, or \\boxed{12", "none", "\\boxed{} 12"]
    rewards = task.score([problem] * len(texts), texts)
    assert [(r.value, r.reason, r.is_correct) for r in rewards] == [
        (1.0, "correct", True),
        (0.5, "correct_unboxed", True),
        (0.0, "wrong", False),
        (-0.1, "no_answer", False),  # a box that does not close is no box, and no number either
        (-0.1, "no_answer", False),
        (0.0, "wrong", False),
    ]
    strict = dataclasses.replace(task, fallback="none")
    assert [r.reason for r in strict.score([problem] * 2, texts[:2])] == ["correct", "no_box"]
    assert [task.extract(text) for text in texts] == ["12", "12", "11", None, None, ""]


def test_an_answer_that_the_scorer_evaluates_cannot_touch_this_machine(tmp_path):
    """number_sorting, like several others, calls `eval` on the answer."""
    task = parse("gym:number_sorting")
    (problem,) = task.problems("train", 1)
    made = tmp_path / "made"
    attack = f"\\boxed{{__import__('os').system('touch {made}')}}"
    right = f"\\boxed{{{problem.reference['answer']}}}"
    rewards = task.score([problem] * 3, [attack, right, "\\boxed{9**9**9**9}"])
    assert [reward.is_correct for reward in rewards] == [False, True, False] and not made.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').write(3,b'1.0') and __import__('os')._exit(0)",
        "entry['answer']",
        "[entry['answer']]",
        "open(3,'w').write('1')",
        "[*oracle_answer]",
    ],
)
@pytest.mark.parametrize("kind", ["string_insertion", "n_queens", "simple_integration", "countdown"])
def test_an_answer_that_the_scorer_evaluates_cannot_set_its_own_score(kind, answer):
    """It runs in the process that knows the reference and writes the score."""
    task = parse(f"gym:{kind}")
    (problem,) = task.problems("train", 1)
    (reward,) = task.score([problem], [f"\\boxed{{{answer}}}"])
    assert (reward.value, reward.is_correct) == (0.0, False)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("puzzle24", ["({})", " {} "], ["6+6+6+6", "24", "{}+0", "({})**1", "({})//1", "-({})"]),
        ("game_of_life_halting", [" {} ", "\\text{{{}}}", "{}."], ["no idea", "0", "not {}"]),
        ("coin_flip", ["+{}", " {} "], ["0", "0.0", "2{}", "-{}"]),
        ("complex_arithmetic", ["({})"], ["nan", "nan+nanj", "NaN", "inf", "-inf+nani"]),
        ("gsm_symbolic", ["${}", "{}.00", "{} of them."], ["-{}", "{} or 7", "7 or {}", "{}/2", "{}x", "nan", ""]),
        ("knights_knaves", ["Therefore, {}"], ["if {}"]),
    ],
)
def test_the_scorers_that_accept_wrong_answers_are_corrected(kind, right, wrong):
    """The package pays in full for every answer in `wrong`, or for another one of its kind, whatever the problem is."""
    task = parse(f"gym:{kind}")
    for problem in task.problems("train", 3):
        answers = [form.format(problem.reference["answer"]) for form in [*right, *wrong]]
        rewards = task.score([problem] * len(answers), [f"\\boxed{{{answer}}}" for answer in answers])
        assert [reward.value for reward in rewards] == [1.0] * len(right) + [0.0] * len(wrong), answers


def test_a_number_with_thousands_and_the_words_of_a_verdict_are_read():
    entry = {"answer": "1754"}
    assert is_right_number("$1,754.", entry) and not is_right_number("1,754 and 3", entry)
    assert not is_right_word("False", {"answer": "True"}) and is_right_word("TRUE", {"answer": "True"})


def test_statements_joined_by_or_are_no_answer_to_knights_and_knaves():
    task = parse("gym:knights_knaves")
    (problem,) = task.problems("train", 1)
    answer = problem.reference["answer"]
    assert " and " in answer
    assert [reward.value for reward in task.score([problem], [f"\\boxed{{{answer.replace(' and ', ' or ')}}}"])] == [
        0.0
    ]


def test_nan_is_refused_only_if_the_reference_is_a_number():
    assert not is_finite("nan", "-5.0 + 20.0i") and not is_finite("3 + infi", "4") and is_finite("nan", "nan or 3")
    assert is_finite("CAN,NAN,NAB", "CAN,CAB,NAB") and is_finite("12 banana", "12")


@pytest.mark.parametrize("output", [b"1e5", b"NaN", b"-1", b'"x"', b"", b"true", b"[1]"])
def test_only_a_number_from_0_to_1_is_a_score(output):
    assert _score_of(output) == 0.0 and _score_of(b"0.5") == 0.5 and _score_of(b"1") == 1.0


def test_the_last_number_of_a_text_is_read_as_a_reader_would():
    task = dataclasses.replace(parse(SMALL), fallback="last_number")
    texts = ["The answer is 1,234.", "12-5", "It is -5.", "1, 2, 3", "1,234,567.5", "2.-5"]
    assert [task.extract(text) for text in texts] == ["1234", "5", "-5", "3", "1234567.5", "5"]


@pytest.mark.slow
def test_every_kind_gives_its_own_answer_the_full_score_in_the_sandbox(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # which problems are drawn does not matter here
    kinds = [kind for kind in load_gym().factory.DATASETS if kind not in ("composite", "zebra_puzzles", *SLOW)]
    for kind in kinds:
        task = parse(f"gym:{kind}")
        (problem,) = task.problems("train", 1)
        answer = problem.reference["answer"]
        assert answer is None or task._scores([(answer, problem.reference)]) == [1.0], kind
    assert len(kinds) > 95


def test_scoring_stops_where_the_package_does_not_work(monkeypatch):
    monkeypatch.setattr(gym.sandbox, "call", lambda *_: [("passed", b'"broken: ImportError()"')])
    task = parse(SMALL)
    with pytest.raises(gym.SandboxError, match="broken"):
        task.score(task.problems("train", 1), ["\\boxed{1}"])


@pytest.mark.parametrize("task", ["math", "code", "gym:letter_counting"])
def test_the_doctor_knows_answers_to_the_tasks_of_smollm2(task):
    from multirole_study.doctor import grading

    trial = SimpleNamespace(cell=Cell("single", "sp", task, "smollm2"))
    finding = grading(trial)
    assert finding.holds and "[True, False, False]" in finding.measured


def test_the_doctor_checks_no_answer_where_the_puzzle_has_none():
    from multirole_study.doctor import grading

    finding = grading(SimpleNamespace(cell=Cell("single", "sp", "gym:graph_color", "smollm2")))
    assert finding.holds and finding.measured.startswith("not checked: gym_graph_color")
