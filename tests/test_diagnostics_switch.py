"""`diagnostics=False` changes no weight bit; what it cannot know is NaN, and the rest is the same number."""

import math

import pytest
import torch
from conftest import make_episodes
from safetensors.torch import load_file

from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.signatures import SIGNATURES
from multirole.experiment.cell import Cell
from multirole.experiment.run import run_cell
from multirole.inspector.report import load, plot_roles

UNKNOWN = {*SIGNATURES, "grad_norm", "chi2_after", "grad_share", "coherence", "amplification", "cosine_previous"}


def trained(make_trainer, is_on: bool, **fields):
    """A trainer after two iterations of several optimizer steps on canned episodes, and the last one's diagnostics."""
    options = {"n_problems": 2, "warmup_iterations": 0, "learning_rate": 1e-2, "micro_batch_tokens": 200}
    cell = Cell(**{"workflow": "voting"} | options | fields, diagnostics=is_on)
    trainer = make_trainer(cell)
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    for seed in range(2):
        rows = trainer.prepare(trainer.model, make_episodes(cell, n_problems=4, seed=seed))
        diagnostics, loss = trainer.update(trainer.model, rows)
        trainer.state.global_step += 1
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert (after != before).sum() > 1000
    return trainer, diagnostics, after, loss


@pytest.mark.parametrize(
    "fields",
    [{"policy": "sp"}, {"policy": "ip"}, {"policy": "sp", "temperature": 0.7, "old_logprobs": "recomputed"}],
    ids=["sp", "ip", "sp at 0.7"],
)
def test_off_leaves_every_bit_of_the_weights(make_trainer, fields):
    _, on, weights, loss = trained(make_trainer, True, **fields)
    trainer, off, others, other_loss = trained(make_trainer, False, **fields)
    assert weights.equal(others) and loss.equal(other_loss)
    assert len(on.ledger) == len(off.ledger) >= 5 and on.ledger == off.ledger
    unknown = UNKNOWN | ({"chi2_raw"} if trainer.cell.temperature != 1.0 else set())
    known, found = on.per_role(), off.per_role()
    for role, metrics in found.items():
        assert metrics.keys() == known[role].keys()
        assert {name for name, value in metrics.items() if math.isnan(value)} == unknown
        assert all(metrics[name] == known[role][name] for name in metrics.keys() - unknown)
    assert off.cosines() == [] and all(math.isnan(step["grad_norm"]) for step in off.steps())
    alarms = Alarms(trainer.cell.policy, trainer.workflow.roles)
    alarms.update(1, found)
    silent = alarms.not_evaluated()
    assert "length_inflation" in silent and "gradient_amplification" not in silent


def test_off_measures_nothing_apart(make_trainer, monkeypatch):
    """No pass over sampled rows, no copy of the weights, one gradient instead of one per role and slot."""
    cell = Cell("voting", "sp", n_problems=2, temperature=0.7, diagnostics=False)
    trainer = make_trainer(cell)
    for owner, name in ((trainer, "_logprobs_of"), (trainer.updates, "_compare")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("measured although switched off"))
    monkeypatch.setattr("multirole.diagnostics.metrics.signatures", lambda *_: pytest.fail("texts were read"))
    diagnostics, _ = trainer.update(trainer.model, trainer.prepare(trainer.model, make_episodes(cell)))
    diagnostics.per_role()
    assert not diagnostics.gradients and not trainer.updates.before


def test_a_whole_run_without_diagnostics_ends_with_the_same_adapters(tmp_path):
    fields = {"workflow": "voting", "policy": "ip", "iterations": 2, "n_problems": 2, "n_episodes": 4, "n_validation": 4,
              "warmup_iterations": 1, "learning_rate": 5e-3, "eval_every": 2}  # fmt: skip
    on, off = (run_cell(Cell(**fields, diagnostics=is_on), tmp_path) for is_on in (True, False))
    names = sorted(path.relative_to(on) for path in on.glob("adapters/step_00002/*/*.safetensors"))
    assert len(names) == 2 and off.name == f"{on.name}-diagnostics-False"
    for name in names:
        mine, theirs = load_file(on / name), load_file(off / name)
        assert all(mine[key].equal(theirs[key]) for key in mine) and mine.keys() == theirs.keys()
    assert load(on, "eval").equals(load(off, "eval"))
    roles = load(off, "roles")
    assert roles[sorted(UNKNOWN)].isna().all(axis=None) and list(roles) == list(load(on, "roles"))
    plot_roles(off)


def test_anything_but_a_bool_is_refused():
    with pytest.raises(ValueError, match="diagnostics='no' is neither True nor False"):
        Cell("voting", "sp", diagnostics="no")
