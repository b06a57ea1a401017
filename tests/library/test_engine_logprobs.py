"""The adapter that samples is the adapter that trains: engine log-probs are HF + PEFT's, before and after every publish."""

import pytest
import torch
from engine_checks import POLICY, TOLERANCE, change_adapters, make_requests, max_error, run_all
from transformers import GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from multirole.engines.protocol import Request
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.qwen3 import Span, forward, make_weights, rope_table


def test_logprobs_match_before_and_after_every_publish(make_model, tokenizer):
    model = make_model(POLICY)
    engine = TransformersEngine(tokenizer.eos_token_id, max_rows=24)
    requests = make_requests(40, len(tokenizer))
    texts = []
    for version in range(3):
        engine.publish(model, version)
        done = run_all(engine, requests)
        assert max_error(model, requests, done) <= TOLERANCE
        texts.append([completion.token_ids for completion in done])
        change_adapters(model, version)
    assert texts[0] != texts[1] != texts[2]


def test_live_training_does_not_reach_the_engine_before_publish(make_model, tokenizer):
    model = make_model(POLICY)
    engine = TransformersEngine(tokenizer.eos_token_id)
    engine.publish(model, 0)
    requests = make_requests(10, len(tokenizer))
    before = run_all(engine, requests)
    for parameter in model.parameters():
        parameter.data += 0.1
    assert run_all(engine, requests) == before


def test_publish_leaves_the_model_untouched(make_model, tokenizer):
    model = make_model(POLICY)
    model.set_adapter("aggregator")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    TransformersEngine(tokenizer.eos_token_id).publish(model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("heads", "n_kv", "tied"), [(3, 1, True), (4, 2, False), (2, 2, True)])
def test_forward_is_transformers_forward(heads, n_kv, tied):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=101, hidden_size=96, intermediate_size=160, num_hidden_layers=3, head_dim=32, rms_norm_eps=1e-6,
        num_attention_heads=heads, num_key_value_heads=n_kv, tie_word_embeddings=tied, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)  # non-trivial norms: their folding is under test
        else:
            parameter.data *= 4
    ids = torch.randint(101, (200,))
    weights = make_weights(model, torch.float32)[None]

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, heads or n_kv, T, d)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)  # (T, heads * d)

    with torch.no_grad():
        hidden = forward(ids, torch.arange(200), [Span(weights, 0, 200)], rope_table(model, 256), 1e-6, attend)
        logits = model(ids[None]).logits[0]
        assert (weights.head.logits(hidden, torch.empty_like(logits)) - logits).abs().max() <= TOLERANCE
        assert logits.std() > 0.5


@pytest.mark.parametrize(("heads", "n_kv"), [(3, 1), (4, 2)])
def test_logprobs_match_for_shared_prompts_of_uneven_groups(heads, n_kv):
    """Prompts shared by 1 to 9 rows that finish at different times and leave room for others; a plain model, base only."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=heads, num_key_value_heads=n_kv, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    engine = TransformersEngine(0, max_rows=20)
    engine.publish(model, 0)
    requests = [
        Request(list(range(1, 12 + 9 * size)), None, 100 * size + i, 1 + (7 * i) % 31, 1.0)
        for size in (1, 4, 5, 6, 7, 9)
        for i in range(size)
    ]
    done = run_all(engine, requests)
    for request, completion in zip(requests, done, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(completion.logprobs)).abs().max() <= TOLERANCE
    for request, completion in list(zip(requests, done, strict=True))[::5]:
        assert run_all(engine, [request])[0].token_ids == completion.token_ids


def test_other_models_are_refused(make_model):
    engine = TransformersEngine(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="GemmaForCausalLM.*engine='generate'.*engine='vllm'"):
        engine.publish(GemmaForCausalLM(GemmaConfig(**small, head_dim=8, vocab_size=8)), 0)
    model = make_model(POLICY)
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        engine.publish(model, 0)
