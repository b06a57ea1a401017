"""Count the peak memory of a micro-batch at a paper scale without a GPU: python memory_on_fake_cuda.py -> JSON lines.

torch's fake tensors have shapes and storages without memory, so that the real model, adapters, autocast, gradient checkpointing
and TRL's head run at their real sizes; every storage that an operation returns is counted while it lives. Code that asks for
the device sees a GPU: attention is the flash kernel, TRL's Triton kernels, which work in place, do nothing, and its products add
without a copy. Rows are separate, or packed with a common prompt of a tenth of their length, whose attention is PyTorch's `varlen_attn`.
"""

import json
import math
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from paper_shapes import config_of
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Qwen3ForCausalLM
from trl.kernels import chunked_logprob

from multirole.inputs.adapters import add_adapters
from multirole.policy import adapter_names
from multirole.update.gradients import PartSums
from multirole.update.passes import tree_attention
from multirole.update.passes.bfloat16_layers import half_layers
from multirole.update.passes.prefix_tree import BlockSequence
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS
from multirole_study.plan import HEAD_COLUMNS, n_parts


class NoKernel:
    """A stand-in for a Triton kernel that can be launched on any grid and does nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


class Live(TorchDispatchMode):
    """Counts the bytes of the live storages that operations have returned."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                self.known.add(key)
                size = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.forget, key, size)
                self.now += size
                self.peak = max(self.peak, self.now)
        return result

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """Stand in for the flash kernel, which a GPU uses for rows without a mask; it needs no copies of shared keys."""
    assert attn_mask is None and is_causal
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]


def materialise(model: nn.Module) -> None:
    """Give every tensor of a model on the meta device a storage; tied tensors share one, and adapters are in float32."""
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is not None and old not in new:
                    empty = torch.empty(old.shape, dtype=old.dtype)
                    new[old] = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
                held[name] = new.get(old)


def packed(tokens: int, length: int) -> dict[str, object]:
    """Return the attention of rows of `length` in one sequence of `tokens`, which share a tenth of their length, as arguments of the model."""
    n_rows, shared = tokens // length, length // 10
    ends = torch.zeros(n_rows + 1, dtype=torch.int32)
    blocks = BlockSequence(torch.zeros(tokens + (n_rows - 1) * shared, dtype=torch.long), ends, ends, length, length)
    return {"prefix_tree": SimpleNamespace(sequence=blocks), "position_ids": torch.zeros(1, tokens, dtype=torch.long)}


def run(scale: str, policy: str, tokens: int, length: int, recomputes: bool, is_packed: bool) -> dict[str, int]:
    """Return the bytes before the micro-batch and at its peak."""
    cell, s = Cell("voting", policy, scale=scale), MODELS[scale].shape
    names = adapter_names(cell.policy)
    with torch.device("meta"):
        base = Qwen3ForCausalLM(config_of(s)).to(torch.bfloat16)
        model = add_adapters(base, LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM"), names)
    with FakeTensorMode(), Live() as live:
        materialise(model)
        model.set_adapter(names[0])
        if recomputes:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        params = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.zeros(n_parts(cell), sum(p.numel() for p in params))
        sums = PartSums(params, gradients)
        sums.set_tokens([(0, tokens)])
        layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
        before = live.now
        live.peak = 0
        ids = torch.zeros((1, tokens) if is_packed else (tokens // length, length), dtype=torch.long)
        rows = packed(tokens, length) if is_packed else {}
        attention = tree_attention.packed_attention(base) if is_packed else nullcontext()
        with half_layers(layers, names[0], sums), torch.autocast("cpu", torch.bfloat16), attention:
            no_mask = {"full_attention": None}  # under fake tensors transformers would make one
            hidden = base.base_model(input_ids=ids, attention_mask=no_mask, use_cache=False, **rows).last_hidden_state
            valid = hidden.flatten(0, 1).clone()
            targets = torch.zeros(len(valid), dtype=torch.long)
            logps, entropies, *_ = chunked_logprob.ChunkedLogProbFunction.apply(
                valid, base.lm_head.weight, None, targets, 0.7, HEAD_COLUMNS, None, 1.0, ("entropy",)
            )
            (logps.sum() + 0 * entropies.detach().sum()).backward()
        return {"before": before, "peak": live.peak, "gradients": gradients.nbytes}


if __name__ == "__main__":
    chunked_logprob._use_triton = lambda device: True
    chunked_logprob._addmm_fp32 = lambda total, a, b: None
    chunked_logprob._forward_kernel = chunked_logprob._backward_kernel = NoKernel()
    chunked_logprob.triton = SimpleNamespace(cdiv=lambda a, b: math.ceil(a / b))
    torch.nn.functional.scaled_dot_product_attention = attend
    tree_attention.has_varlen = lambda _, dtype, head_dim: dtype == torch.bfloat16
    for job in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(run(*job)) + "\n")
