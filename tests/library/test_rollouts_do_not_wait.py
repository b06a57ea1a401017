"""`max_staleness`: iteration n is trained on version max(first, n - k), while later episodes are played; nothing is lost or repeated."""

import threading
import time
from collections import Counter

import pytest
import torch
from scripted_engine import ScriptedEngine
from test_importance_weights_equal_trl import trls_weights

from multirole.callbacks import MultiRoleCallback
from multirole.engines.generate import GenerateEngine
from multirole.engines.protocol import EngineError, Sampling
from multirole.options import MultiRoleGRPOConfig
from multirole.rollout import play_ahead as ahead
from multirole.rollout.errors import RolloutStopped, WorkflowError
from multirole.rollout.play_ahead import copy_with_shared_base, staleness_metrics
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Problem, user
from multirole.workflows import Voting
from multirole_cpu.engine import TransformersEngine

N_ITERATIONS = 5


class Watch(MultiRoleCallback):
    """Notes (problem, episode) and the versions of each iteration's turns, and lets a test act on events."""

    def __init__(self, **actions):
        self.episodes, self.versions, self.logs, self.actions = {}, {}, [], actions
        self.evaluated, self.counts = {}, []

    def on_iteration_end(self, trainer, iteration):
        turns = [turn for episode in iteration.episodes for turn in episode.turns]
        lengths = sum(len(turn.completion_ids) for turn in turns), sum(len(turn.prompt_ids) for turn in turns)
        self.counts.append(((iteration.sampled_tokens, iteration.read_tokens), lengths))

    def on_rollout_end(self, trainer, episodes):
        step = trainer.state.global_step
        self.episodes[step] = [(e.problem.id, e.index) for e in episodes]
        self.versions[step] = {turn.version for e in episodes for turn in e.turns}

    def on_update_begin(self, trainer, rows, steps):
        self.actions.get("on_update_begin", lambda *_: None)(trainer, rows)

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        self.actions.get("on_micro_batch", lambda *_: None)(trainer, rows, batch)

    def on_step_end(self, args, state, control, **_):
        self.actions.get("on_step_end", lambda *_: None)(state, control)

    def on_episodes_evaluated(self, trainer, episodes, metrics, prefix):
        self.evaluated[trainer.state.global_step] = {turn.version for e in episodes for turn in e.turns}

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(logs)


def uneven(completions, **_):
    """Rewards that differ within groups."""
    return [float(sum(map(ord, text)) % 3) for text in completions]


@pytest.fixture
def make(make_library_trainer):
    def make(max_staleness, watch=None, engine=None, workflow=None, folder=None, **config):
        usual = {
            "generation_batch_size": 4, "num_generations": 2, "max_completion_length": 8, "max_steps": N_ITERATIONS, "logging_steps": 1,
            "learning_rate": 1e-2, "n_prompts": 7, "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        return make_library_trainer(
            workflow or Voting(), engine, uneven, max_staleness=max_staleness, callbacks=[watch or Watch()],
            **usual | config,
        )  # fmt: skip

    return make


class Slowed(TransformersEngine):
    """An engine that takes longer than the update."""

    def step(self):
        time.sleep(0.02)
        return super().step()


def weights_of(trainer):
    return [p.detach().clone() for p in trainer.peft_model.parameters() if p.requires_grad]


def trained(make, max_staleness, engine=None, **config):
    watch = Watch()
    trainer = make(max_staleness, watch, engine, **config)
    trainer.train()
    return weights_of(trainer), watch


@pytest.fixture(scope="module")
def plain():
    """plain(make, max_staleness) -> what `trained` returns, of one run."""
    runs = {}

    def get(make, max_staleness):
        if max_staleness not in runs:
            runs[max_staleness] = trained(make, max_staleness)
        return runs[max_staleness]

    return get


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def eos_of(make):
    return make(0).eos_token_ids


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_iteration_has_one_version_and_it_is_logged(make, plain, max_staleness):
    _, watch = plain(make, max_staleness)
    expected = [max(0, n - max_staleness) for n in range(N_ITERATIONS)]
    assert watch.versions == {n: {version} for n, version in enumerate(expected)}
    assert len(watch.counts) == N_ITERATIONS and all(counted == lengths for counted, lengths in watch.counts)
    logged = [(log["staleness/mean"], log["staleness/max"]) for log in watch.logs if "staleness/mean" in log]
    assert logged == [(n - v, n - v) for n, v in enumerate(expected)] * bool(max_staleness)


