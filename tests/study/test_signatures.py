"""The signatures of Tables 4-6, each against numbers counted by hand."""

import math

import pandas as pd
import pytest

from multirole.types import Episode, Problem, Turn
from multirole_study.signatures import (
    SIGNATURES,
    form,
    grams,
    is_hedging,
    jaccard,
    opener,
    signatures,
    signatures_of_frame,
    turn_signature,
)

PROGRAM = "```python\ndef f(xs):\n    xs = xs[:4]\n    return len(xs)\n```"


def turn(role, text, n_tokens=10, slot=0, round=0, finish_reason="stop"):
    return Turn(role, slot, round, [1], [1] * n_tokens, [0.0] * n_tokens, text, finish_reason)


def episode(*turns, problem="p"):
    return Episode(Problem(problem, "math", "question", None), 0, list(turns))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wait, that is off.", True),
        ("ACTUALLY it is 4", True),
        ("we await the result", False),  # inside a longer word
        ("waiting", False),
        ("hmm", True),
        ("hmmm", False),
        ("Let me reconsider.", True),
        ("let us reconsider", False),
        ("On second thought: 5", True),
        ("incorrect", False),
        ("this is not correct.", True),
        ("this is not correctly typed, await it", False),  # two near misses
        ("await it. Wait.", True),
        ("", False),
    ],
)
def test_hedging_phrases(text, expected):
    assert is_hedging(text) is expected


@pytest.mark.parametrize(
    ("text", "n_tokens", "expected"),
    [
        (PROGRAM, 20, "code_fence"),
        (PROGRAM + "\n\\boxed{Correct}", 20, "code_fence"),  # the fence comes first
        (PROGRAM.removesuffix("```"), 20, "code_fence"),  # cut off before it closed
        ("```python\na = 1\n\n  \nb = 2\n```", 20, "other"),  # two lines and two blank ones
        ("```\na\nb\nc\n```", 20, "other"),  # no language
        ("\\boxed{Correct}", 200, "bare_stamp"),
        ("\\boxed{Correct}", 201, "other"),
        ("```python\nx\n```\n\\boxed{Incorrect}", 20, "other"),  # a fence, and too short for a program
        ("\\boxed{12}", 4, "other"),
    ],
)
def test_forms(text, n_tokens, expected):
    assert turn_signature(text, n_tokens).form == expected
    assert form(text, n_tokens, turn_signature(text, n_tokens).verdict) == expected


def test_boxes_and_terse_turns():
    assert turn_signature("\\boxed{2}", 30).is_terse and not turn_signature("\\boxed{2}", 31).is_terse
    assert not turn_signature("\\boxed{ ok. \\boxed{", 3).is_boxed  # the braces never close
    assert not turn_signature("\\boxed{ }", 3).is_boxed
    assert not turn_signature("2", 1).is_terse  # terse, but nothing is selected
    assert turn_signature("so \\boxed{incorrect}", 5).verdict == "incorrect"
    assert turn_signature("\\boxed{maybe}", 5).verdict == "unparsed"


def test_jaccard_by_hand():
    a, b = grams("a b c d"), grams("x b c d")  # {abc, bcd} and {xbc, bcd}
    assert jaccard(a, b) == 1 / 3
    assert jaccard(a, a) == 1.0
    assert grams("A b c") != grams("a b c")  # cases differ
    assert len(grams("a a a a a")) == 1  # a set, not a count
    assert jaccard(grams("a b"), grams("c")) == 1.0 and jaccard(grams("a b"), a) == 0.0


def test_openers():
    assert opener("  Let me\nsolve  this now") == "Let me solve"
    assert opener("\\boxed{1}") == "\\boxed{1}"
    assert opener("") == ""


def test_jaccard_is_a_mean_of_episode_means():
    same, other = "a b c d", "x b c d"
    episodes = [
        episode(*(turn("worker", same, slot=s) for s in range(3))),  # three pairs of 1
        episode(turn("worker", same, slot=0), turn("worker", other, slot=1)),  # one pair of 1/3: the planner cut short
        episode(turn("worker", same)),  # no pair: not in the mean
    ]
    worker = signatures(episodes)["worker"]
    assert worker["jaccard"] == pytest.approx((1.0 + 1 / 3) / 2)
    assert worker["slot_pairs"] == 4


