"""After an error or Ctrl-C within the loss, `train` can be called again, as in a notebook."""

import pytest
from trainers import episodes_of

from multirole.workflows import Voting


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
    assert (trainer.beta, trainer.use_vllm, trainer._micro_batch) == (0.0, False, None)
    assert trainer._metrics["train"] == {"reward": [1.0]}
    step, _ = trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 1e-3)
    assert step.grad_norm > 0
