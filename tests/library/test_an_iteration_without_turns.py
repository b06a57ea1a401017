"""An iteration in which no episode has a turn trains nothing and is recorded; everything else goes on as if (rllm-org/rllm#280)."""

import logging

import pytest
import torch
from trainers import slow_but

from multirole import MultiRoleCallback, RoleDiagnostics, Single, Voting
from multirole.types import Answer, Reward, user

EMPTY = 1
"""The problem whose episodes have no turn. Problems come in their order, one an iteration, so it is that of iteration 2."""


class OneOverlong(Single):
    """The prompt of problem `EMPTY` is too long."""

    async def run(self, problem, call):
        return Answer(
            (await call("generator", [user(problem.question * (200 if problem.id == str(EMPTY) else 1))])).text
        )


class OneFailing(Single):
    """The workflow raises on problem `EMPTY`."""

    async def run(self, problem, call):
        if problem.id == str(EMPTY):
            raise ConnectionError("the tool is down")
        return Answer((await call("generator", [user(problem.question)])).text)


class Silent(Single):
    """The workflow calls no role on the problems that it is told."""

    def __init__(self, *problems):
        super().__init__()
        self.problems = problems

    async def run(self, problem, call):
        return Answer("") if problem.id in self.problems else await super().run(problem, call)


class Seen(MultiRoleCallback):
    """The seeds' prompts and the rates of every iteration."""

    def __init__(self):
        self.iterations = []

    def on_iteration_end(self, trainer, iteration):
        problems = {episode.problem.id for episode in iteration.episodes}
        self.iterations.append((iteration.number, problems, len(iteration.rows), len(iteration.steps)))


def by_length(completions, **_):
    return [float(len(text) % 7) for text in completions]


def by_length_and_grade(completions, episodes, **_):
    for episode, reward in zip(episodes, by_length(completions), strict=True):
        episode.reward = Reward(reward, is_correct=reward > 3)
    return by_length(completions)


def one_problem(make_library_trainer, workflow, *callbacks, reward=by_length, **options):
    usual = {
        "generation_batch_size": 4, "num_generations": 4, "max_steps": 4, "max_completion_length": 8, "max_prompt_tokens": 100,
        "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_failed_episodes": 4,
    }  # fmt: skip
    return make_library_trainer(workflow, None, reward, 8, [*callbacks], **usual | options)


def weights(trainer):
    return [p.detach().clone() for name, p in trainer.peft_model.named_parameters() if "lora" in name]


@pytest.mark.parametrize("workflow", [OneOverlong, OneFailing, lambda: Silent(str(EMPTY))])
def test_the_run_goes_on(make_library_trainer, workflow, caplog):
    seen = Seen()
    trainer = one_problem(make_library_trainer, workflow(), RoleDiagnostics(), seen)
    before = weights(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert seen.iterations == [(1, {"0"}, 4, 1), (2, {"1"}, 0, 0), (3, {"2"}, 4, 1), (4, {"3"}, 4, 1)]
    logs = trainer.state.log_history[:4]
    assert [log["learning_rate"] for log in logs] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert ["generator/rows" in log for log in logs] == [True, False, True, True]
    assert (logs[1]["loss"], logs[1]["grad_norm"]) == (0, 0) and logs[1]["num_tokens"] == logs[0]["num_tokens"]
    assert "No episode of iteration 2 has a turn" in caplog.text and "did not call" not in caplog.text
    assert any(not torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "updates": "tokens", "step_tokens": 10, "mask_truncated_completions": True},
        {"old_logprobs": "recomputed", "num_iterations": 2, "beta": 0.1},
        {"max_staleness": 1},
        {"use_adaptive_entropy": True, "top_entropy_quantile": 0.5, "updates": "one"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_train_allows_it(make_library_trainer, options):
    seen = Seen()
    one_problem(make_library_trainer, OneOverlong(), RoleDiagnostics(), seen, **options).train()
    assert [iteration[2] for iteration in seen.iterations] == [4, 0, 4, 4] and seen.iterations[1][3] == 0


@pytest.mark.parametrize(
    "credit", slow_but(["branches"], ["branches", "shapley", "mean_over_turns", "critic", "permuted"])
)
def test_every_credit_allows_it(make_library_trainer, credit):
    seen = Seen()
    one_problem(
        make_library_trainer,
        OneOverlong(),
        seen,
        reward=by_length_and_grade,
        max_steps=2,
        credit=credit,
        credit_branches=2,
    ).train()
    assert seen.iterations[1] == (2, {"1"}, 0, 0)


def test_a_resume_at_such_an_iteration_ends_as_an_unbroken_run(make_library_trainer, tmp_path):
    unbroken = one_problem(make_library_trainer, OneOverlong(), save_strategy="steps", save_steps=1)
    unbroken.train()
    for step in (1, 2):
        resumed = one_problem(make_library_trainer, OneOverlong())
        resumed.train(resume_from_checkpoint=str(tmp_path / "library" / f"checkpoint-{step}"))
        assert all(torch.equal(*pair) for pair in zip(weights(unbroken), weights(resumed), strict=True))
        ours, theirs = ([log["reward"] for log in t.state.log_history if "reward" in log] for t in (resumed, unbroken))
        assert ours == theirs


def test_a_run_that_never_has_a_turn_ends(make_library_trainer):
    everything = Silent(*map(str, range(8)))
    with pytest.raises(ValueError, match="No episode of iteration 1 has a turn"):
        one_problem(make_library_trainer, everything).train()
    with pytest.raises(
        ValueError, match=r"of iteration 10 has a turn.* In 4 of 4 .*`max_prompt_tokens` \(1\): raise it"
    ):
        one_problem(make_library_trainer, Single(), max_prompt_tokens=1, max_steps=20).train()


class OnlyGenerators(Voting):
    """The workflow never calls the aggregator."""

    async def run(self, problem, call):
        return Answer((await call("generator", [user(problem.question)])).text)


def test_a_run_whose_trained_role_never_has_a_turn_ends(make_library_trainer):
    """Although a partner samples in it. Ten iterations are waited for: the role may be called on some replies only."""
    trainer = one_problem(make_library_trainer, OnlyGenerators(), policy="generator=frozen,aggregator=a", max_steps=20)
    with pytest.raises(
        ValueError, match=r"iteration 10 has a turn of a role that is trained.* Call such a role in .*`run`"
    ):
        trainer.train()


class SomeJudged(Voting):
    """The aggregator is called on the odd problems only."""

    async def run(self, problem, call):
        first = await call("generator", [user(problem.question)])
        return Answer((await call("aggregator", [user(first.text)])).text if int(problem.id) % 2 else first.text)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_trained_role_may_be_called_in_some_iterations_only(make_library_trainer, optim):
    """SGD without momentum keeps no state that would tell that a step was taken."""
    seen = Seen()
    one_problem(make_library_trainer, SomeJudged(), seen, policy="generator=frozen,aggregator=a", optim=optim).train()
    assert [(n_rows, n_steps) for _, _, n_rows, n_steps in seen.iterations] == [(0, 0), (4, 1), (0, 0), (4, 1)]


def test_an_evaluation_without_a_scored_episode_is_logged(make_library_trainer):
    trainer = one_problem(make_library_trainer, OneFailing(), max_failed_episodes=1)
    logged = trainer.evaluate(trainer.train_dataset.select([EMPTY]).add_column("id", [str(EMPTY)]))
    assert logged["eval_reward"] != logged["eval_reward"] and logged["eval_failed_episodes"] == 1
