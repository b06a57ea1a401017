"""Keep pools of running rows: KV cache, sampling state and output so far.

Attention treats a pool as one batch, padded to its longest row, so the engine puts rows of similar prompt length into one
pool. A *shared* pool stores the KV of a prompt once per group of rows with that prompt, and multiplies it with all queries of
the group at once: decoding is bound by reading the cache, and the prompt is then read once instead of once per row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from multirole_cpu.attention_head import FLASH

N_COLUMNS = 10


def product_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with q (n * n_kv, g, d) to keys and values (n * n_kv, L, d) by two batched products; the additive mask is (n * n_kv, 1, L)."""
    return torch.bmm(torch.baddbmm(mask, q, keys.transpose(1, 2)).softmax(-1), values)


def fused_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, by_groups: bool) -> tuple[Tensor, Tensor]:
    """Attend with q (n, heads, d) to keys and values (n, n_kv, L, d) by PyTorch's fused kernel; the additive mask is (n, 1, 1, L).

    Returns the output (n, heads, d) and the log-sum-exp of the scores (n, heads). With `by_groups`, the heads of a KV head are its queries in
    one call; otherwise each has one query, and the keys are read once per head.
    """
    shape = (len(q), keys.shape[1], -1, q.shape[-1]) if by_groups else (*q.shape[:2], 1, q.shape[-1])
    out, lse = FLASH(q.reshape(shape), keys, values, attn_mask=mask, scale=1.0)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


