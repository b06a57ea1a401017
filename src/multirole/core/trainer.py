"""`MultiRoleGRPOTrainer`: stock TRL GRPO, with several roles per episode and several adapters per model.

TRL 1.16 samples one completion per prompt and takes one optimizer step per HF step. Here one HF step is one
*iteration*: TRL scores the episode (reward functions, group baseline, metrics), every turn of the episode becomes a
training row that carries the episode's advantage, and `training_step` takes all optimizer steps of the iteration,
adapter by adapter and mini-batch by mini-batch. HF's own closing `optimizer.step()` then finds no gradient and does
nothing, so schedule, logging, evaluation, checkpoints and resume are per iteration, and inherited.
"""

import itertools
import logging
import os
import time
from collections import defaultdict
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer

from multirole import sandbox
from multirole.core.advantages import with_advantages
from multirole.core.distributed import add_up, deal, full, gather_objects, keep_float32, local_metrics, processes
from multirole.core.engine import Engine
from multirole.core.gradients import Updates, by_part, clipped, gradient_of, local, set_gradient
from multirole.core.logprobs import logprobs_of, padded, score
from multirole.core.policy import adapter_names
from multirole.core.renderers import RENDERERS
from multirole.core.rollout import Attempt, Rollout, Sampling, turn_seed
from multirole.core.rows import ProblemSampler, Row, collate, loss_mass, micro_batches, order_rows, steps_by_adapter
from multirole.core.schedule import lr_factor
from multirole.core.types import Episode, Problem, Turn
from multirole.diagnostics.alarms import AlarmCallback, Alarms
from multirole.diagnostics.judging import score_episodes
from multirole.diagnostics.metrics import IterationDiagnostics, diverged, nothing_sampled, sample_rows
from multirole.diagnostics.remedies import combined, needs_parts, rate_factor, refuse_sharded, roll_back
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import Saving
from multirole.experiment.launch import ONE_PROCESS, Launch
from multirole.experiment.record import N_INSPECTED, Recorder
from multirole.tasks import TASKS

logger = logging.getLogger(__name__)
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is the hook that we stand on


def outcome_reward(prompts: list, completions: list, episode: list[Episode], **_: object) -> list[float]:
    """TRL reward function: the episode's one outcome reward (paper A.7)."""
    return [e.reward.value for e in episode]


