"""The adapter that samples is the adapter that trains: log-probs match before and after every sync; updates are served."""

import pytest
import torch

from multirole.batching import collate
from multirole.cells import Cell
from multirole.diagnostics import IterationDiagnostics
from multirole.engine_torch import TransformersEngine
from multirole.run import load_model, make_engine
from multirole.tasks import TASKS
from multirole.trainer import MultiRoleGRPOTrainer


def gap(trainer, rows):
    """max |trainer - engine| / max(1, |log-prob|) over every sampled token of the rows, adapter by adapter.

    Relative, since a token of log-prob -10 carries ten times the rounding of one of -1 in float32.
    """
    worst = 0.0
    for adapter in trainer.adapters:
        owned = [row for row in rows if row.adapter == adapter]
        trainer.model.set_adapter(adapter)
        batch = collate(owned, trainer.processing_class.pad_token_id, torch.device("cpu"))
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, batch["completion_ids"].size(1)
            )
        sampled = batch["sampling_per_token_logps"]
        difference = (logps - sampled).abs() / sampled.abs().clamp(min=1) * batch["completion_mask"]
        worst = max(worst, difference.max().item())
    trainer.model.set_requires_grad(trainer.adapters, True)
    return worst


@pytest.mark.parametrize(("workflow", "policy"), [("voting", "ip"), ("eval_opt", "sp"), ("orch_workers", "ip")])
def test_log_probs_agree_before_and_after_a_sync(tmp_path, workflow, policy):
    cell = Cell(workflow, policy, "math", n_problems=2, n_episodes=4, temperature=0.8)
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, tokenizer)
    assert isinstance(engine, TransformersEngine)
    problems = TASKS[cell.task_name].problems("train", 8)
    trainer = MultiRoleGRPOTrainer(cell, model, tokenizer, engine, problems, problems, str(tmp_path))
    trainer.create_optimizer_and_scheduler(3)
    attempts = [(problem, index) for problem in problems[:2] for index in range(4)]
    texts = []
    for version in range(3):
        trainer.state.global_step = version
        episodes = trainer.play(attempts, 0)  # the same seeds at every version
        texts.append([turn.text for episode in episodes for turn in episode.turns])
        rows = trainer._rows(episodes)
        assert gap(trainer, rows) < 1e-5
        rows = [type(row)(row.episode, row.turn, row.adapter, 1.0 - 2.0 * (i % 2)) for i, row in enumerate(rows)]
        for adapter in trainer.adapters:
            owned = [row for row in rows if row.adapter == adapter]
            diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
            trainer.optimizer_step(model, adapter, owned, len(owned), 2e-2, diagnostics)
        assert gap(trainer, rows) > 1e-3, "the update changed nothing"
    assert texts[0] != texts[1] != texts[2], "an update must change the next rollout"
