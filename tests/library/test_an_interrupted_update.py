"""After an error or Ctrl-C within the loss, `train` can be called again, as in a notebook."""

import pytest
from scripted_engine import ScriptedEngine
from trainers import episodes_of

from multirole.callbacks import MultiRoleCallback
from multirole.workflows import Single, Voting


def test_the_attributes_that_trls_loss_reads_are_restored(make_library_trainer, monkeypatch):
    """With `use_vllm` left on, TRL's next rollout fails: it looks for a vLLM that was never started."""
    trainer = make_library_trainer(Voting(), beta=0.1, old_logprobs="recomputed")
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    trainer._metrics["train"]["reward"].append(1.0)
    seen = {}

    def interrupted(model, inputs):
        seen.update(beta=trainer.beta, use_vllm=trainer.use_vllm)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "_compute_loss", interrupted)
        trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
    assert seen == {"beta": 0.1, "use_vllm": True}
    assert (trainer.beta, trainer.use_vllm, trainer.underway.micro_batch) == (0.0, False, None)
    assert trainer._metrics["train"] == {"reward": [1.0]}
    step, _ = trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 1e-3)
    assert step.grad_norm > 0


SIZES = {"n_prompts": 4, "generation_batch_size": 8, "num_generations": 4, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip


def test_the_log_of_the_next_run_has_its_own_iterations_only(make_library_trainer, tokenizer):
    """The first run is interrupted after the loss of its iteration. Its rewards are 10 larger, and its log-probs far from the engine's."""

    class Interrupts(MultiRoleCallback):
        def on_adapter_step(self, trainer, step):
            if is_interrupted:
                raise KeyboardInterrupt

    def reward(completions, episodes, log_metric, **_):
        log_metric("size", 10.0 * is_interrupted)
        return [10.0 * is_interrupted + episode.index % 2 for episode in episodes]

    def run(trainer):
        trainer.train()
        log = next(row for row in trainer.state.log_history if "generator/importance_weight" in row)
        return {name: log[name] for name in ("reward", "size", "clip_ratio/region_mean", "generator/sampler_gap")}

    def trainer():
        engine = ScriptedEngine(lambda key, request: ([5, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
        return make_library_trainer(
            Single(), engine, reward, callbacks=[Interrupts()], max_steps=1, old_logprobs="recomputed", learning_rate=0.0, **SIZES
        )  # fmt: skip

    is_interrupted, interrupted = True, trainer()
    with pytest.raises(KeyboardInterrupt):
        interrupted.train()
    assert interrupted.update_metrics.loss.values and interrupted.update_metrics.weights.sums
    interrupted.update_metrics.loss.values = [
        (name, weight, 1.0) for name, weight, _ in interrupted.update_metrics.loss.values
    ]
    interrupted.update_metrics.weights.sums["generator"][3] += 1.0
    is_interrupted = False
    assert run(interrupted) == run(trainer())


def test_an_evaluation_after_an_interrupted_rollout_has_the_present_weights(make_library_trainer, tokenizer):
    """They may have been changed by hand, which no version says."""

    def reward(completions, **_):
        if is_interrupted:
            raise KeyboardInterrupt
        return [0.0] * len(completions)

    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    is_interrupted, trainer = True, make_library_trainer(Single(), engine, reward, max_steps=1, **SIZES)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    is_interrupted = False
    trainer.evaluate(trainer.train_dataset)
    assert engine.versions == [0, 0, None]
