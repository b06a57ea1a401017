"""A trainer on the bench: it takes real training steps while every hand-over is written down, and is put back as it was.

The steps are `MultiRoleGRPOTrainer.training_step` itself, on two problems, with short replies and rewards that the doctor
gives, so that every episode has an advantage. Adapters get random weights first: fresh ones are all the base model, and a
mix-up of them would not show. What a check compares with is written out here once more, plainly, one unpadded row at a
time (`Bench.plain`).
"""

import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from multirole.core.engine import Completion, Engine, Request
from multirole.core.gradients import Updates, weights_of
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode, Reward, Turn
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell

N_PROBLEMS, N_EPISODES, N_TOKENS = 2, 4, 48
"""At most so many problems, episodes of each and tokens of a reply."""
NOISES = tuple(0.01 * 2**i for i in range(8))
APART = 0.2
"""An adapter's B factors, or its copies of layers, get the first noise that moves log-probs by so much on average.

It is a standard deviation for a factor, which starts at zero, and a part of a copy's own."""
RATE = 1e-2
"""At least this peak learning rate, so that a step changes log-probs by far more than rounding does."""
NEUTRAL = {
    "kl_anchor": 0.0, "coherence_penalty": 0.0, "balance_roles": 0.0, "slot_scaling": 0.0, "process_reward": 0.0,
    "train_after": None, "on_alarm": "log",
}  # fmt: skip
"""Remedies are off on the bench: the plain loss is what can be written out in a line."""

Weights = dict[str, list[Tensor]]
"""adapter -> its tensors."""


class CountedEngine:
    """An engine that remembers what it was asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[Request] = []

    def add(self, key: int, request: Request) -> None:
        self.requests.append(request)
        self.engine.add(key, request)

    def step(self) -> list[tuple[int, Completion]]:
        return self.engine.step()

    def publish(self, model: PeftModel, version: int) -> None:
        self.engine.publish(model, version)

    def sleep(self) -> None:
        self.engine.sleep()

    def close(self) -> None:
        self.engine.close()


@dataclass
class Micro:
    """One micro-batch as the loss saw it: all (N, C)."""

    logprobs: Tensor
    old: Tensor
    recorded: Tensor
    mask: Tensor


@dataclass
class Step:
    """One call of `optimizer_step`, and what the optimizer did in it; lists have an item per step that it really took.

    `norms` are of the gradient that it found, `moved` counts the tensors of each adapter that changed by a single bit.
    """

    rows: list[Row]
    rates: list[set[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    moved: list[dict[str, int]] = field(default_factory=list)
    micros: list[Micro] = field(default_factory=list)


@dataclass
class Trial:
    """What was seen of one training step. `graded` are the task's rewards, before the doctor gave its own."""

    requests: list[Request]
    graded: list[Reward] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ledger: list[dict[str, object]] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return [turn for episode in self.episodes for turn in episode.turns]


def given_reward(group: int, attempt: int) -> float:
    """The doctor's reward of one episode: no two alike in a group, and no two groups alike in mean or spread."""
    return 0.25 * group + 0.1 * (1 + group) * ((3 * attempt + group) % 4)


