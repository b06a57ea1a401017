"""The engine "generate" samples any decoder with any adapter: its log-probs are the model's own, recomputed without a cache."""

import logging
import random

import pytest
import torch
from datasets import Dataset
from decoders import FAMILIES, decoder
from engine_checks import POLICY, TOLERANCE, make_requests, max_error, run_all
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_qwen3 import toy_model
from trainers import SUMS, slow_but
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, Phi3Config, Phi3ForCausalLM

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Voting
from multirole.engines.context import Context, check_rope
from multirole.engines.generate import GenerateEngine, computing, scored
from multirole.engines.protocol import Request, RequestRefused
from multirole_cpu.engine import TransformersEngine

VOCAB, EOS = 97, 1
LENGTHS = (1, 3, 9, 17, 20, 20, 33)  # of prompts, around the families' window of 8
QUICK = (
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "lfm2",
    "bamba",
    "recurrent_gemma",
)
ROUGH = {"gpt_neo": 5e-5, "granite": 5e-5, "qwen3_next": 5e-5}
"""Families with larger rounding errors: unscaled attention, or a chunked recurrence."""
WITH_MOE_LOSS = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "jamba")
WITH_MAMBA = {"falcon_h1": ["q_proj", "gate_proj"], "mamba": ["in_proj", "x_proj"], "mamba2": ["in_proj"]}
"""LoRA's target modules of families for which PEFT refuses "all-linear"."""
ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_alpha": 2},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved norm": {"modules_to_save": ["norm"]},
    "lora bias": {"lora_bias": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2}},
}


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_a_cache_changes_nothing(family):
    model = decoder(family, VOCAB, EOS).eval()
    engine = GenerateEngine(EOS)
    engine.publish(model, 0)
    requests = [Request(list(range(2, 2 + n)), None, seed, 12, 1.0) for seed, n in enumerate(LENGTHS)]
    for request, done in zip(requests, run_all(engine, requests), strict=True):
        ids = torch.tensor([request.prompt_ids + done.token_ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]  # (T, V)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=ROUGH.get(family, TOLERANCE), rtol=0)


def test_a_model_that_samples_by_itself_is_scored(monkeypatch, caplog):
    """An example is a model with custom code on the Hub whose `generate` ignores logits processors."""
    model = decoder("qwen2", VOCAB, EOS).eval()
    replies = torch.tensor([[5, 6, 7, 8], [9, EOS, 0, 0]])
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat([input_ids, replies], 1))
    engine = GenerateEngine(EOS)
    engine.publish(model, 0)
    requests = [Request([2, 3, 4], None, 0, 4, 0.7), Request([2], None, 1, 4, 0.7)]
    for _ in range(2):
        done = run_all(engine, requests)
        assert [d.token_ids for d in done] == [[5, 6, 7, 8], [9, EOS]] and [d.finish_reason for d in done] == [
            "length",
            "stop",
        ]
        for request, completion in zip(requests, done, strict=True):
            ids = request.prompt_ids + completion.token_ids
            with torch.no_grad():
                logprobs = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
            n = len(request.prompt_ids)
            assert completion.logprobs == pytest.approx(
                [logprobs[n - 1 + i, ids[n + i]].item() for i in range(len(ids) - n)]
            )
    assert caplog.text.count("Qwen2ForCausalLM.generate` calls no logits processor") == 1


def test_a_model_that_samples_by_other_logprobs_than_it_computes_is_refused(tokenizer, tmp_path):
    base = decoder("rwkv", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(
        ValueError, match=r"`generate` of this RwkvForCausalLM samples tokens whose log-probs differ by \d"
    ):
        train(base, tokenizer, tmp_path, {"target_modules": ["key"]})


@pytest.mark.parametrize(("dimension", "mixed"), [(0, "other rows of its batch"), (1, "later tokens of its row")])
def test_a_model_that_mixes_rows_or_sees_later_tokens_is_refused(tokenizer, tmp_path, monkeypatch, dimension, mixed):
    """Doge's attention saw later tokens before transformers 5.24."""
    base = decoder("qwen2", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    embed = type(base.model.embed_tokens).forward

    def mixing(self, ids):
        embedded = embed(self, ids)  # (N, T, H)
        return embedded + embedded.mean(dimension, keepdim=True)

    monkeypatch.setattr(type(base.model.embed_tokens), "forward", mixing)
    with pytest.raises(ValueError, match=f"differ by .* with the {mixed}"):
        train(base, tokenizer, tmp_path, {})


class Gap(MultiRoleCallback):
    """The largest |trainer's log-prob - engine's| of each iteration's first optimizer step of every adapter."""

    def __init__(self):
        self.gaps = []

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        difference = (logps - batch["sampling_per_token_logps"]) * batch["completion_mask"]
        self.gaps.append(difference.abs().max().item())


def train(base, tokenizer, folder, lora, policy="ip", **options):
    """Train three iterations with one optimizer step per adapter; return the trainer and its `Gap`."""
    usual = {
        "generation_batch_size": 8, "num_generations": 4, "max_steps": 3, "max_completion_length": 12, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "updates": "one", "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False,
    }  # fmt: skip
    gap, config = Gap(), {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | lora
    trainer = MultiRoleGRPOTrainer(
        base, Voting(2, prompts=SUMS), lambda completions, **_: [float(len(text) % 3) for text in completions],
        MultiRoleGRPOConfig(str(folder), policy=policy, **usual | options), Dataset.from_dict({"prompt": ["1+1", "2+2+2"]}),
        processing_class=tokenizer, peft_config=LoraConfig(**config), callbacks=[gap],
    )  # fmt: skip
    start = {name: p.detach().clone() for name, p in trainer.peft_model.named_parameters() if p.requires_grad}
    trainer.train()
    now = dict(trainer.peft_model.named_parameters())
    assert max((now[name] - value).abs().max() for name, value in start.items()) > 1e-3
    return trainer, gap


@pytest.mark.parametrize("family", slow_but(("gemma2",), [name for name in FAMILIES if name != "recurrent_gemma"]))
def test_the_adapter_that_samples_is_the_one_that_trains(family, tokenizer, tmp_path):
    base = decoder(family, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    options = {"router_aux_loss_coef": 0.0} if family in WITH_MOE_LOSS else {}
    lora = {"target_modules": WITH_MAMBA[family]} if family in WITH_MAMBA else {}
    trainer, gap = train(base, tokenizer, tmp_path, lora, engine="generate", **options)
    assert isinstance(trainer.engine, GenerateEngine)
    assert max(gap.gaps) < (2e-4 if family in ROUGH else 3e-5)


def test_a_model_that_trls_head_does_not_score_is_refused(tokenizer, tmp_path):
    """TRL does not know the name of this model's cap (huggingface/trl's `add_fused_lm_head`)."""
    base = decoder("recurrent_gemma", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(ValueError, match="fused head does not compute the log-probs of a RecurrentGemmaForCausalLM"):
        train(base, tokenizer, tmp_path, {})


def test_lora_on_the_head_is_refused(tokenizer, tmp_path):
    """By TRL, whose fused head multiplies with the base's weight, so that such an adapter would get no gradient."""
    base = decoder("qwen2", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        train(base, tokenizer, tmp_path, {"target_modules": ["q_proj", "lm_head"]})


@pytest.mark.parametrize("kind", slow_but(("dora", "saved head"), ADAPTERS))
def test_adapters_of_every_kind_are_sampled_and_trained(kind, tokenizer, tmp_path):
    base = decoder("qwen2", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    _, gap = train(base, tokenizer, tmp_path, ADAPTERS[kind], engine="generate")
    assert max(gap.gaps) < 3e-5


def test_a_qwen3_with_plain_lora_has_the_fast_engine_and_with_dora_the_other(tokenizer, tmp_path):
    engines = []
    for lora in ({}, {"use_dora": True}):
        trainer, gap = train(toy_model(tokenizer, head_dim=16), tokenizer, tmp_path, lora, max_steps=1)
        engines.append(type(trainer.engine))
        assert max(gap.gaps) < 3e-5
    assert engines == [TransformersEngine, GenerateEngine]


def test_what_the_fast_engine_does_not_implement_is_refused_before_training(tokenizer, tmp_path):
    base = decoder("gemma2", len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(ValueError, match="it is a Gemma2ForCausalLM.*Use engine='generate'"):
        train(base, tokenizer, tmp_path, {}, engine="transformers")


def test_tokens_do_not_depend_on_the_batch_and_equal_the_fast_engines(make_model, tokenizer):
    model, requests = make_model(POLICY), make_requests(40, len(tokenizer))
    fast = TransformersEngine(tokenizer.eos_token_id)
    fast.publish(model, 0)
    expected = run_all(fast, requests)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    for max_rows in (3, 128):
        engine = GenerateEngine(tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, max_rows=max_rows)
        engine.publish(model, 0)
        done = run_all(engine, requests, order)
        assert [c.token_ids for c in done] == [c.token_ids for c in expected]
        assert [c.finish_reason for c in done] == [c.finish_reason for c in expected]
        assert max_error(model, requests, done) <= TOLERANCE


def test_the_models_own_sampling_defaults_are_not_used(make_model, tokenizer):
    """Instruction-tuned models have such defaults in generation_config.json."""
    model, requests = make_model(POLICY), make_requests(12, len(tokenizer))
    engine = GenerateEngine(tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    engine.publish(model, 0)
    expected = run_all(engine, requests)
    defaults = model.get_base_model().generation_config
    defaults.update(repetition_penalty=3.0, top_k=2, do_sample=True, temperature=0.1, no_repeat_ngram_size=1)
    assert run_all(engine, requests) == expected
    assert model.get_base_model().generation_config is defaults


def test_the_live_model_is_left_as_it_was(make_model, tokenizer):
    model = make_model(POLICY).train()
    model.set_adapter("aggregator")
    model.base_model.model.model.layers[0].self_attn.eval()

    def state():
        flags = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
        return *flags, model.active_adapter, [p.detach().clone() for p in model.parameters()]

    before = state()
    engine = GenerateEngine(tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    engine.publish(model, 0)
    run_all(engine, make_requests(9, len(tokenizer)))
    after = state()
    assert after[:3] == before[:3]
    assert all(torch.equal(*pair) for pair in zip(before[3], after[3], strict=True))
    with pytest.raises(RuntimeError, match="broken"), computing(model, None):
        raise RuntimeError("broken")
    assert state()[:3] == before[:3]


def test_rows_end_at_their_own_limits_and_ends(make_model, tokenizer):
    model = make_model(POLICY)
    requests = [Request([3 + i, 4, 5], "generator", i, cap, 1.0) for i, cap in enumerate((1, 2, 30, 7))]
    engine = GenerateEngine(tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    engine.publish(model, 0)
    replies = run_all(engine, requests)
    ends = (tokenizer.eos_token_id, replies[2].token_ids[4])
    engine = GenerateEngine(*ends, pad_id=tokenizer.pad_token_id)
    engine.publish(model, 0)
    for request, before, done in zip(requests, replies, run_all(engine, requests), strict=True):
        assert len(done.token_ids) == len(done.logprobs) <= request.max_tokens
        assert done.token_ids == before.token_ids[: len(done.token_ids)]
        assert (done.finish_reason == "stop") == (done.token_ids[-1] in ends)
        assert not set(ends) & set(done.token_ids[:-1])


def test_the_protocol_is_kept(make_model):
    engine = GenerateEngine(EOS)
    assert engine.step() == []
    with pytest.raises(ValueError, match="has not been published"):
        engine.add(0, Request([1], None, 0, 1, 1.0))
    engine.publish(make_model(POLICY), 0)
    with pytest.raises(ValueError, match="adapter 'critic' has not been published.*generator"):
        engine.add(0, Request([1], "critic", 0, 1, 1.0))
    with pytest.raises(ValueError, match="got 1 and 9999"):
        engine.add(0, Request([1], None, 0, 9999, 1.0))
    engine.add(0, Request([3, 4], None, 0, 5, 1.0))
    for busy in (lambda: engine.publish(make_model(POLICY), 1), engine.sleep):
        with pytest.raises(RuntimeError, match="unfinished"):
            busy()
    engine.step()
    engine.sleep()
    engine.close()
    engine.close()


@pytest.mark.parametrize("engine", [TransformersEngine, GenerateEngine])
def test_every_token_that_ends_a_reply_and_the_trainers_precision_reach_the_engine(make_library_trainer, engine):
    trainer = make_library_trainer(Voting(), max_prompt_tokens=100, max_completion_length=50)
    trainer.eos_token_ids = [3, 4]
    made = engine.from_trainer(trainer)
    assert list(made.eos_ids) == [3, 4] and made.max_length == 150
    if engine is GenerateEngine:
        assert made.autocast == trainer.accelerator.autocast and made.pad_id == trainer._tokenizer.pad_token_id


def test_an_unknown_engine_is_refused_before_anything_is_loaded(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"`engine` must be 'auto', one of \['generate', .*got 'sglang'"):
        train("no/such/model", tokenizer, tmp_path, {}, engine="sglang")


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements that any operation's input or output has, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves((args, kwargs, result)):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen2", {}), ("gemma2", {}), ("phi3", {}), ("qwen2", {"target_modules": ["q_proj", "lm_head"]})],
)
def test_the_head_is_not_copied_for_each_row(family, lora):
    """In bfloat16 on a CPU, a frozen head is expanded over the rows of a slice of hidden states.

    At a vocabulary of 151,936, a batch of 96 rows of a model of 0.5B asked for 26 GB.
    """
    vocab, n_rows = 151_936, 16
    model = decoder(family, vocab, EOS).eval().requires_grad_(False).to(torch.bfloat16)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **lora), "a")
    engine = GenerateEngine(EOS)
    engine.publish(model, 0)
    requests = [Request([2 + seed, 3, 4, 5], "a" if lora else None, seed, 3, 1.0) for seed in range(n_rows)]
    with Largest() as largest:
        run_all(engine, requests)
    head = model.get_output_embeddings().weight.numel()
    assert largest.numel <= max(head, n_rows * vocab) + vocab


@pytest.mark.parametrize("largest", [4, 0])
def test_a_batch_that_does_not_fit_runs_in_smaller_ones(monkeypatch, caplog, largest):
    model = decoder("qwen2", VOCAB, EOS).eval()
    requests = [Request(list(range(2, 2 + n)), None, seed, 12, 1.0) for seed, n in enumerate((5, 3, 9, 17, 20, 20, 33))]
    engine, whole = GenerateEngine(EOS), GenerateEngine(EOS)
    for each in (engine, whole):
        each.publish(model, 0)
    expected, generate = run_all(whole, requests), model.generate

    def limited(input_ids, **options):
        if len(input_ids) > largest:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
            )
        return generate(input_ids, **options)

    monkeypatch.setattr(model, "generate", limited)
    if not largest:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"single request .*can't allocate memory.*`max_prompt_tokens`"
        ):
            run_all(engine, requests)
        return
    assert [d.token_ids for d in run_all(engine, requests)] == [d.token_ids for d in expected]
    assert engine.max_rows == 3 and "From now on at most 3 run at once" in caplog.text


@pytest.mark.parametrize(
    ("family", "context"),
    [("gpt2", (512, True)), ("opt", (512, True)), ("gptj", (512, True)), ("qwen2", (32768, False)), ("bloom", None), ("mamba", None)],
)  # fmt: skip
def test_the_context_of_a_base_is_what_its_positions_allow(family, context):
    found = Context.of(decoder(family, VOCAB, EOS))
    assert (found and (found.tokens, found.is_learned)) == context


def test_requests_beyond_the_context_are_refused_or_warned_of_once(caplog):
    fits, beyond = (Request([2] * n, None, 0, 4, 1.0) for n in (12, 13))
    learned, rope = Context(16, is_learned=True), Context(16, is_learned=False)
    with caplog.at_level(logging.WARNING):
        for context in (learned, rope):
            context.check(fits)
        assert not caplog.text
        for _ in range(2):
            rope.check(beyond)
    assert caplog.text.count("replies may get worse") == 1
    with pytest.raises(
        RequestRefused, match="prompt of 13 tokens and a reply of up to 4 .* than the 16 tokens for which"
    ):
        learned.check(beyond)


def test_a_prompt_beyond_learned_positions_ends_training_with_a_sentence(tokenizer, tmp_path):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=None)
    with pytest.raises(RequestRefused, match="more than the 16 tokens for which this base has positions"):
        train(GPT2LMHeadModel(config), tokenizer, tmp_path, {}, engine="generate")


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 64, "factor": 8.0,
}  # fmt: skip


def test_positions_that_depend_on_the_batch_are_refused(tokenizer, tmp_path):
    """Phi-3's: in a batch with a row of more than 64 tokens, short rows have other positions than alone."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    config = Phi3Config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=512, original_max_position_embeddings=64,
        rope_parameters=LONGROPE, **sizes,
    )  # fmt: skip
    dynamic = LlamaConfig(
        **sizes, max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    )
    for each in (config, dynamic):
        check_rope(each, 64)
        with pytest.raises(ValueError, match="may have 65 tokens .* more than 64 this base computes other positions"):
            check_rope(each, 65)
    with pytest.raises(ValueError, match=r"rope_type='longrope'"):
        train(Phi3ForCausalLM(config), tokenizer, tmp_path, {})


def test_a_row_is_scored_from_the_logits_of_its_completion():
    model, seen = decoder("qwen2", VOCAB, EOS).eval(), []
    model.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits.shape[1]))
    assert len(scored(model, Request([2, 3, 4, 5], None, 0, 8, 1.0), [6, 7])) == 2 and seen == [3]
