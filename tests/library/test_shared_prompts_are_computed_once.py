"""Packed rows give the log-probs and the gradients, part by part, of separate rows, and compute shared tokens once."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from decoders import decoder
from trainers import conversation, library_trainer, rows_of, slow_but, updated

from multirole.callbacks import MultiRoleCallback
from multirole.roles.diagnostics import RoleDiagnostics
from multirole.types import Episode, Problem, Turn
from multirole.update.passes import model_passes, prefix_tree, tree_attention
from multirole.update.passes.prefix_tree import (
    block_lengths,
    in_tree_order,
    pack,
    packing_pays,
    shared_length,
    similar_blocks,
    tree_batches,
)
from multirole.update.passes.tree_attention import can_share_prefixes
from multirole.update.rows import Row
from multirole.workflows import EvalOpt, Voting


def one_key(row: Row) -> int:
    return 0


def row_of(prompt: list[int], completion: list[int], slot: int = 0) -> Row:
    turn = Turn("generator", slot, 0, prompt, completion, [-1.0] * len(completion), "", "stop")
    return Row(Episode(Problem("0", "", "", None), 0), turn, "shared")


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([1, 2, 3], [1, 2, 4], 1),  # 2 is followed by another token
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [1, 2, 3], 1),  # an end of sequence is not a continuation
        ([1, 2, 3], [4, 2, 3], 0),
        ([1], [2], 0),
    ],
)
def test_shared_length(one, other, shared):
    assert (
        shared_length(torch.tensor(one), torch.tensor(other))
        == shared
        == shared_length(torch.tensor(other), torch.tensor(one))
    )


def test_a_packing_counted_by_hand():
    """Two replies to one prompt, and a later prompt that holds the first reply."""
    rows = in_tree_order([row_of([7, 8], [1, 2]), row_of([7, 8], [3]), row_of([7, 8, 1, 2, 5], [6])], one_key)
    assert [row.turn.prompt_ids + row.turn.completion_ids for row in rows] == [
        [7, 8, 1, 2],
        [7, 8, 1, 2, 5, 6],
        [7, 8, 3],
    ]
    packing = pack(rows, one_key, torch.device("cpu"))
    assert packing.ids.tolist() == [[7, 8, 1, 2, 2, 5, 6, 8, 3]]
    assert packing.positions.tolist() == [[0, 1, 2, 3, 3, 4, 5, 1, 2]]
    assert packing.labels.tolist() == [[-100, 1, 2, -100, -100, 6, -100, 3, -100]]
    assert packing.blocks == [4, 3, 2]
    assert packing.scores[packing.is_token].tolist() == [1, 2, 5, 7]


def test_micro_batches_of_trees_hold_every_row_and_their_budget():
    rows = [row_of([p, p, p, *range(10)], [p, r, r]) for p in range(3) for r in range(5)]
    for budget in (16, 40, 1000):
        batches = tree_batches(rows, budget, one_key)
        assert sorted(map(id, itertools.chain(*batches))) == sorted(map(id, rows))
        assert all(sum(block_lengths(batch, one_key)) <= max(budget, 16) for batch in batches)
    assert len(batches) == 1


class Parts(MultiRoleCallback):
    """Keeps the parts of each optimizer step's gradient and every row's log-probs."""

    def __init__(self) -> None:
        self.parts, self.logps = [], {}

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        for row, mine, entropy in zip(rows, logps, entropies, strict=True):
            n = len(row.turn.completion_ids)
            self.logps[id(row.turn)] = torch.cat([mine[:n], entropy[:n]])

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        self.parts.append((adapter, parts, gradients.clone()))


class Steps(MultiRoleCallback):
    """A callback that needs no parts."""


def test_groups_of_blocks_counted_by_hand():
    """Blocks of 4 queries and 10 keys have 40 scores each; one of 3 queries is padded to 4, one of 2 is too short for the group."""
    sizes = [(4, 10), (3, 9), (4, 10), (2, 10), (4, 10), (0, 10)]
    assert list(similar_blocks(sizes)) == [[0, 2, 4, 1], [3]]
    assert list(similar_blocks(sizes, 120)) == [[0, 2, 4], [1], [3]]
    assert list(similar_blocks(sizes, 119)) == [[0, 2], [4, 1], [3]]
    assert list(similar_blocks(sizes, 1)) == [[0], [2], [4], [1], [3]]


@pytest.mark.parametrize(
    ("kind", "policy", "merges"),
    slow_but(
        [(EvalOpt, "sp", True), (EvalOpt, "ip", False), (Voting, "ip", True), (Voting, "sp", False)],
        itertools.product([EvalOpt, Voting], ["sp", "ip"], [True, False]),
    ),
)
def test_gradients_and_parts_equal_the_plain_path(tokenizer, tmp_path, monkeypatch, kind, policy, merges):
    monkeypatch.setattr(prefix_tree, "CPU_SCORES", 2000)  # so that groups of similar blocks are cut, as large ones are
    results = []
    for packs in (False, True):
        seen = Parts()
        trainer = library_trainer(kind(), tokenizer, tmp_path, policy=policy, updates="one", micro_batch_tokens=300,
                                  callbacks=[seen])  # fmt: skip
        trainer.passes.can_merge_adapters = merges
        monkeypatch.setattr(model_passes, "packing_pays", lambda *_, packs=packs: packs)
        episodes = conversation(trainer.workflow)
        applied = updated(trainer, episodes, monkeypatch)
        results.append((seen, applied, [seen.logps[id(turn)] for episode in episodes for turn in episode.turns]))
    (plain, applied, logps), (packed, others, packed_logps) = results
    for one, other in zip(applied, others, strict=True):
        assert one.norm() > 1e-2
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    for (_, parts, gradients), (_, same, expected) in zip(packed.parts, plain.parts, strict=True):
        assert parts == same
        torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)
    for one, other in zip(logps, packed_logps, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_diagnostics_entropy_and_importance_are_those_of_separate_rows(tokenizer, tmp_path, monkeypatch):
    """What callbacks and TRL's loss log, by role and per mini-batch."""
    seen = []
    for min_parameters in (10**7, 0):
        monkeypatch.setattr(prefix_tree, "MIN_PARAMETERS", min_parameters)
        diagnostics = RoleDiagnostics()
        trainer = library_trainer(
            EvalOpt(), tokenizer, tmp_path, callbacks=[diagnostics], entropy_coef=0.1, top_entropy_quantile=0.5, beta=0.1,
            old_logprobs="recomputed", updates="one",
        )  # fmt: skip
        rows = trainer.prepare_rows(conversation(trainer.workflow))
        trainer.update(trainer.model.train(), rows)
        assert (trainer.passes.last.packing is None) is bool(min_parameters)
        metrics = {
            f"{role}/{name}": value
            for role, values in diagnostics.per_role(rows).items()
            for name, value in values.items()
        }
        weights = trainer.update_metrics.weights.collect(lambda own: [own])
        metrics |= {f"{role}/{name}": value for role, values in weights.items() for name, value in values.items()}
        metrics |= {name: values for name, values in trainer._metrics["train"].items() if name != "advantages"}
        seen.append(metrics)
    separate, packed = seen
    assert (
        separate.keys() == packed.keys()
        and {"generator/entropy", "kl", "entropy", "generator/sampler_gap"} <= separate.keys()
    )
    for name, value in separate.items():
        assert packed[name] == pytest.approx(value, abs=2e-4, rel=1e-3, nan_ok=True), name


