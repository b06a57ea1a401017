"""Run short training iterations with a trainer that does not train yet, watch them, and restore the trainer.

The iterations are `MultiRoleGRPOTrainer.training_step` itself on a few problems, with short replies and with rewards that give
every episode an advantage. Adapters get random weights first: fresh ones equal the base model, so that a mix-up of adapters
would not show. Before the last iteration's update the weights are moved, so that its ratios are not 1 and its clipping acts;
there the loss also has a KL term. `Bench.plain` computes log-probs the simple way, one unpadded row at a time.
"""

import copy
import itertools
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.distributed import full, gather_objects, local
from multirole.core.engine import Request
from multirole.core.hooks import MultiRoleCallback, OptimizerStep
from multirole.core.inputs import INDEX
from multirole.core.rollout import Attempt
from multirole.core.rows import Row, Steps
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode, Reward, Turn, user
from multirole.diagnostics.gradients import weights_of

N_PROBLEMS, N_EPISODES, N_TOKENS = 2, 4, 48
"""At most so many problems (one per process, if those are more), episodes of each and tokens of a reply."""
NOISES = tuple(0.01 * 2**i for i in range(9))
APART = 2.0
"""The B factors of an adapter get the first of these standard deviations that moves log-probs by so much on average."""
NUDGE = 0.3
"""Part of that deviation by which they move before the last update."""
LEARNING_RATE, MAX_NORM, WARMUP, MAX_STEPS, BETA = 5e-3, 0.05, 2, 40, 0.1
"""The peak rate is large, so that an optimizer step changes log-probs by far more than rounding does, and the norm is one
that gradients exceed. The first of the iterations is the second of a schedule with this warm-up."""

Weights = dict[str, list[Tensor]]
"""adapter -> its tensors."""


@dataclass
class Micro:
    """A micro-batch that was trained: log-probs of the trainer minus those of the engine (tokens), at the adapter's k-th step.

    `rows` are indices of the trial's rows, `reached` the positions (N, width) of the ids (N, width) that get a gradient.
    """

    rows: list[int]
    step: int
    gaps: Tensor
    ids: Tensor
    reached: Tensor


