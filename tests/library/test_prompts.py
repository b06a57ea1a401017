"""The paper's prompts and turn structure: the prompt of each role, and the messages of each model call."""

import asyncio
from importlib.resources import files
from itertools import pairwise
from string import Template

import pytest
from datasets import Dataset
from peft import LoraConfig

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.types import Problem, Turn
from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting
from multirole.workflows.prompts import read_again, render

TASKS = ("math", "code")
FIELDS = {
    "generator": {"question"}, "evaluator": set(), "refine": set(), "aggregator": {"question", "candidates"},
    "orchestrator": {"question"}, "worker": {"question", "strategy"}, "synthesizer": {"question", "candidates"},
}  # fmt: skip
ANSWER = {"math": "\\boxed{}", "code": "```python"}
TOKENS = {
    "evaluator": ["\\boxed{Correct}", "\\boxed{Incorrect}"],
    "aggregator": ["\\boxed{N}"],
    "orchestrator": ["at most 3", "Do NOT solve", "STRATEGY 1:", "STRATEGY 2:"],
    "worker": ["COMPLETE", "Assigned strategy:"],
}


def template(task: str, role: str) -> str:
    return files("multirole.workflows.prompts").joinpath(task, f"{role}.md").read_text(encoding="utf-8")


class Script:
    """A scripted `call`: gives each role its replies in order, and keeps a copy of the messages of every call."""

    def __init__(self, **replies: list[str]) -> None:
        self.replies, self.calls = {role: list(texts) for role, texts in replies.items()}, []

    async def __call__(self, role: str, messages: list[dict], slot: int = 0, round: int = 0) -> Turn:
        self.calls.append((role, slot, round, [dict(message) for message in messages]))
        return Turn(role, slot, round, [], [], [], self.replies[role].pop(0), "stop")

    def of(self, role: str) -> list[list[dict]]:
        return [messages for name, _, _, messages in self.calls if name == role]


def play(workflow, task: str, **replies: list[str]):
    problem = Problem(f"{task}/1", task, "How much is $6 \\times 7$? {braces} and $question", "REFERENCE-42")
    script = Script(**replies)
    return asyncio.run(workflow.run(problem, script)), script, problem


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("role", FIELDS)
def test_every_template_has_its_fields_and_its_format(task, role):
    text = template(task, role)
    assert set(Template(text).get_identifiers()) == FIELDS[role] and Template(text).is_valid()
    expected = TOKENS.get(role, []) + (
        [ANSWER[task]] if role not in ("evaluator", "aggregator", "orchestrator") else []
    )
    assert [token for token in expected if token not in text] == []
    if role == "aggregator":
        assert text.rstrip("\n").endswith("Your selection:")
    if role in ("evaluator", "aggregator", "orchestrator"):
        assert ANSWER[task] not in text  # these roles do not answer the problem
    if task == "code":
        assert "\\boxed{}" not in text


@pytest.mark.parametrize("task", TASKS)
def test_single_asks_the_generator_once(task):
    answer, script, problem = play(Single(), task, generator=["an answer"])
    assert answer.text == "an answer"
    ((message,),) = script.of("generator")
    assert message["role"] == "user" and problem.question in message["content"]


@pytest.mark.parametrize(("task", "rounds"), [("math", 3), ("code", 2)])
def test_eval_opt_shares_one_conversation_without_its_critique_prompts(task, rounds):
    drafts, verdicts = [f"draft {i}" for i in range(rounds)], [f"no {i} \\boxed{{Incorrect}}" for i in range(rounds)]
    workflow = EvalOpt(rounds)
    answer, script, problem = play(workflow, task, generator=drafts, evaluator=verdicts)
    assert answer.text == drafts[-1]
    assert [(role, round) for role, _, round, _ in script.calls] == [
        turn for round in range(rounds) for turn in (("generator", round), ("evaluator", round))
    ]
    spoken = [text for pair in zip(drafts, verdicts, strict=True) for text in pair]
    critique, refine = template(task, "evaluator").rstrip("\n"), template(task, "refine").rstrip("\n")
    for n_spoken, (role, _, _, messages) in enumerate(script.calls):
        first, *history = messages
        assert first["role"] == "user" and problem.question in first["content"]
        if n_spoken:  # every call but the first: consecutive assistant turns between two user turns
            *history, last = history
            assert last == {"role": "user", "content": critique if role == "evaluator" else refine}
        assert history == [{"role": "assistant", "content": text} for text in spoken[:n_spoken]]


@pytest.mark.parametrize("task", TASKS)
def test_eval_opt_stops_at_the_first_correct_verdict(task):
    answer, script, _ = play(EvalOpt(3), task, generator=["a", "b"], evaluator=["hm, unsure", "\\boxed{CORRECT}"])
    assert answer.text == "b" and len(script.calls) == 4


@pytest.mark.parametrize("task", TASKS)
def test_voting_asks_three_times_the_same_and_shows_every_candidate_in_full(task):
    texts = ["first\n\n```python\nx = 1\n```", "second \\boxed{7}", "third " + "long " * 2000]
    answer, script, problem = play(Voting(3), task, generator=texts, aggregator=["analysis\n\\boxed{2}"])
    assert answer.text == texts[1]
    asked = script.of("generator")
    assert len(asked) == 3 and all(one == other for one, other in pairwise(asked))
    assert [slot for role, slot, _, _ in script.calls if role == "generator"] == [0, 1, 2]
    ((message,),) = script.of("aggregator")
    assert problem.question in message["content"]
    for i, text in enumerate(texts, start=1):
        assert f"\n--- Solution {i} ---\n{text}" in message["content"]
    assert message["content"].endswith("Your selection:")