class Pool:
    """A pool of rows in slots 0..n-1. A shared pool also holds prompts in slots 0..n_prompts-1, each used by at least one row."""

    def __init__(self, empty_kv: Tensor, is_shared: bool, attention: str) -> None:
        """`empty_kv` is (layers, 2, 0 rows, n_kv, 0 tokens, d); `attention` is that of `kernels.Kernels`, "products" in float32 alone."""
        self.n_kv, self.is_shared = empty_kv.shape[3], is_shared
        self.is_fused, self.by_groups = attention != "products", attention == "groups"
        self.n, self.n_prompts, self.longest = 0, 0, 0
        self.is_placed = False
        device = empty_kv.device
        self.kv = self.prompt_kv = empty_kv
        self.prompt_length = torch.zeros(0, dtype=torch.int64, device=device)
        self.ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(0, 0, device=device)
        self.temperature = torch.zeros(0, device=device)
        self.state = torch.zeros(0, N_COLUMNS, dtype=torch.int64, device=device)
        self._name_columns()

    def _name_columns(self) -> None:
        """Name the columns of `state`. `position` counts cached tokens, `start` those in the shared prompt, `count` sampled ones.

        `home` is the slot of the shared prompt; the other columns belong to the request.
        """
        columns = self.state.unbind(1)
        self.key, self.group, self.adapter, self.seed, self.limit, self.token = columns[:6]
        self.position, self.count, self.start, self.home = columns[6:]

    def reserve(self, n_rows: int, length: int) -> None:
        """Allocate room for `n_rows` rows of `length` tokens each, without shared prompts."""
        self.kv = _grown_kv(self.kv, n_rows, length)
        rows, tokens = self.kv.shape[2], self.kv.shape[4]
        self.ids, self.logprobs = _grown(self.ids, (rows, tokens)), _grown(self.logprobs, (rows, tokens))
        self.temperature, self.state = _grown(self.temperature, (rows,)), _grown(self.state, (rows, N_COLUMNS))
        self._name_columns()

    def add_prompt(self, length: int) -> int:
        """Return a slot for a shared prompt of `length` cached tokens; the caller writes its KV."""
        slot = self.n_prompts
        self.prompt_kv = _grown_kv(self.prompt_kv, slot + 1, length)
        self.prompt_length = _grown(self.prompt_length, (self.prompt_kv.shape[2],))
        self.prompt_length[slot] = length
        self.n_prompts += 1
        return slot

    def start_step(self) -> None:
        """Compute what all layers use: the longest row L without its shared prompt, additive mask, cache rows to write."""
        cached = (self.position - self.start)[: self.n]
        self.longest = int(cached.max()) + 1
        self.mask = self._mask(cached + 1, self.longest)
        first = torch.arange(self.n * self.n_kv, device=cached.device) * self.kv.shape[4]
        keys_at = first + cached.repeat_interleave(self.n_kv)  # (n * n_kv,)
        self.write_at = torch.cat([keys_at, keys_at + self.kv.shape[2:5].numel()])  # (2 * n * n_kv,)
        if self.is_shared and not self.is_placed:
            self._place()

    def _mask(self, lengths: Tensor, longest: int) -> Tensor:
        """Return the additive mask, 0 within a row's length and -inf beyond: (rows * n_kv, 1, longest); for the fused kernel (rows, 1, 1, longest)."""
        hidden = torch.arange(longest, device=lengths.device) >= lengths[:, None]  # (rows, longest)
        mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)
        if self.is_fused:
            return mask[:, None, None]
        return mask.repeat_interleave(self.n_kv, 0)[:, None]

    def _place(self) -> None:
        """Assign each row a lane `rank` of its prompt and kv head; the largest group decides the number of lanes."""
        home = self.home[: self.n]
        sizes = home.bincount(minlength=self.n_prompts)
        self.width = int(sizes.max())
        order = home.argsort(stable=True)
        rank = torch.empty_like(home)
        rank[order] = torch.arange(self.n, device=home.device) - (sizes.cumsum(0) - sizes)[home[order]]
        kv = torch.arange(self.n_kv, device=home.device)
        lanes = (home * self.n_kv + kv[:, None]) * self.width + rank  # (n_kv, n)
        self.lanes = lanes.t().flatten()  # (n * n_kv,): the lane of each row and kv head
        self.rows = torch.zeros(self.n_prompts * self.n_kv * self.width, dtype=torch.int64, device=home.device)
        self.rows[self.lanes] = torch.arange(len(self.lanes), device=home.device)
        lengths = self.prompt_length[: self.n_prompts]
        self.longest_prompt = int(lengths.max())
        self.prompt_mask = self._mask(lengths, self.longest_prompt)
        self.is_placed = True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (n, n_kv, d) at each row's position, then attend with q (n, heads, d) -> (n, heads * d)."""
        new = torch.stack((k.to(self.kv.dtype), v)).view(-1, k.shape[-1])  # (2 * n * n_kv, d)
        self.kv[layer].view(-1, k.shape[-1]).index_copy_(0, self.write_at, new)
        if self.is_fused:
            return self._attend_fused(layer, q.to(self.kv.dtype))
        rows = self.n * self.n_kv
        keys, values = self.kv[layer].flatten(1, 2)[:, :rows, : self.longest]  # (n * n_kv, L, d) each
        q = q.reshape(rows, -1, q.shape[-1])  # (n * n_kv, g, d) with g = heads / n_kv
        n_q = q.shape[1]
        if n_q == 3:
            q = F.pad(q, (0, 0, 0, 1))  # (n * n_kv, 4, d): MKL multiplies 4 rows 1.4 times as fast as 3
        if not self.is_shared:
            out = product_attention(q, keys, values, self.mask)  # (n * n_kv, g, d)
        else:
            scores = torch.baddbmm(self.mask, q, keys.transpose(1, 2))  # (n * n_kv, g, L)
            used = self.n_prompts * self.n_kv
            prompts = self.prompt_kv[layer].flatten(1, 2)
            keys_p, values_p = prompts[:, :used, : self.longest_prompt]  # (prompts * n_kv, P, d) each
            scores_p = torch.baddbmm(self.prompt_mask, self._spread(q), keys_p.transpose(1, 2))
            weights = torch.cat([self._unspread(scores_p), scores], -1).softmax(-1)  # (n * n_kv, g, P + L)
            weights_p, weights = weights.split((self.longest_prompt, self.longest), -1)
            out = torch.baddbmm(self._unspread(torch.bmm(self._spread(weights_p), values_p)), weights, values)
        return out[:, :n_q].reshape(self.n, -1)  # (n, heads * d)

    def _attend_fused(self, layer: int, q: Tensor) -> Tensor:
        """Attend with q (n, heads, d) -> (n, heads * d), with scores and softmax in float32.

        A row's attention over its shared prompt and over its other tokens are averaged, weighted by their sums of exponentials.
        """
        keys, values = self.kv[layer, :, : self.n, :, : self.longest]  # (n, n_kv, L, d) each
        out, lse = fused_attention(q, keys, values, self.mask, self.by_groups)  # (n, heads, d), (n, heads)
        if not self.is_shared:
            return out.flatten(1)
        by_kv = (self.n * self.n_kv, -1, q.shape[-1])
        lanes = self._spread(q.reshape(by_kv)).unflatten(0, (-1, self.n_kv))  # (prompts, n_kv, width * g, d)
        # (prompts, n_kv, P, d) each
        keys, values = self.prompt_kv[layer, :, : self.n_prompts, :, : self.longest_prompt]
        out_p, lse_p = FLASH(lanes, keys, values, attn_mask=self.prompt_mask, scale=1.0)
        out_p, lse_p = self._unspread(out_p.flatten(0, 1)), self._unspread(lse_p.flatten(0, 1)[..., None])
        share = (lse_p - lse.reshape(lse_p.shape)).sigmoid().to(out.dtype)  # (n * n_kv, g, 1)
        return out.reshape(by_kv).lerp(out_p, share).view(self.n, -1)

    def _spread(self, x: Tensor) -> Tensor:
        """Move rows to the lanes of their prompt, (n * n_kv, g, c) -> (prompts * n_kv, width * g, c); empty lanes hold any values."""
        return x.index_select(0, self.rows).view(self.n_prompts * self.n_kv, -1, x.shape[-1])

    def _unspread(self, x: Tensor) -> Tensor:
        """Invert `_spread`."""
        return x.reshape(len(self.rows), -1, x.shape[-1]).index_select(0, self.lanes)  # (n * n_kv, g, c)

    def kv_of_row(self, slot: int, start: int, stop: int) -> Tensor:
        """Return keys and values (layers, 2, n_kv, stop - start, d) of a row's cached tokens, its shared prompt first."""
        shared = int(self.start[slot])  # tokens in the shared prompt
        parts = [self.kv[:, :, slot, :, max(start - shared, 0) : max(stop - shared, 0)]]
        if start < shared:
            parts.insert(0, self.prompt_kv[:, :, int(self.home[slot]), :, start : min(stop, shared)])
        return torch.cat(parts, 3)

    def drop(self, finished: list[int]) -> None:
        """Remove rows, and prompts without rows, by moving the last remaining ones into their slots."""
        n = self.n - len(finished)
        removed = set(finished)
        holes = [slot for slot in finished if slot < n]
        moved = [slot for slot in range(n, self.n) if slot not in removed]
        if holes:
            for tensor in (self.state, self.temperature, self.ids, self.logprobs):
                tensor[holes] = tensor[moved]
            self.kv[:, :, holes, :, : self.longest] = self.kv[:, :, moved, :, : self.longest]
        self.n = n
        self.is_placed = False
        if self.is_shared:
            sizes = self.home[:n].bincount(minlength=self.n_prompts)
            for slot in reversed((sizes == 0).nonzero()[:, 0].tolist()):
                self._drop_prompt(slot)

    def _drop_prompt(self, slot: int) -> None:
        """Move the last prompt into `slot`."""
        last = self.n_prompts - 1
        if slot != last:
            self.prompt_kv[:, :, slot] = self.prompt_kv[:, :, last]
            self.prompt_length[slot] = self.prompt_length[last]
            self.home[: self.n][self.home[: self.n] == last] = slot
        self.n_prompts = last


def _grown_kv(kv: Tensor, n_rows: int, length: int) -> Tensor:
    """Return `kv` (layers, 2, rows, n_kv, S, d) with room for `n_rows` rows of `length` tokens; a dimension grows by doubling."""
    rows, tokens = kv.shape[2], kv.shape[4]
    rows = rows if n_rows <= rows else max(n_rows, 2 * rows)
    tokens = tokens if length <= tokens else max(length, 2 * tokens)
    return _grown(kv, (*kv.shape[:2], rows, kv.shape[3], tokens, kv.shape[5]))


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of `shape` with `tensor` in the low corner. Zeros, because masked cache entries must be finite."""
    if tensor.shape == torch.Size(shape):
        return tensor
    larger = tensor.new_zeros(shape)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger
