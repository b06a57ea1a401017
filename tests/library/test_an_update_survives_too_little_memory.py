"""An update that runs out of memory computes its passes again, in smaller ones, and gives the gradient of the unbroken one."""

from collections.abc import Callable

import pytest
import torch
from trainers import conversation, episodes_of, library_trainer, rows_of, slow_but

from multirole.callbacks import MultiRoleCallback
from multirole.roles.diagnostics import RoleDiagnostics
from multirole.update.gradients import PartSums
from multirole.update.passes import model_passes, recomputation
from multirole.update.passes.model_passes import ModelPasses
from multirole.update.passes.recomputation import is_out_of_memory
from multirole.update.passes.tree_attention import StoredScores, stored_bytes
from multirole.update.rows import Row
from multirole.workflows import EvalOpt, Voting

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB"
CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 26137853952 bytes."


class Seen(MultiRoleCallback):
    """Keeps the rows of each micro-batch that callbacks are shown, and the gradient by part."""

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        self.rows += rows

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        self.parts = dict(zip(parts, gradients.clone(), strict=True))

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.parts: dict = {}


def gradient(trainer, rows: list[Row]) -> torch.Tensor:
    params, _ = trainer.compute_gradient(trainer.model.train(), "shared", rows, len(rows))
    return torch.cat([p.grad.flatten() for p in params])


def plant(monkeypatch, trainer, where: str, fails: Callable[[int, int], bool]) -> list[tuple[int, bool]]:
    """Let the n-th pass over some rows fail in its forward pass, after its backward pass, or within it; return its (rows, recomputes)."""
    tried: list[tuple[int, bool]] = []
    planned: list[bool] = []

    def raise_if_due(at: str) -> None:
        if at == where and planned and planned[-1]:
            planned[-1] = False
            raise torch.OutOfMemoryError(CUDA)

    def score(original, self, *args):
        micro = self.last
        tried.append((len(micro.rows), micro.recomputes))
        planned.append(fails(len(tried), len(micro.rows)))
        raise_if_due("forward")
        return original(self, *args)

    def missing(original, self, total, segments):
        for i, segment in enumerate(original(self, total, segments)):
            if len(self.added) >= 5 and i == 0:
                raise_if_due("within backward")
            yield segment

    def backward(original, loss, **named):
        original(loss, **named)
        raise_if_due("after backward")

    for owner, name, wrapper in ((ModelPasses, "score", score), (PartSums, "missing", missing)):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, f=wrapper, original=original: f(original, *args))
    monkeypatch.setattr(
        model_passes, "free_memory", lambda model: None
    )  # collecting garbage takes longer than these passes
    plain = trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss, **named: backward(plain, loss, **named))
    return tried


CASES = [  # PEFT's own layers keep their gradients pass by pass
    (where, merges, bf16)
    for where in ("forward", "within backward", "after backward")
    for merges, bf16 in ((True, False), (False, False), (True, True))
    if merges or where != "within backward"
]
QUICK = [("within backward", True, True), ("after backward", False, False), ("after backward", True, False)]


@pytest.mark.parametrize(("where", "merges", "bf16"), slow_but(QUICK, CASES))
def test_a_pass_that_fails_once_gives_the_same_bits(tokenizer, tmp_path, monkeypatch, where, merges, bf16):
    """It is repeated with its activations recomputed, also where layers have no gradient checkpointing otherwise."""
    results = []
    for fails in (lambda n, rows: False, lambda n, rows: n == 2):
        seen = Seen()
        trainer = library_trainer(
            Voting(),
            tokenizer,
            tmp_path,
            callbacks=[seen],
            bf16=bf16,
            gradient_checkpointing=False,
            micro_batch_tokens=512,
        )
        trainer.passes.can_merge_adapters = merges
        rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
        tried = plant(monkeypatch, trainer, where, fails)
        results.append((gradient(trainer, rows), seen, tried, trainer.passes.take_counts()))
    (expected, whole, _, none), (computed, seen, tried, counts) = results
    assert not none
    assert counts == {model_passes.OUT_OF_MEMORY: 1} and tried[1][1] is False and tried[2] == (tried[1][0], True)
    assert torch.equal(expected, computed) and expected.norm() > 1e-3
    assert len(seen.rows) == len(whole.rows) == len(rows), "every row is recorded once"


