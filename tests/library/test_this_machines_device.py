"""Updates and rollouts on this machine's GPU equal those on its CPU in float32. Without a GPU, both sides are the CPU."""

import itertools

import pytest
import torch
from trainers import conversation, library_trainer, rows_of, slow_but, updated

from multirole.update.passes import model_passes, tree_attention
from multirole.workflows import EvalOpt, Voting

HAS_GPU = torch.cuda.is_available()


def round_base(trainer, dtype: torch.dtype) -> None:
    """Round the frozen base to bfloat16, and keep it in `dtype`."""
    for name, parameter in trainer.peft_model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16().to(dtype)


@pytest.mark.parametrize(
    ("is_half", "packs"),  # without a GPU it compares a CPU with itself
    slow_but([(False, True), (True, True)] if HAS_GPU else [(True, True)], itertools.product((False, True), repeat=2)),
)
def test_gradients_equal_those_of_the_cpu(tokenizer, tmp_path, monkeypatch, is_half, packs):
    """In bfloat16 up to its rounding, for rows that share prompts and rows that do not."""
    applied = []
    for is_here in (False, True):
        trainer = library_trainer(
            EvalOpt(),
            tokenizer,
            tmp_path,
            policy="ip",
            updates="one",
            bf16=is_here and is_half,
            use_cpu=not (is_here and HAS_GPU),
        )
        round_base(trainer, torch.bfloat16 if is_here and is_half else torch.float32)
        monkeypatch.setattr(model_passes, "packing_pays", lambda *_, pays=is_here and packs: pays)
        applied.append([g.float().cpu() for g in updated(trainer, conversation(trainer.workflow), monkeypatch)])
    assert len(applied[0]) == len(applied[1]) > 1
    for expected, other in zip(*applied, strict=True):
        assert expected.norm() > 1e-2
        error = ((other - expected).norm() / expected.norm()).item()
        # 0.06 on a CPU in bfloat16; wrong tokens or weights give about 1
        assert error < (0.2 if is_half else 1e-4), error


def test_the_engine_samples_from_what_the_trainer_computes(tokenizer, tmp_path):
    trainer = library_trainer(Voting(), tokenizer, tmp_path, policy="ip", use_cpu=not HAS_GPU)
    rows = rows_of(trainer, trainer.play([(trainer.problems[0], index) for index in range(4)], 0))
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        torch.testing.assert_close(logps, torch.tensor(row.turn.logprobs), atol=1e-4, rtol=0)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_prompts_need_no_masks_on_a_gpu(head_dim):
    assert tree_attention.has_varlen(torch.device("cuda", 0), torch.bfloat16, head_dim)
