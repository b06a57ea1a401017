"""Run short training iterations with a trainer that does not train yet, watch them, and restore the trainer.

The iterations are `MultiRoleGRPOTrainer.training_step` itself on two problems, with short replies and with rewards that give
every episode an advantage. Adapters get random weights first: fresh ones equal the base model, so that a mix-up of adapters
would not show. `Bench.plain` computes log-probs the simple way, one unpadded row at a time, for comparison.
"""

import copy
import itertools
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirole.core.hooks import MultiRoleCallback, OptimizerStep
from multirole.core.inputs import INDEX
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode, Reward, Turn, user
from multirole.diagnostics.gradients import weights_of

N_PROBLEMS, N_EPISODES, N_TOKENS = 2, 4, 48
"""At most so many problems, episodes of each and tokens of a reply."""
NOISES = tuple(0.01 * 2**i for i in range(9))
APART = 2.0
"""The B factors of an adapter get the first of these standard deviations that moves log-probs by so much on average."""
LEARNING_RATE = 1e-2
"""Large, so that an optimizer step changes log-probs by far more than rounding does."""

Weights = dict[str, list[Tensor]]
"""adapter -> its tensors."""


@dataclass
class Micro:
    """A micro-batch that was trained: log-probs of the trainer minus those of the engine (tokens), at the adapter's k-th step.

    `reached` are the positions (N, width) of the ids (N, width) to which the loss sends a gradient.
    """

    rows: list[Row]
    step: int
    gaps: Tensor
    ids: Tensor
    reached: Tensor


@dataclass
class Trial:
    """What was observed in one iteration; each optimizer step with the number of tensors of each adapter that it changed."""

    episodes: list[Episode] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    micros: list[Micro] = field(default_factory=list)
    steps: list[tuple[OptimizerStep, dict[str, int]]] = field(default_factory=list)


def given_reward(problem: int, attempt: int) -> float:
    """A reward that no other episode of the problem has; problems differ in mean and spread."""
    return 0.25 * problem + 0.1 * (1 + problem) * ((3 * attempt + problem) % 4)


