"""Keys and values of earlier turns are reused under the same adapter and version alone, and change no log-prob."""

import random

import pytest
import torch
from engine_checks import POLICY, TOLERANCE, change_adapters, max_error, run_all

from multirole.engines.protocol import Request
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.prefix_cache import BLOCK, PrefixCache

BYTES = 1 << 22


def conversations(engine: TransformersEngine, adapters: list[str | None], n_turns: int = 3) -> tuple[list, list]:
    """Return (requests, completions) of conversations that continue from each reply: three episodes of four problems per adapter."""
    rng = random.Random(0)
    questions = [[7] * 20 + [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))] for _ in range(4)]
    prompts = [(question, adapter) for adapter in adapters for question in questions for _ in range(3)]
    asked, answered = [], []
    for turn in range(n_turns):
        requests = [Request(ids, adapter, 100 * turn + i, 4 + i % 23, 1.0) for i, (ids, adapter) in enumerate(prompts)]
        done = run_all(engine, requests)
        asked += requests
        answered += done
        prompts = [
            (
                request.prompt_ids + reply.token_ids + [rng.randrange(3, 200) for _ in range(rng.randint(1, 20))],
                request.adapter,
            )
            for request, reply in zip(requests, done, strict=True)
        ]
    return asked, answered


def computed_tokens(engine: TransformersEngine, monkeypatch) -> list[int]:
    """Return a list that is filled with the number of tokens of every prefill."""
    counts, prefill = [], engine._prefill_spans
    monkeypatch.setattr(
        engine, "_prefill_spans", lambda kv, adapter, spans: (counts.append(sum(s.n_new for s in spans)), prefill(kv, adapter, spans))
    )  # fmt: skip
    return counts


@pytest.mark.parametrize("max_rows", [pytest.param(384, marks=pytest.mark.slow), 5])
def test_logprobs_are_those_without_reuse(make_model, tokenizer, monkeypatch, max_rows):
    model = make_model(POLICY)
    plain = TransformersEngine(tokenizer.eos_token_id, prefix_bytes=0)
    engine = TransformersEngine(tokenizer.eos_token_id, prefix_bytes=BYTES, max_rows=max_rows)
    for tried in (plain, engine):
        tried.publish(model, 0)
    counts = computed_tokens(engine, monkeypatch)
    asked, answered = conversations(engine, [None, "generator", "aggregator"])
    assert [c.token_ids for c in answered] == [
        c.token_ids for c in conversations(plain, [None, "generator", "aggregator"])[1]
    ]
    assert max_error(model, asked, answered) <= TOLERANCE
    distinct = {(request.adapter, tuple(request.prompt_ids)) for request in asked}
    assert sum(counts) < 0.6 * sum(len(ids) - 1 for _, ids in distinct), (
        "conversations are mostly what was computed before"
    )


def test_a_common_prefix_is_stored_from_the_row_that_computed_it(make_model, tokenizer):
    """Another row has slot 0 of the pool meanwhile."""
    model, head = make_model(POLICY), [5 + i % 50 for i in range(200)]
    engine = TransformersEngine(tokenizer.eos_token_id, prefix_bytes=BYTES)
    engine.publish(model, 0)
    engine.add(-1, Request([9] * 150, "generator", 1, 40, 1.0))
    engine.step()
    for first in (10, 20):
        requests = [Request([*head, i, i + 1], "generator", i, 4, 1.0) for i in range(first, first + 3)]
        assert max_error(model, requests, run_all(engine, requests)) <= TOLERANCE
    assert -1 in engine.running and len(engine.pools) == 1


def test_nothing_is_reused_across_versions_and_adapters(make_model, tokenizer, monkeypatch):
    model = make_model(POLICY)
    engine = TransformersEngine(tokenizer.eos_token_id, prefix_bytes=BYTES)
    counts = computed_tokens(engine, monkeypatch)
    prompt = [5 + i % 50 for i in range(80)]
    requests = [Request(prompt, adapter, 0, 6, 1.0) for adapter in (None, "generator", "aggregator")]
    for version in range(2):
        engine.publish(model, version)
        for request in requests:
            counts.clear()
            done = run_all(engine, [request])
            assert sum(counts) == len(prompt) - 1, "neither an adapter nor a version finds another's"
            assert max_error(model, [request], done) <= TOLERANCE
            counts.clear()
            assert max_error(model, [request], run_all(engine, [request])) <= TOLERANCE
            assert sum(counts) == (len(prompt) - 1) % BLOCK, "the same again: all whole blocks are found"
        change_adapters(model, version)


def test_sleep_empties_the_cache(make_model, tokenizer):
    engine = TransformersEngine(tokenizer.eos_token_id, prefix_bytes=BYTES)
    engine.publish(make_model(POLICY), 0)
    run_all(engine, [Request(list(range(3, 60)), None, 0, 3, 1.0)])
    assert engine.prefixes.blocks
    engine.sleep()
    assert engine.prefixes is None


def test_small_models_have_no_prefix_cache(make_model, tokenizer):
    engine = TransformersEngine(tokenizer.eos_token_id)
    engine.publish(make_model(POLICY), 0)
    assert engine.prefixes is None


def kv_of(ids: list[int], empty: torch.Tensor):
    """Return distinguishable keys and values: those of a token are the sum of the tokens up to it."""
    sums = torch.tensor(ids).cumsum(0).float()
    whole = sums[:, None].expand(empty.shape[0], 2, empty.shape[3], -1, empty.shape[5])
    return lambda start, stop: whole[:, :, :, start:stop]


def test_a_full_cache_evicts_the_least_recently_used():
    """Every entry found was computed for exactly these tokens, even after slots were reused many times."""
    empty = torch.zeros(2, 2, 0, 1, 0, 4)
    block_bytes = 2 * 2 * 1 * BLOCK * 4 * 4
    cache = PrefixCache(empty, 12 * block_bytes)
    rng = random.Random(0)
    stored = []
    for _ in range(400):
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 6 * BLOCK))]
        if stored and rng.random() < 0.6:
            ids = rng.choice(stored)[: rng.randint(1, 60)] + ids
        stored.append(ids)
        adapter = rng.randrange(2)
        slots = cache.find(adapter, ids)
        n = len(slots) * BLOCK
        assert n <= len(ids)
        if slots:
            assert torch.equal(cache.read(slots), kv_of(ids, empty)(0, n))
        cache.write(adapter, ids, kv_of(ids, empty))
        assert len(cache.blocks) <= 12 and len({slot for _, slot in cache.blocks.values()}) == len(cache.blocks)
    latest = stored[-1][: 12 * BLOCK]
    assert len(cache.find(adapter, latest)) == len(latest) // BLOCK
