"""The example's own workflow and own task train as a cell, named by their file; what cannot be trained is refused before."""

import asyncio
import sys
import time
from pathlib import Path

import pytest
from trainers import table

from multirole import Answer, Problem, user
from multirole.experiment import own
from multirole.experiment.cell import Cell
from multirole.experiment.run import run_cell
from multirole.workflows import WORKFLOWS

DEBATE = Path(__file__).parents[1] / "examples" / "debate.py"


def test_the_debate_of_the_examples_trains(tmp_path):
    cell = Cell(
        f"{DEBATE}:Debate", "debater=a,judge=b", f"{DEBATE}:task", iterations=2, n_problems=2, n_episodes=4, n_validation=4,
        eval_every=2, save_every=2, warmup_iterations=1,
    )  # fmt: skip
    folder = run_cell(cell, tmp_path)
    assert folder.name == cell.id and folder.name.startswith("debate-map-sums-s0-")
    roles = table(folder, "roles")
    assert set(roles["role"]) == {"debater", "judge"}
    assert set(roles[roles["role"] == "debater"]["rows"]) == {2 * 4 * 4}  # two debaters, two rounds
    ledger = table(folder, "ledger")
    assert (ledger[ledger["iteration"] == 1]["adapter"].value_counts()).to_dict() == {"adapter_a": 4, "adapter_b": 1}
    evaluated = table(folder, "eval")
    assert set(evaluated["step"]) == {0, 2} and set(evaluated["reward"]) <= {0.0, 1.0}


class Broken:
    """A workflow whose `run` is one of the coroutines below."""

    name, roles = "broken", {"speaker": 2, "judge": 1}

    def __init__(self, run) -> None:
        self.play = run

    async def run(self, problem, call):
        return await self.play(problem, call)


async def calls_for_ever(problem, call):
    round = 0
    while True:
        round = (await call("speaker", [user("?")], round=round)).round + 1


async def is_busy(problem, call):
    ends = time.monotonic() + 3  # its thread outlives the test, and would take half of every later test's time
    while time.monotonic() < ends:
        pass


async def sleeps(problem, call):
    time.sleep(600)  # noqa: ASYNC251


async def waits(problem, call):
    await asyncio.sleep(600)


async def exits(problem, call):
    sys.exit(0)


async def calls_a_third_speaker(problem, call):
    await asyncio.gather(*(call("speaker", [user("?")], slot=slot) for slot in range(3)))


async def calls_nobody(problem, call):
    await call("spaeker", [user("?")])


async def reads_a_number(problem, call):
    return Answer(str(int((await call("speaker", [user("?")])).text)))


async def returns_text(problem, call):
    return "42"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (calls_for_ever, "at most 256 calls"),
        (is_busy, "still running after 0.5 s, here(.|\\n)*is_busy"),
        (sleeps, "still running after 0.5 s, here(.|\\n)*time.sleep"),
        (waits, "still running after 0.5 s"),
        (exits, "failed: SystemExit: 0(.|\\n)*sys.exit"),
        (calls_a_third_speaker, r"slot=2\)`: the roles and their numbers of slots are {'speaker': 2, 'judge': 1}"),
        (calls_nobody, "call.'spaeker'"),
        (reads_a_number, "every reply was '', it failed: ValueError(.|\\n)*reads_a_number"),
        (returns_text, "must return an `Answer`, got '42'"),
    ],
)
def test_a_workflow_that_cannot_be_trained_is_refused_with_its_problem_and_traceback(run, words, monkeypatch):
    monkeypatch.setattr(own, "DRY_SECONDS", 0.5)
    with pytest.raises(ValueError, match=f"The workflow 'broken' cannot be trained.* problem 'p7'.*{words}"):
        own.dry_run(Broken(run), Problem("p7", "sums", "1+1?", None))


def test_a_role_that_is_not_called_is_named_and_allowed(caplog):
    async def calls_no_judge(problem, call):
        return Answer((await call("speaker", [user("?")])).text)

    own.dry_run(Broken(calls_no_judge), Problem("p7", "sums", "1+1?", None))
    assert "'broken' did not call judge in a trial" in caplog.text


@pytest.mark.parametrize("task", ["math", "code"])
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_the_built_in_workflows_pass_the_trial(workflow, task, caplog):
    cell = Cell(workflow, "sp", task)
    own.dry_run(cell.make_workflow(), cell.make_task().problems("validation", 1)[0])
    assert not caplog.text
