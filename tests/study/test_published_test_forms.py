"""Hidden tests in every published form are read and passed by the right program, or refused with a description of what was found."""

import base64
import json
import os
import pickle
import zlib
from decimal import Decimal

import pytest

from multirole_sandbox import grade
from multirole_sandbox.published import normalise_tests, read_json, write_json
from multirole_study.tasks import hidden_tests

STDIN = [{"input": "", "output": "3", "testtype": "stdin"}]
LONG = str(Decimal(7**9000))
LONGER = str(Decimal(7**9000 + 1))
"""7,606 digits, which `str` refuses (CVE-2020-10735)."""


def functional(arguments: str, expected: str) -> list[dict]:
    return [{"input": arguments, "output": expected, "testtype": "functional", "metadata": {"func_name": "f"}}]


def called(arguments: list, expected: object) -> dict:
    return {"fn_name": "f", "inputs": [arguments], "outputs": [expected]}


def packed(tests: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol))).decode()


FORMS = {
    # LiveCodeBench/LiveCodeBench, lcb_runner/benchmarks/code_generation.py
    "JSON": (json.dumps(STDIN), "print(3)"),
    "private tests": (packed(STDIN), "print(3)"),
    "private tests, pickle protocol 2": (packed(STDIN, 2), "print(3)"),
    "compressed JSON": (base64.b64encode(zlib.compress(json.dumps(STDIN).encode())).decode(), "print(3)"),
    "an evaluation sample": ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "f"}, "def f(a, b): return a + b"),
    "a sample with a list": ({"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "f"}, "def f(a): return sum(a)"),
    "metadata as JSON": ([functional("1", "2")[0] | {"metadata": '{"func_name": "f"}'}], "def f(a): return a + 1"),
    "line ends after the arguments": (functional("1\n2\n", "3\n"), "def f(a, b): return a + b"),
    "CRLF between the arguments": (functional("1\r\n2\r\n", "3"), "def f(a, b): return a + b"),
    "an argument over several lines": (functional("[\n 1,\n 2\n]\n3", "6"), "def f(a, b): return sum(a) + b"),
    # agentica-org/rllm, rewards/code_reward.py reads `ast.literal_eval` of the column
    "the text of a Python list": (str(STDIN), "print(3)"),
    "Python values": (functional("True\nNone\n'a'", "'a'"), "def f(a, b, c): return c if a and b is None else 0"),
    "a Python tuple": (functional("(1, 2)", "(2, 1)"), "def f(a): return a[::-1]"),
    "a list of JSON texts": ([json.dumps(STDIN[0])], "print(3)"),
    "a tuple of tests": (tuple(STDIN), "print(3)"),
    # hendrycks/apps and FlagOpen/TACO
    "lists of lines": ({"inputs": [["1", "2"]], "outputs": [["3"]]}, "print(int(input()) + int(input()))"),
    "no function, said so": ({"inputs": [""], "outputs": ["3"], "fn_name": None}, "print(3)"),
    "a bare text as output": (called(["a"], "aa"), "def f(a): return a * 2"),
    "a tuple for a list": (called([1], [[1, 2]]), "def f(a): return (1, 2)"),
    # PrimeIntellect verifiable-coding-problems; open-r1's copy has the lists as JSON
    "a call without a type": ([{"fn_name": "f", "input": [1, 2], "output": 3}], "def f(a, b): return a + b"),
    "no arguments": ([{"type": "function_call", "fn_name": "f", "input": [], "output": [3]}], "def f(): return 3"),
    "texts as arguments": ([{"type": "function_call", "fn_name": "f", "input": ["a", "b"], "output": ["ab"]}], "def f(a, b): return a + b"),
    "arguments as JSON": ([{"type": "function_call", "fn_name": "f", "input": "[1, 2]", "output": "3"}], "def f(a, b): return a + b"),
    # names of functions: LeetCodeDataset's entry points, PrimeIntellect-ai/genesys's classes of any name
    "Solution().f": ([{"fn_name": "Solution().f", "input": [1], "output": [2]}], "class Solution:\n def f(self, a): return a + 1"),
    "Solution.f": ([{"fn_name": "Solution.f", "input": [1], "output": [2]}], "def f(a): return a + 1"),
    "a method of another class": ([{"fn_name": "f", "input": [1], "output": [2]}], "class Answer:\n def f(self, a): return a + 1"),
    # hendrycks/apps, eval/testing_util.py: "JSON forces dictionaries to have string keys; this undoes this"
    "integer keys": (called([{"1": 5, "2": 3}], [11]), "def f(d): return sum(k * d[k] for k in d)"),
    "nested integer keys": (called([{"1": {"2": 3}}], [6]), "def f(d): return sum(k * j * v for k, i in d.items() for j, v in i.items())"),
    "integer keys of a second argument": (called([2, {"1": 5}], [5]), "def f(n, d): return d[n - 1]"),
    "integer keys in a list": (called([[{"1": 5}, {"2": 6}]], [11]), "def f(ds): return sum(d[i + 1] for i, d in enumerate(ds))"),
    "negative keys": (called([{"-1": 5}], [5]), "def f(d): return d[-1]"),
    "integer keys of JSON lines": (functional('{"1": 5}', "5"), "def f(d): return d[1]"),
    "digits that were text": (called([{"2": "abc"}], ["abc"]), "def f(d): return d['2']"),
    "mixed keys stay text": (called([{"a": 1, "2": 2}], [3]), "def f(d): return d['a'] + d['2']"),
    "padded keys stay text": (called([{"01": 1}], [1]), "def f(d): return d['01']"),
    "integer keys that are returned": (called([2], {"2": 4}), "def f(n): return {n: n * n}"),
    "nested keys that are returned": (called([2], [[{"2": {"3": 4}}]]), "def f(n): return [{n: {n + 1: 4}}]"),
    # NVIDIA-NeMo/Gym#2956 (3): integers of more than 4300 digits
    "a long argument": (functional(LONG, LONGER), "def f(a): return a + 1"),
    "a long number in JSON": (f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [[{LONG}]]}}', "def f(a): return a"),
    "a long number that is read": ([{"input": LONG, "output": LONG}], "print(int(input()))"),
    "a long number that is printed": ([{"input": "", "output": LONG}], "print(7**9000)"),
    # hendrycks/apps compares with `==`
    "a Decimal": (functional("1", "0.5"), "def f(a): return Decimal('0.5')\nfrom decimal import Decimal"),
    "a whole Fraction": (functional("1", "3"), "def f(a): return Fraction(6, 2)\nfrom fractions import Fraction"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), FORMS.values(), ids=FORMS)
