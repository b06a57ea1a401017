"""Scheduling changes nothing: a request's tokens depend on the request and the published weights alone."""

import random
import threading
from dataclasses import replace

import pytest
import torch
from engine_checks import POLICY, make_requests, run_all

from multirole.engines import sampling
from multirole.engines.generate import GenerateEngine
from multirole.engines.protocol import Request
from multirole.engines.sampling import sample, uniform
from multirole_cpu import engine as transformers_engine
from multirole_cpu.engine import TransformersEngine


@pytest.fixture
def engine(make_model, tokenizer):
    engine = TransformersEngine(tokenizer.eos_token_id)
    engine.publish(make_model(POLICY), 0)
    return engine


def test_same_seeds_same_tokens_in_any_order_and_batch(make_model, tokenizer, engine):
    requests = make_requests(24, len(tokenizer))
    expected = run_all(engine, requests)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    for max_rows in (1, 5, 384):
        other = TransformersEngine(tokenizer.eos_token_id, max_rows=max_rows)
        other.publish(make_model(POLICY), 1)
        done = run_all(other, requests, order)
        assert [c.token_ids for c in done] == [c.token_ids for c in expected]
        assert [c.finish_reason for c in done] == [c.finish_reason for c in expected]
        for a, b in zip(done, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_same_calls_are_bit_identical(engine, tokenizer):
    requests = make_requests(40, len(tokenizer))
    assert run_all(engine, requests) == run_all(engine, requests)


def test_shared_prompts_change_nothing(engine, tokenizer, monkeypatch):
    prompt = make_requests(1, len(tokenizer), seed=5, max_prompt=150)[0].prompt_ids * 2
    requests = [Request(prompt, "generator", seed, 30, 1.0) for seed in range(12)]
    prefill, computed = engine._prefill, []
    monkeypatch.setattr(engine, "_prefill", lambda *batch: (computed.append(batch[2]), prefill(*batch)))
    together = run_all(engine, requests)
    (((ids, _),),) = computed
    assert ids == prompt[:-1]  # one prefill for all; the last token is decoded
    alone = [run_all(engine, [request])[0] for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) > 1

    engine.add(0, requests[0])  # the others arrive while the first is running, and share its prompt
    assert not engine.step()
    computed.clear()
    for key, request in enumerate(requests[1:], 1):
        engine.add(key, request)
    done = {}
    while len(done) < len(requests):
        done.update(engine.step())
    assert not computed
    assert [done[key].token_ids for key in range(len(requests))] == [c.token_ids for c in alone]


def test_rows_leave_when_they_finish(engine, tokenizer):
    for key, cap in enumerate((1, 2, 5, 2)):
        engine.add(key, Request([3 + key, 4, 5], "generator", key, cap, 1.0))
    finished, steps = set(), 0
    while len(finished) < 4:
        steps += 1
        for key, done in engine.step():
            assert len(done.token_ids) == len(done.logprobs) <= (1, 2, 5, 2)[key]
            assert (done.finish_reason == "stop") == (done.token_ids[-1] == tokenizer.eos_token_id)
            assert tokenizer.eos_token_id not in done.token_ids[:-1]
            assert steps == len(done.token_ids), "a row leaves in the step of its last token"
            finished.add(key)
    assert engine.step() == []


def test_a_completion_ends_with_any_end_of_sequence_token(make_model, tokenizer):
    """As in TRL, these are the tokenizer's and those of the model's generation config."""
    requests = make_requests(60, len(tokenizer))
    one = TransformersEngine(tokenizer.eos_token_id)
    one.publish(make_model(POLICY), 0)
    first_tokens = [c.token_ids[0] for c in run_all(one, requests) if len(c.token_ids) > 1]
    ends = (tokenizer.eos_token_id, max(set(first_tokens), key=first_tokens.count))
    engine = TransformersEngine(*ends)
    engine.publish(make_model(POLICY), 0)
    done = run_all(engine, requests)
    assert ends[1] in {d.token_ids[-1] for d in done if d.finish_reason == "stop"}
    assert not any(token in ends for d in done for token in d.token_ids[:-1])


def test_publish_while_running_is_refused(engine, make_model, tokenizer):
    engine.add(0, Request([3, 4], None, 0, 5, 1.0))
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.publish(make_model(POLICY), 1)
    engine.step()
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.publish(make_model(POLICY), 1)


def test_bad_requests_are_refused(engine):
    with pytest.raises(ValueError, match="adapter 'critic' has not been published.*generator"):
        engine.add(0, Request([1], "critic", 0, 1, 1.0))
    for request in (Request([], None, 0, 1, 1.0), Request([1], None, 0, 0, 1.0), Request([1], None, 0, 9999, 1.0)):
        with pytest.raises(ValueError, match=f"got {len(request.prompt_ids)} and {request.max_tokens}"):
            engine.add(0, request)


def test_another_thread_may_drive_the_engine(engine, tokenizer):
    requests = make_requests(10, len(tokenizer))
    expected, replies = run_all(engine, requests), []
    thread = threading.Thread(target=lambda: replies.extend(run_all(engine, requests)))
    thread.start()
    thread.join()
    assert replies == expected


def test_uniforms_are_uniform_and_differ_by_seed_and_position():
    seeds = torch.arange(-300, 300).repeat_interleave(100)
    u = uniform(seeds, torch.arange(100).repeat(600))
    assert 0 <= u.min() and u.max() < 1 and len(u.unique()) == len(u)
    assert u.mean() == pytest.approx(0.5, abs=0.005) and u.var() == pytest.approx(1 / 12, abs=0.002)
    by_seed = u.view(600, 100)
    assert torch.corrcoef(torch.stack([by_seed[:, :-1].flatten(), by_seed[:, 1:].flatten()]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([by_seed[:-1].flatten(), by_seed[1:].flatten()]))[0, 1].abs() < 0.02


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 40_000
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    tokens, logprobs = sample(logits.expand(n, -1), torch.full((n,), 0.7), u)
    expected = (logits / 0.7).softmax(0)
    assert torch.allclose(tokens.bincount(minlength=4) / n, expected, atol=0.01)
    assert torch.allclose(logprobs.exp(), expected[tokens])
    assert (sample(logits.expand(n, -1), torch.zeros(n), u)[0] == 2).all()


@pytest.mark.parametrize("n_tokens", [4096, 5000])
def test_a_large_vocabulary_is_searched_in_blocks_for_the_same_tokens(n_tokens):
    """Also where the last block is not full, and at temperature 0."""
    n = 400
    logits = 3 * torch.randn(n, n_tokens, generator=torch.Generator().manual_seed(0))
    u, temperature = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64)), torch.full((n,), 0.7)
    temperature[::4] = 0
    tokens, logprobs = sample(logits.clone(), temperature, u)
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    at_once, expected = sampling._sample_at_once(scaled, temperature == 0, u)
    assert torch.equal(tokens, at_once) and len(tokens.unique()) > 200
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_the_chunks_in_which_logits_are_computed_change_nothing(engine, tokenizer, monkeypatch):
    requests = make_requests(30, len(tokenizer))
    whole = run_all(engine, requests)
    monkeypatch.setattr(engine, "kernels", replace(engine.kernels, n_logits=7 * len(tokenizer)))
    monkeypatch.setattr(transformers_engine, "CACHED_LOGITS", 3 * len(tokenizer))
    assert [done.token_ids for done in run_all(engine, requests)] == [done.token_ids for done in whole]


