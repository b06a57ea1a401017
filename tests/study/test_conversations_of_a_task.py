"""A user's task takes rows whose prompts are conversations, and hands them on to the library and the reward."""

import json

import pytest

from multirole.inputs.problems import to_problems
from multirole.types import assistant, user
from multirole_study.experiment.cell_trainer import to_dataset
from multirole_study.tasks.sources import DataError
from multirole_study.tasks.user_task import Task

SYSTEM = {"role": "system", "content": "Answer in one word."}
HISTORY = [SYSTEM, user("What is 1+1?"), assistant("2")]
TALK = [*HISTORY, user("And doubled?")]


def test_a_task_of_a_file_takes_conversations(tmp_path):
    rows = [
        {"prompt": TALK, "answer": "four"},
        {"prompt": "text", "answer": "a"},
        {"prompt": HISTORY[:2], "answer": "b"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    def reward(prompts, completions, answer):
        seen.extend(prompts)
        return [1.0] * len(prompts)

    task = Task("talk", path, path, reward)
    problems = task.problems("train")
    assert [p.history for p in problems] == [HISTORY, [], [SYSTEM]]
    assert [p.question for p in problems] == ["And doubled?", "text", "What is 1+1?"]
    assert len({p.id for p in problems}) == 3
    task.score(problems, ["x"] * 3)
    assert seen == [TALK, "text", HISTORY[:2]]
    again = to_problems(to_dataset(problems))
    assert [(p.id, p.history, p.question) for p in again] == [(p.id, p.history, p.question) for p in problems]
    bad = Task("talk", [{"prompt": TALK[:3]}], path, reward)
    with pytest.raises(DataError, match="row 0 of a list in memory cannot be a prompt: .*must end with a user message"):
        bad.problems("train")
