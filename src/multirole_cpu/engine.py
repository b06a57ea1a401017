"""Default engine on a CPU: a functional decoder (`families`) with a static KV cache and several adapters in one running batch.

Why it is faster than `model.generate` on the same rows: the cache is never concatenated or repeated per head,
norm weights are folded into the projections, q/k/v and gate/up are one product each, finished rows leave at once, and
identical prompts are computed, stored and read once (`kv_cache`). `benchmarks/bench_engine.py` measures it.

A row's tokens depend only on its request, up to float rounding: products with another batch size may differ in the last bit
(1e-7), which changes a token only if its uniform number falls that close to a boundary. The same calls in the same order give
bit-identical results. Not supported: other models, sliding windows, RoPE that depends on the length, DoRA.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix

import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from multirole.callbacks import Trainer
from multirole.engines import check_idle, check_request, too_large
from multirole.engines.protocol import Completion, Request
from multirole.engines.sampling import sample, signed, uniform
from multirole.update.passes.recomputation import is_out_of_memory
from multirole_cpu.families import Served
from multirole_cpu.kernels import engine_dtype, kernels_of
from multirole_cpu.kv_cache import Pool
from multirole_cpu.prefix_cache import BLOCK, PrefixCache
from multirole_cpu.qwen3 import (
    Span,
    Weights,
    base_of,
    check_supported,
    forward,
    make_weights,
    rope_table,
    unsupported,
)

PREFILL_TOKENS = 4096
"""Largest number of padded tokens in a prefill batch: bounds its memory, and is large enough for full speed."""
SPAN_TOKENS = 1024
"""The same for the unpadded tokens of a large model, whose activations then stay in the processor's cache."""
MIN_POOL_LENGTH = 64
"""Prompts of up to 64 tokens share a pool, then those of up to 128, 256 and so on."""
CACHED_LOGITS = 1 << 19
"""Number of logits sampled from at once: 2 MiB, which fit into a core's cache."""
ADMIT_EVERY = 4
"""Steps between admissions while rows run: prompts prefilled together cost little more than one."""
SHARED_ROWS, SHARED_TOKENS = 4, 16
"""A prompt goes to a shared pool if at least this many rows have it and it has at least this many tokens."""

PREFIX_BYTES, PREFIX_PARAMETERS = 1 << 30, 10_000_000
"""Size of the prefix cache, and the smallest model that uses one: smaller ones compute a prompt as fast as they find it."""
COMMON_TOKENS = 256
"""Smallest number of saved tokens for which the common prefix of several prompts is computed in a separate pass."""

Item = tuple[int, int, Request]
"""(caller's key, group id, request); requests with the same adapter and prompt have the same group id."""
PoolKind = tuple[int, int]
"""(class of prompt length, class of group size; 0 for pools without shared prompts)."""


@dataclass(frozen=True)
class PromptSpan:
    """A prompt to prefill, without its last token. The KV of its first `start` tokens is already in its `slots`."""

    ids: list[int]
    start: int
    slots: list[int]

    @property
    def n_new(self) -> int:
        """Return the number of tokens to compute."""
        return len(self.ids) - self.start