@pytest.mark.parametrize("merges", [True, False])
def test_roles_share_tokens_where_no_callback_needs_parts(tokenizer, tmp_path, monkeypatch, merges):
    """An evaluator's prompt begins with the generator's. If a callback needs parts, each role has a separate tree."""
    n_tokens, applied = [], []
    for watcher in (Parts(), Steps()):
        trainer = library_trainer(EvalOpt(), tokenizer, tmp_path, updates="one", callbacks=[watcher])
        trainer.passes.can_merge_adapters = merges
        monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
        counted = []
        monkeypatch.setattr(model_passes, "pack", lambda *a, c=counted: c.append(pack(*a)) or c[-1])
        applied.append(updated(trainer, conversation(trainer.workflow), monkeypatch)[0])
        monkeypatch.setattr(model_passes, "pack", pack)
        n_tokens.append(sum(packing.ids.numel() for packing in counted))
    assert n_tokens[1] < n_tokens[0]
    torch.testing.assert_close(*applied, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_stored", [True, False])
def test_logprobs_of_packed_rows(tokenizer, tmp_path, monkeypatch, is_stored):
    """With PyTorch's kernel, as on a GPU, too."""
    if not is_stored:
        monkeypatch.setattr(tree_attention, "MAX_SCORES", 0)
    trainer = library_trainer(EvalOpt(), tokenizer, tmp_path, policy="ip", micro_batch_tokens=300)
    rows = rows_of(trainer, conversation(trainer.workflow))
    for base in (False, True):
        plain = trainer.logprobs_of(rows, base)
        monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
        for one, other in zip(plain, trainer.logprobs_of(rows, base), strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
        monkeypatch.setattr(model_passes, "packing_pays", packing_pays)


def varlen_reference(q, k, v, query_ends, key_ends, max_q, max_k, *, scale, window_size, enable_gqa, from_end=True):
    """PyTorch's `varlen_attn`, block by block; without `from_end` causal attention counts from the first key."""
    assert window_size == (-1, 0) and enable_gqa == (q.size(1) != k.size(1))
    outputs = []
    for (a, b), (c, d) in zip(
        itertools.pairwise(query_ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True
    ):
        assert b - a <= max_q and d - c <= max_k
        queries, keys, values = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))  # (heads, tokens, d)
        offset = (d - c) - (b - a) if from_end else 0
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(offset)
        one = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(one[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(("heads", "n_kv"), [(4, 2), (2, 2)])
def test_varlen_attention_equals_masked_attention(monkeypatch, heads, n_kv):
    """On a GPU all blocks go through one call; here PyTorch's kernel is replaced by its definition."""
    monkeypatch.setattr(tree_attention, "varlen_attn", varlen_reference)
    same = row_of([7, 8], [1, 2])  # the second time it adds no token
    rows = in_tree_order([same, same, row_of([7, 8], [3]), row_of([7, 8, 1, 2, 5], [6]), row_of([9], [4, 4])], one_key)
    packing = pack(rows, one_key, torch.device("cpu"))
    assert 0 in packing.blocks
    n, results = sum(packing.blocks), []
    given = [torch.randn(n, count, 8, generator=torch.Generator().manual_seed(count)) for count in (heads, n_kv, n_kv)]
    for attend, argument in (
        (tree_attention.masked_attention, packing),
        (tree_attention.varlen_attention, packing.sequence),
    ):
        q, k, v = (x.clone().requires_grad_() for x in given)
        out = attend(q, k, v, argument, 0.3)
        results.append([out, *torch.autograd.grad((out * given[0].cos()).sum(), (q, k, v))])
    for masked, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, masked)


def test_gradients_of_a_shared_token_are_summed_in_float32():
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    taken = tree_attention.GatheredRows.apply(x, torch.zeros(512, dtype=torch.long))
    taken.sum().backward()
    assert x.grad.item() == 512  # sums of ones in bfloat16 stop at 256


@pytest.mark.parametrize("attend", [varlen_reference, functools.partial(varlen_reference, from_end=False), None])
def test_varlen_attention_is_used_where_it_agrees(monkeypatch, caplog, attend):
    """A kernel whose causal attention counts from the first key, or that fails, is not used."""
    on_gpu, dtype = SimpleNamespace(type="cuda"), torch.bfloat16
    attend = attend or functools.partial(torch.nn.functional.scaled_dot_product_attention, unknown=1)
    monkeypatch.setattr(tree_attention, "varlen_attn", attend)
    cpu = torch.device("cpu")
    for name in ("zeros", "randn"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, device, real=real, **named: real(*size, **named))
    monkeypatch.setattr(torch, "Generator", lambda device, real=torch.Generator: real(cpu))
    assert tree_attention.has_varlen.__wrapped__(on_gpu, dtype, 16) == (attend is varlen_reference)
    assert bool(caplog.records) == (attend is not varlen_reference)
    assert not tree_attention.has_varlen(cpu, dtype, 16)
    assert not tree_attention.has_varlen.__wrapped__(on_gpu, torch.float32, 16)


def test_packing_is_chosen_by_counted_tokens():
    shared, apart = [row_of([*range(30)], [r]) for r in range(40, 44)], [row_of([r, *range(30)], [r]) for r in range(4)]
    assert packing_pays(shared, 10**8, one_key) and not packing_pays(apart, 10**8, one_key)
    assert not packing_pays(shared, 450_000, one_key)  # below 10M parameters runs stay bit-equal
    by_slot = [row_of([*range(30)], [slot], slot) for slot in range(4)]
    assert not packing_pays(by_slot, 10**8, lambda row: row.turn.slot)


def test_models_with_windows_take_the_plain_path(tokenizer, tmp_path):
    trainer = library_trainer(Voting(), tokenizer, tmp_path)
    base = trainer.peft_model.get_base_model()
    assert trainer.passes.can_share_prompts and can_share_prefixes(base)
    base.config.layer_types = ["sliding_attention"] * len(base.config.layer_types)
    assert not can_share_prefixes(base)


def test_a_window_without_layer_types_takes_the_plain_path():
    """Mistral's configuration names the window only."""
    model = decoder("mistral", 97)
    assert not can_share_prefixes(model)
    model.config.sliding_window = None
    assert can_share_prefixes(model)


@pytest.mark.parametrize("recomputes", [True, False])
def test_gradient_checkpointing_changes_nothing(tokenizer, tmp_path, monkeypatch, recomputes):
    """Only micro-batches that do not fit are recomputed, packed ones included."""
    applied = []
    monkeypatch.setattr(model_passes, "packing_pays", lambda *_: True)
    for fits in (True, False):
        trainer = library_trainer(EvalOpt(), tokenizer, tmp_path, updates="one")
        trainer.model.train()
        if recomputes:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        monkeypatch.setattr(model_passes, "fits", lambda *_, fits=fits: fits)
        layer, calls = trainer.peft_model.get_base_model().model.layers[0].self_attn, []
        plain = layer.forward
        layer.forward = lambda *a, c=calls, f=plain, **k: c.append(1) or f(*a, **k)
        applied.append(updated(trainer, conversation(trainer.workflow), monkeypatch)[0])
        assert len(calls) == (2 if recomputes and not fits else 1)
    torch.testing.assert_close(*applied, atol=1e-7, rtol=0)
