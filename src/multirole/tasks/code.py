"""code: DeepCoder's PrimeIntellect problems, the paper's Code task (sec 4). Hidden tests run in `multirole.sandbox`.

Known gap. Before splitting, the authors removed every test that a reference run had not marked as passed, and every row
without a test left. The file with these marks (`coding_dataset_filtering/runtime_results.json`) is not public, so their
split cannot be rebuilt. `rows` says what stands in for it:

* "deepcoder": the 16,252 rows as published, no filter: 15,252 training and 1,000 validation rows;
* "reconstruction": 14,995 rows (13,995 / 1,000) of a public conversion of the same dataset, which ASPECT takes for the
  authors' filtered rows. Nobody can check that. The conversion script in open-instruct, in the later version that we
  read, does something else: it keeps problems on standard input with at most 15 tests, the largest ones below
  100 kB, and runs nothing. ASPECT found the rows in the order of the source; the order of tests within a row
  changes no reward.

Either is split like `shuffle(seed=42)`, first 1,000 rows for the test ("validation" here). A question is the problem
text in a frame that states the format of the answer, in the manner of LiveCodeBench; the role's prompt is put round it.
"""

import json
import math
import re
from pathlib import Path

from multirole.core.types import Problem, Reward
from multirole.sandbox import Limits, grade_batch, normalise_tests
from multirole.tasks.sources import BadRow, Layout, Pin, Row, load, question_id, text_of
from multirole.workflows.prompts import render

NAME = "code"
CODE_REWARDS = ("fraction", "all_pass")
DEEPCODER = Pin(
    repo="agentica-org/DeepCoder-Preview-Dataset",
    config="primeintellect",
    revision="780aeec7b7716e34f0b9e02bb624fc6ad8384725",
    files=(
        ("primeintellect/train-00000-of-00005.parquet", "a1efc9d5e9eb6a9977576b08e5349758c8b139131ea5d13ef5c390f2a21db538"),
        ("primeintellect/train-00001-of-00005.parquet", "2a645ca9e77976f49699ad9c25d79a697203e8811b0887ae256e7301d3e72681"),
        ("primeintellect/train-00002-of-00005.parquet", "2bd0cc7207fa0aad722cc21a275afd777ab1debb318c4b9a9eccb18f7fee32f0"),
        ("primeintellect/train-00003-of-00005.parquet", "4503d28636d63dab88e4a07a54b4a8257c9ad2e1663e8cdcb1216e2306550427"),
        ("primeintellect/train-00004-of-00005.parquet", "b1148bc2f0939843d500e43668e643c619a67f17797358a1ddf8e33c9782a545"),
    ),
    rows=16_252,
    note="unfiltered: the authors' runtime filter is not public",
)  # fmt: skip
RECONSTRUCTION = Pin(
    repo="mnoukhov/deepcoder_primeintellect",
    config="default",
    revision="90f49967b15f25ce5a8513fb3606d13dc41e6a94",
    files=(  # the name that `push_to_hub` gives; ASPECT publishes the checksum only
        ("data/train-00000-of-00001.parquet", "34651aa15b21e8a5ff6b9b14db4b8d474892e67189c77ecc9b41693a51c90212"),
    ),
    rows=14_995,
    note="a public conversion that others take for the authors' filtered rows; unverifiable",
)  # fmt: skip
RECONSTRUCTION_SUFFIX = (  # data, not a prompt of ours: what the conversion put after every problem text
    "\n\nWrite Python code to solve this problem. Your program should read the input from stdin and write the output "
    "to stdout. Enclose your complete solution in a single ```python code block."
)


def n_test(n_rows: int) -> int:
    """Test rows among n: the paper's 1,000, or one row in ten (rounded up) of a file with fewer than 2,000 rows."""
    return 1_000 if n_rows >= 2_000 else math.ceil(n_rows / 10)


def to_problem(row: Row) -> Problem:
    """A row of the original schema: problem, tests, and where present starter_code and metadata."""
    return _problem(
        text_of(row, "problem", "no_question"), row.get("tests"), row.get("starter_code"), row.get("metadata")
    )


def from_conversion(row: Row) -> Problem:
    """A row of the reconstruction: one user message (problem text and a fixed suffix), and the kept tests."""
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise BadRow("not_one_message")
    content = text_of(messages[0], "content", "no_question")
    if messages[0].get("role") != "user" or not content.endswith(RECONSTRUCTION_SUFFIX):
        raise BadRow("unknown_suffix")
    return _problem(content.removesuffix(RECONSTRUCTION_SUFFIX), row.get("ground_truth"), None, None)


ROWS = {
    "deepcoder": (DEEPCODER, Layout(("problem", "tests"), ("starter_code", "metadata"), to_problem, n_test)),
    "reconstruction": (RECONSTRUCTION, Layout(("messages", "ground_truth"), (), from_conversion, n_test)),
}


def problems(
    split: str, count: int | None = None, data: str | Path | None = None, rows: str = "deepcoder"
) -> list[Problem]:
    """The problems of "train" or "validation", in the split's order; `count=None` is all, a smaller count a prefix.

    `data` replaces the download and is in the schema that `rows` names.
    """
    return load(*_version(rows), data).take(split, count)


def describe(data: str | Path | None = None, rows: str = "deepcoder") -> dict[str, object]:
    """What the provenance of a run says about its rows: repository, revision, checksums, counts, what was left out."""
    return load(*_version(rows), data).description | {"schema": rows}