class TransformersEngine:
    """Engine (`multirole.engines.protocol`) on copies of the weights of one of `families`, with or without PEFT adapters.

    `publish` copies the weights, so the live model is never modified and may train between steps. `max_rows` is the number of
    requests running at once and `max_length` the largest prompt + max_tokens, in tokens. A completion ends with any of `eos_ids`.
    """

    plays_during_update = True
    """`publish` copies the weights. Not in bfloat16 on a CPU, see `from_trainer`."""

    def __init__(
        self, *eos_ids: int, max_rows: int = 384, max_length: int = 1024, prefix_bytes: int | None = None
    ) -> None:
        self.eos_ids, self.max_rows, self.max_length = torch.tensor(eos_ids), max_rows, max_length
        self.prefix_bytes = prefix_bytes
        self.prefixes: PrefixCache | None = None
        self.logits = torch.empty(0, 0)
        self.running: dict[int, Request] = {}
        self.served: set[int] = set()  # keys of running requests that have options of serving
        self.waiting: deque[Item] = deque()
        self.groups: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.pools: dict[PoolKind, Pool] = {}
        self.weights: dict[str | None, Weights] = {}
        self.clock = 0

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> "TransformersEngine":
        """Build the engine of a trainer.

        Raises ValueError for `max_staleness` in bfloat16 on a CPU: engine and update set the precision of the process's products.
        """
        args = trainer.args
        if args.max_staleness and args.device.type == "cpu" and not trainer.passes.is_float32:
            raise ValueError(
                f"`max_staleness={args.max_staleness}` in bfloat16 on a CPU would let engine='transformers' and the update change the "
                "precision of each other's products, which torch sets per process. Train in float32, use engine='vllm_server', or leave it at 0."
            )
        check_supported(trainer.peft_model)
        return cls(*trainer.eos_token_ids, max_length=args.max_prompt_tokens + args.max_completion_length)

    @classmethod
    def unsupported(cls, model: PeftModel | PreTrainedModel) -> str | None:
        """Return a property of a model or its adapters that `qwen3.forward` does not implement, or None."""
        return next(unsupported(model), None)

    @classmethod
    def from_model(
        cls, model: PeftModel | Served, eos_ids: Sequence[int], pad_id: int, max_length: int
    ) -> "TransformersEngine":
        """Build the engine, and publish the model. Nothing is padded."""
        engine = cls(*eos_ids, max_length=max_length)
        engine.publish(model, 0)
        return engine

    @torch.no_grad()  # not inference_mode: sharded weights (FSDP2) cannot be gathered in it
    def publish(self, model: PeftModel | Served, version: int) -> None:
        """Copy `model`'s current weights, and drop all keys and values of older ones."""
        check_idle(f"publish(version={version})", len(self.waiting) + self.n_running)
        base = base_of(model)
        self.kernels = kernels_of(base)
        self.weights = make_weights(model, engine_dtype(base), self.kernels)
        self.names = list(self.weights)
        c = model.config
        embed = self.weights[None].embed
        self.rope = rope_table(model, self.max_length)
        self.empty_kv = embed.new_zeros(c.num_hidden_layers, 2, 0, c.num_key_value_heads, 0, self.rope.cos.shape[1])
        self.eos_ids = self.eos_ids.to(embed.device)
        self.eps = c.rms_norm_eps
        self.pools.clear()
        self.logits = embed.new_empty(0, 0, dtype=torch.float32)
        n_bytes = self.prefix_bytes
        if n_bytes is None:
            n_bytes = PREFIX_BYTES if model.num_parameters() >= PREFIX_PARAMETERS else 0
        self.prefixes = PrefixCache(self.empty_kv, n_bytes) if n_bytes else None

    @property
    def n_running(self) -> int:
        return sum(pool.n for pool in self.pools.values())

    def add(self, key: int, request: Request) -> None:
        """Queue one request under a `key` that the caller chooses."""
        check_request(request, self.weights, self.max_length)
        prompt = (request.adapter, tuple(request.prompt_ids))
        self.running[key] = request
        if request.top_p < 1 or request.is_whole is not None:
            self.served.add(key)
        self.waiting.append((key, self.groups.setdefault(prompt, len(self.groups)), request))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Admit waiting requests that fit, advance every running row by one token, and return the finished rows.

        If memory does not suffice, all unfinished requests start again, fewer at once. Their seeds decide what they sample, so replies stay the same.
        Another error drops all requests.
        """
        unfinished, reason = dict(self.running), ""
        try:
            return self._step()
        except BaseException as error:
            self.prefixes, self.clock, self.logits = None, 0, self.logits.new_empty(0, 0)
            for state in (self.running, self.served, self.waiting, self.groups, self.pools):
                state.clear()
            if not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
                raise
            reason = str(error)
        # the traceback, with the tensors that it held, is gone only now
        clear_device_cache(garbage_collection=True)
        self.max_rows = too_large(min(self.max_rows, len(unfinished)), self.max_length, reason)
        for key, request in unfinished.items():
            self.add(key, request)
        return []

    def _step(self) -> list[tuple[int, Completion]]:
        if self.clock % ADMIT_EVERY == 0 or not self.n_running:
            self._admit()
        self.clock += 1
        pools = [pool for pool in self.pools.values() if pool.n]
        if not pools:
            return []
        self._decode(pools)
        finished = [item for pool in pools for item in self._collect(pool)]
        if not self.waiting and not self.n_running:
            self.groups.clear()
            self.clock = 0  # the next rollout is scheduled as if it were the first
        return finished

    def sleep(self) -> None:
        """Free the copied weights and the caches; `publish` allocates them again."""
        check_idle("sleep()", len(self.waiting) + self.n_running)
        self.close()

    def close(self) -> None:
        """Free weights and caches. Idempotent."""
        self.waiting.clear()
        self.running.clear()
        self.served.clear()
        self.pools.clear()
        self.prefixes = None
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
            kind = home.get(group) or self._pool_kind(len(request.prompt_ids), sizes[group])
            batches[kind, self.names.index(request.adapter)].append(item)
        for (kind, adapter), batch in batches.items():
            if kind not in self.pools:
                self.pools[kind] = Pool(self.empty_kv, kind[1] > 0, self.kernels.attention)
            self._admit_batch(self.pools[kind], adapter, batch)

    def _pool_kind(self, prompt_length: int, n_rows: int) -> PoolKind:
        """Return the kind of pool for `n_rows` rows of one prompt; classes are powers of two."""
        is_shared = n_rows >= SHARED_ROWS and prompt_length >= SHARED_TOKENS
        # a row of a shared pool waits for longer prompts only when they are read, which happens once for the group
        min_length = MIN_POOL_LENGTH * (4 if is_shared and self.empty_kv.dtype == torch.bfloat16 else 1)
        return ((prompt_length - 1) // min_length).bit_length(), n_rows.bit_length() if is_shared else 0

    def _admit_batch(self, pool: Pool, adapter: int, items: list[Item]) -> None:
        """Put `items` into the pool's next slots, and compute each prompt that no running row has, once.

        The last prompt token is left out: it is the first input of decoding, so that logits are computed in one place.
        """
        running = {group: slot for slot, group in enumerate(pool.group[: pool.n].tolist())}
        prompts = {group: request.prompt_ids[:-1] for _, group, request in items}
        start, stop = pool.n, pool.n + len(items)
        lengths = [request.max_tokens + (0 if pool.is_shared else len(request.prompt_ids)) for _, _, request in items]
        pool.reserve(stop, max(lengths))
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
        if self.prefixes is not None:
            kv = pool.prompt_kv if pool.is_shared else pool.kv
            self._prefill_rest(kv, adapter, [(ids, targets[group]) for group, ids in prompts.items() if ids])
            return
        todo = sorted((len(ids), group) for group, ids in prompts.items() if ids)
        while todo:
            longest = todo[-1][0]
            batch = [group for _, group in todo[-max(1, PREFILL_TOKENS // longest) :]]
            del todo[-len(batch) :]
            kv = pool.prompt_kv if pool.is_shared else pool.kv
            self._prefill(kv, adapter, [(prompts[group], targets[group]) for group in batch], longest)

    def _prefill(self, kv: Tensor, adapter: int, batch: list[tuple[list[int], list[int]]], longest: int) -> None:
        """Compute the KV of B prompts, right-padded to T = `longest` (causal, so unmasked), and copy it to slots of `kv`.

        Padding is overwritten or masked later: a row attends only to positions that were written for it.
        """
        shape = (len(batch), longest)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch], device=kv.device)  # (B, T)
        positions = torch.arange(longest, device=kv.device).repeat(len(batch))  # (B * T,)
        slots = torch.tensor([slot for _, slots in batch for slot in slots], device=kv.device)
        source = torch.tensor([i for i, (_, slots) in enumerate(batch) for _ in slots], device=kv.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))  # (B, heads or n_kv, T, d)
            q, k = q.to(kv.dtype), k.to(kv.dtype)
            kv[layer, 0, slots, :, :longest] = k[source]
            kv[layer, 1, slots, :, :longest] = v[source]
            if layer == len(kv) - 1:
                return None
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2).reshape(shape[0] * shape[1], -1)  # (B * T, heads * d)

        spans = [Span(self.weights[self.names[adapter]], 0, tokens.numel())]
        forward(tokens.flatten(), positions, spans, self.rope, self.eps, attend)

    def _prefill_rest(self, kv: Tensor, adapter: int, prompts: list[tuple[list[int], list[int]]]) -> None:
        """Copy the cached prefixes of the prompts to their slots of `kv`, and compute the remaining tokens.

        A prefix that all prompts share and the cache lacks is computed first, if that saves enough tokens.
        """
        assert self.prefixes is not None
        common = list(commonprefix([ids for ids, _ in prompts]))
        known = len(self.prefixes.find(adapter, common)) * BLOCK
        if (len(prompts) - 1) * (len(common) - known) >= COMMON_TOKENS:
            slot = prompts[0][1][:1]
            self._prefill_spans(kv, adapter, [self._span(kv, adapter, common, slot)])
            self.prefixes.write(adapter, common, lambda start, stop: kv[:, :, slot[0], :, start:stop])
        spans = sorted((self._span(kv, adapter, *prompt) for prompt in prompts), key=lambda span: span.n_new)
        spans = [span for span in spans if span.n_new]
        while spans:
            n = max(1, SPAN_TOKENS // spans[-1].n_new)
            self._prefill_spans(kv, adapter, spans[-n:])
            del spans[-n:]

    def _span(self, kv: Tensor, adapter: int, ids: list[int], slots: list[int]) -> "PromptSpan":
        """Copy a prompt's cached prefix to its slots."""
        assert self.prefixes is not None
        blocks = self.prefixes.find(adapter, ids)
        start = len(blocks) * BLOCK
        if blocks:
            kv[:, :, slots, :, :start] = self.prefixes.read(blocks)[:, :, None]
        return PromptSpan(ids, start, slots)

    def _prefill_spans(self, kv: Tensor, adapter: int, prompts: list["PromptSpan"]) -> None:
        """Compute the KV of the prompts' new tokens in their first slots, then copy it to the others.

        Everything except attention is computed without padding, for the N new tokens of B concatenated prompts; attention is
        computed for (B, T) new and (B, S) cached tokens.
        """
        device = kv.device
        n_new = torch.tensor([prompt.n_new for prompt in prompts], device=device)  # (B,)
        start = torch.tensor([prompt.start for prompt in prompts], device=device)  # (B,)
        first = torch.tensor([prompt.slots[0] for prompt in prompts], device=device)  # (B,)
        tokens = torch.tensor(
            [token for prompt in prompts for token in prompt.ids[prompt.start :]], device=device
        )  # (N,)
        owner = torch.arange(len(prompts), device=device).repeat_interleave(n_new)  # (N,)
        at = torch.arange(len(tokens), device=device) - (n_new.cumsum(0) - n_new)[owner]  # (N,) in 0..T-1
        positions, slots = start[owner] + at, first[owner]  # (N,) each
        longest, total = int(n_new.max()), max(len(prompt.ids) for prompt in prompts)  # T, S
        last_visible = start[:, None] + torch.arange(
            longest, device=device
        )  # (B, T): the last position that a token sees
        hidden = torch.arange(total, device=device) > last_visible[..., None]  # (B, T, S)
        mask = torch.zeros(hidden.shape, dtype=kv.dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            kv[layer, 0, slots, :, positions] = k.to(kv.dtype)
            kv[layer, 1, slots, :, positions] = v
            if layer == len(kv) - 1:
                return None
            padded = q.new_zeros(len(prompts), longest, *q.shape[1:], dtype=kv.dtype)  # (B, T, heads, d)
            padded[owner, at] = q.to(kv.dtype)
            keys, values = kv[layer, :, first, :, :total]  # (B, n_kv, S, d) each
            out = F.scaled_dot_product_attention(
                padded.transpose(1, 2), keys, values, attn_mask=mask, scale=1.0, enable_gqa=True
            )  # (B, heads, T, d)
            return out.transpose(1, 2)[owner, at].flatten(1)  # (N, heads * d)

        span = Span(self.weights[self.names[adapter]], 0, len(tokens))
        forward(tokens, positions, [span], self.rope, self.eps, attend)
        for prompt in prompts:
            source, copies = prompt.slots[0], prompt.slots[1:]
            if copies:
                kv[:, :, copies, :, : len(prompt.ids)] = kv[:, :, source : source + 1, :, : len(prompt.ids)]

    def _decode(self, pools: list[Pool]) -> None:
        """Decode one token for every row of every pool. Rows are sorted by adapter; attention works in slot order."""
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
        tokens, logprobs = self._sample(
            hidden[back] if several else hidden,
            temperature,
            uniform(state[:, 3], state[:, 7]),
            self._top_p(state[:, 0]),
        )
        for pool, new, logprob in zip(pools, tokens.split(counts), logprobs.split(counts), strict=True):
            n = pool.n
            slots = torch.arange(n, device=new.device)
            pool.ids[slots, pool.count[:n]] = new
            pool.logprobs[slots, pool.count[:n]] = logprob
            pool.token[:n] = new
            pool.position[:n] += 1
            pool.count[:n] += 1

    def _top_p(self, keys: Tensor) -> Tensor | None:
        """Return `top_p` (N,) of the requests with these keys (N,); None if it is 1 for all."""
        if not self.served:
            return None
        return torch.tensor([self.running[key].top_p for key in keys.tolist()], device=keys.device)

    def _sample(self, hidden: Tensor, temperature: Tensor, u: Tensor, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample tokens (N,) and their log-probs (N,) from hidden states (N, H).

        Logits are computed in equal chunks of rows, in one reused buffer, and sampled from in smaller chunks.
        """
        weights = self.weights[None]
        n_tokens = len(weights.embed)
        at_once, cached = max(1, self.kernels.n_logits // n_tokens), max(1, CACHED_LOGITS // n_tokens)
        n_rows = math.ceil(len(hidden) / math.ceil(len(hidden) / at_once))
        if len(self.logits) < n_rows:
            self.logits = hidden.new_empty(n_rows, n_tokens, dtype=torch.float32)
        sampled, rows = [], (hidden, temperature, u) if top_p is None else (hidden, temperature, u, top_p)
        for part, *of_rows in zip(*(x.split(n_rows) for x in rows), strict=True):
            logits = weights.head.logits(part, self.logits[: len(part)])
            sampled += [sample(*chunk) for chunk in zip(*(x.split(cached) for x in (logits, *of_rows)), strict=True)]
        tokens, logprobs = zip(*sampled, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _collect(self, pool: Pool) -> list[tuple[int, Completion]]:
        """Remove finished rows from the pool and return their completions."""
        stopped = (pool.token[: pool.n, None] == self.eos_ids).any(1)
        for slot, key in enumerate(pool.key[: pool.n].tolist() if self.served else ()):
            if (is_whole := self.running[key].is_whole) is not None:
                stopped[slot] |= is_whole(pool.ids[slot, : pool.count[slot]].tolist())
        finished = (stopped | (pool.count[: pool.n] >= pool.limit[: pool.n])).nonzero()[:, 0].tolist()
        completions = []
        for slot in finished:
            key, count = int(pool.key[slot]), int(pool.count[slot])
            reason = "stop" if stopped[slot] else "length"
            ids, logprobs = pool.ids[slot, :count].tolist(), pool.logprobs[slot, :count].tolist()
            request = self.running.pop(key)
            self.served.discard(key)
            if self.prefixes is not None:
                adapter = self.names.index(request.adapter)
                self.prefixes.write(adapter, request.prompt_ids + ids[:-1], partial(pool.kv_of_row, slot))
            completions.append((key, Completion(ids, logprobs, reason)))
        if finished:
            pool.drop(finished)
        return completions