@pytest.mark.parametrize("where", ["_decode", "_admit_batch", "_collect"])
def test_requests_that_run_out_of_memory_run_again_fewer_at_once(engine, tokenizer, monkeypatch, caplog, where):
    """Those that were finished in the same step, and not returned, included."""
    requests = make_requests(24, len(tokenizer), seed=1)
    expected, original, calls = run_all(engine, requests), getattr(TransformersEngine, where), []

    def fails(self, *args):
        calls.append(self.n_running)
        result = original(self, *args)
        if len(calls) in (2, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(TransformersEngine, where, fails)
    done = run_all(engine, requests)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert engine.max_rows <= 12 and "Memory did not suffice for 24 requests at once" in caplog.text
    assert not engine.running and not engine.waiting


def test_a_single_request_that_does_not_fit_ends_with_what_to_change(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "_decode", lambda *_: torch.empty(2**60))
    with pytest.raises(
        torch.OutOfMemoryError, match="for a single request of at most 1024 tokens .*`max_prompt_tokens`"
    ):
        run_all(engine, make_requests(3, len(tokenizer)))


@pytest.mark.parametrize(("kind", "where"), [(TransformersEngine, "_decode"), (GenerateEngine, "_generate")])
def test_after_an_error_an_engine_takes_adapters_and_requests(kind, where, make_model, tokenizer, monkeypatch):
    model, requests = make_model(POLICY), make_requests(4, len(tokenizer))
    engine = kind(tokenizer.eos_token_id)
    engine.publish(model, 0)
    expected = [done.token_ids for done in run_all(engine, requests)]
    with monkeypatch.context() as broken:
        broken.setattr(kind, where, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_all(engine, requests)
    engine.publish(model, 1)
    assert [done.token_ids for done in run_all(engine, requests)] == expected
