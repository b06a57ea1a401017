"""Sample with `transformers`' own `generate`: slow, but correct for every decoder and adapter that `transformers` runs.

The model's own code makes masks, positions and caches, for any attention (full, sliding windows, recurrent states). Only the
choice of tokens is replaced, so that a request's seed decides its reply (`sampling`), independently of its batch.

Requests of one adapter run as a batch until the last one ends, and no other request runs meanwhile. Rows that have ended are
still computed, and equal prompts are computed once per row. A model with recurrent states cannot skip padding, so its batches
hold prompts of one length.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from multirole.callbacks import Trainer
from multirole.engines import check_idle, check_request, too_large, why_generate
from multirole.engines.protocol import Completion, Request
from multirole.engines.sampling import sample, signed, uniform
from multirole.types import accepts
from multirole.update.passes.recomputation import free_memory, is_out_of_memory

logger = logging.getLogger(__name__)

MAX_GAP = 1e-2
"""Largest difference, in nats, between the log-probs of `generate` and of one forward pass in float32. Correct models differ by less than 1e-4."""
MAX_ROUGH_GAP = 0.5
"""The same in 16 bits, or with quantised weights."""


class SeededSampler(LogitsProcessor):
    """Logits processor that chooses each row's next token by its request's seed, temperature and top-p, and masks all others.

    `logprobs` lists the log-probs (N,) of the chosen tokens, one tensor per step.
    """

    def __init__(self, requests: list[Request], device: torch.device) -> None:
        self.seeds = torch.tensor([signed(request.seed) for request in requests], device=device)  # (N,)
        self.temperature = torch.tensor([float(request.temperature) for request in requests], device=device)  # (N,)
        top_p = torch.tensor([request.top_p for request in requests], device=device)  # (N,)
        self.top_p = top_p if min(request.top_p for request in requests) < 1 else None
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = torch.full_like(self.seeds, len(self.logprobs))
        tokens, logprobs = sample(scores, self.temperature, uniform(self.seeds, index), self.top_p)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)  # (N, V)


class RowLimits(StoppingCriteria):
    """Stopping criterion that ends each row at its request's `max_tokens`, or where the request says that it is whole."""

    def __init__(self, requests: list[Request], width: int, device: torch.device) -> None:
        self.requests, self.width = requests, width
        self.limits = width + torch.tensor([request.max_tokens for request in requests], device=device)  # (N,)

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        ends = self.limits <= input_ids.shape[1]  # (N,)
        for row, request in enumerate(self.requests):
            if request.is_whole is not None:
                ends[row] |= request.is_whole(input_ids[row, self.width :].tolist())
        return ends


