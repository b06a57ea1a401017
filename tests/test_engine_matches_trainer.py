"""The adapter that samples is the adapter that trains: log-probs match before and after every sync; updates are served."""

import pytest
import torch

from multirole.core.rows import collate
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.experiment.run import load_model, make_engine
from multirole.tasks import TASKS


def gaps(trainer, rows):
    """Mean and max of |trainer log-prob - engine log-prob| over every sampled token of the rows, adapter by adapter."""
    differences = []
    for adapter in trainer.adapters:
        owned = [row for row in rows if row.adapter == adapter]
        trainer.model.set_adapter(adapter)
        batch = collate(owned, trainer.processing_class.pad_token_id, torch.device("cpu"))
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].size(1)
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
        keep = batch["completion_mask"].bool()
        differences.append((logps - batch["sampling_per_token_logps"]).abs()[keep])
    trainer.model.set_requires_grad(trainer.adapters, True)
    flat = torch.cat(differences)
    return flat.mean().item(), flat.max().item()


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
        mean, largest = gaps(trainer, rows)
        # the trained base has logits near 40, where one float32 rounding is 4e-6: single tokens differ by a few of them
        assert mean < 1e-6 and largest < 5e-5, f"version {version}: mean {mean:.1e}, max {largest:.1e}"
        rows = [type(row)(row.episode, row.turn, row.adapter, 1.0 - 2.0 * (i % 2)) for i, row in enumerate(rows)]
        for adapter in trainer.adapters:
            owned = [row for row in rows if row.adapter == adapter]
            diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
            trainer.optimizer_step(model, adapter, owned, len(owned), 5e-3, diagnostics)
        assert gaps(trainer, rows)[1] > 1e-3, "the update changed nothing"
    assert texts[0] != texts[1] != texts[2], "an update must change the next rollout"