def test_rounds_are_not_slots():
    """A refined draft resembles its first version by design: only slots of one stage are compared."""
    draft = episode(turn("generator", "a b c d"), turn("generator", "a b c d", round=1))
    assert signatures([draft])["generator"]["jaccard"] == 0.0
    assert signatures([draft])["generator"]["slot_pairs"] == 0


def test_the_signatures_of_one_role_by_hand():
    voters = [
        turn("generator", "Wait, a b\n\\boxed{7}", 40, slot=0),
        turn("generator", "Wait, a c\n", 20, slot=1, finish_reason="length"),
        turn("generator", "So \\boxed{7}", 10, slot=2),
    ]
    episodes = [episode(*voters, turn("aggregator", "\\boxed{1}", 4)), episode(turn("generator", PROGRAM, 22))]
    values = signatures(episodes)["generator"]
    assert values["truncated_rate"] == 0.25
    assert (values["length_mean"], values["length_p50"]) == (23.0, 21.0)  # 10 20 22 40
    assert values["length_p95"] == pytest.approx(22 + 0.85 * 18)
    assert values["boxed_rate"] == values["box_retention"] == 0.5
    assert values["hedging_rate"] == 0.5
    assert values["terse_rate"] == 0.25
    assert (values["code_fence_rate"], values["bare_stamp_rate"], values["other_rate"]) == (0.25, 0.0, 0.75)
    assert values["unique_openers"] == 4
    # 3-grams: {Wait, a b | a b box}, {Wait, a c}, {}: nothing is shared, and only the third set is empty
    assert (values["jaccard"], values["slot_pairs"]) == (0.0, 3)
    assert signatures(episodes)["aggregator"]["terse_rate"] == 1.0


def test_retention_looks_at_first_turns_only():
    episodes = [
        episode(turn("generator", "\\boxed{3}", round=1), turn("generator", "three", round=0)),  # in any order
        episode(turn("generator", "\\boxed{3}")),
    ]
    values = signatures(episodes)["generator"]
    assert values["box_retention"] == 0.5 and values["boxed_rate"] == 2 / 3


def test_verdicts_of_an_evaluator():
    said = ["\\boxed{Correct}", "\\boxed{correct}", "\\boxed{Incorrect}", "fine"]
    values = signatures([episode(turn("evaluator", text)) for text in said])["evaluator"]
    assert (values["verdict_rate"], values["correct_verdict_rate"], values["bare_stamp_rate"]) == (0.75, 0.5, 0.75)


def test_every_role_has_every_key_and_no_nan():
    turns = [turn("a", ""), turn("b", "\\boxed{1}", slot=0), turn("b", "", 1, slot=1)]
    roles = signatures([episode(*turns), episode(), episode(turn("c", "x"))])
    assert list(roles) == ["a", "b", "c"]
    for values in roles.values():
        assert tuple(values) == SIGNATURES
        assert all(isinstance(v, float) and math.isfinite(v) for v in values.values())
        assert values["code_fence_rate"] + values["bare_stamp_rate"] + values["other_rate"] == 1.0
    assert signatures([]) == {} and signatures([episode()]) == {}


def frame(episodes, step):
    return pd.DataFrame(
        {
            "step": step, "problem": e.problem.id, "role": t.role, "slot": t.slot, "round": t.round,
            "finish_reason": t.finish_reason, "completion_tokens": len(t.completion_ids), "text": t.text,
        }
        for e in episodes
        for t in e.turns
    )  # fmt: skip


def test_recorded_turns_give_the_same_numbers():
    early = [episode(*(turn("w", "a b c d e", slot=s) for s in range(3)), turn("s", "\\boxed{1}"), problem="1")]
    late = [episode(*(turn("w", f"a b c {s}", 50, slot=s) for s in range(3)), turn("s", "hmm"), problem="1")]
    turns = pd.concat([frame(late, 10), frame(early, 0)])
    table = signatures_of_frame(turns).set_index(["step", "role"])
    assert list(table.index) == [(0, "w"), (0, "s"), (10, "w"), (10, "s")]
    for step, episodes in ((0, early), (10, late)):
        for role, values in signatures(episodes).items():
            assert table.loc[(step, role)].to_dict() == values
    assert list(signatures_of_frame(turns.iloc[:0]).columns) == ["step", "role", *SIGNATURES]


def test_episodes_that_cannot_be_told_apart_are_refused():
    twice = frame([episode(turn("w", "a")), episode(turn("w", "b"))], 0)  # the same problem twice at one step
    with pytest.raises(ValueError, match="cannot be told apart"):
        signatures_of_frame(twice)
