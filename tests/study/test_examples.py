"""The examples run as a reader would run them, from another folder, and do what they say."""

import difflib
import os
import re
import runpy
import sys
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str, folder: Path, arguments: tuple[str, ...] = ()) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))  # as `python FILE` does
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def run(name: str, folder: Path, *arguments: str) -> str:
    code = processes.run(folder / "log", script, name, folder, arguments)
    printed = (folder / "log").read_text()
    assert code == 0, printed[-3000:]
    return printed


def test_the_readme_lists_every_script():
    listed = re.findall(r"\]\((\w+\.py|\w+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    there = [path.name for path in EXAMPLES.iterdir() if path.suffix == ".py" or path.is_dir() and path.name[0] != "_"]
    assert sorted(listed) == sorted(there)


@pytest.mark.slow
def test_a_user_supplied_workflow_rows_and_reward(tmp_path):
    output = run("debate.py", tmp_path)
    assert "eval_reward" in output
    assert {"adapter_a", "adapter_b"} <= {path.name for path in (tmp_path / "out" / "debate").iterdir()}
    played = run("play.py", tmp_path)
    assert [played.count(who) for who in ("debater 0,", "debater 1,", "judge 0,")] == [2, 2, 1]
    assert "\nanswer: " in played


@pytest.mark.slow
def test_a_stock_script_becomes_multi_role_in_under_ten_lines(tmp_path):
    scripts = [(EXAMPLES / name).read_text().splitlines() for name in ("grpo_stock.py", "grpo_multirole.py")]
    changed = [line for line in difflib.ndiff(*scripts) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) < 10
    output = run("grpo_multirole.py", tmp_path)
    assert "aggregator/rows" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_stock.py", "partial_sharing.py", "own_credit.py"])
def test_the_other_examples(name, tmp_path):
    output = run(name, tmp_path)
    assert "reward" in output


@pytest.mark.slow
def test_a_role_learns_to_call_a_function(tmp_path):
    output = run("tools.py", tmp_path)
    rewards, calls = (
        [float(number) for number in re.search(rf"^{name}: \[(.*)\]$", output, re.MULTILINE)[1].split(", ")]
        for name in ("reward", "solver/tool_calls")
    )
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3 and sum(calls[-3:]) > sum(calls[:3])


@pytest.mark.slow
def test_two_players_of_a_game(tmp_path):
    pytest.importorskip("textarena")
    output = run("two_players.py", tmp_path, "1")
    assert re.search(r"^seed 0: won 0\.\d+ of its games against the frozen start", output, re.MULTILINE)


@pytest.mark.slow
def test_taught_roles_come_close_to_their_teachers(tmp_path):
    output = run("distillation.py", tmp_path)
    base, teachers, taught = map(float, re.search(r"base (\S+), teachers (\S+), taught (\S+)", output).groups())
    assert teachers > base + 0.1 and taught > base + 0.5 * (teachers - base)


def test_the_reward_and_the_rows_of_the_language_model():
    example = runpy.run_path(str(EXAMPLES / "language_model.py"))
    rewards = example["correct"](
        [""] * 5, [r"It is \boxed{41}.", "40 + 1 = 41", r"\boxed{40}, not 41", r"\boxed{} 41", "No idea."], ["41"] * 5
    )
    assert rewards == [1.0, 0.5, 0.0, 0.0, 0.0]
    train, validation = example["rows"]("train", 64), example["rows"]("validation", 64)
    assert not set(train["prompt"]) & set(validation["prompt"])
    for row in train:
        first, second = re.findall(r"\d+", row["prompt"])
        assert int(first) + int(second) == int(row["answer"]), row
