"""Define `MultiRoleGRPOTrainer`: TRL's GRPO with several roles per episode and several adapters per model.

TRL samples one completion per prompt and takes one optimizer step per HF step. Here one HF step is one *iteration*: TRL scores the episode (reward
functions, group baseline, metrics), every turn of the episode becomes a training row that carries the episode's advantage, and `training_step`
takes all optimizer steps of the iteration, adapter by adapter and mini-batch by mini-batch. HF's loop calls `optimizer.step()` afterwards, which
finds no gradient and does nothing. So schedule, logging, evaluation, checkpoints and resume are HF's, and count iterations.

This file is the loop. Read `training_step`, `prepare_rows`, `update`, `optimizer_step` and `compute_gradient`, in this order. `trl_parts` fits TRL's
trainer to it, `rollout` plays the episodes, and `update` computes the gradient of one optimizer step. docs/architecture.md lists all rooms.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from multirole.bases.gguf_folder import local_base
from multirole.callbacks import Iteration, OptimizerStep, require_value
from multirole.chat.templates import Renderer, chat_template, check_chats
from multirole.credit import with_credit
from multirole.engines import check_engine, load_engine
from multirole.engines.context import Context, check_rope
from multirole.engines.protocol import Engine, Sampling
from multirole.inputs.adapters import changes_base, load_processor, named_adapters, train_only, with_adapters
from multirole.inputs.arguments import check_arguments, facts_before_loading, kl_weights, use_one_gpu
from multirole.inputs.problems import INDEX, Problems, check_dataset, check_ids, checked_evaluation, to_problems
from multirole.inputs.streams import IndexedRows, StreamedRows, is_transformed, stream_rows
from multirole.metrics.completions_table import evaluation_logs
from multirole.metrics.episode_traces import trace_callbacks
from multirole.metrics.episodes import (
    ZeroRewardWarning,
    evaluation_advantages,
    n_overflows,
    report_no_turns,
    surrogate_loss,
)
from multirole.metrics.evaluation import (
    evaluation_metrics,
    gathered_columns,
    mean_by_name,
    mean_of_logged,
    score_shares,
    warn_of_loss_as_metric,
)
from multirole.metrics.iteration import UpdateMetrics, log_iteration, partner_metrics, role_metrics
from multirole.options import MultiRoleGRPOConfig
from multirole.partners import Partners
from multirole.policy import adapter_names, parse_policy
from multirole.rollout.play_ahead import RolloutsAhead, plays_during_update, staleness_metrics
from multirole.rollout.player import Player
from multirole.rollout.replay import Replay
from multirole.rollout.rollout import Attempt, Rollout, numbered_attempts, warn_of_silent_roles
from multirole.rollout.seeds import turn_seed
from multirole.schedule import schedule_callbacks
from multirole.teachers import Teachers
from multirole.trl_parts import StockHooks
from multirole.types import Episode, Workflow
from multirole.update.adapter_gradient import AdapterGradient, RowGroup, scaled_rates, set_optimizer_mode
from multirole.update.entropy import StepEntropy, step_entropy
from multirole.update.gradients import clip
from multirole.update.importance import Correction
from multirole.update.kl_bound import KLBound
from multirole.update.noise import disable_noise, warn_of_noise
from multirole.update.passes.fast_passes import choose_kernels
from multirole.update.passes.logprobs import HeadWatch, check_head, check_rows
from multirole.update.passes.model_passes import MicroBatch, ModelPasses
from multirole.update.passes.recomputation import return_freed_memory, use_growing_segments
from multirole.update.processes import (
    check_launch,
    gather_objects,
    keep_float32,
    local_metrics,
    processes,
    save_every_adapter,
)
from multirole.update.reference import Reference
from multirole.update.rows import (
    Row,
    collate,
    episode_rows,
    later_rows,
    loss_mass,
    plan_steps,
    rows_in_turn,
    shuffled,
    trained_tokens,
)
from multirole.update.scoring import score_rows
from multirole.update.threads import use_fitting_threads
from multirole.workflows import check_sets


class MultiRoleGRPOTrainer(StockHooks):
    """Trains every role of a workflow with GRPO on one outcome reward per episode.

    A subclass of TRL's `GRPOTrainer`: everything that neither this class nor its parent `multirole.trl_parts.StockHooks` overrides is inherited, the
    loss included.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As in TRL, or the path of a GGUF file, which is converted once (docs/bases.md). A `PeftModel` must hold an adapter for each name of the policy map or, for a policy with one adapter, the adapter
            "default". Otherwise pass `peft_config`.
        workflow ([`Workflow`]):
            Any object with `name`, `roles` (role to its number of slots) and `async def run(problem, call) -> Answer`.
        reward_funcs (`Callable`, `str`, `PreTrainedModel` or a list of these):
            As in TRL: `f(prompts, completions, **columns) -> list[float | None]`, one number per episode. `completions` are the
            episodes' answers: texts, or lists of messages if the prompts are messages; `completion_ids` are their tokens. A function that
            takes `episodes` gets the episodes with all their turns. A function may set `episode.reward` to a [`Reward`] with a reason and
            `is_correct`, which accuracy counts; its value is then the weighted sum of all functions.
        args ([`MultiRoleGRPOConfig`], *optional*):
            Configuration; by default TRL's, with a shared policy.
        train_dataset, eval_dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            A "prompt" column (text, or messages that end with a user message) and any other columns. "id" identifies a problem; without it,
            the row's index does. "task" names the prompt templates of the built-in workflows. A stream is read during training, which needs
            `max_steps`; an evaluation set that is a stream, or a dict of streams, is read completely.
        processing_class (`PreTrainedTokenizerBase`, *optional*), reward_processing_classes, callbacks, optimizers:
            As in TRL. Callbacks that are [`MultiRoleCallback`] take part in the iteration.
        peft_config (`LoraConfig`, *optional*):
            One adapter with this configuration is created for each name in the policy map.
        engine ([`Engine`], *optional*):
            The engine that generates the replies; by default the one that `args.engine` names.
        is_answer (`Callable[[str], bool]`, *optional*):
            Returns whether a reply holds an answer, for the rate of unparsed turns. By default, any text does.
        render (`Callable[[PreTrainedTokenizerBase, list[Message]], list[int]]`, *optional*):
            Turns messages into the token ids of a prompt. By default the tokenizer's chat template, with `args.chat_template_kwargs`. A function
            that takes `strftime_now` gets the run's clock, which stands still, for templates that write the date.
        quantization_config, tools, rollout_func, environment_factory:
            Parameters of TRL's trainer that have no meaning here and must be None.
    """

    problems: Problems
    partners: Partners

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        workflow: Workflow | None = None,
        reward_funcs: Any = None,
        args: MultiRoleGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: LoraConfig | None = None,
        engine: Engine | None = None,
        is_answer: Callable[[str], bool] = bool,
        render: Renderer | None = None,
        *,
        quantization_config: None = None,
        tools: None = None,
        rollout_func: None = None,
        environment_factory: None = None,
    ) -> None:
        reward_funcs = check_arguments(
            model, workflow, reward_funcs, args, peft_config, engine, optimizers[0], quantization_config=quantization_config, tools=tools,
            rollout_func=rollout_func, environment_factory=environment_factory,
        )  # fmt: skip
        assert workflow is not None  # or it has been refused
        processes()  # before anything that would set up torch.distributed its own way, such as vLLM
        args = copy.copy(args) if args is not None else MultiRoleGRPOConfig("multirole-grpo")
        use_one_gpu(args)
        use_growing_segments()
        self.workflow = workflow
        policy = parse_policy("sp" if args.policy is None else args.policy, list(workflow.roles))
        self.policy = named_adapters(model, policy, adapter_names(policy))
        self.adapters = adapter_names(self.policy)
        args.check()
        self.partners = Partners(self.policy)
        facts = facts_before_loading(
            args, self.partners.trained, model, peft_config, reward_funcs, train_dataset, eval_dataset
        )
        self.teachers = Teachers(args)
        args.check(roles=list(self.policy), **facts, **self.partners.facts, **self.teachers.facts)
        check_dataset("train_dataset", train_dataset, reward_funcs)
        self._evaluation_sets = (
            eval_dataset,
            None if eval_dataset is None else checked_evaluation(eval_dataset, reward_funcs),
        )
        evaluated = self._evaluation_sets[1]
        check_sets(workflow, train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated]))
        check_engine(args.engine)
        callbacks = with_credit(args, callbacks or [], workflow)
        self.partners.check(args, callbacks)
        self.teachers.check()
        self.role_betas = kl_weights(args, self.policy)
        self._set_train_rows(train_dataset, args)
        if isinstance(model, str):
            model = local_base(model)
        peft_model = with_adapters(model, peft_config, self.adapters, args)
        self.partners.add_to(peft_model, args)
        self.teachers.add_to(peft_model)
        args.check(ties_embeddings=peft_model.config.tie_word_embeddings)
        if args.device.type == "cpu":
            # transformers' is "cpu:0" where there are several processes, and torch loads no optimizer to that
            args.__dict__["_setup_devices"] = torch.device("cpu")
            use_fitting_threads(sum(p.numel() for p in peft_model.parameters()))
        self.model_options = {}
        if isinstance(model, str):
            processing_class = processing_class or load_processor(model, args)
            self.model_options = dict(args.model_init_kwargs or {})
            if not any(isinstance(function, str) for function in reward_funcs):
                args.model_init_kwargs = None  # used; TRL would warn that they are not, or load reward models with them
        self.init_stock(
            peft_model, reward_funcs, args, [*schedule_callbacks(args), *callbacks, *trace_callbacks(args)], workflow.name,
            train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processing_class, reward_processing_classes=reward_processing_classes, optimizers=optimizers,
        )  # fmt: skip
        switched_off = disable_noise(self.peft_model, args.neftune_noise_alpha)
        if self.accelerator.is_main_process:
            warn_of_noise(switched_off)
            warn_of_loss_as_metric(args)
        self._n_steps = 0  # optimizer steps that were taken
        self.kl_bound = None if args.target_kl is None else KLBound(args.target_kl)
        self.update_metrics = UpdateMetrics(is_per_row=args.importance_sampling_level == "sequence")
        self._zero_reward = ZeroRewardWarning()
        self._set_up_passes(has_initial_adapters=isinstance(model, PeftModel) or changes_base(peft_config))
        self._set_up_rollout(engine, render, is_answer)

    # ---- the iteration

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: object = None) -> Tensor:
        """Run one iteration: the rollout, then every optimizer step of every adapter.

        Returns the mean loss of the optimizer steps, detached.
        """
        started = time.perf_counter()
        tokens = self.rollout.sampled_tokens, self.rollout.read_tokens
        model.train()
        set_optimizer_mode(self.optimizer, "train")
        self.underway.is_before_update, self.underway.n_tokens = True, self.state.num_input_tokens_seen
        episodes = self._generate_and_score_completions(inputs)
        if self.player.ahead is None:
            self.player.rest()
        played = time.perf_counter()
        rows = self.prepare_rows(episodes)
        self.underway.is_before_update = False
        steps, loss = self.update(model, rows)
        return_freed_memory(self.passes.base)
        self._step += 1  # TRL counts training steps here
        self.underway.has_unsaved = True
        seconds = {"rollout": played - started, "update": time.perf_counter() - played}
        self._metrics["train"]["step_time"].append(sum(seconds.values()))
        self.partners.past.end_iteration(self.state.global_step + 1)
        iteration = Iteration(self.state.global_step + 1, episodes, rows, steps, seconds)
        iteration.sampled_tokens, iteration.read_tokens = self._tokens_of(episodes, *tokens)
        self._finish_iteration(iteration)
        return loss

    def _tokens_of(self, episodes: list[Episode], sampled_before: int, read_before: int) -> tuple[int, int]:
        """Return how many tokens the engine has sampled and read for an iteration, in all processes. Before are this process's counts at its start."""
        if (
            self.player.ahead is not None
        ):  # the counts have iterations that are played meanwhile, and nothing is replayed
            turns = [turn for episode in episodes for turn in episode.turns]
            return sum(len(turn.completion_ids) for turn in turns), sum(len(turn.prompt_ids) for turn in turns)
        counts = self.rollout.sampled_tokens - sampled_before, self.rollout.read_tokens - read_before
        sampled, read = map(sum, zip(*gather_objects(counts), strict=True))
        return sampled, read

    def prepare_rows(self, episodes: list[Episode]) -> list[Row]:
        """Return the iteration's rows in the order of training, with their advantages and the log-probs that the loss needs."""
        args = self.args
        rows = episode_rows(episodes, self.partners.trained, args.mask_truncated_completions)
        if not rows:
            has_sampled = not self.partners.roles and self.state.num_input_tokens_seen > 0  # partners sample, too
            report_no_turns(
                episodes, self.state.global_step + 1, args.max_prompt_tokens, self.run_state.has_trained or has_sampled
            )
        for callback in self.multirole_callbacks:
            rows = require_value(callback.on_rows(self, rows), callback, "on_rows", "the rows to train")
        rows = shuffled(rows, turn_seed(args.seed, self.state.global_step, "row order", 0, "", 0, 0))
        trained = [r for r in rows_in_turn(rows, args.role_order, self.state.global_step) if not r.is_masked]
        if anchored := [row for row in trained if self.role_betas[row.turn.role]]:
            for row, logps in zip(anchored, self.logprobs_of(anchored, base=True), strict=True):
                row.ref_logps = logps
        self.teachers.score(trained, self._tokenizer.pad_token_id)
        return rows

    def update(self, model: nn.Module, rows: list[Row]) -> tuple[list[OptimizerStep], Tensor]:
        """Take every optimizer step of every adapter; return the steps and their mean loss, detached."""
        trained = rows_in_turn(rows, self.args.role_order, self.state.global_step)
        steps = plan_steps(trained, self.adapters, self.args)
        if self.kl_bound is not None:
            self.kl_bound.begin()
        for callback in self.multirole_callbacks:
            callback.on_update_begin(self, rows, steps)
        model.train()  # a callback may have evaluated in this iteration
        set_optimizer_mode(self.optimizer, "train")
        if self.args.old_logprobs == "recomputed":  # of the steps that callbacks have changed
            later = later_rows(steps, self.args.num_iterations)
            for row, logps in zip(later, self.logprobs_of(later), strict=True):
                row.old_logps = logps
        optimizer_steps: list[OptimizerStep] = []
        losses = []
        for adapter, mini_batches in steps.items():
            lr = self.adapter_learning_rate(adapter)
            if mini_batches or not optimizer_steps:  # logged is the rate of the last adapter that takes a step
                self._last_lr = lr
            for i, mini_batch in enumerate(mini_batches * self.args.num_iterations):
                step_rows = mini_batch.rows
                if self.kl_bound is not None and i:
                    step_rows = self.kl_bound.within(step_rows, self.logprobs_of)
                if not step_rows:
                    continue
                step, loss = self.optimizer_step(model, adapter, step_rows, mini_batch.divisor, lr)
                optimizer_steps.append(step)
                losses.append(loss)
        self.update_metrics.loss.write_to(self._metrics["train"])
        for callback in self.multirole_callbacks:
            callback.on_update_end(self, rows)
        norms = [step.grad_norm for step in optimizer_steps]
        self._last_grad_norm = torch.tensor(max(norms, default=0.0))
        no_loss = torch.zeros((), device=self.accelerator.device)
        return optimizer_steps, torch.stack(losses).mean() if losses else no_loss

    def optimizer_step(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int, lr: float
    ) -> tuple[OptimizerStep, Tensor]:
        """Take one AdamW step of one adapter on one mini-batch; no other tensor changes. Also returns the loss, detached."""
        params, loss = self.compute_gradient(model, adapter, rows, divisor)
        norm, norm_after = clip(params, self.args.max_grad_norm)
        if not torch.isfinite(norm):  # the same in every process
            raise FloatingPointError(
                f"The gradient of adapter {adapter!r} has the norm {norm.item()} at iteration {self.state.global_step + 1}, although the loss is "
                "finite. Lower `learning_rate`, or resume from an earlier checkpoint."
            )
        with scaled_rates(self.optimizer, lr, self.lr_scheduler.get_last_lr()[0]):
            self.optimizer.step()
        self._n_steps += 1
        self.run_state.has_trained = True
        self.optimizer.zero_grad()  # to None: zeros would move the other adapters (momentum, decay)
        step = OptimizerStep(adapter, rows, lr, norm.item(), norm_after.item())
        for callback in self.multirole_callbacks:
            callback.on_adapter_step(self, step)
        return step, loss

    def compute_gradient(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int
    ) -> tuple[list[nn.Parameter], Tensor]:
        """Compute the gradient of one mini-batch and leave it in `grad` of the adapter's tensors; return these and the loss, detached.

        Rows whose gradient is zero are only scored. Each micro-batch's loss is a mean over its rows or tokens; its weight makes the
        sum a mean over the mini-batch. Every process raises FloatingPointError if one has no finite loss, and torch.OutOfMemoryError if the
        memory of one does not suffice for a single row.
        """
        entropy = step_entropy(rows, self.entropy_weight(adapter), self.top_entropy_quantile, self.entropies_of)
        needs_parts = any(callback.overrides("on_gradient_parts") for callback in self.multirole_callbacks)
        gradient = AdapterGradient(
            self.passes, adapter, rows, needs_parts, self.role_betas, bool(entropy.coef), self.teachers.weights
        )
        mass = divisor * loss_mass(rows, self.args.loss_type) / len(rows)
        backward = functools.partial(self._backward, model, mass, entropy, max(1, trained_tokens(rows)))
        loss = gradient.compute(backward, self._record, self.state.global_step + 1)
        if self.has_entropy_bonus:
            self.end_entropy(adapter, entropy, loss)
        for callback in self.multirole_callbacks:
            callback.on_gradient_parts(self, adapter, gradient.parts, gradient.values)
        gradient.apply()
        return gradient.params, loss

    def _backward(
        self, model: nn.Module, mass: float, entropy: StepEntropy, n_tokens: int, micro: MicroBatch, group: RowGroup
    ) -> Tensor:  # fmt: skip
        """Run TRL's loss on one micro-batch and, if it is finite, its backward pass; return the loss, weighted by its share of the `mass`.

        The loss of the roles' teachers, a mean over `n_tokens`, is a part of it.
        """
        weight = micro.weight * (loss_mass(micro.rows, self.args.loss_type) / mass)
        micro.batch = collate(micro.rows, self._tokenizer.pad_token_id, self.accelerator.device, self.args.old_logprobs)
        is_taught = self.teachers.loss.applies_to(micro)
        micro.watch = HeadWatch() if is_taught and self.teachers.loss.heads else None
        micro.entropy, mask = entropy, micro.batch["completion_mask"]  # (N, C)
        micro.batch["num_items_in_batch"] = mask.sum() * self.accelerator.num_processes
        with (
            self.passes.pass_over(micro, keeps_activations=True),
            torch.set_grad_enabled(group.has_gradient),
            self.computing_loss(micro, group.beta),
        ):
            with self.compute_loss_context_manager(), local_metrics(self.accelerator):
                loss = self.compute_loss(model, micro.batch) * weight
                if self.has_entropy_bonus and weight:
                    loss = loss - entropy.bonus(micro.rows, micro.entropies, mask)
                if is_taught:
                    loss = loss + self.teachers.loss.loss(micro, n_tokens)
            if group.has_gradient and (self.is_sharded or torch.isfinite(loss)):
                # FSDP2 averages gradients over the processes; ours are to be summed
                self.accelerator.backward(loss * self.accelerator.num_processes if self.is_sharded else loss)
        return loss.detach()

    def _record(self, micro: MicroBatch) -> None:
        """Add a micro-batch, whose pass has ended, to the metrics of the iteration, and show it to the callbacks."""
        self.update_metrics.add(micro)
        if not micro.weight:
            return
        entropies = micro.entropies.detach()  # (N, C)
        if self.has_entropy_bonus:
            micro.entropy.add(micro.rows, entropies, micro.batch["completion_mask"])
        for callback in self.multirole_callbacks:
            callback.on_micro_batch(self, micro.rows, micro.batch, micro.logps.detach(), entropies)

    # ---- log-probs

    def logprobs_of(self, rows: list[Row], base: bool = False) -> list[Tensor]:
        """Return the log-probs (C,) of each row's completion under its adapter's current weights; on the host.

        They are at the sampling temperature. With `base`, they are under the reference of `beta`: the base model, or the initial weights
        of adapters that were trained before. With several processes each computes a shard and gets them all.
        """
        reference = self.reference if base else None
        return score_rows(self.passes, rows, self._tokenizer.pad_token_id, "logprobs", reference)

    def entropies_of(self, rows: list[Row]) -> list[Tensor]:
        """Return the entropies (C,) in nats of the distributions that `logprobs_of` takes its log-probs from."""
        return score_rows(self.passes, rows, self._tokenizer.pad_token_id, "entropies")

    # ---- episodes

    def play(
        self, attempts: list[Attempt], iteration: int, policy: Mapping[str, str | None] | None = None,
        replays: Sequence[Replay] | None = None,
    ) -> list[Episode]:  # fmt: skip
        """Play episodes under the current adapters, without scoring them. Each process plays a share and gets all of them.

        `policy` replaces the trained map in this call; None runs a role on the base model. `replays`, one per attempt, replay
        episodes that were played before (`forks`).
        """
        if self.player.ahead is not None:
            self.player.ahead.wait()
        version = self.state.global_step
        # the adapters also change within an iteration
        weights = version, self._n_steps
        if replays is not None:
            self.args.check(replaying_credit="A fork")
        players = self.partners.players(self.policy if policy is None else policy, version)
        self.rollout.versions = self.partners.versions(version)
        return self.player.play(self.peft_model, version, weights, attempts, iteration, players, replays)

    def _play_ahead(
        self, model: PeftModel, version: int, attempts: list[Attempt], iteration: int
    ) -> list[Episode]:  # fmt: skip
        """Play episodes of a later iteration under a copy of the adapters."""
        return self.player.play(model, version, version, attempts, iteration)

    def play_iteration(self, attempts: list[Attempt]) -> list[Episode]:
        """Play the episodes of the iteration, or take those that were played during the last updates."""
        iteration = self.state.global_step
        if self.player.ahead is None:
            return self.play(attempts, iteration)
        episodes = self.player.ahead.take(iteration)
        assert [(e.problem.id, e.index) for e in episodes] == [(p.id, i) for p, i in attempts]
        return episodes

    def attempts_at(self, indices: list[int]) -> list[Attempt]:
        """Return the attempts at the training problems of these indices, which repeat once per episode."""
        return numbered_attempts(self.problems[index] for index in indices)

    def _attempts_of(self, iteration: int) -> list[Attempt]:
        """Return the attempts of an iteration, in the order of the run; none after the last iteration."""
        size = self.args.generation_batch_size
        return self.attempts_at(self._order[iteration * size : (iteration + 1) * size])

    def _end_episode(self, episode: Episode) -> None:
        for callback in self.multirole_callbacks:
            callback.on_episode_end(self, episode)

    # ---- metrics and evaluation

    def _finish_iteration(self, iteration: Iteration) -> None:
        """Write metrics per role into TRL's log, after the callbacks' `on_iteration_end`."""
        iteration.roles |= role_metrics(iteration.rows, list(self.policy))
        iteration.roles |= partner_metrics(iteration.episodes, self.partners.roles)
        for role, values in self.update_metrics.weights.collect(gather_objects).items():
            iteration.roles[role] |= values
        for role, kl in self.update_metrics.mean_teacher_kl(self.teachers.weights).items():
            iteration.roles[role]["teacher_kl"] = kl
        is_main = self.accelerator.is_main_process
        if iteration.number == 1 and iteration.rows and is_main:
            called = {turn.role for episode in iteration.episodes for turn in episode.turns}
            warn_of_silent_roles(self.workflow, called, "in the first iteration", n_overflows(iteration.episodes))
        for role, values in (self.kl_bound.metrics() if self.kl_bound is not None else {}).items():
            iteration.roles[role] |= values
        for counts in gather_objects(self.passes.take_counts()):
            for name, n in counts.items():
                iteration.repeated_passes[name] = iteration.repeated_passes.get(name, 0) + n
        for callback in self.multirole_callbacks:
            callback.on_iteration_end(self, iteration)
        log_iteration(self._metrics["train"], iteration, bool(self.args.max_failed_episodes))
        if self.player.ahead is not None:
            for name, value in staleness_metrics(iteration.rows, self.state.global_step).items():
                self._metrics["train"][name].append(value)
        if self.budget is not None:
            for name, n in self.budget.spent.items():
                self._metrics["train"][f"spent/{name}"] = [n]
        if self.reward_weights.any():  # without an outcome, all rewards are 0
            self._zero_reward.count(iteration.episodes, is_main)

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Play `num_generations_eval` episodes per problem with the current adapters; log `eval_reward`, and `eval_accuracy` if known.

        `eval_loss` is the objective at a ratio of 1 without KL. It is about 0 for every policy, as in TRL.
        """
        dataset: Any = dataloader.dataset  # torch's type declares no iterator
        rows: list[dict[str, Any]] = list(dataset)  # once: a transform of the dataset may draw
        n_episodes, prefix = self.args.num_generations_eval or 1, metric_key_prefix
        self.model.eval()
        set_optimizer_mode(self.optimizer, "eval")
        episodes = self.play([(problem, i) for problem in to_problems(rows) for i in range(n_episodes)], -1)
        scores = score_shares(episodes, rows, self._calculate_rewards, self.accelerator)  # (N, F)
        means = mean_by_name(self.reward_func_names, scores)
        self.player.rest()
        metrics = evaluation_metrics(prefix, episodes, means, bool(self.args.max_failed_episodes))
        for callback in self.multirole_callbacks:
            callback.on_episodes_evaluated(self, episodes, metrics, prefix)
        if self.player.has_published:  # a callback has played episodes
            self.player.rest()
        metrics |= mean_of_logged(prefix, self._pending_metrics)
        rewards = [None if episode.reward is None else episode.reward.value for episode in episodes]
        advantages = evaluation_advantages(rewards, n_episodes)
        metrics[f"{prefix}_loss"] = surrogate_loss(episodes, advantages, self.args.loss_type)
        if self.log_completions:
            columns = dict(zip(self.reward_func_names, scores.T.tolist(), strict=True))
            prompts = [row["prompt"] for row in rows for _ in range(n_episodes)]
            extra = gathered_columns(self._pending_extra_logs, len(episodes), self.accelerator)
            self.underway.evaluation = prefix, evaluation_logs(prompts, episodes, columns, advantages, extra)
        self._pending_metrics.clear()  # or TRL would add them to the next iteration's
        self._pending_extra_logs.clear()
        return EvalLoopOutput(None, None, denumpify_detensorize(metrics), len(episodes))

    # ---- set-up

    def _set_train_rows(self, train_dataset: Dataset | IterableDataset, args: MultiRoleGRPOConfig) -> None:
        """Set `train_rows`, the rows of `train_dataset` with their indices, and `problems`, what is made of them."""
        if isinstance(train_dataset, IterableDataset):
            self.train_rows = stream_rows(train_dataset, args, INDEX)
        else:
            args.set_epochs(len(train_dataset))
            self.train_rows = IndexedRows(train_dataset, INDEX)
        self.problems = Problems(self.train_rows)
        if (
            is_transformed(train_dataset) and "id" in self.train_rows[0]
        ):  # of others, `check_dataset` has read the column
            check_ids("the dataset", (problem.id for problem in self.problems))
        self._rows_source = train_dataset

    def _set_up_passes(self, has_initial_adapters: bool) -> None:
        """Set up forward passes, importance weights and the reference of KL.

        `has_initial_adapters`: the base alone is not the initial policy, because the model came with adapters or the new ones took over a part of it.
        """
        self.is_sharded = self.is_fsdp_enabled
        check_launch(self.accelerator, self.is_sharded, self.is_deepspeed_enabled)
        if self.is_sharded:
            keep_float32(self.accelerator)
            save_every_adapter(self.accelerator)
        is_anchored = has_initial_adapters and any(self.role_betas.values())
        self.reference = Reference.before_training(
            self.peft_model, self.adapters if is_anchored else [], self.is_sharded
        )
        self.passes = ModelPasses(self.peft_model, self.adapters, self.accelerator, self.args, self.is_sharded)
        self.run_state.kernels = self._choose_kernels()
        self.correction = Correction.from_args(self.args)
        self.args.check(is_sharded=self.is_sharded)
        self.teachers.set_up(self.passes, self.args, self._tokenizer, (self.epsilon_low, self.epsilon_high))
        if not self.is_sharded:
            with self.accelerator.autocast():
                tolerance = 0.01 if self.passes.is_float32 else 0.5
                check_rows(self.peft_model, tolerance)
                check_head(self.peft_model, self.temperature, tolerance)

    def _choose_kernels(self) -> dict[str, object]:
        """Return the kernels that the first process chooses, after every process has been told to use them."""
        base, is_half = self.passes.base, self.passes.is_half
        chosen = gather_objects(choose_kernels(base, is_half) if self.accelerator.is_main_process else {})[0]
        return choose_kernels(base, is_half, chosen) if chosen else {}

    def _set_up_rollout(
        self, engine: Engine | None, render: Renderer | None, is_answer: Callable[[str], bool]
    ) -> None:  # fmt: skip
        """Set up the engine and what plays episodes on it. Refuses prompts that the chat template cannot render (ValueError)."""
        args, workflow, self.has_own_render = self.args, self.workflow, render is not None
        # also TRL's, for reward models
        self.chat_template_kwargs = {"strftime_now": self.clock} | self.chat_template_kwargs
        if render is None:
            render = functools.partial(chat_template, **self.chat_template_kwargs)
            is_stream = isinstance(self.train_rows, StreamedRows)  # of which only the first row is read now
            tried = [self.problems[0]] if is_stream else self.problems
            check_chats(render, self._tokenizer, workflow, tried)
        else:
            render = self.clock.bind(render)
        check_rope(self.peft_model.config, args.max_prompt_tokens + args.max_completion_length)
        maker = engine or load_engine(args.engine, self.peft_model, self.passes.is_float32)
        engine_class = (maker if isinstance(maker, type) else type(maker)).__name__
        args.check(engine_class=engine_class, plays_during_update=plays_during_update(maker))
        self.engine = self.partners.with_endpoints(engine or maker.from_trainer(self), self)
        # one thread, one tokenizer
        tokenizer = copy.deepcopy(self._tokenizer) if args.max_staleness else self._tokenizer
        self.rollout = Rollout(
            workflow, self.engine, tokenizer, self.partners.players(self.policy, 0), is_answer, args.seed, args.max_prompt_tokens,
            render=render, max_turns=args.max_turns, turn_seeds=args.turn_seeds, max_failed_episodes=args.max_failed_episodes,
            on_episode_end=self._end_episode, strip_thoughts=args.strip_thoughts,
            n_embeddings=len(self.peft_model.get_input_embeddings().weight), context=Context.of(self.peft_model), versions=self.partners.versions(0),
        )  # fmt: skip
        sampling = Sampling(args.max_completion_length, args.temperature)
        self.player = Player(self.rollout, sampling, functools.partial(return_freed_memory, self.passes.base))
        weights = self.update_metrics.weights
        weights.warns = self.accelerator.is_main_process and not args.max_staleness
        weights.first_gaps = self.run_state.sampler_gaps
        if args.max_staleness:
            train_only(self.peft_model, self.adapters)
            self.player.ahead = RolloutsAhead(self.peft_model, self._play_ahead, self._attempts_of, args.max_staleness)
            self.rollout.is_stopped = self.player.ahead.is_stopped.is_set
            self._order = self._get_train_sampler()

    def take_dataset(self, dataset: Any) -> None:
        """Set `train_rows` for a call of `train`; checks a dataset that has replaced the one that was passed first."""
        is_replaced = dataset is not self._rows_source
        if is_replaced:
            check_dataset("train_dataset", dataset, self.reward_funcs)
        if is_replaced or isinstance(self.train_rows, StreamedRows):  # the length of a stream's rows is that of the run
            self._set_train_rows(dataset, self.args)
        if self.player.ahead is not None:
            self._order = self._get_train_sampler()