def test_a_slow_engine_gives_the_same_run(make, plain):
    weights, watch = plain(make, 1)
    slow_weights, slow = trained(make, 1, Slowed(*eos_of(make), max_length=2056))
    assert equal(weights, slow_weights) and watch.episodes == slow.episodes and watch.versions == slow.versions
    assert not equal(weights, plain(make, 0)[0])


def test_two_versions_behind_repeats(make, plain):
    assert equal(plain(make, 2)[0], trained(make, 2)[0])


def test_episodes_are_played_during_the_update(make):
    """The second iteration's replies wait for the first iteration's update, which goes on when they have come."""
    updating, replied = threading.Event(), threading.Event()

    class Meeting(TransformersEngine):
        n_published = 0

        def publish(self, model, version):
            self.n_published += 1
            super().publish(model, version)

        def step(self):
            finished = super().step()
            if self.is_second and not replied.is_set():
                assert updating.wait(60)
                replied.set()
            return finished

    def on_update_begin(trainer, rows):
        if trainer.state.global_step == 0:
            updating.set()
            assert replied.wait(60)

    engine = Meeting(*eos_of(make), max_length=2056)
    watch = Watch(on_update_begin=on_update_begin)
    trainer = make(1, watch, engine, max_steps=2)
    Meeting.is_second = property(lambda self: trainer.rollout.n_played == 1)
    play, trainer.rollout.n_played = trainer.rollout.run, -1

    def run(*args):
        trainer.rollout.n_played += 1
        return play(*args)

    trainer.rollout.run = run
    trainer.train()
    assert replied.is_set() and watch.versions == {0: {0}, 1: {0}}


def test_importance_weights_of_stale_rows_are_trls(make):
    """pi_old belongs to the weights at the start of the update; the sampler's weights are one version older."""
    old, seen = {}, {}

    def on_update_begin(trainer, rows):
        for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
            old[id(row)] = logps

    def on_micro_batch(trainer, rows, batch):
        for i, row in enumerate(rows):
            n = len(row.turn.completion_ids)
            torch.testing.assert_close(batch["old_per_token_logps"][i, :n], old[id(row)], atol=2e-5, rtol=0)
            assert batch["sampling_per_token_logps"][i, :n].tolist() == pytest.approx(row.turn.logprobs)
        expected = trls_weights(
            batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"], "sequence_mask", None, 3.0
        )  # fmt: skip
        torch.testing.assert_close(
            batch["importance_sampling_ratio"], expected, atol=1e-3, rtol=0
        )  # our log-probs have no rounding error
        seen.setdefault(trainer.state.global_step, []).append(batch["importance_sampling_ratio"].flatten())

    watch = Watch(on_update_begin=on_update_begin, on_micro_batch=on_micro_batch)
    make(
        1, watch, old_logprobs="recomputed", vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0,
    ).train()  # fmt: skip
    assert (torch.cat(seen[0]) == 1).all()
    for n in range(1, N_ITERATIONS):
        assert ((torch.cat(seen[n]) - 1).abs() > 1e-3).any(), n


def test_the_ratio_of_stale_rows_starts_from_the_sampler(make):
    ratios = {}

    def on_micro_batch(trainer, rows, batch):
        assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
        assert "importance_sampling_ratio" not in batch
        if trainer.state.global_step not in ratios:  # the first micro-batch of an iteration, before any step
            current = torch.nn.utils.rnn.pad_sequence(trainer.logprobs_of(rows), True)
            gap = (current - batch["old_per_token_logps"]) * batch["completion_mask"]
            ratios[trainer.state.global_step] = gap.abs().max().item()

    make(1, Watch(on_micro_batch=on_micro_batch)).train()
    assert ratios[0] < 1e-4 and all(ratios[n] > 1e-3 for n in range(1, N_ITERATIONS))


