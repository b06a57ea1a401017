"""The CPU default: a functional Qwen3 or Llama with a static KV cache, serving several merged adapters in one running batch.

Where the speed comes from, against `model.generate` on the same rows: no cache is ever concatenated or repeated per head,
norm weights are folded into the projections and q/k/v and gate/up are one product each, finished rows leave at once, and
identical prompts are computed, stored and read once (`kv_cache`). `benchmarks/bench_engine.py` measures it.

A row's tokens depend on its request alone, up to float rounding: products of another batch size may differ in the last
bit (1e-7), which changes a token only when its uniform falls that close to a boundary. The same calls in the same order
are bit-identical. Not covered: other models, biases, sliding windows, RoPE that depends on the length, DoRA.
"""

from collections import Counter, defaultdict, deque

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor

from multirole.core.engine import Completion, Request
from multirole.core.hooks import Trainer
from multirole.engines import check_idle, check_request
from multirole.engines.kv_cache import Pool
from multirole.engines.qwen3 import Served, Span, Weights, check_supported, forward, merge_adapters, rope_table
from multirole.engines.sampling import sample, signed, uniform

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill batch: bounds its memory, and is large enough for full matrix-product speed."""
SHORTEST_POOL = 64
"""Prompts of up to 64 tokens share a pool, then up to 128, 256 and so on."""
ADMIT_EVERY = 4
"""Steps between admissions while rows run: prompts prefilled together cost little more than one."""
SHARED_ROWS, SHARED_TOKENS = 4, 16
"""A prompt goes to a shared pool when it arrives in at least this many rows and has at least this many tokens."""

Item = tuple[int, int, Request]
"""(caller's key, group id, request); requests of equal adapter and prompt have equal group ids."""
PoolKind = tuple[int, int]
"""(class of prompt length, class of group size; 0 for pools that share nothing)."""


class TransformersEngine:
    """`multirole.core.engine.Engine` on the weights of a live `transformers` Qwen3 or Llama, with or without PEFT adapters.

    `publish` copies merged float32 weights, so the live model is never modified and may train between steps.
    `max_rows` is the number of requests running at once; `max_length` the limit of prompt + max_tokens, in tokens. A completion
    ends with any of `eos_ids`.
    """

    def __init__(self, *eos_ids: int, max_rows: int = 384, max_length: int = 1024) -> None:
        self.eos_ids, self.max_rows, self.max_length = torch.tensor(eos_ids), max_rows, max_length
        self.waiting: deque[Item] = deque()
        self.groups: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.pools: dict[PoolKind, Pool] = {}
        self.weights: dict[str | None, Weights] = {}
        self.clock = 0

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> "TransformersEngine":
        """The engine of a trainer."""
        args = trainer.args
        check_supported(trainer.peft_model)
        return cls(*trainer.eos_token_ids, max_length=args.max_prompt_tokens + args.max_completion_length)

    @torch.no_grad()  # not inference_mode: sharded weights (FSDP2) cannot be gathered in it
    def publish(self, model: PeftModel | Served, version: int) -> None:
        """Take `model`'s present weights. Nothing is cached between requests, so nothing can be stale."""
        check_idle(f"publish(version={version})", len(self.waiting) + self.n_running)
        self.weights = merge_adapters(model)
        self.names = list(self.weights)
        c = model.config
        embed = self.weights[None].embed
        self.empty_kv = embed.new_zeros(c.num_hidden_layers, 2, 0, c.num_key_value_heads, 0, c.head_dim)
        self.eos_ids = self.eos_ids.to(embed.device)
        self.eps = c.rms_norm_eps
        self.rope = rope_table(model, self.max_length)
        self.pools.clear()

    @property
    def n_running(self) -> int:
        return sum(pool.n for pool in self.pools.values())

    def add(self, key: int, request: Request) -> None:
        """Queue one request under the caller's own `key`."""
        check_request(request, self.weights, self.max_length)
        prompt = (request.adapter, tuple(request.prompt_ids))
        self.waiting.append((key, self.groups.setdefault(prompt, len(self.groups)), request))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Admit what fits, advance every running row by one token, return the rows that finished."""
        if self.clock % ADMIT_EVERY == 0 or not self.n_running:
            self._admit()
        self.clock += 1
        pools = [pool for pool in self.pools.values() if pool.n]
        if not pools:
            return []
        self._decode(pools)
        done = [item for pool in pools for item in self._collect(pool)]
        if not self.waiting and not self.n_running:
            self.groups.clear()
            self.clock = 0  # the next rollout is scheduled as if it were the first
        return done

    def sleep(self) -> None:
        """Free the merged weights and the caches; `publish` makes them again."""
        check_idle("sleep()", len(self.waiting) + self.n_running)
        self.close()

    def close(self) -> None:
        """Free weights and caches; idempotent."""
        self.waiting.clear()
        self.pools.clear()
        self.weights.clear()

    def _admit(self) -> None:
        """Fill free slots in order of arrival, pool by pool and adapter by adapter."""
        n = min(len(self.waiting), self.max_rows - self.n_running)
        items = [self.waiting.popleft() for _ in range(n)]
        if not items:
            return
        sizes = Counter(group for _, group, _ in items)
        home = {group: kind for kind, pool in self.pools.items() for group in pool.group[: pool.n].tolist()}
        batches: dict[tuple[PoolKind, int], list[Item]] = defaultdict(list)
        for item in items:
            _, group, request = item
            kind = home.get(group) or _pool_kind(len(request.prompt_ids), sizes[group])
            batches[kind, self.names.index(request.adapter)].append(item)
        for (kind, adapter), batch in batches.items():
            if kind not in self.pools:
                self.pools[kind] = Pool(self.empty_kv, is_shared=kind[1] > 0)
            self._admit_batch(self.pools[kind], adapter, batch)

    def _admit_batch(self, pool: Pool, adapter: int, items: list[Item]) -> None:
        """Place `items` in the pool's next slots; prompts that no running row holds are computed, once each.

        The last prompt token is left out: it is the first input of decoding, so that one place computes logits.
        """
        running = {group: slot for slot, group in enumerate(pool.group[: pool.n].tolist())}
        prompts = {group: request.prompt_ids[:-1] for _, group, request in items}
        start, stop = pool.n, pool.n + len(items)
        own = [request.max_tokens + (0 if pool.is_shared else len(request.prompt_ids)) for _, _, request in items]
        pool.reserve(stop, max(own))
        if pool.is_shared:
            homes = {
                group: int(pool.home[running[group]]) if group in running else pool.add_prompt(len(ids))
                for group, ids in prompts.items()
            }
        targets: dict[int, list[int]] = defaultdict(list)
        rows = []
        for slot, (key, group, r) in enumerate(items, start):
            cached = len(r.prompt_ids) - 1
            row = (key, group, adapter, signed(r.seed), r.max_tokens, r.prompt_ids[-1], cached, 0)
            rows.append((*row, cached, homes[group]) if pool.is_shared else (*row, 0, 0))
            targets[group].append(slot)
        pool.state[start:stop] = torch.tensor(rows)
        pool.temperature[start:stop] = torch.tensor([r.temperature for _, _, r in items])
        pool.n, pool.is_placed = stop, False
        for group in prompts.keys() & running.keys():
            length, slot = len(prompts.pop(group)), running[group]
            if not pool.is_shared:
                pool.kv[:, :, targets[group], :, :length] = pool.kv[:, :, slot : slot + 1, :, :length]
        if pool.is_shared:
            targets = {group: [homes[group]] for group in prompts}
        todo = sorted((len(ids), group) for group, ids in prompts.items() if ids)
        while todo:
            longest = todo[-1][0]
            batch = [group for _, group in todo[-max(1, PREFILL_TOKENS // longest) :]]
            del todo[-len(batch) :]
            kv = pool.prompt_kv if pool.is_shared else pool.kv
            self._prefill(kv, adapter, [(prompts[group], targets[group]) for group in batch], longest)

    def _prefill(self, kv: Tensor, adapter: int, batch: list[tuple[list[int], list[int]]], longest: int) -> None:
        """Compute the KV of B prompts, right-padded to T = `longest` (causal, so unmasked), and copy it to slots of `kv`.

        Padding is overwritten or masked later: a row only ever attends to positions that were written for it.
        """
        shape = (len(batch), longest)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch], device=kv.device)  # (B, T)
        positions = torch.arange(longest, device=kv.device).repeat(len(batch))  # (B * T,)
        slots = torch.tensor([slot for _, slots in batch for slot in slots], device=kv.device)
        source = torch.tensor([i for i, (_, slots) in enumerate(batch) for _ in slots], device=kv.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))  # (B, heads or n_kv, T, d)
            kv[layer, 0, slots, :, :longest] = k[source]
            kv[layer, 1, slots, :, :longest] = v[source]
            if layer == len(kv) - 1:
                return None
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2).reshape(shape[0] * shape[1], -1)  # (B * T, heads * d)

        spans = [Span(self.weights[self.names[adapter]], 0, tokens.numel())]
        forward(tokens.flatten(), positions, spans, self.rope, self.eps, attend)

    def _decode(self, pools: list[Pool]) -> None:
        """One token for every row of every pool. Inside, rows are sorted by adapter; attention works in slot order."""
        state = torch.cat([pool.state[: pool.n] for pool in pools])  # (N, 10)
        temperature = torch.cat([pool.temperature[: pool.n] for pool in pools])  # (N,)
        for pool in pools:
            pool.start_step()
        order = state[:, 2].argsort(stable=True)  # (N,) slots in adapter order
        back = order.argsort()
        sizes = state[:, 2].bincount(minlength=len(self.names)).tolist()
        several = max(sizes) < len(order)
        counts = [pool.n for pool in pools]
        spans, start = [], 0
        for name, size in zip(self.names, sizes, strict=True):
            if size:
                spans.append(Span(self.weights[name], start, start + size))
                start += size

        def attend(layer: int, *qkv: Tensor) -> Tensor:
            by_pool = zip(*((x[back] if several else x).split(counts) for x in qkv), strict=True)
            outs = [pool.attend(layer, q, k, v) for pool, (q, k, v) in zip(pools, by_pool, strict=True)]
            out = outs[0] if len(outs) == 1 else torch.cat(outs)  # (N, heads * d)
            return out[order] if several else out

        tokens, positions = state[order, 5], state[order, 6]
        hidden = forward(tokens, positions, spans, self.rope, self.eps, attend)
        logits = F.linear(hidden[back] if several else hidden, self.weights[None].head)  # (N, V)
        tokens, logprobs = sample(logits, temperature, uniform(state[:, 3], state[:, 7]))
        for pool, new, logprob in zip(pools, tokens.split(counts), logprobs.split(counts), strict=True):
            n = pool.n
            slots = torch.arange(n, device=new.device)
            pool.ids[slots, pool.count[:n]] = new
            pool.logprobs[slots, pool.count[:n]] = logprob
            pool.token[:n] = new
            pool.position[:n] += 1
            pool.count[:n] += 1

    def _collect(self, pool: Pool) -> list[tuple[int, Completion]]:
        """Take finished rows out of the pool."""
        stopped = (pool.token[: pool.n, None] == self.eos_ids).any(1)
        finished = (stopped | (pool.count[: pool.n] >= pool.limit[: pool.n])).nonzero()[:, 0].tolist()
        done = []
        for slot in finished:
            key, count = int(pool.key[slot]), int(pool.count[slot])
            reason = "stop" if stopped[slot] else "length"
            ids, logprobs = pool.ids[slot, :count].tolist(), pool.logprobs[slot, :count].tolist()
            done.append((key, Completion(ids, logprobs, reason)))
        if finished:
            pool.drop(finished)
        return done


def _pool_kind(prompt_length: int, n_rows: int) -> PoolKind:
    """The pool for `n_rows` rows of one prompt; classes are powers of two."""
    shared = n_rows >= SHARED_ROWS and prompt_length >= SHARED_TOKENS
    return ((prompt_length - 1) // SHORTEST_POOL).bit_length(), n_rows.bit_length() if shared else 0