class MultiRoleGRPOTrainer(GRPOTrainer):
    """Trains every role of a workflow with GRPO on one outcome reward per episode.

    Overrides of TRL 1.16 / transformers 5.17; all else, the loss included, is inherited:

    - `_get_train_sampler`: `ProblemSampler`.
    - `create_optimizer`, `create_scheduler`: one AdamW over all adapters; the cell's schedule on the cell's clock.
    - `_prepare_inputs`: passes our own batches through.
    - `_generate_and_score_completions`: TRL's, then one row per turn.
    - `training_step`: the iteration.
    - `_get_per_token_logps_and_entropies`: the same numbers from right-padded rows without an attention mask.
    - `_clip_grad_norm`: reports the norm of our last step, since HF finds no gradient to clip.
    - `evaluate`: one episode per validation problem, scored by the task.
    - `_save_checkpoint`: into `output_dir`, then the record is written and the checkpoint gets its name.

    Args:
        model: a PEFT model with one adapter per name in `cell.policy`.
        problems: training problems; `validation` problems are attempted once each every `cell.eval_every` iterations.
        recorder: where metrics, outcomes and turns go; None keeps nothing. Only the first of several processes has one.
        launch: how the run is spread over processes and devices.
    """

    def __init__(
        self,
        cell: Cell,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        problems: list[Problem],
        validation: list[Problem],
        output_dir: str,
        recorder: Recorder | None = None,
        launch: Launch = ONE_PROCESS,
        **kwargs: object,
    ) -> None:
        self.cell, self.engine, self.problems, self.validation = cell, engine, problems, validation
        self.recorder, self.task, self.workflow = recorder, TASKS[cell.task_name], cell.make_workflow()
        self.adapters, self.alarms = adapter_names(cell.policy), Alarms(cell.policy, self.workflow.roles)
        self.rollout = Rollout(
            self.workflow, engine, tokenizer, cell.policy, lambda text: self.task.extract(text) is not None,
            cell.seed, cell.max_prompt_tokens, RENDERERS[cell.renderer],
        )  # fmt: skip
        self.published, self.updates, self.grading = -1, Updates(launch.is_sharded), sandbox.Stats()
        self.launch, self.is_sharded, n_processes = launch, launch.is_sharded, processes().num_processes
        launch.check_processes(n_processes, cell.n_problems)
        refuse_sharded(cell, launch)
        self._last_grad_norm, self.saving = torch.tensor(0.0), Saving(Path(output_dir))
        super().__init__(
            model=model,
            reward_funcs=[outcome_reward],
            args=cell.grpo_config(output_dir, n_processes, launch.sharding),
            train_dataset=Dataset.from_dict({"prompt": [p.question for p in problems], "index": range(len(problems))}),
            eval_dataset=Dataset.from_dict({"prompt": [p.question for p in validation]}),
            processing_class=tokenizer,
            rollout_func=self._rollout_func,
            **kwargs,
        )
        if self.is_sharded:
            keep_float32(self.accelerator)
        self.add_callback(AlarmCallback(self.alarms, "log" if cell.on_alarm == "rollback" else cell.on_alarm))
        self.current_gradient_accumulation_steps = 1  # HF sets it in its loop; an iteration never accumulates

    # ---- data order, optimizer and schedule

    def _get_train_sampler(self, dataset: Dataset | None = None) -> ProblemSampler:
        cell = self.cell
        return ProblemSampler(len(self.problems), cell.n_problems, cell.n_episodes, cell.iterations, cell.seed)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimizer over every adapter. An adapter without gradients is not touched by a step."""
        self.accelerator.unwrap_model(self.model).set_requires_grad(self.adapters, True)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The learning rate of each iteration's first update call; `training_step` sets the later calls'."""
        n_calls = len(self.adapters)
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda it: lr_factor(self.cell, it, 0, n_calls))
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- rollouts

    def _publish(self) -> None:
        """Hand the adapters to the engine, once per version of the weights."""
        if self.published != self.state.global_step:
            self.engine.publish(self.accelerator.unwrap_model(self.model), self.state.global_step)
            self.published = self.state.global_step

    def _rest_engine(self) -> None:
        """Give the engine's memory to the trainer until the next rollout."""
        self.engine.sleep()
        self.published = -1

    def play(self, attempts: list[Attempt], iteration: int, sampling: Sampling | None = None) -> list[Episode]:
        """Episodes under the current adapters, scored once each by the task.

        Each engine plays a share of the attempts; every process is told all of them and gets all episodes.
        """
        self._publish()
        group, rank = self.launch.vllm_tensor_parallel, self.accelerator.process_index
        n_engines = self.accelerator.num_processes // group
        cuts = [len(attempts) * i // n_engines for i in range(n_engines + 1)]
        episodes = self.rollout.run(
            attempts[cuts[rank // group] : cuts[rank // group + 1]], iteration, sampling or self.cell.sampling()
        )
        if rank % group == 0:
            with_turns = self.cell.process_reward > 0 and iteration >= 0
            self.grading = score_episodes(episodes, self.cell, with_turns)
        played = gather_objects([(e.turns, e.answer, e.reward) for e in episodes])[::group]
        return [
            Episode(problem, index, *one)
            for (problem, index), one in zip(attempts, itertools.chain.from_iterable(played), strict=True)
        ]

    def _rollout_func(self, prompts: list[str], _: GRPOTrainer) -> dict[str, list]:
        """TRL's hook: one row per episode of this process, its last turn; the episode travels along for the reward."""
        self._episodes = self.play(self._attempts, self.state.global_step)
        start = self.accelerator.process_index * len(prompts)
        episodes = self._episodes[start : start + len(prompts)]
        eos = self.processing_class.eos_token_id
        nothing = Turn("", 0, 0, [eos], [eos], [0.0], "", "stop")  # an episode whose first prompt was too long
        last = [episode.turns[-1] if episode.turns else nothing for episode in episodes]
        return {
            "prompt_ids": [turn.prompt_ids for turn in last],
            "completion_ids": [turn.completion_ids for turn in last],
            "logprobs": [turn.logprobs for turn in last],
            "episode": episodes,
        }

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Episode]:
        """TRL's scoring of this process's episodes; returns those of all, with TRL's group-relative advantage on each."""
        seen: dict[int, int] = defaultdict(int)
        self._attempts = []
        for index in itertools.chain.from_iterable(gather_objects([row["index"] for row in inputs])):
            self._attempts.append((self.problems[index], seen[index]))
            seen[index] += 1
        scored = super()._generate_and_score_completions(inputs)
        advantages = itertools.chain.from_iterable(gather_objects(scored["advantages"].tolist()))
        for episode, advantage in zip(self._episodes, advantages, strict=True):
            episode.advantage = advantage
        return self._episodes

    def _prepare_inputs(self, inputs: dict) -> dict:
        return inputs

    def _rows(self, episodes: list[Episode]) -> list[Row]:
        """One row per turn, with its advantage."""
        starts, iteration = self.cell.train_starts, self.state.global_step
        return with_advantages(
            [Row(e, t, self.cell.policy[t.role], 0.0, iteration >= starts[t.role]) for e in episodes for t in e.turns],
            episodes, self.cell,
        )  # fmt: skip

    # ---- the iteration

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: object = None) -> Tensor:
        """One iteration: roll out, then every optimizer step of every adapter (design sec 4).

        Returns the mean loss of the optimizer steps, detached.
        """
        started = time.perf_counter()
        model.train()
        episodes = self._generate_and_score_completions(inputs)
        self._rest_engine()
        played = time.perf_counter()
        diagnostics, loss = self.update(model, self.prepare(model, episodes))
        self._step += 1  # TRL counts training steps here
        update = time.perf_counter() - played
        seconds = {"rollout": played - started, "update": update, "grading": self.grading.seconds}
        self._log_iteration(diagnostics, episodes, seconds)
        if self.cell.on_alarm == "rollback" and self.alarms.new:
            roll_back(self.accelerator.unwrap_model(self.model), self.optimizer, self.recorder, self.cell)
        return loss

    def prepare(self, model: nn.Module, episodes: list[Episode]) -> list[Row]:
        """The iteration's rows in the order of training; notes their pi_old and the base's log-probs where these are needed."""
        seed = turn_seed(self.cell.seed, self.state.global_step, "row order", 0, "", 0, 0)
        rows = order_rows(self._rows(episodes), self.cell.row_order, torch.Generator().manual_seed(seed))
        if not rows:
            raise nothing_sampled(self.cell.max_prompt_tokens, self.state.global_step)
        trained, anchors = [row for row in rows if row.is_trained], self.cell.anchors
        if self.cell.old_logprobs == "recomputed":
            self._old_logprobs = self._logprobs_of(model, trained)
        if anchored := [row for row in trained if anchors[row.turn.role]]:
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                self._base_logprobs = self._logprobs_of(model, anchored)
        return rows

    def update(self, model: nn.Module, rows: list[Row]) -> tuple[IterationDiagnostics, Tensor]:
        """Every optimizer step of every adapter; returns what was seen of them and their mean loss, detached."""
        cell, iteration, peft_model = self.cell, self.state.global_step, self.accelerator.unwrap_model(self.model)
        diagnostics = IterationDiagnostics(rows, cell.clip_low, cell.clip_high, cell.temperature, cell.diagnostics)
        trained = [row for row in rows if row.is_trained]
        sample, losses = sample_rows(trained) if diagnostics.is_on else [], []
        if sample and cell.temperature != 1.0:
            diagnostics.raw = self._logprobs_of(model, sample, temperature=1.0)
        steps = steps_by_adapter(trained, self.adapters, cell)
        self.updates.start(peft_model, steps if diagnostics.is_on else ())
        peak = cell.learning_rate * rate_factor(self.alarms.log, self.recorder, cell)
        for call, (adapter, mini_batches) in enumerate(steps.items()):
            lr = peak * lr_factor(cell, iteration, call, len(self.adapters))
            for mini_batch, divisor in mini_batches:
                losses.append(self.optimizer_step(model, adapter, mini_batch, divisor, lr, diagnostics))
        diagnostics.cosine_previous = self.updates.finish(peft_model)
        if sample:
            diagnostics.add_after(sample, self._logprobs_of(model, sample))
        return diagnostics, torch.stack(losses).mean() if losses else torch.zeros(())

    def optimizer_step(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int, lr: float,
        diagnostics: IterationDiagnostics,
    ) -> Tensor:  # fmt: skip
        """One AdamW step of one adapter on one mini-batch; no other tensor moves. Returns the loss, detached."""
        params, loss = self.accumulate(model, adapter, rows, divisor, diagnostics)
        self._last_grad_norm, norm_after = clipped(params, self.cell.max_grad_norm)
        add_up([loss])
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.unwrap_model(self.model).set_requires_grad(self.adapters, True)
        diagnostics.add_step(adapter, rows, lr, self._last_grad_norm.item(), norm_after.item())
        return loss

    def accumulate(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int, diagnostics: IterationDiagnostics
    ) -> tuple[list[nn.Parameter], Tensor]:
        """The gradient of one mini-batch, left in the adapter's tensors; returns those and this process's loss, detached.

        It is accumulated by role and slot, so that each one's own part is known and the parts sum to what is applied.
        Without diagnostics only their sum is kept, over the same groups in the same order: another order of float additions
        would round differently, and the switch would change the weights. Each micro-batch's loss is a mean over its
        rows or tokens; its weight makes the sum a mean over the mini-batch.
        """
        peft_model = self.accelerator.unwrap_model(self.model)
        peft_model.set_adapter(adapter)
        params = [p for p in peft_model.parameters() if p.requires_grad]
        parts, loss = by_part(rows), torch.zeros((), device=self.accelerator.device)
        is_apart, whole = diagnostics.is_on or needs_parts(self.cell), divisor * loss_mass(rows, self.cell) / len(rows)
        n_kept, n = len(parts) if is_apart else 1, sum(local(p).numel() for p in params)
        kept = torch.zeros(n_kept, n, device=loss.device)
        for at, owned in enumerate(parts.values()):
            peft_model.zero_grad(set_to_none=True)
            for micro, weight in self._share(owned):
                loss = loss + self._backward(model, micro, weight * loss_mass(micro, self.cell) / whole, diagnostics)
            part = gradient_of(params)
            if not self.is_sharded:  # FSDP2 has added up the processes' gradients already
                add_up([part])
            kept[at % n_kept] += part
        if diagnostics.is_on:
            diagnostics.add_gradients(adapter, list(parts), kept, self.is_sharded)
        set_gradient(params, combined(list(parts), kept, self.workflow.roles, adapter, self.cell, self.updates))
        return params, loss

    def _share(self, rows: list[Row]) -> list[tuple[list[Row], float]]:
        """The micro-batches of `rows` that this process computes, with their weights."""
        return deal(micro_batches(rows, self.cell.micro_batch_tokens), self.accelerator, self.is_sharded)

    def _backward(self, model: nn.Module, micro: list[Row], weight: float, diagnostics: IterationDiagnostics) -> Tensor:
        """TRL's loss of one micro-batch of one role, weighted by its share of the mini-batch, and its gradient."""
        batch = collate(micro, self.processing_class.pad_token_id, self.accelerator.device)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        if self.cell.old_logprobs == "recomputed":
            batch["old_per_token_logps"] = padded(self._old_logprobs, micro).to(self.accelerator.device)
        self.beta = self.cell.anchors[micro[0].turn.role]
        if self.beta:
            batch["ref_per_token_logps"] = padded(self._base_logprobs, micro).to(self.accelerator.device)
        with self.compute_loss_context_manager(), local_metrics(self.accelerator):
            loss = self.compute_loss(model, batch) * weight
        self.beta = 0.0  # or TRL would look for a reference model in the next rollout
        if not torch.isfinite(loss):
            raise diverged(loss.item(), self.state.global_step, micro)
        # FSDP2 averages gradients over the processes; ours are to be summed
        self.accelerator.backward(loss * self.accelerator.num_processes if self.is_sharded else loss)
        if weight:
            diagnostics.add_tokens(micro, batch, *self._logps)
        return loss.detach()

    def _logprobs_of(self, _: nn.Module, rows: list[Row], temperature: float | None = None) -> dict[int, Tensor]:
        """The trainer's own log-probs of the rows' completions under the present weights: id(turn) -> (C,)."""
        peft_model, pad_id = self.accelerator.unwrap_model(self.model), self.processing_class.pad_token_id
        found = logprobs_of(peft_model, rows, self._share, pad_id, self.accelerator, temperature)
        peft_model.set_requires_grad(self.adapters, True)
        return found

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **_: object,
    ) -> tuple[Tensor, Tensor, None]:  # fmt: skip
        """TRL's numbers, log-probs and entropies (N, C), from rows moved to the left edge."""
        with self.accelerator.autocast():  # unwrapped: data parallelism is ours (`distributed`)
            logps, entropies = score(self.accelerator.unwrap_model(model), input_ids, attention_mask, logits_to_keep)
        self._logps = (logps.detach(), entropies.detach())
        return logps, entropies, None

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._last_grad_norm

    def _log_iteration(self, diagnostics: IterationDiagnostics, episodes: list[Episode], seconds: dict) -> None:
        """Metrics per role into TRL's log and, with the ledger and the turns, into the record."""
        diagnostics.merge(gather_objects(diagnostics.token_sums()))
        roles, it = diagnostics.per_role(), self.state.global_step + 1
        alarms = self.alarms.update(it, roles)
        for role, metrics in roles.items():
            for name, value in metrics.items():
                self._metrics["train"][f"{role}/{name}"].append(value)
        for name in [name for name in self._metrics["train"] if name.startswith("completions/")]:
            del self._metrics["train"][name]  # TRL's lengths are of each episode's last turn: ours are per role
        accuracy = sum(episode.reward.is_correct for episode in episodes) / len(episodes)
        self._metrics["train"]["accuracy"].append(accuracy)
        logger.info("iteration %d: reward %.3f, accuracy %.3f", it, self._metrics["train"]["reward"][-1], accuracy)
        if self.recorder:
            self.recorder.add_iteration(it, episodes, self.cell.n_episodes, roles, alarms, diagnostics, seconds)

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """One episode per validation problem with the current adapters: `eval_accuracy`, `eval_reward`."""
        self.model.eval()
        episodes = self.play([(problem, 0) for problem in self.validation], -1, self.cell.sampling(is_evaluation=True))
        metrics = {
            "eval_accuracy": sum(e.reward.is_correct for e in episodes) / len(episodes),
            "eval_reward": sum(e.reward.value for e in episodes) / len(episodes),
        }
        self._rest_engine()
        rows = [Row(e, t, self.cell.policy[t.role], 0.0) for e in episodes[:N_INSPECTED] for t in e.turns]
        with self.accelerator.unwrap_model(self.model).disable_adapter():
            base_logprobs = self._logprobs_of(self.model, rows)
        if self.recorder:
            self.recorder.add_evaluation(self.state.global_step, episodes, base_logprobs, self.processing_class.decode)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        peft_model, step, staged = self.accelerator.unwrap_model(self.model), self.state.global_step, self.saving.staged
        own, named = peft_model.base_model.prefix, peft_model.named_parameters()
        weights = {name: full(p.detach()) for name, p in named if own in name}
        phases = [
            lambda: super(MultiRoleGRPOTrainer, self)._save_checkpoint(model, trial),
            lambda: self.updates.save(staged / f"checkpoint-{step}"),
            lambda: self.recorder and peft_model.save_pretrained(staged / "adapters", state_dict=weights),
            lambda: self.recorder and self.recorder.seal(step),
        ]
        if self.saving.attempt(step, phases) and self.recorder:
            self.recorder.save(step)
