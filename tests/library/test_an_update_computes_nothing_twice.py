"""On a GPU an update recomputes, scores and casts only what it must; the numbers stay those of the plain computation."""

from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from trainers import build_model, episodes_of, library_trainer, rows_of

from multirole.update.passes import model_passes
from multirole.update.passes.activation_memory import bytes_per_token, kept_tokens
from multirole.update.passes.model_passes import MicroBatch, ModelPasses
from multirole.update.rows import later_rows, plan_steps
from multirole.workflows import Voting

GIB = 2**30
QWEN3_1_7B = {"hidden": 2048, "intermediate": 6144, "n_layers": 28, "is_half": True}


# ---- recomputed layers


def test_micro_batches_on_a_gpu_by_hand():
    """A Qwen3 of 1.7B parameters with two adapters of rank 64: half of the memory that is left, in tokens."""
    per_token = bytes_per_token(**QWEN3_1_7B)
    assert per_token == 28 * (14 * 2048 + 6 * 6144) * 2 == 3_670_016
    base, adapters = round(3.2 * GIB), round(0.52 * GIB)
    room = (80 - 2 * 3.2 - 5 * 0.52) / 2 * GIB
    assert kept_tokens(80 * GIB, base, adapters, per_token, 40960) == pytest.approx(room / per_token, abs=1)
    assert kept_tokens(80 * GIB, base, adapters, per_token, 2048) == 2048, "never above micro_batch_tokens"
    assert kept_tokens(24 * GIB, base, adapters, per_token, 40960) == 40960, "too few: larger ones, recomputed"