def test_the_right_program_passes_the_tests_in_every_form(tests, program):
    assert grade(program, tests).reasons == ("passed",)
    assert normalise_tests(normalise_tests(tests)) == normalise_tests(tests)


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (functional("1", "[2]"), "def f(a): return 2"),  # LiveCodeBench's values are not wrapped
        (functional(LONG, LONG), "def f(a): return a + 1"),
        ([{"input": "", "output": LONG}], "print(7**9000 + 1)"),
        (functional("1", "[1]"), "def f(a): return {1}"),
        (called([{"1": 5}], [6]), "def f(d): return d[1]"),
        (called([{"1": 5}], [5]), "def f(d): return d[2]"),
        ([{"fn_name": "g", "input": [1], "output": [1]}], "class A:\n def f(self, a): return a"),
    ],
)
def test_a_wrong_program_passes_in_none(tests, program):
    assert grade(program, tests).reward == 0.0


class Attack:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


REFUSED = {  # what the message has to name
    "open-r1#28: code_contests": ({"input": [""], "output": ["3"]}, r"this one has \['input', 'output'\]"),
    "verification_info": ({"language": "python", "test_cases": STDIN}, "'test_cases' is the list to pass"),
    "rllm#178: JSON twice": (json.dumps(json.dumps(STDIN)), "a text instead of a list: it was encoded twice"),
    "no text": ([{"input": None, "output": "3"}], "test 0 of 1 has a NoneType as 'input'"),
    "a number": ([*STDIN, {"input": 1.5, "output": "3"}], "test 1 of 2 has a float as 'input'"),
    "a missing key": ([{"input": "1"}], r"has no 'output'; its keys are \['input'\]"),
    "an unknown type": ([{"input": "1", "output": "1", "testtype": "guess"}], "the testtype 'guess'"),
    "an empty text": (" ", "an empty text"),
    "an empty list": ([], "an empty list"),
    "fewer outputs": ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
    "one argument without a list": ({"fn_name": "f", "inputs": [3], "outputs": [3]}, "a list of arguments"),
    "no function": ([{"input": "1", "output": "1", "testtype": "functional"}], "None cannot be the name of a function"),
    "a function that is code": ([{"fn_name": "f(1) + g", "input": [1], "output": [1]}], "cannot be the name of a function"),
    "no JSON": (functional("x y", "1"), "its 'input' 'x y' is neither JSON nor a Python value"),
    "prose": ("see below", "a text that is not JSON"),
    "a pickle that runs code": (base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode(), "unpickling runs code"),
    "a pickled list": (base64.b64encode(zlib.compress(pickle.dumps(STDIN))).decode(), "a pickle of more than one text"),
    "too deep": ("[" * 100_000, "recursion"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "message"), REFUSED.values(), ids=REFUSED)