class Bench:
    """The trainer, its small cell, and what is done with them. Made by `on_bench`."""

    def __init__(self, trainer: MultiRoleGRPOTrainer, model: PeftModel, cell: Cell) -> None:
        self.trainer, self.model, self.cell = trainer, model, cell
        self.small = trainer.cell
        self.rated = replace(self.small, learning_rate=cell.learning_rate, diagnostics=False)
        self.adapters = trainer.adapters
        sampler = itertools.islice(trainer._get_train_sampler(), 0, N_PROBLEMS * cell.n_episodes, cell.n_episodes)
        self.inputs = [trainer.train_dataset[i] for i in sampler for _ in range(self.small.n_episodes)]
        self.trial = Trial([])
        self._spy()
        self.spoil()
        self.first = self.weights()

    # ---- weights

    def weights(self) -> Weights:
        """A copy of every adapter."""
        return {name: [p.detach().clone() for p in weights_of(self.model, name)] for name in self.adapters}

    @torch.no_grad()
    def put(self, weights: Weights) -> None:
        """The opposite of `weights`."""
        for name, tensors in weights.items():
            for parameter, tensor in zip(weights_of(self.model, name), tensors, strict=True):
                parameter.copy_(tensor)

    @torch.no_grad()
    def spoil(self) -> None:
        """Give each adapter random weights of its own."""
        ids = self.trainer.processing_class(self.inputs[0]["prompt"]).input_ids[:64]
        text = Turn("", 0, 0, ids[:1], ids[1:], [], "", "stop")
        for i, name in enumerate(self.adapters):
            own = (f"lora_B.{name}.", f"ln_tuning_layers.{name}.")
            noisy = [p for key, p in self.model.named_parameters() if any(part in key for part in own)]
            fresh, base = [(p.clone(), p.std().item() or 1.0) for p in noisy], None
            for noise in (0.0, *NOISES):
                generator = torch.Generator().manual_seed(i)
                for parameter, (first, size) in zip(noisy, fresh, strict=True):
                    parameter.copy_(first.cpu() + noise * size * torch.randn(parameter.shape, generator=generator))
                now = self.plain(text, name, self.cell.temperature)
                base = now if base is None else base
                if (now - base).abs().mean() >= APART:
                    break

    def checksum(self) -> dict[str, int]:
        """Of every tensor of the base: the sum of its bit patterns."""
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        prefix = self.model.base_model.prefix
        base = {name: p.detach() for name, p in self.model.named_parameters() if prefix not in name}
        return {name: int(p.view(kinds[p.element_size()]).sum(dtype=torch.int64)) for name, p in base.items()}

    # ---- training

    def start(self, noise: int) -> None:
        """The first weights, a fresh optimizer; `noise` seeds the global generators, on which nothing may depend."""
        trainer = self.trainer
        self.put(self.first)
        random.seed(noise)
        np.random.seed(noise)
        torch.manual_seed(noise)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.create_optimizer_and_scheduler(self.cell.iterations)
        trainer.optimizer.register_step_pre_hook(lambda *_: self._before_step())
        trainer.optimizer.register_step_post_hook(lambda *_: self._after_step())
        trainer.updates, trainer.published = Updates(), -1
        trainer.alarms = Alarms(self.cell.policy, trainer.workflow.roles)

    def train(self, iteration: int) -> Trial:
        """One iteration as HF's loop drives it."""
        self.trainer.engine.requests = []
        self.trial = Trial(self.trainer.engine.requests)
        self.trainer.state.global_step = iteration
        self.trainer.training_step(self.trainer.model, self.inputs)
        self.trainer.state.global_step += 1
        return self.trial

    def update(self, iteration: int, episode: Episode, advantage: float) -> Trial:
        """The optimizer steps of an iteration that holds one episode, all of its rows with this advantage."""
        self.trial = Trial([])
        self.trainer.state.global_step = iteration
        rows = self.trainer.prepare(self.trainer.model, [episode])
        self.trainer.update(self.trainer.model, [replace(row, advantage=advantage) for row in rows])
        return self.trial

    def gradient(self, adapter: str, rows: list[Row], **changes: object) -> Tensor:
        """The trainer's gradient (n,) of one mini-batch under the present weights, with fields of the cell changed."""
        self.trainer.cell, self.trial = replace(self.small, **changes), Trial([], steps=[Step(rows)])
        self.trainer.prepare(self.trainer.model, list({id(row.episode): row.episode for row in rows}.values()))
        diagnostics = IterationDiagnostics(rows, self.small.clip_low, self.small.clip_high, self.small.temperature)
        self.trainer.accumulate(self.trainer.model, adapter, rows, len(rows), diagnostics)
        self.trainer.cell = self.small
        tensors = weights_of(self.model, adapter)
        found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in tensors])
        self.model.zero_grad(set_to_none=True)
        return found

    # ---- what the checks compare with

    def plain(self, turn: Turn, adapter: str, temperature: float) -> Tensor:
        """Log-probs (C,) of one turn's completion: the row alone, no padding, no fused head, logits / temperature."""
        device = self.trainer.accelerator.device
        if self.model.active_adapter != adapter:
            self.model.set_adapter(adapter)
        base, n_prompt = self.model.get_base_model(), len(turn.prompt_ids)
        ids = torch.tensor([turn.prompt_ids + turn.completion_ids], device=device)  # (1, P + C)
        with self.trainer.accelerator.autocast():
            hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[0, n_prompt - 1 : -1]  # (C, H)
            logits = base.get_output_embeddings()(hidden).float() / temperature  # (C, V)
        return logits.log_softmax(-1).gather(1, ids[0, n_prompt:, None])[:, 0]

    @torch.no_grad()
    def plain_of(self, turns: list[Turn], temperature: float | None = None, adapter: str | None = None) -> list[Tensor]:
        """`plain` of each turn, on the host, under its role's adapter and at the cell's temperature, or under and at others."""
        at = temperature or self.cell.temperature
        return [self.plain(turn, adapter or self.cell.policy[turn.role], at).cpu() for turn in turns]

    def plain_gradient(self, adapter: str, rows: list[Row]) -> Tensor:
        """The gradient (n,) of GRPO's loss at ratio 1, written out: minus A x log-prob, each token with its weight."""
        tensors, total, how = weights_of(self.model, adapter), 0, self.cell.loss_aggregation
        n_tokens = sum(len(row.turn.completion_ids) for row in rows)
        for row in rows:
            logprobs = self.plain(row.turn, adapter, self.cell.temperature)
            divisor = {"grpo": len(rows) * len(logprobs), "token": n_tokens,
                       "dr_grpo": len(rows) * self.small.max_response_tokens}[how]  # fmt: skip
            loss = -row.advantage * logprobs.sum() / divisor
            total = total + torch.cat([g.flatten() for g in torch.autograd.grad(loss, tensors)])
        return total

    @contextmanager
    def watched_positions(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Within it: ids (N, width) of every forward pass, and which positions (N, width) the loss reaches."""
        seen: list[tuple[Tensor, Tensor]] = []

        def hook(_: object, __: tuple, kwargs: dict, output: object) -> None:
            ids, hidden = kwargs["input_ids"], output.last_hidden_state
            if hidden.requires_grad:
                hidden.register_hook(lambda g: seen.append((ids.cpu(), (g != 0).any(-1).cpu())))

        handle = self.model.get_base_model().model.register_forward_hook(hook, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    # ---- spies: attributes of this one trainer, gone with the bench

    def _spy(self) -> None:
        trainer = self.trainer
        play, prepare = trainer.play, trainer.prepare
        update, optimizer_step = trainer.update, trainer.optimizer_step
        compute_loss, score = trainer.compute_loss, trainer._get_per_token_logps_and_entropies
        seen: list[Tensor] = []

        def play_seen(*given: object) -> list[Episode]:
            groups: dict[str, int] = defaultdict(lambda: len(groups))
            episodes = play(*given)
            self.trial.graded = [episode.reward for episode in episodes]
            for e in episodes:
                e.reward = Reward(given_reward(groups[e.problem.id], e.index), "given", False)
            return episodes

        def prepare_seen(model: object, episodes: list[Episode]) -> list[Row]:
            self.trial.episodes, self.trial.rows = episodes, prepare(model, episodes)
            return self.trial.rows

        def update_seen(model: object, rows: list[Row]) -> tuple[IterationDiagnostics, Tensor]:
            diagnostics, loss = update(model, rows)
            self.trial.ledger = diagnostics.ledger
            return diagnostics, loss

        def step_seen(model: object, adapter: str, rows: list[Row], *rest: object) -> Tensor:
            self.trial.steps.append(Step(rows))
            return optimizer_step(model, adapter, rows, *rest)

        def score_seen(*given: object, **named: object) -> tuple:
            found = score(*given, **named)
            seen.append(found[0].detach())
            return found

        def loss_seen(model: object, batch: dict[str, Tensor], **named: object) -> Tensor:
            loss = compute_loss(model, batch, **named)
            found = (seen.pop(), batch["old_per_token_logps"], batch["sampling_per_token_logps"])
            self.trial.steps[-1].micros.append(Micro(*(t.cpu() for t in found), batch["completion_mask"].bool().cpu()))
            return loss

        trainer.play, trainer.prepare = play_seen, prepare_seen
        trainer.update, trainer.optimizer_step = update_seen, step_seen
        trainer.compute_loss, trainer._get_per_token_logps_and_entropies = loss_seen, score_seen

    def _before_step(self) -> None:
        step, groups = self.trial.steps[-1], self.trainer.optimizer.param_groups
        step.rates.append({group["lr"] for group in groups})
        squares = [
            p.grad.double().square().sum().item() for group in groups for p in group["params"] if p.grad is not None
        ]
        step.norms.append(sum(squares) ** 0.5)
        self._held = self.weights()

    def _after_step(self) -> None:
        now = self.weights()
        moved = {name: sum(not a.equal(b) for a, b in zip(now[name], self._held[name], strict=True)) for name in now}
        self.trial.steps[-1].moved.append(moved)


@contextmanager
def on_bench(trainer: MultiRoleGRPOTrainer) -> Iterator[Bench]:
    """A bench for a trainer that does not train yet. Its attributes, adapters, generators and engine are put back.

    An engine that cannot be copied (vLLM) is left asleep: whoever plays next publishes the adapters first, and no reply
    depends on what it did before.
    """
    model, cell, engine = trainer.accelerator.unwrap_model(trainer.model), trainer.cell, trainer.engine
    attributes, base = dict(vars(trainer)), model.get_base_model()
    held = {name: p.detach().clone() for name, p in model.named_parameters() if model.base_model.prefix in name}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes, active = [(module, module.training) for module in model.modules()], model.active_adapter
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all())
    was_checkpointing = base.is_gradient_checkpointing
    trainer.cell = replace(
        cell, n_problems=N_PROBLEMS, n_episodes=min(N_EPISODES, cell.n_episodes), learning_rate=max(RATE, cell.learning_rate),
        max_response_tokens=min(N_TOKENS, cell.max_response_tokens), **NEUTRAL,
    )  # fmt: skip
    trainer.num_generations, trainer.max_completion_length = trainer.cell.n_episodes, trainer.cell.max_response_tokens
    for name in ("state", "control", "_metrics", "_logs"):
        setattr(trainer, name, copy.deepcopy(attributes[name]))
    trainer.recorder, trainer.rollout = None, copy.copy(trainer.rollout)
    own = copy.deepcopy(engine) if isinstance(engine, TransformersEngine) else engine
    trainer.engine = trainer.rollout.engine = CountedEngine(own)
    try:
        if trainer.args.gradient_checkpointing:  # as `train` does
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        yield Bench(trainer, model, cell)
        own.sleep()
    finally:
        if trainer.args.gradient_checkpointing and not was_checkpointing:
            base.gradient_checkpointing_disable()
        vars(trainer).clear()
        vars(trainer).update(attributes)
        trainer.published = -1
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