@pytest.mark.parametrize(
    ("changes", "is_cut"),
    [
        ({}, True),
        ({"device": torch.device("cpu")}, False),
        ({"is_sharded": True}, False),
        ({"has_checkpointing": False}, False),
    ],
)
def test_micro_batches_are_cut_only_where_layers_would_be_recomputed_on_a_gpu(monkeypatch, changes, is_cut):
    """On a CPU they never are, so that recorded runs do not depend on a machine's memory."""
    config = SimpleNamespace(
        hidden_size=2048,
        num_hidden_layers=28,
        to_dict=lambda: {"intermediate_size": 6144},
        get_text_config=lambda: config,
    )
    values = {"device": torch.device("cuda"), "is_sharded": False, "has_checkpointing": True} | changes
    base = SimpleNamespace(config=config, device=values["device"])
    monkeypatch.setattr(model_passes, "recomputed_layers", lambda base: ["a layer"] * values["has_checkpointing"])
    parameters = [
        SimpleNamespace(nbytes=3 * GIB, requires_grad=False),
        SimpleNamespace(nbytes=GIB // 2, requires_grad=True),
    ]
    passes = SimpleNamespace(
        base=base, is_sharded=values["is_sharded"], is_half=True, micro_batch_tokens=40960,
        model=SimpleNamespace(parameters=lambda: iter(parameters)),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    expected = kept_tokens(80 * GIB, 3 * GIB, GIB // 2, bytes_per_token(**QWEN3_1_7B), 40960) if is_cut else 40960
    assert ModelPasses.tokens_with_gradient.func(passes) == expected
    assert (expected < 40960) is is_cut


def test_smaller_micro_batches_with_a_gradient_give_the_same_gradient(make_library_trainer):
    gradients, sizes = [], {}
    for limit in (1024, 64):
        trainer = make_library_trainer(Voting(), updates="one")
        vars(trainer.passes)["tokens_with_gradient"] = limit
        sizes[limit] = []
        pass_over = trainer.passes.pass_over

        def counted(micro, keeps_activations, sizes=sizes[limit], pass_over=pass_over):
            sizes.append((keeps_activations, micro.n_tokens, len(micro.rows)))
            return pass_over(micro, keeps_activations)

        trainer.passes.pass_over = counted
        rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
        trainer.logprobs_of(rows)
        params, _ = trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
        gradients.append(torch.cat([p.grad.flatten() for p in params]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)
    with_gradient, scored = ([size for size in sizes[64] if size[0] is kept] for kept in (True, False))
    assert all(n_tokens <= 64 or n_rows == 1 for _, n_tokens, n_rows in with_gradient)
    assert max(n_tokens for _, n_tokens, _ in scored) > 512, "micro-batches that keep no activations need not be cut"


# ---- old log-probs


@pytest.mark.parametrize(
    ("policy", "num_iterations", "n_scored"),
    [("ip", 1, 32), ("sp", 1, 48), ("ip", 2, 64)],
    ids=["one step of each adapter needs none", "one step of the only adapter needs none", "a second pass needs all"],
)
def test_old_log_probs_are_scored_only_for_later_steps(
    make_library_trainer, monkeypatch, policy, num_iterations, n_scored
):
    """16 episodes of three voters and an aggregator, trained in steps of 16 rows, make 3 + 1 steps under IP and 4 under SP."""
    trainer = make_library_trainer(
        Voting(), policy=policy, old_logprobs="recomputed", num_iterations=num_iterations, learning_rate=0.0
    )
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    scored: list = []
    plain = trainer.logprobs_of
    monkeypatch.setattr(trainer, "logprobs_of", lambda rows: scored.extend(rows) or plain(rows))
    steps_taken, _ = trainer.update(trainer.model, rows)
    assert len(scored) == n_scored and len(steps_taken) == 4 * num_iterations
    first_steps = {
        id(row) for steps in plan_steps(rows, trainer.adapters, trainer.args).values() for row in steps[0][0]
    }
    assert (num_iterations == 2) or not first_steps & {id(row) for row in scored}
    assert [row.old_logps is None for row in rows].count(True) == 64 - n_scored


def test_every_row_is_either_scored_or_in_a_first_step(make_library_trainer):
    trainer = make_library_trainer(Voting(), policy="ip")
    steps = plan_steps(rows_of(trainer, episodes_of(trainer.workflow.roles)), trainer.adapters, trainer.args)
    assert {name: len(planned) for name, planned in steps.items()} == {"generator": 3, "aggregator": 1}
    expected = [id(row) for mini_batch, _ in steps["generator"][1:] for row in mini_batch]
    assert [id(row) for row in later_rows(steps, 1)] == expected


@pytest.mark.parametrize(
    ("options", "n_scored"),
    [({}, 64), ({"role_order": ["aggregator"]}, 16), ({"mask_truncated_completions": True}, 48)],
    ids=["all", "one role in turn", "no truncated ones"],
)
def test_the_reference_scores_only_rows_that_are_trained(make_library_trainer, monkeypatch, options, n_scored):
    """16 episodes of three voters and an aggregator, whose replies are cut off."""
    trainer = make_library_trainer(
        Voting(), policy="ip", beta=0.1, old_logprobs="recomputed", num_iterations=2, **options
    )
    episodes = episodes_of(trainer.workflow.roles)
    for turn in [turn for episode in episodes for turn in episode.turns if turn.role == "aggregator"]:
        turn.finish_reason = "length"
    scored: list = []
    plain = trainer.logprobs_of
    monkeypatch.setattr(trainer, "logprobs_of", lambda rows, base=False: scored.append(len(rows)) or plain(rows, base))
    rows = trainer.prepare_rows(episodes)
    assert len(rows) == 64 and scored == [n_scored]
    trainer.update(trainer.model, rows)
    assert scored == [n_scored, n_scored]  # and their old log-probs


# ---- casts


@pytest.mark.parametrize(("bf16", "are_on"), [(True, False), (False, True)])
def test_lora_inputs_are_not_cast_to_float32_and_back_under_autocast(tokenizer, tmp_path, bf16, are_on):
    trainer = library_trainer(Voting(), tokenizer, tmp_path, bf16=bf16)
    layers = [module for module in trainer.peft_model.modules() if isinstance(module, LoraLayer)]
    micro = MicroBatch(rows_of(trainer, episodes_of(trainer.workflow.roles)), 1.0, None)
    with trainer.passes.pass_over(micro, keeps_activations=True):
        assert layers and {layer.cast_input_dtype_enabled for layer in layers} == {are_on}
    assert {layer.cast_input_dtype_enabled for layer in layers} == {True}


def test_the_casts_change_no_bit_under_autocast(tokenizer):
    """Autocast rounds the cast input to bfloat16 again, so that log-probs and gradients without the casts are the same."""
    results = []
    for is_cast in (True, False):
        model = build_model(tokenizer, {"x": "a"}).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = is_cast
        with torch.autocast("cpu", torch.bfloat16):
            logps = model(torch.arange(48)[None]).logits.float().log_softmax(-1)
        logps[0, :, 7].sum().backward()
        grads = [parameter.grad for name, parameter in model.named_parameters() if "lora_" in name]
        results.append([logps, *grads])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
