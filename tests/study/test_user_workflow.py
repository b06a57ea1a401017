"""The example's workflow and task train as a cell, named by their file; `bad_inputs.OWN` has what is refused before."""

import asyncio
from pathlib import Path

import pytest
from trainers import episodes_of, rows_of, table

from multirole import Answer, Problem, user
from multirole.core.hooks import Iteration
from multirole.workflows import WORKFLOWS
from multirole_study import Task
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.preflight import dry_run, first_prompts
from multirole_study.experiment.run import run_cell

DEBATE = Path(__file__).parents[2] / "examples" / "debate.py"


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


class Echo:
    """A workflow whose judge has nothing to do."""

    name, roles = "echo", {"speaker": 2, "judge": 1}

    async def run(self, problem, call):
        return Answer((await call("speaker", [user("?")])).text)


def test_a_role_that_is_not_called_is_named_and_allowed(caplog, make_library_trainer):
    dry_run(Echo(), Problem("p7", "sums", "1+1?", None))
    assert "'echo' did not call judge in a trial" in caplog.text
    caplog.clear()
    trainer = make_library_trainer(Echo(), policy="ip")
    for number, roles in enumerate([{"speaker": 2, "judge": 1}, {"speaker": 2}, {"speaker": 2}]):
        episodes = episodes_of(roles)
        trainer._finish_iteration(Iteration(number, episodes, rows_of(trainer, episodes), [], {}))
    assert [record.message for record in caplog.records] == [
        "The workflow 'echo' did not call judge in the first iteration. A role that is never called is not trained."
    ]


@pytest.mark.parametrize("task", ["math", "code"])
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_the_built_in_workflows_pass_the_trial(workflow, task, caplog):
    cell = Cell(workflow, "sp", task)
    dry_run(cell.make_workflow(), cell.make_task().problems("validation", 1)[0])
    assert not caplog.text


async def forgets_to_await(problem, call):
    call("speaker", [user("?")])
    return Answer((await call("judge", [user("?")])).text)


async def calls_nobody(problem, call):
    return Answer("7")


async def answers_with_a_turn(problem, call):
    return Answer(await call("judge", [user("?")]))


def test_a_task_takes_one_reward_function():
    with pytest.raises(TypeError, match="must be one function, got"):
        Task("sums", [], [], [len])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (forgets_to_await, r"did not await its calls of \['speaker'\] on problem 'p7'"),
        (calls_nobody, "'hasty' made no call"),
        (answers_with_a_turn, "returned an Answer of a Turn on problem 'p7'"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_common_mistakes_are_found_before_training(run, message):
    class Hasty:
        name, roles = "hasty", {"speaker": 1, "judge": 1}

        async def run(self, problem, call):
            return await run(problem, call)

    with pytest.raises(ValueError, match=message):
        dry_run(Hasty(), Problem("p7", "sums", "1+1?", None))


BESIDE = "from helpers import ask\nfrom multirole import Answer\nclass Own:\n    name, roles = 'own', {'a': 1}\n    async def run(self, problem, call):\n"
BESIDE += (
    "        import later\n        return Answer((await call('a', [ask(later.PREFIX + problem.question)])).text)\n"
)


def test_prompts_of_any_workflow_are_measured_before_training():
    """This includes calls in a task group and calls with a token limit."""

    class Grouped:
        name, roles = "grouped", {"solver": 2}

        async def run(self, problem, call):
            async with asyncio.TaskGroup() as group:
                for slot in range(2):
                    group.create_task(call("solver", [user(problem.question)], slot=slot, max_tokens=4))

    problems = [Problem(str(i), "", "x" * i, None) for i in (3, 5)]
    assert first_prompts(Grouped(), problems, lambda messages: len(messages[0]["content"])) == [3, 5]
