"""`MultiRoleGRPOTrainer`: stock TRL GRPO, with several roles per episode and several LoRA adapters per model.

TRL 1.16 samples one completion per prompt and takes one optimizer step per HF step. Here one HF step is one
*iteration*: TRL scores the episode (reward functions, group baseline, metrics), every turn of the episode becomes a
training row that carries the episode's advantage, and `training_step` takes all optimizer steps of the iteration,
adapter by adapter and mini-batch by mini-batch. HF's own closing `optimizer.step()` then finds no gradient and does
nothing, so schedule, logging, evaluation, checkpoints and resume are per iteration, and inherited.
"""

import functools
import itertools
import logging
import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer

from multirole import sandbox
from multirole.advantages import group_advantages
from multirole.alarms import AlarmCallback, Alarms
from multirole.batching import ProblemSampler, Row, collate, left_aligned, micro_batches, mini_batches, order_rows
from multirole.cells import Cell
from multirole.diagnostics import IterationDiagnostics, diverged, sample_rows
from multirole.distributed import add_up, deal, full, gather_objects, keep_float32, local_metrics, processes
from multirole.engine import Engine
from multirole.episodes import Episode, Problem, Turn
from multirole.gradients import Updates, by_part, gradient_of, local, set_gradient
from multirole.launch import ONE_PROCESS, Launch
from multirole.policies import adapter_names
from multirole.record import N_INSPECTED, Recorder
from multirole.renderers import RENDERERS
from multirole.rollout import Attempt, Rollout, Sampling, turn_seed
from multirole.schedule import lr_factor
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
    - `_save_checkpoint`: the record is written, then the checkpoint is marked complete.

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
        self._last_grad_norm = torch.tensor(0.0)
        self._logps: tuple[torch.Tensor, torch.Tensor] | None = None
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
        self.add_callback(AlarmCallback(self.alarms, cell.on_alarm))
        self.current_gradient_accumulation_steps = 1  # HF sets it in its loop; an iteration never accumulates

    # ---- data order, optimizer and schedule

    def _get_train_sampler(self, dataset: Dataset | None = None) -> ProblemSampler:
        cell = self.cell
        return ProblemSampler(len(self.problems), cell.n_problems, cell.n_episodes, cell.iterations, cell.seed)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
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
            self._score(episodes)
        played = gather_objects([(e.turns, e.answer, e.reward) for e in episodes])[::group]
        return [
            Episode(problem, index, *one)
            for (problem, index), one in zip(attempts, itertools.chain.from_iterable(played), strict=True)
        ]

    def _score(self, episodes: list[Episode]) -> None:
        """The outcome reward of each episode (paper A.7)."""
        answers = [episode.answer.text for episode in episodes]
        rewards = self.task.score_batch([e.problem for e in episodes], answers, **self.cell.reward_options)
        self.grading = sandbox.take_stats()
        if self.grading.programs:
            logger.info("graded %s", self.grading.line())
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.reward = reward if episode.answer.reason is None else replace(reward, reason=episode.answer.reason)

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
        """One row per turn: the episode's advantage is copied to every turn, or groups are pooled by role or slot."""
        rows = [Row(e, t, self.cell.policy[t.role], e.advantage) for e in episodes for t in e.turns]
        if self.cell.advantage_group != "episode":
            by_slot = self.cell.advantage_group == "slot"
            groups = [(r.episode.group(self.cell.n_episodes), r.turn.role, r.turn.slot * by_slot) for r in rows]
            pooled = group_advantages([r.episode.reward.value for r in rows], groups)
            rows = [replace(row, advantage=advantage) for row, advantage in zip(rows, pooled, strict=True)]
        return rows

    # ---- the iteration

    def training_step(
        self, model: torch.nn.Module, inputs: list[dict], num_items_in_batch: object = None
    ) -> torch.Tensor:
        """One iteration: roll out, then every optimizer step of every adapter (design sec 4).

        Returns the mean loss of the optimizer steps, detached.
        """
        cell, iteration, started = self.cell, self.state.global_step, time.perf_counter()
        model.train()
        episodes = self._generate_and_score_completions(inputs)
        self._rest_engine()
        rolled_out = time.perf_counter()
        generator = torch.Generator().manual_seed(turn_seed(cell.seed, iteration, "row order", 0, "", 0, 0))
        rows = order_rows(self._rows(episodes), cell.row_order, generator)
        if not rows:
            raise ValueError(
                f"max_prompt_tokens={cell.max_prompt_tokens} is shorter than the first prompt of every episode of "
                f"iteration {iteration + 1}: nothing was sampled. Write a larger max_prompt_tokens."
            )
        if cell.old_logprobs == "recomputed":
            self._old_logprobs = self._logprobs_of(model, rows)
        # the released code updates the adapter of the shortest row first, which matters to its clock per update call
        by_adapter: dict[str, list[Row]] = {name: [] for name in self.adapters} if cell.row_order == "shuffled" else {}
        for row in rows:
            by_adapter.setdefault(row.adapter, []).append(row)
        diagnostics = IterationDiagnostics(rows, cell.clip_low, cell.clip_high)
        losses = []
        self.updates.start(self.accelerator.unwrap_model(self.model), by_adapter)
        for call, (adapter, owned) in enumerate(by_adapter.items()):
            lr = cell.learning_rate * lr_factor(cell, iteration, call, len(self.adapters))
            for mini_batch, divisor in mini_batches(owned, cell.n_problems * cell.n_episodes, cell.minibatch_split):
                losses.append(self.optimizer_step(model, adapter, mini_batch, divisor, lr, diagnostics))
        diagnostics.cosine_previous = self.updates.finish(self.accelerator.unwrap_model(self.model))
        sample = sample_rows(rows)
        diagnostics.add_after(sample, self._logprobs_of(model, sample))
        self._step += 1  # TRL counts training steps here
        now, grading = time.perf_counter(), self.grading.seconds
        seconds = {"rollout": rolled_out - started, "update": now - rolled_out, "grading": grading}
        self._log_iteration(diagnostics, episodes, seconds)
        return torch.stack(losses).mean()

    def optimizer_step(
        self, model: torch.nn.Module, adapter: str, rows: list[Row], divisor: int, lr: float,
        diagnostics: IterationDiagnostics,
    ) -> torch.Tensor:  # fmt: skip
        """One AdamW step of one adapter on one mini-batch; no other tensor moves. Returns the loss, detached.

        The gradient is accumulated by role and slot, so that each one's own part is known and the parts sum to what is
        applied. Each micro-batch's loss is a mean over its rows; its weight makes the sum a mean over the mini-batch.
        """
        peft_model = self.accelerator.unwrap_model(self.model)
        peft_model.set_adapter(adapter)
        params = [p for p in peft_model.parameters() if p.requires_grad]
        parts, loss = by_part(rows), torch.zeros((), device=self.accelerator.device)
        matrix = torch.zeros(len(parts), sum(local(p).numel() for p in params), device=loss.device)  # (K, n)
        for row, ((role, _), owned) in zip(matrix, parts.items(), strict=True):
            self.optimizer.zero_grad(set_to_none=True)
            for micro, weight in self._share(owned):
                loss = loss + self._backward(model, micro, weight, divisor, role, diagnostics)
            row.copy_(gradient_of(params))
        if not self.is_sharded:  # FSDP2 has added up the processes' gradients already
            add_up([matrix])
        diagnostics.add_gradients(adapter, list(parts), matrix, self.is_sharded)
        set_gradient(params, functools.reduce(torch.add, matrix))
        self._last_grad_norm = full(torch.nn.utils.clip_grad_norm_(params, self.cell.max_grad_norm))
        add_up([loss])
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        peft_model.set_requires_grad(self.adapters, True)
        diagnostics.add_step(adapter, rows, lr, self._last_grad_norm.item())
        return loss

    def _share(self, rows: list[Row]) -> list[tuple[list[Row], float]]:
        """The micro-batches of `rows` that this process computes, with their weights."""
        return deal(micro_batches(rows, self.cell.micro_batch_tokens), self.accelerator, self.is_sharded)

    def _backward(
        self, model: torch.nn.Module, micro: list[Row], weight: float, divisor: int, role: str,
        diagnostics: IterationDiagnostics,
    ) -> torch.Tensor:  # fmt: skip
        """TRL's loss of one micro-batch, weighted by its share of the mini-batch, and its gradient."""
        batch = collate(micro, self.processing_class.pad_token_id, self.accelerator.device)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        if self.cell.old_logprobs == "recomputed":
            old = [self._old_logprobs[id(row.turn)] for row in micro]
            padded = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)  # (N, C)
            batch["old_per_token_logps"] = padded.to(self.accelerator.device)
        with self.compute_loss_context_manager(), local_metrics(self.accelerator):
            loss = self.compute_loss(model, batch) * (weight * len(micro) / divisor)
        if not torch.isfinite(loss):
            raise diverged(loss.item(), self.state.global_step, role, micro)
        # FSDP2 averages gradients over the processes; ours are to be summed
        self.accelerator.backward(loss * self.accelerator.num_processes if self.is_sharded else loss)
        if weight:
            diagnostics.add_tokens(micro[0].adapter, role, batch, *self._logps)
        return loss.detach()

    @torch.no_grad()
    def _logprobs_of(self, model: torch.nn.Module, rows: list[Row]) -> dict[int, torch.Tensor]:
        """The trainer's own log-probs of the rows' completions under the present weights: id(turn) -> (C,)."""
        peft_model, computed = self.accelerator.unwrap_model(self.model), {}
        place = {id(row.turn): i for i, row in enumerate(rows)}  # the same in every process
        for adapter in self.adapters:
            peft_model.set_adapter(adapter)
            for micro, _ in self._share([row for row in rows if row.adapter == adapter]):
                batch = collate(micro, self.processing_class.pad_token_id, self.accelerator.device)
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (N, P + C)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (N, P + C)
                logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].size(1))
                for row, values in zip(micro, logps, strict=True):
                    computed[place[id(row.turn)]] = values[: len(row.turn.completion_ids)].cpu()
        peft_model.set_requires_grad(self.adapters, True)
        everyones = {i: values for part in gather_objects(computed) for i, values in part.items()}
        return {id(row.turn): everyones[i] for i, row in enumerate(rows)}

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
        """TRL's numbers, from rows moved to the left edge: causal attention then needs no mask and positions no ids.

        `input_ids` and `attention_mask` are (N, P + C) as TRL pads them; returns log-probs and entropies (N, C).
        """
        ids, labels, at, inside = left_aligned(input_ids, attention_mask, logits_to_keep)
        with self.accelerator.autocast():  # unwrapped: data parallelism is ours (`distributed`)
            outputs = self.accelerator.unwrap_model(model)(input_ids=ids, labels=labels, fused_lm_head=True)
        logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
        entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
        self._logps = (logps.detach(), entropies.detach())
        return logps, entropies, None

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
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

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        super()._save_checkpoint(model, trial)
        peft_model = self.accelerator.unwrap_model(self.model)
        weights = {name: full(p.detach()) for name, p in peft_model.named_parameters() if "lora_" in name}
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        self.updates.save(folder)
        self.accelerator.wait_for_everyone()
        if self.recorder:
            adapters = self.recorder.folder / "adapters" / f"step_{self.state.global_step:05d}"
            peft_model.save_pretrained(adapters, state_dict=weights)
            self.recorder.save(self.state.global_step)
        self.accelerator.wait_for_everyone()