@pytest.mark.parametrize("task", TASKS)
def test_orch_workers_follow_at_most_three_strategies_and_the_synthesizer_answers(task):
    plan = "\n".join(f"STRATEGY {i}: way {i}" for i in (1, 2, 3, 4))
    answer, script, problem = play(
        OrchWorkers(3), task, orchestrator=[plan], worker=["one", "two", "three"], synthesizer=["the final answer"]
    )
    assert answer.text == "the final answer"
    assert len(script.of("worker")) == 3
    for i, (message,) in enumerate(script.of("worker"), start=1):
        assert problem.question in message["content"] and f"Assigned strategy:\nway {i}\n" in message["content"]
    ((message,),) = script.of("synthesizer")
    for i, text in enumerate(("one", "two", "three"), start=1):
        assert f"--- Solution {i} (Strategy: way {i}) ---\n{text}\n" in message["content"]
    assert "way 4" not in message["content"]


@pytest.mark.parametrize("task", TASKS)
def test_one_strategy_makes_one_worker(task):
    _, script, _ = play(OrchWorkers(3), task, orchestrator=["STRATEGY 1: only"], worker=["w"], synthesizer=["s"])
    assert len(script.of("worker")) == 1


@pytest.mark.parametrize("task", TASKS)
def test_no_role_sees_the_reference_and_every_conversation_ends_with_a_user_turn(task):
    runs = [
        play(Single(), task, generator=["g"]),
        play(EvalOpt(2), task, generator=["g", "g"], evaluator=["?", "?"]),
        play(Voting(3), task, generator=["g"] * 3, aggregator=["?"]),
        play(OrchWorkers(3), task, orchestrator=["STRATEGY 1: x"], worker=["w"], synthesizer=["s"]),
    ]
    for _, script, problem in runs:
        for _, _, _, messages in script.calls:
            assert messages[0]["role"] == messages[-1]["role"] == "user"
            assert problem.reference not in "".join(message["content"] for message in messages)


def test_a_template_of_ones_own_is_read_again_and_a_dollar_is_written_twice(tmp_path):
    """A notebook edits its templates between two runs; a workflow reads them when it is made."""
    path = tmp_path / "generator.md"
    for text, message in (
        (
            "It costs $5: $question",
            r"has a `\$` that names no field. Its fields are \['question'\]; write `\$\$` for a dollar sign",
        ),
        ("$x$: $question", r"generator.md of .* uses \$x. Its fields"),
    ):
        path.write_text(text)
        read_again(str(tmp_path))
        with pytest.raises(ValueError, match=message):
            render(str(tmp_path), "generator", question="1+1")
    path.write_text("It costs $$5: $question")
    read_again(str(tmp_path))
    assert render(str(tmp_path), "generator", question="1+1") == "It costs $5: 1+1"
    with pytest.raises(ValueError, match='the column "task" of a dataset, must name a folder'):
        render("summarization", "generator", question="1+1")


def test_a_set_without_a_template_that_the_workflow_reads_is_refused_when_it_is_made(tmp_path):
    """Eval-Opt also reads refine.md, which no role is named after, and only after a draft that is judged wrong."""
    for role in ("generator", "evaluator"):
        (tmp_path / f"{role}.md").write_text("Go on.")
    with pytest.raises(
        ValueError, match="no prompt template refine.md in .* one <role>.md per role, and refine.md for Eval-Opt"
    ):
        EvalOpt(prompts=str(tmp_path))
    Single(prompts=str(tmp_path))


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_column_task_that_names_no_set_is_refused_before_a_model_is_loaded(tmp_path, name):
    """Many datasets have such a column. A workflow with `prompts`, and one of the user's, do not read it."""
    rows = Dataset.from_list([{"prompt": "1+1", "task": "math"}, {"prompt": "2+2", "task": "gsm8k"}])
    sets = {"train_dataset": rows.select([0])} | {name: rows}

    def train(workflow):
        args = MultiRoleGRPOConfig(str(tmp_path), report_to="none", bf16=False)
        MultiRoleGRPOTrainer("no/model", workflow, lambda **_: [], args, **sets, peft_config=LoraConfig())

    with pytest.raises(
        ValueError, match="There is no prompt template generator.md in 'gsm8k'.*rename it, or pass prompts='general'"
    ):
        train(Voting())
    with pytest.raises(OSError):  # of the model
        train(Voting(prompts="general"))


def test_a_set_may_be_inside_an_installed_package(tmp_path, monkeypatch):
    folder = tmp_path / "some_templates" / "sets" / "short"
    folder.mkdir(parents=True)
    (tmp_path / "some_templates" / "__init__.py").touch()
    (folder / "generator.md").write_text("Solve $question.\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    _, script, _ = play(Single(prompts="some_templates:sets/short"), "math", generator=["42"])
    assert script.of("generator")[0][-1]["content"].startswith("Solve How much is $6")
    for missing in ("some_templates:sets/long", "no_such_package:sets", "some_templates"):
        with pytest.raises(ValueError, match="There is no prompt template generator.md in"):
            render(missing, "generator", question="")