class Watcher(MultiRoleCallback):
    """Records the events of an iteration."""

    def __init__(self, bench: "Bench") -> None:
        self.bench, self.trial = bench, Trial()
        self.held: Weights = {}
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        self.trial.episodes = episodes

    def on_rows(self, trainer: MultiRoleGRPOTrainer, rows: list[Row]) -> list[Row]:
        self.trial.rows = rows
        return rows

    def on_micro_batch(
        self, trainer: MultiRoleGRPOTrainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        gaps = (logps - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
        taken = sum(step.adapter == rows[0].adapter for step, _ in self.trial.steps)
        self.trial.micros.append(Micro(rows, taken, gaps.cpu(), *self.seen.pop()))

    def on_gradient(self, trainer: MultiRoleGRPOTrainer, adapter: str, gradient: Tensor) -> Tensor:
        self.held = self.bench.weights()
        return gradient

    def on_adapter_step(self, trainer: MultiRoleGRPOTrainer, step: OptimizerStep) -> None:
        now = self.bench.weights()
        moved = {name: sum(not a.equal(b) for a, b in zip(now[name], self.held[name], strict=True)) for name in now}
        self.trial.steps.append((step, moved))

    def on_forward(self, _: object, __: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: remember the positions whose outputs get a gradient."""
        ids, hidden = kwargs["input_ids"], output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.seen.append((ids.cpu(), (grad != 0).any(-1).cpu())))


class Bench:
    """A trainer set up for short iterations. Made by `on_bench`."""

    def __init__(self, trainer: MultiRoleGRPOTrainer) -> None:
        self.trainer, self.model, self.adapters = trainer, trainer.peft_model, trainer.adapters
        self.graded_by = (trainer.reward_funcs, trainer.reward_weights)
        self.order: list[str] = []
        """Ids of the problems in the order in which they were first rewarded."""
        self.watcher = Watcher(self)
        trainer.callback_handler.callbacks = [self.watcher]
        self.indices = list(itertools.islice(trainer._get_train_sampler(), trainer.args.n_episodes))
        self.spoil()
        self.new_optimizer()

    def weights(self) -> Weights:
        """A copy of every adapter."""
        return {name: [p.detach().clone() for p in weights_of(self.model, name)] for name in self.adapters}

    @torch.no_grad()
    def put(self, weights: Weights) -> None:
        """Write a copy back."""
        for name, tensors in weights.items():
            for parameter, tensor in zip(weights_of(self.model, name), tensors, strict=True):
                parameter.copy_(tensor)

    @torch.no_grad()
    def spoil(self) -> None:
        """Give each adapter random weights of its own."""
        question = user(self.trainer.problems[self.indices[0]].question)
        ids = self.trainer.rollout.render(self.trainer.rollout.tokenizer, [question])[:64]
        text = Turn("", 0, 0, ids[:1], ids[1:], [], "", "stop")
        for i, name in enumerate(self.adapters):
            noisy = [p for key, p in self.model.named_parameters() if f"lora_B.{name}." in key]
            fresh, before = [p.clone() for p in noisy], self.plain(text, name)
            for noise in NOISES:
                generator = torch.Generator().manual_seed(i)
                for parameter, first in zip(noisy, fresh, strict=True):
                    parameter.copy_(first.cpu() + noise * torch.randn(parameter.shape, generator=generator))
                if (self.plain(text, name) - before).abs().mean() >= APART:
                    break

    def checksums(self) -> dict[str, int]:
        """The sum of the bit patterns of every tensor of the base."""
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        prefix = self.model.base_model.prefix
        base = {name: p.detach() for name, p in self.model.named_parameters() if prefix not in name}
        return {name: int(p.view(kinds[p.element_size()]).sum(dtype=torch.int64)) for name, p in base.items()}

    def new_optimizer(self) -> None:
        """Forget the state of the optimizer."""
        self.trainer.optimizer = self.trainer.lr_scheduler = None
        self.trainer.create_optimizer_and_scheduler(self.trainer.args.max_steps)

    def train(self) -> Trial:
        """One iteration, as transformers' loop calls it."""
        trainer, self.watcher.trial = self.trainer, Trial()
        trainer.reward_funcs, trainer.reward_weights = [self._rewards], torch.ones(1)
        trainer.reward_func_names, trainer.reward_processing_classes = ["doctor"], [None]
        decoder = self.model.get_base_model().base_model
        handle = decoder.register_forward_hook(self.watcher.on_forward, with_kwargs=True)
        try:
            trainer.training_step(trainer.model, [trainer.train_dataset[i] for i in self.indices])
        finally:
            handle.remove()
        trainer.state.global_step += 1
        return self.watcher.trial

    def due(self, episode: Episode) -> float:
        """The reward that the doctor gives to an episode."""
        if episode.problem.id not in self.order:
            self.order.append(episode.problem.id)
        return given_reward(self.order.index(episode.problem.id), episode.index)

    def _rewards(self, prompts: list, completions: list, episodes: list[Episode], **_: object) -> list[float]:
        return [self.due(episode) for episode in episodes]

    def save_and_load(self) -> tuple[Weights, list[Tensor], Weights, list[Tensor]]:
        """Save a checkpoint, lose everything, and load it: adapters and moments before and after."""
        trainer, before, moments = self.trainer, self.weights(), self._moments()
        with tempfile.TemporaryDirectory() as folder:
            trainer.args.output_dir = folder
            MultiRoleGRPOTrainer._save_checkpoint(trainer, trainer.model, None)
            self.put({name: [torch.zeros_like(t) for t in tensors] for name, tensors in before.items()})
            self.new_optimizer()
            checkpoint = str(Path(folder) / f"checkpoint-{trainer.state.global_step}")
            trainer._load_from_checkpoint(checkpoint)
            trainer._load_optimizer_and_scheduler(checkpoint)
        return before, moments, self.weights(), self._moments()

    def _moments(self) -> list[Tensor]:
        state = self.trainer.optimizer.state
        return [
            state[p][key].detach().cpu().clone()
            for name in self.adapters for p in weights_of(self.model, name) if p in state for key in ("exp_avg", "exp_avg_sq")
        ]  # fmt: skip

    def plain(self, turn: Turn, adapter: str | None, temperature: float | None = None) -> Tensor:
        """Log-probs (C,) of a completion, on the host: the row alone, no padding, no fused head. `adapter` None is the base."""
        device = self.trainer.accelerator.device
        self.model.set_adapter(adapter or self.adapters[0])
        base, n_prompt = self.model.get_base_model(), len(turn.prompt_ids)
        ids = torch.tensor([turn.prompt_ids + turn.completion_ids], device=device)  # (1, P + C)
        without = nullcontext() if adapter else self.model.disable_adapter()
        with self.trainer.accelerator.autocast(), torch.no_grad(), without:
            hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = base.get_output_embeddings()(hidden[0, n_prompt - 1 : -1]).float()  # (C, V)
        logprobs = (logits / (temperature or self.trainer.args.temperature)).log_softmax(-1)
        return logprobs.gather(1, ids[0, n_prompt:, None])[:, 0].cpu()

    def grade(self, episodes: list[Episode]) -> list[Reward]:
        """Rewards of the trainer's own reward functions for these episodes, as one batch."""
        trainer, rows = self.trainer, []
        trainer.reward_funcs, trainer.reward_weights = self.graded_by
        places = {problem.id: i for i, problem in enumerate(trainer.problems)}
        copies = [replace(episode, reward=None) for episode in episodes]
        for episode in copies:
            row = dict(trainer.train_dataset[places[episode.problem.id]])
            rows.append({name: value for name, value in row.items() if name != INDEX})
        trainer.score_episodes(copies, rows)
        return [episode.reward or Reward(float("nan")) for episode in copies]


@contextmanager
def on_bench(trainer: MultiRoleGRPOTrainer) -> Iterator[Bench]:
    """A bench for a trainer that does not train yet; afterwards everything is as it was, and the engine sleeps."""
    model, handler, attributes = trainer.peft_model, trainer.callback_handler, dict(vars(trainer))
    callbacks, base = handler.callbacks, model.get_base_model()
    held = {name: p.detach().clone() for name, p in model.named_parameters() if model.base_model.prefix in name}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes, active = [(module, module.training) for module in model.modules()], model.active_adapter
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all())
    was_checkpointing = base.is_gradient_checkpointing
    for name in ("args", "state", "control", "_metrics", "_logs", "_pending_extra_logs", "_pending_metrics"):
        setattr(trainer, name, copy.deepcopy(attributes[name]))
    args = trainer.args
    args.num_generations = trainer.num_generations = min(N_EPISODES, args.num_generations)
    args.generation_batch_size = N_PROBLEMS * args.num_generations
    args.max_completion_length = trainer.max_completion_length = min(N_TOKENS, args.max_completion_length)
    args.learning_rate, args.lr_scheduler_type, args.lr_scheduler_kwargs = LEARNING_RATE, "constant", None
    args.warmup_steps, args.max_steps, args.push_to_hub = 0, 10, False
    trainer.state.max_steps, trainer.state.global_step = args.max_steps, 0
    trainer.betas, trainer.lr_scale, trainer._published = dict.fromkeys(trainer.betas, 0.0), 1.0, -1
    try:
        if args.gradient_checkpointing:  # as `train` does
            trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        yield Bench(trainer)
        trainer.engine.sleep()
    finally:
        if args.gradient_checkpointing and not was_checkpointing:
            base.gradient_checkpointing_disable()
        handler.callbacks = callbacks
        trainer.__dict__.clear()
        trainer.__dict__.update(attributes)
        trainer._published = -1
        model.set_adapter(active)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in held:
                    parameter.copy_(held[name])
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        torch.cuda.set_rng_state_all(generators[3])
