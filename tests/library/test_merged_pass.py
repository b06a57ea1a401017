"""One merged pass gives what the plain path gives part by part, and rows without a gradient are scored but not differentiated."""

import pytest
import torch
from peft import LoraConfig
from toy_qwen3 import toy_model
from trainers import diagnostics_of, episodes_of, rows_of

from multirole.callbacks import MultiRoleCallback
from multirole.inputs.adapters import add_adapters
from multirole.update.gradients import plain_lora
from multirole.update.rows import Row
from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting


class Seen(MultiRoleCallback):
    """Keeps the parts of each optimizer step's gradient, and counts the passes."""

    def __init__(self) -> None:
        self.parts, self.passes = [], 0

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        self.passes += 1

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        self.parts.append((adapter, parts, gradients.clone()))


def silence(rows: list[Row], n: int) -> None:
    """Take the advantage from every n-th episode's rows, as a group of equal rewards does."""
    for row in rows:
        row.advantage *= row.episode.index % n > 0


SMALL_PASSES = {"micro_batch_tokens": 300, "seed": 0}
CASES = [
    (Single, {}),
    pytest.param(Voting, {"policy": "sp"}, marks=pytest.mark.slow),
    pytest.param(Voting, {"policy": "ip"}, marks=pytest.mark.slow),
    (EvalOpt, {"policy": "sp", "beta": 0.1, "old_logprobs": "recomputed"}),
    (EvalOpt, {"policy": "ip", "role_beta": {"evaluator": 0.5}}),
    (OrchWorkers, {"policy": "sp", "role_beta": {"worker": 0.5}, "temperature": 0.7}),
    (OrchWorkers, {"policy": "ip", "delta": 3.0}),
]


@pytest.mark.parametrize(("workflow", "options"), CASES, ids=lambda value: getattr(value, "name", None) or str(value))
def test_the_merged_pass_equals_the_plain_one_part_by_part(make_diagnosed_trainer, workflow, options):
    passes = []
    for merges in (True, False):
        seen = Seen()
        trainer = make_diagnosed_trainer(workflow(), callbacks=[seen], **options, **SMALL_PASSES)
        assert trainer.passes.can_merge_adapters  # float32 on one process
        trainer.passes.can_merge_adapters = merges
        rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
        silence(rows, 3)
        trainer.update(trainer.model, rows)  # several optimizer steps: from the second on, ratios are not 1
        passes.append((seen, diagnostics_of(trainer).per_role(rows)))
    (one, metrics), (other, plain) = passes
    assert [(adapter, sorted(parts)) for adapter, parts, _ in one.parts] == [
        (adapter, sorted(parts)) for adapter, parts, _ in other.parts
    ]
    for (_, parts, gradients), (_, others, expected) in zip(one.parts[:1], other.parts[:1], strict=True):
        for part, gradient in zip(parts, gradients, strict=True):
            assert gradient.norm() > 1e-3
            torch.testing.assert_close(gradient, expected[others.index(part)], atol=3e-6, rtol=0)
    for role, values in metrics.items():  # all rows are in the metrics, whether they have a gradient or not
        for name in ("perplexity", "entropy", "chi2", "kl", "clip_fraction", "grad_norm", "grad_share"):
            assert values[name] == pytest.approx(plain[role][name], rel=1e-3, abs=1e-4), (role, name)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rows_without_a_gradient_are_not_differentiated(make_diagnosed_trainer, beta, monkeypatch):
    """A KL penalty gives every row a gradient; without one, an advantage of zero leaves none."""
    trainer = make_diagnosed_trainer(Voting(), beta=beta)
    rows, differentiated = trainer.prepare_rows(episodes_of(trainer.workflow.roles)), []
    silence(rows, 2)
    plain = trainer.compute_loss

    def watched(model, batch, *args, **kwargs):
        if torch.is_grad_enabled():
            differentiated.extend(batch["advantages"].tolist())
        return plain(model, batch, *args, **kwargs)

    monkeypatch.setattr(trainer, "compute_loss", watched)
    trainer.update(trainer.model, rows)
    live = [row for row in rows if row.advantage or beta]
    assert len(differentiated) == len(live) and (beta or len(live) < len(rows))


def test_more_roles_take_no_more_passes(make_library_trainer):
    """All parts of a step share its micro-batches."""
    passes = []
    for parts in (1, 4):
        seen = Seen()
        trainer = make_library_trainer(Voting(), callbacks=[seen], **SMALL_PASSES)
        rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
        for i, row in enumerate(rows):
            row.turn.role, row.turn.slot = ("generator", i % parts) if parts > 1 else ("generator", 0)
        trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 1e-3)
        passes.append(seen.passes)
    assert passes[0] == passes[1] > 1


def test_gradient_checkpointing_changes_nothing(make_library_trainer):
    """It runs the forward pass again in the backward pass, with other tensor objects. TRL's configuration has it on."""
    gradients = []
    for is_on in (False, True):
        seen = Seen()
        trainer = make_library_trainer(Voting(), callbacks=[seen])
        if is_on:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
        trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 0.0)
        gradients.append(seen.parts[0][2])
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


@pytest.mark.parametrize("change", ["dropout", "dora", "bfloat16"])
def test_other_adapters_take_the_plain_path(make_library_trainer, change):
    """What cannot be merged in float32 is trained part by part."""
    trainer = make_library_trainer(Voting())
    model, params = trainer.peft_model, [p for p in trainer.peft_model.parameters() if p.requires_grad]
    assert plain_lora(model, "shared", params, (torch.float32,))
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    if change == "dropout":
        layer.lora_dropout["shared"] = torch.nn.Dropout(0.1)
    elif change == "dora":
        layer.lora_variant["shared"] = object()
    else:
        layer.base_layer.to(torch.bfloat16)
    assert not plain_lora(model, "shared", params, (torch.float32,))


def test_a_saved_head_takes_the_plain_path(tokenizer):
    """All its LoRA layers are plain, but a merged pass would give the head no gradient."""
    base = toy_model(tokenizer, head_dim=16, tie_word_embeddings=False)
    model = add_adapters(base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]), ["x"])
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lora = [p for name, p in params.items() if "lora_" in name]
    assert len(lora) == 4 and len(params) == 5
    assert len(plain_lora(model, "x", lora, (torch.float32,))) == 2
    assert plain_lora(model, "x", list(params.values()), (torch.float32,)) == []