@pytest.mark.parametrize("max_staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_and_resumed_equals_an_unbroken_one(make, plain, max_staleness):
    """The episodes in flight are played again, with the adapters that played them."""

    class Killed(BaseException):
        pass

    def kill(state, control):
        if state.global_step == 3:
            raise Killed

    saves = {"save_strategy": "steps", "save_steps": 2}
    weights, whole = plain(make, max_staleness)
    first = Watch(on_step_end=kill)
    trainer = make(max_staleness, first, **saves)
    with pytest.raises(Killed):
        trainer.train()
    assert not trainer.engine.waiting and not trainer.engine.n_running
    rest = Watch()
    resumed = make(max_staleness, rest, **saves)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert rest.versions == {n: {max(0, n - max_staleness)} for n in (2, 3, 4)}
    assert {n: first.episodes[n] for n in (0, 1)} | rest.episodes == whole.episodes
    assert Counter(one for n in whole.episodes.values() for one in n).total() == 4 * N_ITERATIONS
    assert equal(weights, weights_of(resumed))


def test_a_resumed_run_trains_no_row_that_its_own_max_staleness_forbids(make):
    def stop(state, control):
        control.should_training_stop = state.global_step == 3

    stopped = make(2, Watch(on_step_end=stop), save_strategy="steps", save_steps=3)
    stopped.train()
    for max_staleness, versions in ((1, [3, 3]), (3, [1, 2])):
        rest = Watch()
        make(max_staleness, rest).train(resume_from_checkpoint=f"{stopped.args.output_dir}/checkpoint-3")
        assert rest.versions == {3: {versions[0]}, 4: {versions[1]}}, max_staleness


def test_evaluations_use_the_current_weights(make):
    def evaluate(state, control):
        if state.global_step % 2 == 0:
            trainer.evaluate(trainer.train_dataset.select_columns(["prompt", "task"]).select(range(2)))

    watch = Watch(on_step_end=evaluate)
    trainer = make(2, watch)
    trainer.train()
    assert watch.evaluated == {2: {2}, 4: {4}}
    assert watch.versions == {n: {max(0, n - 2)} for n in range(N_ITERATIONS)}


def test_an_evaluation_waits_for_the_rollouts_ahead(make):
    """Otherwise the evaluation's adapters would be published while the next iteration is sampled."""

    def evaluate(state, control):
        if state.global_step == 1:
            assert trainer.player.ahead.pending
            trainer.evaluate(trainer.train_dataset.select_columns(["prompt", "task"]).select(range(2)))

    watch = Watch(on_step_end=evaluate)
    trainer = make(2, watch, Slowed(*eos_of(make), max_length=2056), max_steps=3, max_completion_length=5)
    trainer.train()
    assert watch.evaluated == {1: {1}} and watch.versions == {0: {0}, 1: {0}, 2: {0}}


def test_a_stopped_run_leaves_the_engine_idle(make):
    """Episodes that will not be trained are dropped, and an evaluation can follow."""

    def stop(state, control):
        control.should_training_stop = state.global_step == 2

    watch = Watch(on_step_end=stop)
    trainer = make(2, watch, Slowed(*eos_of(make), max_length=2056))
    trainer.train()
    assert list(watch.episodes) == [0, 1] and not trainer.engine.waiting and not trainer.engine.n_running
    trainer.evaluate(trainer.train_dataset.select_columns(["prompt", "task"]).select(range(2)))
    assert watch.evaluated == {2: {2}}


def test_after_ctrl_c_twice_training_can_start_again(make, monkeypatch):
    """The second one comes while the engine finishes its requests. The dropped episodes are not taken for those of the next run."""

    def interrupt(state, control):
        if state.global_step == 1 and is_impatient:
            raise KeyboardInterrupt

    def interrupted(futures):
        waited(futures)
        raise KeyboardInterrupt

    is_impatient, waited, watch = True, ahead.wait, Watch(on_step_end=interrupt)
    trainer = make(2, watch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ahead, "wait", interrupted)
        trainer.train()
    is_impatient = False
    watch.episodes.clear()
    trainer.train()
    assert list(watch.episodes) == list(range(N_ITERATIONS))


class FailsLater:
    """Raises on one problem after its first call."""

    name, roles = "fails_later", {"solver": 1}

    def __init__(self, problem):
        self.problem = problem

    async def run(self, problem, call):
        turn = await call("solver", [user(problem.question)])
        if problem.id == self.problem:
            raise KeyError("no such thing")
        return Answer(turn.text)


def test_a_workflow_that_fails_in_the_background_ends_the_run(make):
    _, whole = trained(make, 0, workflow=FailsLater(None))
    problem = whole.episodes[3][0][0]
    n_before = min(n for n in whole.episodes if problem in {name for name, _ in whole.episodes[n]})
    watch = Watch()
    trainer = make(1, watch, workflow=FailsLater(problem))
    with pytest.raises(WorkflowError, match=f"failed on problem '{problem}': KeyError") as error:
        trainer.train()
    assert "raise KeyError" in str(error.value) and list(watch.episodes) == list(range(n_before))
    assert not trainer.player.ahead.pending


class FailsInItsSecondRollout(TransformersEngine):
    n_added, n_late = 0, 0

    def add(self, key, request):
        self.n_late += self.n_added > 16
        self.n_added += 1
        super().add(key, request)

    def step(self):
        if self.n_added > 16:  # the calls of an iteration
            raise EngineError("The cable is cut.")
        return super().step()


def test_a_failed_engine_gets_no_further_requests(make):
    """Each further rollout would wait for a lost server again. The error is raised in its iteration, without our stack frames."""
    engine, watch = FailsInItsSecondRollout(*eos_of(make), max_length=2056), Watch()
    trainer = make(2, watch, engine)
    with pytest.raises(EngineError, match="The cable is cut") as error:
        trainer.train()
    assert list(watch.episodes) == [0] and not trainer.player.ahead.pending
    assert engine.n_added - engine.n_late == 17 and engine.n_late < 12  # the other calls of that rollout's first stage
    assert len(error.traceback) == 2


def test_the_copy_shares_the_base_and_no_adapter(make):
    trainer = make(1)
    for model in (trainer.player.ahead.copy, copy_with_shared_base(trainer.peft_model)):
        for (name, ours), (same_name, theirs) in zip(
            trainer.peft_model.named_parameters(), model.named_parameters(), strict=True
        ):
            assert name == same_name and torch.equal(ours, theirs)
            assert (ours.data_ptr() == theirs.data_ptr()) == ("lora_" not in name)


def test_engines_that_share_the_trainers_weights_are_refused(make):
    for engine in ("generate", "vllm"):
        with pytest.raises(ValueError, match="shares weights or memory with the trainer.*engine='transformers'"):
            make(
                1,
                engine=GenerateEngine(0, pad_id=0, max_length=8) if engine == "generate" else None,
                **({} if engine == "generate" else {"use_vllm": True}),
            )


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_staleness` must be 0 or more, got -1"):
        MultiRoleGRPOConfig(str(tmp_path), max_staleness=-1)
    with pytest.raises(ValueError, match="needs a correction for older rows"):
        MultiRoleGRPOConfig(
            str(tmp_path), max_staleness=1, old_logprobs="recomputed", vllm_importance_sampling_correction=False
        )


class TwoCalls:
    """Like an agent with a client of its own, so that its rollouts share an event loop."""

    name, roles, waits_outside = "two_calls", {"solver": 2}, True

    async def run(self, problem, call):
        first = await call("solver", [user(problem.question)], slot=0)
        return Answer(first.text + (await call("solver", [user("again")], slot=1)).text)


def test_a_stopped_rollout_leaves_nothing_behind(tokenizer):
    """It is stopped while the first replies are sampled. The engine finishes them, no second call is made, and the next rollout is complete."""
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 3), tokenizer.eos_token_id)
    rollout = Rollout(TwoCalls(), engine, tokenizer, {"solver": "a"}, bool, 0, max_prompt_tokens=100)
    attempts = [(Problem(str(i), "", f"question {i}", None), 0) for i in range(4)]
    rollout.is_stopped = lambda: engine.steps == 2
    with pytest.raises(RolloutStopped):
        rollout.run(attempts, 0, Sampling(10, 1.0))
    assert not engine.running and len(engine.requests) == 4
    rollout.is_stopped = lambda: False
    rollout.on_episode_end = lambda episode: 1 / 0
    with pytest.raises(ZeroDivisionError):  # while others wait for their second call
        rollout.run([(problem, 0) for problem, _ in attempts[:2]], 1, Sampling(10, 1.0))
    assert not engine.running
    del engine.requests[4:]
    rollout.on_episode_end = lambda episode: None
    episodes = rollout.run(attempts, 1, Sampling(10, 1.0))
    assert [len(episode.turns) for episode in episodes] == [2] * 4 and len(engine.requests) == 12


def test_an_iteration_without_rows_has_no_staleness():
    assert staleness_metrics([], 3) == {}