@dataclass
class Trial:
    """What was observed in one iteration; each optimizer step with the number of tensors of each adapter that it changed.

    `first` holds of each adapter's first step the rows, their divisor and the gradient before clipping; `wrong` by how much
    each step's weights and rate differ from a plain AdamW's and a plain schedule's, relative to the rate.
    """

    episodes: list[Episode] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    micros: list[Micro] = field(default_factory=list)
    steps: list[tuple[OptimizerStep, dict[str, int]]] = field(default_factory=list)
    first: dict[str, tuple[list[Row], int, Tensor]] = field(default_factory=dict)
    wrong: list[tuple[float, float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


def given_reward(problem: int, attempt: int) -> float:
    """A reward that no other episode of the problem has; problems differ in mean and spread."""
    return 0.25 * problem + 0.1 * (1 + problem) * ((3 * attempt + problem) % 4)


def rate_at(args: MultiRoleGRPOConfig, tick: int) -> float:
    """The learning rate at a tick of transformers' schedule, for an optimizer that never steps."""
    optimizer, options = torch.optim.SGD([torch.zeros(1)], args.learning_rate), dict(args.lr_scheduler_kwargs or {})
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps, options)
    if not isinstance(schedule, LambdaLR):  # which waits for evaluations, and there is none here
        return args.learning_rate
    return args.learning_rate * schedule.lr_lambdas[0](min(tick, args.max_steps))


class PlainAdamW:
    """AdamW of one adapter after a clip of the whole gradient, as its paper writes it."""

    def __init__(self) -> None:
        self.t, self.m, self.v = 0, torch.zeros(()), torch.zeros(())

    def step(self, weights: Tensor, gradient: Tensor, lr: float, args: MultiRoleGRPOConfig) -> Tensor:
        """The weights (n,) after a step with this gradient (n,)."""
        gradient = gradient * min(1.0, args.max_grad_norm / (gradient.norm().item() + 1e-6))
        b1, b2, self.t = args.adam_beta1, args.adam_beta2, self.t + 1
        self.m = b1 * self.m.to(gradient) + (1 - b1) * gradient
        self.v = b2 * self.v.to(gradient) + (1 - b2) * gradient**2
        update = self.m / (1 - b1**self.t) / ((self.v / (1 - b2**self.t)).sqrt() + args.adam_epsilon)
        return weights - lr * args.weight_decay * weights - lr * update


class Watcher(MultiRoleCallback):
    """Records the events of an iteration."""

    def __init__(self, bench: "Bench") -> None:
        self.bench, self.trial = bench, Trial()
        self.is_nudged = False
        self.held: Weights = {}
        self.plan: Steps = {}
        self.optimizers = {name: PlainAdamW() for name in bench.adapters}
        self.gradient = torch.zeros(0)
        self.ids, self.reached = torch.zeros(0), torch.zeros(0)
        self.evaluated: list[Episode] = []

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        self.trial.episodes = episodes

    def on_rows(self, trainer: MultiRoleGRPOTrainer, rows: list[Row]) -> list[Row]:
        self.trial.rows = rows
        return rows

    def on_update_begin(self, trainer: MultiRoleGRPOTrainer, rows: list[Row], steps: Steps) -> None:
        self.plan = steps
        if self.is_nudged:
            self.bench.nudge()

    def on_micro_batch(
        self, trainer: MultiRoleGRPOTrainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        gaps = (logps - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()]
        places = {id(row): i for i, row in enumerate(self.trial.rows)}
        at = [places[id(row)] for row in rows]
        self.trial.micros.append(Micro(at, self._taken(rows[0].adapter), gaps.cpu(), self.ids, self.reached))

    def _taken(self, adapter: str) -> int:
        return sum(step.adapter == adapter for step, _ in self.trial.steps)

    def on_gradient(self, trainer: MultiRoleGRPOTrainer, adapter: str, gradient: Tensor) -> Tensor:
        self.held, self.gradient = self.bench.weights(), self.bench.whole(adapter, gradient)
        if not self._taken(adapter):
            self.trial.first[adapter] = (*self.plan[adapter][0], self.gradient.clone())
        return gradient

    def on_adapter_step(self, trainer: MultiRoleGRPOTrainer, step: OptimizerStep) -> None:
        now, args, name = self.bench.weights(), trainer.args, step.adapter
        moved = {key: sum(not a.equal(b) for a, b in zip(now[key], self.held[key], strict=True)) for key in now}
        self.trial.steps.append((step, moved))
        tick, calls = trainer.state.global_step, list(self.plan)
        if args.lr_clock != "iteration":
            tick = tick * len(self.bench.adapters) + calls.index(name)
        lr = rate_at(args, tick)
        before, after = (torch.cat([t.flatten() for t in tensors[name]]) for tensors in (self.held, now))
        expected = self.optimizers[name].step(before, self.gradient, lr, args)
        self.trial.wrong.append(((after - expected).abs().max().item() / lr, abs(step.lr - lr) / lr))

    def on_episodes_evaluated(
        self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        self.evaluated = episodes

    def on_forward(self, _: object, __: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: remember the positions whose outputs get a gradient."""
        self.ids, hidden = kwargs["input_ids"].cpu(), output.last_hidden_state
        self.reached = torch.zeros_like(self.ids, dtype=torch.bool)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: setattr(self, "reached", (grad != 0).any(-1).cpu()))


class Bench:
    """A trainer set up for short iterations. Made by `on_bench`."""

    def __init__(self, trainer: MultiRoleGRPOTrainer) -> None:
        self.trainer, self.model, self.adapters = trainer, trainer.peft_model, trainer.adapters
        self.graded_by = (trainer.reward_funcs, trainer.reward_weights)
        self.indices = list(itertools.islice(trainer._get_train_sampler(), trainer.args.generation_batch_size))
        self.order = [trainer.problems[i].id for i in dict.fromkeys(self.indices)]
        """Ids of the trained problems."""
        self.noises: dict[str, float] = {}
        self.watcher = Watcher(self)
        trainer.callback_handler.callbacks = [self.watcher]
        self.spoil()
        self.new_optimizer()

    def weights(self) -> Weights:
        """A copy of every adapter, whole on each process."""
        return {name: [full(p.detach()).clone() for p in weights_of(self.model, name)] for name in self.adapters}

    @torch.no_grad()
    def put(self, weights: Weights) -> None:
        """Write a copy back."""
        for name, tensors in weights.items():
            for parameter, tensor in zip(weights_of(self.model, name), tensors, strict=True):
                parameter.copy_(as_sharded(tensor, parameter))

    def whole(self, adapter: str, gradient: Tensor) -> Tensor:
        """What the processes hold of a gradient (n,) of an adapter, as one vector."""
        params, wholes = weights_of(self.model, adapter), []
        for p, piece in zip(params, gradient.split([local(p).numel() for p in params]), strict=True):
            own = piece.view_as(local(p))
            if isinstance(p, DTensor):
                own = DTensor.from_local(own, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            wholes.append(full(own).flatten())
        return torch.cat(wholes)

    def gradient(self, adapter: str, loss: Tensor) -> Tensor:
        """The gradient (n,) of a loss that every process has computed; its graph stays."""
        loss.backward(retain_graph=True)
        found = [full(p.grad).flatten() for p in weights_of(self.model, adapter) if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return torch.cat(found)

    @torch.no_grad()
    def _add_noise(self, adapter: str, std: float, seed: int) -> None:
        """To the B factors of an adapter; the same on every process."""
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in self.model.named_parameters():
            if f"lora_B.{adapter}." in key:
                parameter.add_(as_sharded(std * torch.randn(parameter.shape, generator=generator), parameter))

    def spoil(self) -> None:
        """Give each adapter random weights of its own."""
        question = user(self.trainer.problems[self.indices[0]].question)
        ids = self.trainer.rollout.render(self.trainer.rollout.tokenizer, [question])[:64]
        text = Turn("", 0, 0, ids[:1], ids[1:], [], "", "stop")
        for i, name in enumerate(self.adapters):
            fresh, before = {name: self.weights()[name]}, self.plain(text, name)
            for noise in NOISES:
                self.put(fresh)
                self._add_noise(name, noise, i)
                self.noises[name] = noise
                if (self.plain(text, name) - before).abs().mean() >= APART:
                    break

    def nudge(self) -> None:
        """Move each adapter a little, between sampling and the update."""
        for i, name in enumerate(self.adapters):
            self._add_noise(name, NUDGE * self.noises[name], 100 + i)

    def checksums(self) -> dict[str, int]:
        """The sum of the bytes of every tensor of the base, as far as this process holds it."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        prefix = self.model.base_model.prefix
        base = {name: local(p.detach()) for name, p in self.model.named_parameters() if prefix not in name}
        return {name: int(p.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for name, p in base.items()}

    def new_optimizer(self) -> None:
        """Forget the state of the optimizer, and put the schedule where the iterations are."""
        trainer = self.trainer
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
        with warnings.catch_warnings():  # of a schedule that moves before its optimizer
            warnings.simplefilter("ignore")
            for _ in range(trainer.state.global_step):
                trainer.lr_scheduler.step()

    def train(self, is_nudged: bool = False) -> Trial:
        """One iteration, as transformers' loop calls it."""
        trainer, self.watcher.trial, self.watcher.is_nudged = self.trainer, Trial(), is_nudged
        trainer.betas = dict.fromkeys(trainer.betas, BETA if is_nudged else 0.0)
        self._reward_by_the_doctor()
        decoder = self.model.get_base_model().base_model
        handle = decoder.register_forward_hook(self.watcher.on_forward, with_kwargs=True)
        share = len(self.indices) // trainer.accelerator.num_processes
        start = trainer.accelerator.process_index * share
        with self.asked() as seeds:
            try:
                own = [trainer.train_dataset[i] for i in self.indices[start : start + share]]
                trainer.training_step(trainer.model, own)
            finally:
                handle.remove()
        trainer.state.global_step += 1
        trainer.lr_scheduler.step()
        trial = self.watcher.trial
        trial.micros = list(itertools.chain.from_iterable(gather_objects(trial.micros)))
        trial.seeds = list(itertools.chain.from_iterable(gather_objects([request.seed for request in seeds])))
        return trial

    @contextmanager
    def asked(self) -> Iterator[list[Request]]:
        """The requests that this process's engine gets in the meantime."""
        engine: Any = self.trainer.engine
        requests, add = [], engine.add

        def record(key: int, request: Request) -> None:
            requests.append(request)
            add(key, request)

        engine.add = record
        try:
            yield requests
        finally:
            del engine.add

    def play(self, attempts: list[Attempt]) -> list[Request]:
        """The requests of a rollout with very short replies."""
        args = self.trainer.args
        n_tokens, args.max_completion_length = args.max_completion_length, min(4, args.max_completion_length)
        with self.asked() as requests:
            self.trainer.play(attempts, self.trainer.state.global_step)
        self.trainer._rest_engine()  # as before every update
        args.max_completion_length = n_tokens
        return list(itertools.chain.from_iterable(gather_objects(requests)))

    def evaluate(self) -> list[Episode]:
        """The trainer's evaluation of a few problems of its own; none where it has none."""
        trainer, data = self.trainer, self.trainer.eval_dataset
        data = next(iter(data.values()), None) if isinstance(data, dict) else data
        if data is not None:
            self._reward_by_the_doctor()
            trainer.evaluate(data.select(range(min(N_PROBLEMS, len(data)))))
        return self.watcher.evaluated

    def due(self, episode: Episode) -> float:
        """The reward that the doctor gives to an episode."""
        known = episode.problem.id in self.order
        return given_reward(self.order.index(episode.problem.id) if known else 0, episode.index)

    def _reward_by_the_doctor(self) -> None:
        trainer = self.trainer
        trainer.reward_funcs, trainer.reward_weights = [self._rewards], torch.ones(1)
        trainer.reward_func_names, trainer.reward_processing_classes = ["doctor"], [None]

    def _rewards(self, prompts: list, completions: list, episodes: list[Episode], **_: object) -> list[float]:
        return [self.due(episode) for episode in episodes]

    def save_and_load(self) -> tuple[Weights, list[Tensor], Weights, list[Tensor]]:
        """Save a checkpoint, lose everything, and load it: adapters and moments before and after."""
        trainer, before, moments = self.trainer, self.weights(), self._moments()
        self.model.set_requires_grad(self.adapters, True)  # FSDP2's checkpoints hold what is trained
        with tempfile.TemporaryDirectory() as own:
            trainer.args.output_dir = folder = gather_objects(own)[0]
            MultiRoleGRPOTrainer._save_checkpoint(trainer, trainer.model, None)
            trainer.accelerator.wait_for_everyone()
            self.put({name: [torch.zeros_like(t) for t in tensors] for name, tensors in before.items()})
            self.new_optimizer()
            checkpoint = str(Path(folder) / f"checkpoint-{trainer.state.global_step}")
            trainer._load_from_checkpoint(checkpoint)
            trainer._load_optimizer_and_scheduler(checkpoint)
            trainer.accelerator.wait_for_everyone()
        return before, moments, self.weights(), self._moments()

    def _moments(self) -> list[Tensor]:
        state = self.trainer.optimizer.state
        return [
            full(state[p][key].detach()).cpu().clone()
            for name in self.adapters for p in weights_of(self.model, name) if p in state for key in ("exp_avg", "exp_avg_sq")
        ]  # fmt: skip

    def plain(
        self, turn: Turn, adapter: str | None, temperature: float | None = None, is_exact: bool = False, keeps: bool = False
    ) -> Tensor:  # fmt: skip
        """Log-probs (C,) of a completion: the row alone, no padding, no fused head. `adapter` None is the base.

        On the host, or on the device with their graph (`keeps`). `is_exact` computes in float32, whatever the base is in.
        """
        accelerator = self.trainer.accelerator
        self.model.set_adapter(adapter or self.adapters[0])
        n_reply = len(turn.completion_ids)
        ids = torch.tensor([turn.prompt_ids + turn.completion_ids], device=accelerator.device)  # (1, P + C)
        without = nullcontext() if adapter else self.model.disable_adapter()
        precision = in_float32(self.model) if is_exact else accelerator.autocast()
        with precision, torch.set_grad_enabled(keeps), without:
            found = self.model(input_ids=ids, use_cache=False, logits_to_keep=n_reply + 1)
            logits = found.logits[0, :-1].float()  # (C, V)
        logprobs = (logits / (temperature or self.trainer.args.temperature)).log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, -n_reply:, None])[:, 0]
        return chosen if keeps else chosen.cpu()

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


def as_sharded(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor that every process has, where and as far as it holds `parameter`."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within it, every module of half precision computes in float32; only the one at work is held so."""
    held: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, args: tuple) -> tuple:
        half = (p for p in module.parameters(recurse=False) if p.dtype in (torch.bfloat16, torch.float16))
        held[module] = [(p, p.data) for p in half]
        for p, data in held[module]:
            p.data = data.float()
        return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def narrow(module: nn.Module, *_: object) -> None:
        for p, data in held.pop(module):
            p.data = data

    leaves = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_pre_hook(widen) for module in leaves]
    handles += [module.register_forward_hook(narrow) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def on_bench(trainer: MultiRoleGRPOTrainer) -> Iterator[Bench]:
    """A bench for a trainer that does not train yet; afterwards everything is as it was, and the engine sleeps."""
    model, handler, attributes = trainer.peft_model, trainer.callback_handler, dict(vars(trainer))
    callbacks, base = handler.callbacks, model.get_base_model()
    held = {name: p.detach().clone() for name, p in model.named_parameters() if model.base_model.prefix in name}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes, active = [(module, module.training) for module in model.modules()], model.active_adapter
    generators = random.getstate(), np.random.get_state()
    was_checkpointing = base.is_gradient_checkpointing
    for name in ("args", "state", "control", "_metrics", "_logs", "_pending_extra_logs", "_pending_metrics"):
        setattr(trainer, name, copy.deepcopy(attributes[name]))
    args = trainer.args
    n_problems = max(N_PROBLEMS, trainer.accelerator.num_processes)
    args.num_generations = trainer.num_generations = min(N_EPISODES, args.num_generations)
    args.generation_batch_size = n_problems * args.num_generations
    args.max_completion_length = trainer.max_completion_length = min(N_TOKENS, args.max_completion_length)
    args.learning_rate, args.lr_scheduler_kwargs, args.max_grad_norm = LEARNING_RATE, None, MAX_NORM
    args.warmup_steps, args.max_steps, args.push_to_hub = min(WARMUP, args.warmup_steps), MAX_STEPS, False
    trainer.state.max_steps, trainer.state.global_step = args.max_steps, 1
    trainer._published = -1
    try:
        if args.gradient_checkpointing:  # as `train` does
            trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
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
