"""`diagnostics=False` changes no weight bit; what it cannot know is NaN, and the rest is the same number."""

import math

import pytest
import torch
from safetensors.torch import load_file
from trainers import SMALL_RUN, diagnostics_of, make_episodes, table

from multirole.diagnostics.signatures import SIGNATURES
from multirole.experiment.cell import Cell
from multirole.experiment.run import run_cell

UNKNOWN = {*SIGNATURES, "chi2_after"}
LENGTHS = {"length_mean", "truncated_rate"}
"""The trainer's own, which a whole run has all the same."""


def trained(make_trainer, is_on: bool, **fields):
    """A trainer after two iterations of several optimizer steps on canned episodes, the last one's metrics, all weights, loss."""
    options = {"n_problems": 2, "warmup_iterations": 0, "learning_rate": 1e-2, "micro_batch_tokens": 200}
    cell = Cell(**{"workflow": "voting"} | options | fields, diagnostics=is_on)
    trainer = make_trainer(cell)
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    for seed in range(2):
        rows = trainer.prepare_rows(make_episodes(cell, n_problems=4, seed=seed))
        _, loss = trainer.update(trainer.model, rows)
        trainer.state.global_step += 1
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert (after != before).sum() > 1000
    return trainer, diagnostics_of(trainer).per_role(rows), after, loss


@pytest.mark.parametrize(
    "fields",
    [{"policy": "ip"}, {"policy": "sp", "temperature": 0.7, "old_logprobs": "recomputed"}],
    ids=["ip", "sp at 0.7"],
)
def test_off_leaves_every_bit_of_the_weights(make_trainer, fields):
    one, known, weights, loss = trained(make_trainer, True, **fields)
    other, found, others, other_loss = trained(make_trainer, False, **fields)
    on, off = diagnostics_of(one), diagnostics_of(other)
    assert weights.equal(others) and loss.equal(other_loss)
    assert len(on.ledger) == len(off.ledger) >= 5 and on.ledger == off.ledger
    unknown = UNKNOWN | ({"chi2_raw"} if other.args.temperature != 1.0 else set())
    for role, metrics in found.items():
        assert metrics.keys() == known[role].keys()
        assert all(math.isnan(metrics[name]) for name in unknown)
        assert all(
            metrics[name] == pytest.approx(known[role][name], abs=0, nan_ok=True) for name in metrics.keys() - unknown
        )
    assert off.cosines() == on.cosines()


def test_off_measures_nothing_apart(make_trainer, monkeypatch):
    """No pass over sampled rows, no reading of texts."""
    cell = Cell("voting", "sp", n_problems=2, temperature=0.7, diagnostics=False)
    trainer = make_trainer(cell)
    diagnostics, rows = diagnostics_of(trainer), trainer.prepare_rows(make_episodes(cell))
    monkeypatch.setattr(trainer, "logprobs_of", lambda *_, **__: pytest.fail("measured although switched off"))
    monkeypatch.setattr("multirole.diagnostics.metrics.signatures", lambda *_: pytest.fail("texts were read"))
    trainer.update(trainer.model, rows)
    diagnostics.per_role(rows)


def test_a_trainer_without_callbacks_moves_the_weights_as_one_with_them(make_trainer, make_library_trainer):
    """The library alone, from TRL's arguments, against the cell with all of its diagnostics."""
    found = []
    cell = Cell("voting", "ip", n_problems=2, warmup_iterations=0, learning_rate=1e-2, lr_schedule="constant")
    for trainer in (
        make_trainer(cell),
        make_library_trainer(
            cell.make_workflow(), policy="ip", learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=1.0,
            weight_decay=0.01, seed=cell.seed,
        ),
    ):  # fmt: skip
        trainer.update(trainer.model, trainer.prepare_rows(make_episodes(cell)))
        found.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert found[0].equal(found[1])


def test_a_whole_run_without_diagnostics_ends_with_the_same_adapters(finished, tmp_path):
    on, off = finished, run_cell(SMALL_RUN.replace(diagnostics=False), tmp_path)
    names = sorted(path.relative_to(on) for path in on.glob("adapters/step_00004/*/*.safetensors"))
    assert len(names) == 2 and off.name != on.name
    for name in names:
        mine, theirs = load_file(on / name), load_file(off / name)
        assert all(mine[key].equal(theirs[key]) for key in mine) and mine.keys() == theirs.keys()
    assert table(on, "eval").equals(table(off, "eval"))
    roles = table(off, "roles")
    assert roles[sorted(LENGTHS)].equals(table(on, "roles")[sorted(LENGTHS)])
    assert roles[sorted(UNKNOWN - LENGTHS)].isna().all(axis=None) and list(roles) == list(table(on, "roles"))


def test_anything_but_a_bool_is_refused():
    with pytest.raises(ValueError, match="`diagnostics` must be a valid boolean, got 'no'"):
        Cell("voting", "sp", diagnostics="no")