def copied_slice(head: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward hook of a head: copy an input that is not contiguous.

    `generate` passes a slice, the last positions of the prompts. torch multiplies such a slice and a frozen head row by row and,
    in bfloat16 on a CPU, copies the head for each row.
    """
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in arguments)


class GenerateEngine:
    """Engine (`multirole.engines.protocol`) that calls `generate` of a live `transformers` model, with or without PEFT adapters.

    The weights are not copied: they must not be trained between `publish` and the last `step`.

    Args:
        eos_ids: tokens that end a completion.
        pad_id: the token that pads prompts on the left.
        max_rows: largest number of requests in a batch.
        max_length: largest prompt + max_tokens, in tokens.
        autocast: returns the context manager to compute in, the same as the trainer's.
    """

    def __init__(
        self,
        *eos_ids: int,
        pad_id: int = 0,
        max_rows: int = 128,
        max_length: int = 1024,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.eos_ids, self.pad_id, self.max_rows, self.max_length = list(eos_ids), pad_id, max_rows, max_length
        self.autocast = autocast
        self.waiting: dict[int, Request] = {}
        self.model: PeftModel | PreTrainedModel | None = None
        self.has_warned = False
        self.max_gap: float | None = None
        """Largest difference, in nats, of log-probs that `check_scores` accepts in the first batch; None checks none."""

    @classmethod
    def from_trainer(cls, trainer: Trainer) -> "GenerateEngine":
        """Build the engine of a trainer, on its live model."""
        args = trainer.args
        if trainer.is_sharded:
            raise ValueError(
                "engine='generate' runs the trainer's own model, which FSDP2 has sharded over processes that sample replies of different "
                "lengths. Launch with data parallelism, or use engine='vllm'."
            )
        if trainer.accelerator.is_main_process:
            warn_of_speed(trainer.peft_model)
        engine = cls(
            *trainer.eos_token_ids, pad_id=trainer._tokenizer.pad_token_id,
            max_length=args.max_prompt_tokens + args.max_completion_length, autocast=trainer.accelerator.autocast,
        )  # fmt: skip
        is_quantised = getattr(trainer.passes.base, "is_quantized", False)
        is_exact = trainer.passes.is_float32 and not is_quantised
        engine.max_gap = MAX_GAP if is_exact else MAX_ROUGH_GAP
        return engine

    @classmethod
    def unsupported(cls, model: PeftModel | PreTrainedModel) -> str | None:
        """Return None: every decoder and adapter that transformers runs is supported."""
        return None

    @classmethod
    def from_model(
        cls, model: PeftModel | PreTrainedModel, eos_ids: Sequence[int], pad_id: int, max_length: int
    ) -> "GenerateEngine":
        """Build the engine on a live model, and publish it."""
        warn_of_speed(model)
        engine = cls(*eos_ids, pad_id=pad_id, max_length=max_length)
        engine.publish(model, 0)
        return engine

    def publish(self, model: PeftModel | PreTrainedModel, version: int) -> None:
        """Use `model`'s current weights; no cache outlives a batch."""
        check_idle(f"publish(version={version})", len(self.waiting))
        self.model = model

    def add(self, key: int, request: Request) -> None:
        """Queue one request under a `key` that the caller chooses."""
        adapters = self.model.peft_config if isinstance(self.model, PeftModel) else ()
        check_request(request, [] if self.model is None else [None, *adapters], self.max_length)
        self.waiting[key] = request

    def step(self) -> list[tuple[int, Completion]]:
        """Run one batch to its end: the request that has waited longest, and those that can be batched with it. An error drops all requests."""
        try:
            return self._step()
        except BaseException:
            self.waiting.clear()
            raise

    def _step(self) -> list[tuple[int, Completion]]:
        if self.model is None or not self.waiting:
            return []
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

        def group(request: Request) -> tuple[str | None, int]:
            return request.adapter, len(request.prompt_ids) if base._is_stateful else 0

        first = group(next(iter(self.waiting.values())))
        batch = {key: request for key, request in self.waiting.items() if group(request) == first}
        requests = dict(list(batch.items())[: self.max_rows])
        reason = ""
        try:
            with computing(self.model, first[0]), self.autocast():
                completions = self._generate(base, list(requests.values()))
                if self.max_gap is not None:
                    check_scores(base, list(requests.values()), completions, self.max_gap)
                    self.max_gap = None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        if reason:  # the traceback, with the tensors that it held, is gone only now
            free_memory(base)
            self.max_rows = too_large(len(requests), self.max_length, reason)
            return []
        for key in requests:
            del self.waiting[key]
        return list(zip(requests, completions, strict=True))

    def _generate(self, base: PreTrainedModel, requests: list[Request]) -> list[Completion]:
        """Generate the completions of one batch."""
        width = max(len(request.prompt_ids) for request in requests)
        missing = [width - len(request.prompt_ids) for request in requests]
        ids = [[self.pad_id] * n + list(r.prompt_ids) for n, r in zip(missing, requests, strict=True)]
        input_ids = torch.tensor(ids, device=base.device)  # (N, width)
        is_token = torch.arange(width)[None] >= torch.tensor(missing)[:, None]  # (N, width)
        sampler = SeededSampler(requests, base.device)
        config = GenerationConfig(
            do_sample=False, use_cache=True, eos_token_id=self.eos_ids, pad_token_id=self.pad_id,
            max_new_tokens=max(request.max_tokens for request in requests),
        )  # fmt: skip
        usual = base.generation_config
        base.generation_config = config  # or `generate` would add the model's own penalties
        try:
            output = base.generate(
                input_ids, attention_mask=is_token.long().to(base.device), generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([RowLimits(requests, width, base.device)]),
            )  # (N, width + T)  # fmt: skip
        finally:
            base.generation_config = usual
        if not sampler.logprobs:
            self._warn_of_own_sampling(base)
            ids = [
                self._completion(row, [], r).token_ids
                for row, r in zip(output[:, width:].tolist(), requests, strict=True)
            ]
            rows = [scored(base, request, row) for row, request in zip(ids, requests, strict=True)]
            return [self._completion(*row) for row in zip(ids, rows, requests, strict=True)]
        logprobs = torch.stack(sampler.logprobs, 1).tolist()  # N lists of T
        return [self._completion(*row) for row in zip(output[:, width:].tolist(), logprobs, requests, strict=True)]

    def _warn_of_own_sampling(self, base: PreTrainedModel) -> None:
        """Say once that the model's `generate` chooses tokens by itself."""
        if not self.has_warned:
            logger.warning(
                "`%s.generate` calls no logits processor, so it samples by itself: replies do not depend on the seeds of their turns. "
                "Their log-probs are computed by another pass, at the temperature of the run.", type(base).__name__,
            )  # fmt: skip
            self.has_warned = True

    def _completion(self, ids: list[int], logprobs: list[float], request: Request) -> Completion:
        """Cut a row of the batch at its end."""
        ids, is_whole = ids[: request.max_tokens], request.is_whole
        stop = next((i for i, token in enumerate(ids) if token in self.eos_ids), None)
        if is_whole is not None:
            stop = next((i for i in range(len(ids) if stop is None else stop) if is_whole(ids[: i + 1])), stop)
        n = len(ids) if stop is None else stop + 1
        return Completion(ids[:n], logprobs[:n], "length" if stop is None else "stop")

    def sleep(self) -> None:
        """Release the model until the next `publish`."""
        check_idle("sleep()", len(self.waiting))
        self.model = None

    def close(self) -> None:
        """Release the model and drop queued requests; idempotent."""
        self.waiting.clear()
        self.model = None


def warn_of_speed(model: PeftModel | PreTrainedModel) -> None:
    """Say that replies are sampled slowly, why, and what to install if that helps."""
    reason = why_generate(model) or "engine='generate' was asked for"
    logger.warning(
        "Replies are sampled by transformers' `generate` (%s), which is several times slower than the engines 'transformers' and 'vllm'.",
        reason,
    )


def check_scores(base: PreTrainedModel, requests: list[Request], completions: list[Completion], max_gap: float) -> None:
    """Raise ValueError if `generate`, with a cache and in a batch, sampled by other log-probs than a forward pass over one row gives.

    The rows with the longest and the shortest prompt are compared. `check_rows` of the trainer finds models that are wrong without a cache.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
    gap = 0.0
    for i in {order[0], order[-1]}:
        pairs = zip(completions[i].logprobs, scored(base, requests[i], completions[i].token_ids), strict=True)
        gap = max(gap, *(abs(sampled - computed) for sampled, computed in pairs))
    if gap > max_gap:
        raise ValueError(
            f"`generate` of this {type(base).__name__} samples tokens whose log-probs differ by {gap:.2g} nats from those of its forward pass "
            "over the same text, so the replies would not be samples of what is trained: its cache, its padding or its recurrent state is wrong in "
            "transformers. Use another model, or a version of transformers in which this is corrected."
        )


@torch.no_grad()
def scored(base: PreTrainedModel, request: Request, completion_ids: list[int]) -> list[float]:
    """Return the log-probs (T,) of a completion under the current weights, at the request's temperature."""
    prompt_ids, device = list(request.prompt_ids), base.device
    n = len(completion_ids) + 1
    options = {"logits_to_keep": n} if accepts(base.forward, "logits_to_keep") else {}
    logits = base(torch.tensor([prompt_ids + completion_ids], device=device), **options).logits[0, -n:-1]  # (T, V)
    logprobs = (logits.float() / (request.temperature or 1.0)).log_softmax(-1)  # (T, V)
    return logprobs.gather(1, torch.tensor(completion_ids, device=device)[:, None])[:, 0].tolist()


@contextmanager
def computing(model: PeftModel | PreTrainedModel, adapter: str | None) -> Iterator[None]:
    """Context manager: the model computes with `adapter` (None: the base) in evaluation mode; its state is restored afterwards."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    head = base.get_output_embeddings()
    handle = head and head.register_forward_pre_hook(copied_slice)
    training = [module for module in model.modules() if module.training]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    active = model.active_adapter if isinstance(model, PeftModel) else None
    model.eval()
    try:
        if isinstance(model, PeftModel) and adapter is None:
            with model.disable_adapter():
                yield
        else:
            if isinstance(model, PeftModel):
                model.set_adapter(adapter)
            yield
    finally:
        if handle:
            handle.remove()
        if isinstance(model, PeftModel):
            model.set_adapter(active)
        for parameter, needs_grad in zip(model.parameters(), trainable, strict=True):
            parameter.requires_grad = needs_grad
        for module in training:
            module.training = True
