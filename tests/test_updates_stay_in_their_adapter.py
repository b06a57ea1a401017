"""An update on one role's rows moves that role's adapter only, bit for bit; the frozen base never moves."""

import pytest
import torch
from conftest import make_episodes

from multirole.core.rows import Row
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.experiment.cell import Cell


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before, model):
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


@pytest.mark.parametrize("policy", ["ip", "sp", "orchestrator=x,worker=y,synthesizer=x"])
def test_a_step_moves_only_the_tensors_of_its_adapter(make_trainer, policy):
    cell = Cell("orch_workers", policy)
    trainer = make_trainer(cell)
    rows = trainer._rows(make_episodes(cell))
    for _ in range(2):  # the second step meets an optimizer that holds momentum for every adapter
        for adapter in trainer.adapters:
            owned = [row for row in rows if row.adapter == adapter]
            before = snapshot(trainer.model)
            diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
            trainer.optimizer_step(trainer.model, adapter, owned, len(owned), 1e-2, diagnostics)
            changed = moved(before, trainer.model)
            assert changed, "the step moved nothing"
            assert all(f".{adapter}." in name and "lora_" in name for name in changed)


def test_hf_closing_step_moves_nothing(make_trainer):
    """HF steps the optimizer once more at the end of `training_step`; it must find no gradient."""
    cell = Cell("voting", "ip")
    trainer = make_trainer(cell)
    rows = trainer._rows(make_episodes(cell))
    trainer.optimizer_step(
        trainer.model, "generator", [r for r in rows if r.adapter == "generator"], 6, 1e-2,
        IterationDiagnostics(rows, 0.2, 0.28),
    )  # fmt: skip
    before = snapshot(trainer.model)
    trainer.optimizer.step()
    assert not moved(before, trainer.model)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_each_adapter_counts_its_own_optimizer_steps(make_trainer):
    """Bias correction of Adam is per adapter: three generator steps and one aggregator step count 3 and 1."""
    cell = Cell("voting", "ip", n_problems=2)
    trainer = make_trainer(cell)
    rows = [Row(r.episode, r.turn, r.adapter, r.advantage) for r in trainer._rows(make_episodes(cell))]
    for adapter, steps in (("generator", 3), ("aggregator", 1)):
        for _ in range(steps):
            owned = [row for row in rows if row.adapter == adapter]
            trainer.optimizer_step(trainer.model, adapter, owned, 9, 1e-3, IterationDiagnostics(rows, 0.2, 0.28))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    for parameter, state in trainer.optimizer.state.items():
        assert state["step"] == (3 if ".generator." in names[id(parameter)] else 1)