def test_what_packed_attention_stores_counts_as_memory(tokenizer, tmp_path, monkeypatch):
    """It may be more than all other activations; on a CPU, a pass that is too large ends the process."""
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
    trainer = library_trainer(Voting(), tokenizer, tmp_path, micro_batch_tokens=512)
    passes, rows = trainer.passes, rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    micro = next(passes.micro_batches(rows, model_passes.no_key, [0.0], has_gradient=True))
    base, config = passes.base, passes.base.config
    base.gradient_checkpointing_enable()
    q, k, v = (
        torch.ones(micro.n_tokens, n_heads, config.head_dim, requires_grad=True)
        for n_heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    kept = StoredScores.apply(q, k, v, micro.packing, 1.0).grad_fn.saved_tensors
    stored = config.num_hidden_layers * sum(tensor.nbytes for tensor in kept)
    assert stored_bytes(base, micro.packing) == stored
    needed = stored + recomputation.activation_bytes(base, micro.n_tokens, passes.is_half)
    for share in (0.99, 1.01):
        free = share * needed / recomputation.USABLE_FRACTION
        monkeypatch.setattr(recomputation, "free_bytes", lambda device, free=free: free)
        with passes.pass_over(micro, keeps_activations=True):
            assert bool(recomputation.recomputed_layers(base)) == (share < 1)


HALVES = [(where, packs) for where in ("forward", "within backward") for packs in (False, True)]


@pytest.mark.parametrize(("where", "packs"), slow_but([("within backward", True)], HALVES))
def test_halves_down_to_single_rows_give_the_gradient_by_part(tokenizer, tmp_path, monkeypatch, where, packs):
    """Whatever the pass over all rows had added before it failed is not added again by its halves."""
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: packs)
    parts = []
    for largest in (10**6, 3):
        seen = Seen()
        trainer = library_trainer(EvalOpt(), tokenizer, tmp_path, callbacks=[seen], micro_batch_tokens=2048)
        rows = rows_of(trainer, conversation(trainer.workflow, 2))
        tried = plant(monkeypatch, trainer, where, lambda n, rows, largest=largest: rows > largest)
        gradient(trainer, rows)
        parts.append(seen.parts)
        assert sorted(map(id, seen.rows)) == sorted(map(id, rows)), "every row is recorded once"
    assert max(n for n, _ in tried) > 3 and {n for n, _ in tried[-3:]} <= {1, 2, 3}
    assert parts[0].keys() == parts[1].keys()
    for part, values in parts[0].items():
        assert values.norm() > 1e-3
        torch.testing.assert_close(parts[1][part], values, atol=1e-6, rtol=1e-5)


def test_a_size_that_has_failed_is_not_tried_again_and_the_log_says_so(make_library_trainer, monkeypatch, caplog):
    trainer = make_library_trainer(Voting(), micro_batch_tokens=1024)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 3))
    tried = plant(monkeypatch, trainer, "forward", lambda n, rows: rows > 4)
    gradient(trainer, rows)
    failed = [size for size in tried if size[0] > 4]
    assert "Memory did not suffice for a pass over" in caplog.text and "in halves" in caplog.text
    tried.clear()
    gradient(trainer, rows)
    assert len([size for size in tried if size[0] > 4]) < len(failed) and len(tried) >= len(rows) / 4


@pytest.mark.parametrize("sharded", [False, True])
def test_a_single_row_that_does_not_fit_ends_with_the_setting_to_change(make_library_trainer, monkeypatch, sharded):
    trainer = make_library_trainer(Voting())
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    plant(monkeypatch, trainer, "forward", lambda n, rows: True)
    trainer.passes.is_sharded = sharded  # whose other processes wait within the pass
    setting = "Lower `micro_batch_tokens`" if sharded else "a single row of .* Lower `max_prompt_tokens`"
    with pytest.raises(torch.OutOfMemoryError, match=setting):
        gradient(trainer, rows)


