"""The example's workflow and task train as a cell, named by their file; `bad_inputs.OWN` has what is refused before."""

import asyncio
import inspect
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from trainers import episodes_of, rows_of, table

from multirole import Answer, Problem, user
from multirole.callbacks import Iteration
from multirole.openai_api.workflow import from_openai
from multirole.workflows import WORKFLOWS
from multirole_study import Task
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import make_trainer
from multirole_study.experiment.preflight import dry_run, first_prompts
from multirole_study.experiment.run import run_cell

DEBATE = Path(__file__).parents[2] / "examples" / "debate.py"


def test_the_debate_of_the_examples_trains(tmp_path):
    cell = Cell(
        f"{DEBATE}:Debate", "debater=a,judge=b", f"{DEBATE}:task", max_steps=2, n_problems=2, num_generations=4, n_validation=4,
        eval_steps=2, save_steps=2, warmup_steps=1, max_completion_length=24,
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


class Reads:
    """A workflow that shows its role the row's column "context"."""

    name, roles = "reads", {"reader": 1}

    def __init__(self, n_rounds=1):
        self.n_rounds = n_rounds

    async def run(self, problem, call):
        return Answer((await call("reader", [user(f"{problem.reference['context']}: {problem.question}")])).text)


def test_a_workflow_reads_the_columns_of_its_rows(tmp_path, make_model, tokenizer):
    """As in the library, and as the trial before training has them. The reference of a built-in task stays hidden."""
    rows = [{"prompt": f"{i}+1", "context": f"row {i}"} for i in range(4)]
    task = Task("sums", rows, rows, lambda completions, **_: [0.0] * len(completions))
    cell = Cell(Reads(), "sp", task, n_problems=2, num_generations=2)
    seen = []
    trainer = make_trainer(
        cell, str(tmp_path), problems=(task.problems("train"), task.problems("validation")),
        model=(make_model(cell.policy), tokenizer),
        engine=ScriptedEngine(lambda key, r: (seen.append(tokenizer.decode(r.prompt_ids)) or [tokenizer.eos_token_id], 1), tokenizer.eos_token_id),
    )  # fmt: skip
    trainer.play([(problem, 0) for problem in trainer.problems], 0)
    assert len(seen) == 4 and all(f"row {i}: {i}+1" in prompt for i, prompt in enumerate(seen))


class Changes(Reads):
    """A workflow that takes what it has read out of its row, and notes the run's sampling."""

    def on_rollout_begin(self, tokenizer, sampling):
        self.temperature = sampling.temperature

    async def run(self, problem, call):
        answer = await super().run(problem, call)
        problem.reference["context"] = problem.reference["list"].pop()
        return answer


def test_a_workflow_may_change_its_row_and_has_the_event_of_a_rollout(tmp_path, make_model, tokenizer):
    """Each episode has its own copy, and so has the reward function."""
    rows = [{"prompt": f"{i}+1", "context": f"row {i}", "list": [i]} for i in range(2)]
    task = Task("sums", rows, rows, lambda completions, **_: [0.0] * len(completions))
    workflow = Changes()
    trainer = make_trainer(
        Cell(workflow, "sp", task, n_problems=2, num_generations=2, temperature=0.5), str(tmp_path), problems=(task.problems("train"), task.problems("validation")),
        model=(make_model({"reader": "shared"}), tokenizer),
        engine=ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id),
    )  # fmt: skip
    for _ in range(2):
        trainer.play([(problem, index) for problem in trainer.problems for index in range(2)], 0)
    assert workflow.temperature == 0.5
    assert [problem.reference for problem in task.problems("train")] == [
        {"context": f"row {i}", "list": [i]} for i in range(2)
    ]


def test_two_agents_of_one_name_are_two_runs():
    def agent_saying(word):
        async def agent(question, client):
            return word

        return agent

    ids = [
        Cell(from_openai(agent_saying(word), ["solver"], name="agent"), "sp").id
        for word in ("one", "one", "two", "three")
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3


def test_two_objects_of_one_class_or_file_are_two_runs(tmp_path):
    assert Cell(Reads(1), "ip").id != Cell(Reads(2), "ip").id
    assert Cell(Reads(1), "ip").id == Cell(Reads(1), "ip").id == Cell(Reads, "ip").id
    path = tmp_path / "mine.py"
    path.write_text(
        f"{inspect.getsource(Reads)}\n\none, two = Reads(1), Reads(2)\n".replace(
            "user(", "(lambda t: {'role': 'user', 'content': t})("
        ).replace("Answer(", "str(")
    )
    assert Cell(f"{path}:one", "ip").id != Cell(f"{path}:two", "ip").id


def test_a_structure_of_other_objects_is_refused_in_plain_words(tmp_path):
    (tmp_path / "flow.py").write_text(
        "from multirole import Structure\n\nclass Flow:\n    name, roles = 'flow', {'solver': 1}\n"
        "    structure = Structure(edges=(('question', 'solver'),))\n\n    async def run(self, problem, call):\n        pass\n"
    )
    with pytest.raises(ValueError, match="flow.py:Flow' cannot be used: .*must be made of `multirole.Edge`, got"):
        Cell(f"{tmp_path}/flow.py:Flow", "sp")


def test_a_workflow_with_tools_is_tried_without_a_tokenizer():
    """Its tools are checked, and no reply calls one."""

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: the first.
            b: the second.
        """
        raise AssertionError

    class Asks:
        name, roles = "asks", {"solver": 1}

        def __init__(self, tool):
            self.tool = tool

        async def run(self, problem, call):
            return Answer((await call("solver", problem.messages, tools=[self.tool])).text)

    dry_run(Asks(add), Problem("p7", "sums", "1+1?", None))
    with pytest.raises(ValueError, match="neither a function with a name nor a description"):
        dry_run(Asks(lambda a: a), Problem("p7", "sums", "1+1?", None))