def _version(rows: str) -> tuple[Pin, Layout]:
    if rows not in ROWS:
        raise ValueError(f"got rows={rows!r}: no such version of the code problems; write one of {sorted(ROWS)}")
    return ROWS[rows]


def _problem(statement: str, tests: object, starter: object, metadata: object) -> Problem:
    """The question in the frame that its tests need; the reference is JSON text, so that 16,000 rows fit in memory."""
    canonical = canonical_tests(tests, metadata)
    is_call = canonical[0]["testtype"] == "functional"
    if isinstance(starter, str) and starter.strip():
        question = render(NAME, "format_starter", problem=statement, starter_code=starter)
    elif is_call:  # the authors' frame asks for a program on standard input here, too
        question = render(NAME, "format_function", problem=statement, func_name=canonical[0]["metadata"]["func_name"])
    else:
        question = render(NAME, "format_stdin", problem=statement)
    return Problem(question_id(NAME, question), NAME, question, json.dumps(canonical))


def canonical_tests(tests: object, metadata: object) -> list[dict[str, object]]:
    """The published forms of hidden tests in the sandbox's form, see `normalise_tests`. Raises BadRow.

    A list of {input, output} with `testtype` "functional" (LiveCodeBench; the name stands in the row's metadata) or
    `type` "function_call" (PrimeIntellect; `fn_name` in each test); or a dict of `inputs` and `outputs`, with `fn_name`
    for calls (TACO). Anything may be JSON text instead.
    """
    tests, metadata = _decoded(tests, "unreadable_tests"), _decoded(metadata, "unreadable_metadata")
    if isinstance(tests, dict) and "inputs" in tests:
        tests = _from_taco(tests)
    if not tests:
        raise BadRow("no_tests")
    if not isinstance(tests, list) or not all(isinstance(t, dict) and "input" in t and "output" in t for t in tests):
        raise BadRow("unreadable_tests")
    declared = metadata.get("func_name") if isinstance(metadata, dict) else None
    names = [_function_name(test, declared) for test in tests]
    if len(set(names)) > 1:
        raise BadRow("mixed_tests")
    try:
        return normalise_tests([_canonical(test, name) for test, name in zip(tests, names, strict=True)])
    except ValueError as error:
        raise BadRow("unreadable_tests") from error


def _decoded(value: object, reason: str) -> object:
    """JSON text as data; anything else unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason) from error


def _from_taco(tests: dict[str, object]) -> list[dict[str, object]]:
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRow("unreadable_tests")
    if len(inputs) != len(outputs):
        raise BadRow("unequal_lengths")
    kind = {"type": "function_call", "fn_name": tests["fn_name"]} if tests.get("fn_name") else {}
    return [{"input": i, "output": o} | kind for i, o in zip(inputs, outputs, strict=True)]


def _function_name(test: dict[str, object], declared: object) -> str | None:
    """The function that a test calls, None for a test on standard input."""
    kind = test.get("testtype") or test.get("type") or "stdin"
    if kind in ("stdin", "stdin_stdout"):
        return None
    if kind not in ("functional", "function_call"):
        raise BadRow("unreadable_tests")
    name = test.get("fn_name") or declared
    if not isinstance(name, str) or not name.isidentifier():
        raise BadRow("no_function_name")
    return name


def _canonical(test: dict[str, object], name: str | None) -> dict[str, object]:
    given, expected = test["input"], test["output"]
    if name is None:
        return {"input": given, "output": expected, "testtype": "stdin"}
    if isinstance(given, list):  # PrimeIntellect and TACO: arguments and result are data; LiveCodeBench: JSON text
        given, expected = "\n".join(map(json.dumps, given)), json.dumps(expected)
    return {"input": given, "output": expected, "testtype": "functional", "metadata": {"func_name": name}}


def extract(text: str) -> str | None:
    """The program: the content of the last fenced block, or None.

    A block opens with ``` and at most one word (the language, whichever) at the end of a line, and goes up to the next
    ```; one that never closes does not count, and a blank one holds no program. The released code and LiveCodeBench
    take the last block as well.
    """
    blocks = re.findall(r"```[\w+#.-]*[ \t]*\r?\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks and blocks[-1].strip() else None


def score_batch(
    problems: list[Problem],
    texts: list[str],
    malformed: float = 0.0,
    code_reward: str = "fraction",
    limits: Limits | None = None,
) -> list[Reward]:
    """Reward by hidden tests: the passed "fraction" (paper A.7), or 1 if "all_pass"; `malformed` without a program.

    `is_correct` is "all tests passed" under either. The reason is that of the first test that did not pass.
    """
    if code_reward not in CODE_REWARDS:
        raise ValueError(f"got code_reward={code_reward!r}: no such way to grade code; write one of {CODE_REWARDS}")
    programs = [extract(text) for text in texts]
    jobs = [(program, problem.reference) for program, problem in zip(programs, problems, strict=True)]
    distinct = list(dict.fromkeys(job for job in jobs if job[0] is not None))  # one problem's episodes may agree
    tests = {reference: json.loads(reference) for _, reference in distinct}
    verdicts = grade_batch(
        [program for program, _ in distinct], [tests[reference] for _, reference in distinct], code_reward, limits
    )
    graded = dict(zip(distinct, verdicts, strict=True))
    return [
        Reward(malformed, "no_code", False)
        if job[0] is None
        else Reward(graded[job].reward, graded[job].reason, graded[job].passed == graded[job].total)
        for job in jobs
    ]