def test_log_probs_and_entropies_are_scored_in_halves(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(Voting(), micro_batch_tokens=2048)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    expected = trainer.logprobs_of(rows), trainer.entropies_of(rows)
    tried = plant(monkeypatch, trainer, "forward", lambda n, rows: rows > 3)
    for values, others in zip(expected, (trainer.logprobs_of(rows), trainer.entropies_of(rows)), strict=True):
        for one, other in zip(values, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert max(tried)[0] > 3 and not any(recomputes for _, recomputes in tried)
    tried.clear()
    monkeypatch.setattr(ModelPasses, "score", lambda *_: (_ for _ in ()).throw(RuntimeError(CPU)))
    with pytest.raises(torch.OutOfMemoryError, match="DefaultCPUAllocator.*`max_prompt_tokens`"):
        trainer.logprobs_of(rows)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(), True),
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_metrics_of_a_broken_iteration_are_those_of_an_unbroken_one(tokenizer, tmp_path, monkeypatch):
    """With an entropy bonus and importance weights, whose sums are over the mini-batch."""
    logs = []
    for largest in (10**6, 3):
        trainer = library_trainer(
            Voting(),
            tokenizer,
            tmp_path,
            callbacks=[RoleDiagnostics()],
            entropy_coef=0.1,
            old_logprobs="recomputed",
            updates="one",
        )
        rows = rows_of(trainer, conversation(trainer.workflow, 2))
        tried = plant(monkeypatch, trainer, "after backward", lambda n, rows, largest=largest: rows > largest)
        steps, _ = trainer.update(trainer.model.train(), rows)
        logs.append(
            (
                dict(trainer._metrics["train"]),
                trainer.update_metrics.weights.collect(lambda own: [own]),
                steps[0].grad_norm,
            )
        )
    assert max(tried)[0] > 3
    (log, weights, norm), (other, same, again) = logs
    assert norm == pytest.approx(again, rel=1e-5) and log.keys() == other.keys()
    for name in log:
        assert log[name] == pytest.approx(other[name], abs=1e-5), name
    for role in weights:
        assert weights[role] == pytest.approx(same[role], abs=1e-5)


# ---- what is not finite


class Faulty:
    """Spoils the n-th fast pass: its log-probs, or what its backward pass adds to the gradient."""

    def __init__(self, monkeypatch, spoils: str, at: int = 2, is_plain_spoiled: bool = False) -> None:
        self.plain = 0
        self.fast = 0
        score, missing = ModelPasses.score, PartSums.missing

        def scored(passes, *args):
            logps, entropies = score(passes, *args)
            self.plain += passes.last.is_plain
            self.fast += not passes.last.is_plain
            is_bad = is_plain_spoiled if passes.last.is_plain else self.fast == at
            return (logps * float("nan") if spoils == "loss" and is_bad else logps), entropies

        def spoiled(sums, total, segments):
            for segment in missing(sums, total, segments):
                yield segment
                if spoils == "gradient" and self.fast == at:
                    total[segment[0]].view(-1)[0] = float("inf")

        monkeypatch.setattr(ModelPasses, "score", scored)
        monkeypatch.setattr(PartSums, "missing", spoiled)


SPOILED = [(spoils, packs) for spoils in ("loss", "gradient") for packs in (False, True)]


@pytest.mark.parametrize(("spoils", "packs"), slow_but([("loss", True), ("gradient", False)], SPOILED))
def test_what_is_not_finite_is_computed_again_without_fast_paths(
    tokenizer, tmp_path, monkeypatch, caplog, spoils, packs
):
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: packs)
    parts = []
    for is_faulty in (False, True):
        seen = Seen()
        trainer = library_trainer(EvalOpt(), tokenizer, tmp_path, callbacks=[seen], micro_batch_tokens=300)
        rows = rows_of(trainer, conversation(trainer.workflow, 2))
        faulty = Faulty(monkeypatch, spoils) if is_faulty else None
        gradient(trainer, rows)
        parts.append(seen.parts)
        assert sorted(map(id, seen.rows)) == sorted(map(id, rows))
    assert faulty.plain == trainer.passes.take_counts()[model_passes.NOT_FINITE] > 0
    assert "without fast paths" in caplog.text
    for part, values in parts[0].items():
        torch.testing.assert_close(parts[1][part], values, atol=1e-6, rtol=1e-5)


def test_what_stays_not_finite_is_an_outcome(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(Voting())
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    faulty = Faulty(monkeypatch, "loss", is_plain_spoiled=True)
    with pytest.raises(FloatingPointError, match="The loss is nan at iteration 1, computed without fast paths"):
        gradient(trainer, rows)
    assert faulty.plain > 0


def test_log_probs_that_are_not_finite_are_scored_again(make_library_trainer, monkeypatch):
    trainer = make_library_trainer(Voting(), micro_batch_tokens=512)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    expected = trainer.logprobs_of(rows)
    faulty = Faulty(monkeypatch, "loss")
    for one, other in zip(trainer.logprobs_of(rows), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert faulty.plain > 0