def test_unreadable_tests_are_refused_with_a_description(tests, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{message}.*Write a non-empty list"):
        normalise_tests(tests)
    assert not list(tmp_path.iterdir())


def test_an_expected_output_that_no_program_may_write_is_refused(monkeypatch):
    monkeypatch.setattr("multirole_sandbox.published.MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(ValueError, match="test 1 of 2 expects an output of 1001 characters.*more than 1000 bytes"):
        normalise_tests([*STDIN, {"input": "", "output": "1" * 1001}])


def test_a_packed_bomb_is_refused_unread(monkeypatch):
    monkeypatch.setattr("multirole_sandbox.published.MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        normalise_tests(packed([{"input": "1" * 5000, "output": "1"}]))


def test_a_row_of_livecodebench_is_graded_by_its_public_and_private_tests():
    add = {"testtype": "functional"}
    row = {
        "public_test_cases": json.dumps([add | {"input": "1\n2", "output": "3"}]),
        "private_test_cases": packed([add | {"input": "5\n2", "output": "7"}]),
        "metadata": '{"func_name": "add"}',
    }
    reward = hidden_tests(("public_test_cases", "private_test_cases"))
    programs = ["class Solution:\n    def add(self, a, b): return a + b", "def add(a, b): return 3"]
    columns = {name: [value] * 2 for name, value in row.items()}
    assert reward(prompts=["p"] * 2, completions=[f"```python\n{one}\n```" for one in programs], **columns) == [
        1.0,
        0.5,
    ]


def test_json_of_long_integers_is_exact():
    value = {"a": [7**9000, (1.5, "x")], "b": {"c": -(7**9000)}}
    assert read_json(write_json(value)) == {"a": [7**9000, [1.5, "x"]], "b": {"c": -(7**9000)}}


# huggingface/open-r1#28 and LeetCode's templates, which take `ListNode` and `TreeNode` as given
NODES = {
    "a list": ([[1, 2, 3]], [3, 2, 1], "def f(self, head: Optional[ListNode]) -> Optional[ListNode]:\n  last = None\n  while head: head.next, last, head = last, head, head.next\n  return last"),
    "an empty list": ([[]], [], "def f(self, head: Optional[ListNode]) -> Optional[ListNode]: return head"),
    "lists": ([[[1, 4], [2], []]], [1, 2, 4], "def f(self, lists: List[Optional[ListNode]]) -> Optional[ListNode]:\n  values = []\n  for l in lists:\n    while l: values.append(l.val); l = l.next\n  first = None\n  for v in sorted(values, reverse=True): first = ListNode(v, first)\n  return first"),
    "a list and a number": ([[1, 2, 3], 2], 3, "def f(self, head: 'ListNode', n: int) -> int:\n  for _ in range(n): head = head.next\n  return head.val"),
    "a tree": ([[1, 2, 3, None, 4]], [1, 3, 2, None, None, 4], "def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n  if root: root.left, root.right = self.f(root.right), self.f(root.left)\n  return root"),
    "the depth of a tree": ([[3, 9, 20, None, None, 15, 7]], 3, "def f(self, root: TreeNode) -> int: return 1 + max(self.f(root.left), self.f(root.right)) if root else 0"),
    "paths": ([[1, 2]], [[1, 2]], "def f(self, root: Optional[TreeNode]) -> List[List[int]]: return [[root.val, root.left.val]]"),
    "lists of lists": ([[[1], [2]]], 2, "def f(self, rows: List[List[int]]) -> int: return len(rows)  # no ListNode"),
}  # fmt: skip
OWN = "class ListNode:\n def __init__(self, x): self.val, self.next = x, None\n def size(self): return 1 + (self.next.size() if self.next else 0)\n"


@pytest.mark.parametrize(("arguments", "expected", "program"), NODES.values(), ids=NODES)
def test_the_nodes_of_leetcode_are_converted_from_and_to_lists(arguments, expected, program):
    body = "\n".join(f" {line}" for line in program.split("\n"))
    tests = functional("\n".join(map(json.dumps, arguments)), json.dumps(expected))
    assert grade(f"class Solution:\n{body}", tests).reasons == ("passed",)
    assert grade(f"class Solution:\n{body}", functional(tests[0]["input"], '"other"')).reward == 0.0


def test_a_program_gets_nodes_of_its_own_class():
    assert grade(f"{OWN}def f(head: ListNode) -> int: return head.size()", functional("[5, 6, 7]", "3")).reward == 1.0
