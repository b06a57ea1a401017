"""Diagnostics do not change the trained weights by a bit."""

import pytest
import torch
from cells import make_episodes
from trainers import diagnostics_of

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"policy": "ip"}, marks=pytest.mark.slow),
        {"policy": "sp", "temperature": 0.7, "old_logprobs": "recomputed"},
    ],
    ids=["ip", "sp at 0.7"],
)
def test_weights_and_loss_are_those_without_diagnostics(make_trainer, fields):
    options = {"n_problems": 2, "warmup_steps": 0, "learning_rate": 1e-2}
    cell, results = Cell(workflow="voting", **options, **fields), []
    for is_watched in (True, False):
        trainer = make_trainer(cell, launch=Launch(micro_batch_tokens=200))
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        if not is_watched:
            trainer.remove_callback(diagnostics_of(trainer))
        for seed in range(2):
            rows = trainer.prepare_rows(make_episodes(cell, n_problems=4, seed=seed))
            _, loss = trainer.update(trainer.model, rows)
            trainer.state.global_step += 1
        results.append((torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), loss))
    (weights, loss), (others, other_loss) = results
    assert weights.equal(others) and loss.equal(other_loss)
    assert (weights != before).sum() > 1000
