"""Define `MultiRoleGRPOTrainer`: TRL's GRPO with several roles per episode and several adapters per model.

TRL 1.16 samples one completion per prompt and takes one optimizer step per HF step. Here one HF step is one
*iteration*: TRL scores the episode (reward functions, group baseline, metrics), every turn of the episode becomes a
training row that carries the episode's advantage, and `training_step` takes all optimizer steps of the iteration,
adapter by adapter and mini-batch by mini-batch. HF's loop calls `optimizer.step()` afterwards, which finds no gradient and does
nothing. So schedule, logging, evaluation, checkpoints and resume are HF's, and count iterations.

Read `training_step`, `update`, `optimizer_step` and `compute_gradient`, in this order: they are the loop. `adapter_update` computes the
gradient of one optimizer step, `model_passes` runs the forward passes, and `scoring` computes log-probs without gradient.
docs/architecture.md lists the other files.
"""

import copy
import functools
import itertools
import json
import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, denumpify_detensorize

from multirole.callbacks import Iteration, MultiRoleCallback, OptimizerStep, require_value
from multirole.chat.templates import Renderer, StartClock, chat_template, check_chats
from multirole.credit.advantages import groups_of_equal_rewards
from multirole.credit.rewards import answers_as_completions, leave_out_failed, set_rewards, with_equal_columns
from multirole.engines.protocol import Engine, EngineError, RequestRefused, Sampling
from multirole.inputs.arguments import check_arguments, check_processes, kl_weights, named_adapters, use_one_gpu
from multirole.inputs.epochs import EpochCount
from multirole.inputs.streams import IndexedRows, StreamedRows, check_streams, stream_rows
from multirole.inputs.validation import (
    INDEX,
    Problems,
    changes_base,
    check_dataset,
    check_evaluated,
    check_head_cast,
    check_ids,
    check_shared_base,
    check_thought_rewards,
    checked_evaluation,
    checked_reward,
    load_processor,
    to_problems,
    train_only,
    with_adapters,
)
from multirole.metrics.completions_table import evaluation_logs, save_separately
from multirole.metrics.episodes import (
    SILENT_ITERATIONS,
    ZeroRewardWarning,
    evaluation_advantages,
    n_overflows,
    surrogate_loss,
)
from multirole.metrics.evaluation import (
    evaluation_metrics,
    mean_by_name,
    mean_of_logged,
    score_shares,
    warn_of_loss_as_metric,
)
from multirole.metrics.iteration import OF_RATIOS, OF_ROWS, LossMetrics, log_iteration, role_metrics
from multirole.options import MultiRoleGRPOConfig
from multirole.policy import adapter_names, parse_policy
from multirole.rollout.replay import Replay
from multirole.rollout.rollout import (
    Attempt,
    Rollout,
    WorkflowError,
    answer_ids,
    check_failures,
    last_turns,
    numbered_attempts,
    transcript,
    turn_seed,
    warn_of_silent_roles,
)
from multirole.rollout.staleness import RolloutsAhead, check_staleness, staleness_metrics
from multirole.saving.checkpoints import (
    SERVING,
    PolicyMap,
    check_checkpoint,
    copy_adapters,
    last_checkpoint,
    loading_on_host,
    resume_argument,
    rotating_by_step,
    saved_args,
)
from multirole.saving.model_card import write_card
from multirole.trl_parts import GRPOTrainer
from multirole.types import Episode, Workflow
from multirole.update.adapter_update import AdapterGradient, RowGroup, scaled_rates, set_optimizer_mode
from multirole.update.entropy import by_adapter, next_coef, step_entropy, value_of, with_value
from multirole.update.gradients import clip
from multirole.update.importance import Correction, WeightSums
from multirole.update.noise import disable_noise, warn_of_noise
from multirole.update.passes.logprobs import check_head, check_rows
from multirole.update.passes.model_passes import MicroBatch, ModelPasses
from multirole.update.passes.recomputation import return_freed_memory, use_growing_segments
from multirole.update.processes import (
    all_reduce,
    check_launch,
    gather_objects,
    keep_float32,
    local_metrics,
    own_share,
    processes,
    save_every_adapter,
)
from multirole.update.reference import Reference
from multirole.update.rows import Row, collate, episode_rows, later_rows, loss_mass, plan_steps, problem_order, shuffled
from multirole.update.scoring import score_rows
from multirole.update.threads import use_fitting_threads

logger = logging.getLogger(__name__)

ENGINES_PACKAGE = "multirole.engines"
"""Package of the engines that have a short name; imported late, because it imports `multirole.core`."""


class MultiRoleGRPOTrainer(GRPOTrainer):
    """Trains every role of a workflow with GRPO on one outcome reward per episode.

    Overrides of TRL 1.16 / transformers 5.17; everything else, the loss included, is inherited:

    - `train`: resumes from `args.resume_from_checkpoint`, and hides the frames of this package when a workflow fails.
    - `get_train_dataloader`: TRL's, of rows that carry their index; also of a `train_dataset` that was replaced before `train`.
    - `_get_train_sampler`: one long epoch, so that a resume continues the order of problems.
    - `create_optimizer`: one AdamW over all adapters.
    - `_calculate_rewards`: TRL's, with the episodes' answers as completions.
    - `_generate_and_score_completions`: TRL's; returns episodes with their advantages.
    - `training_step`: the iteration.
    - `_get_per_token_logps_and_entropies`: the same numbers from right-padded rows without an attention mask.
    - `get_high_entropy_mask`: the tokens of the mini-batch's top quantile.
    - `_clip_grad_norm`, `_get_grad_norm`: report the largest norm of the iteration's steps, since HF finds no gradient to clip.
    - `_get_learning_rate`: reports the rate of the last adapter that took a step, if a callback changes the schedule's.
    - `log`: TRL's; `epoch` counts passes over the dataset, and the table of completions of an evaluation holds its own episodes.
    - `evaluate`: checks the dataset that is passed, or `eval_dataset` if it was replaced, and reads a stream.
    - `predict`: an evaluation of the dataset; there are no `predictions`, only metrics.
    - `evaluation_loop`: episodes on the evaluation problems, scored by the reward functions.
    - `_load_from_checkpoint`: HF's, of a checkpoint of this run's adapters and policy map.
    - `_load_best_model`: `load_best_model_at_end` of every adapter, as a resumed run loads them.
    - `_save_checkpoint`: TRL's; `save_total_limit` never removes the checkpoint that was saved, whatever the clock says.
    - `_push_from_checkpoint`: also copies the adapters' folders.
    - `create_model_card`: of several adapters, without local paths.
    - `_save`: also writes what serving the adapters takes (`serving.json`).

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As in TRL. A `PeftModel` must hold an adapter for each name of the policy map or, for a policy with one adapter, the adapter
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

    args: MultiRoleGRPOConfig
    control: TrainerControl
    entropy_coef: float | dict[str, float]  # of each adapter, if there are several
    problems: Problems
    train_rows: IndexedRows | StreamedRows
    train_dataset: Any
    eval_dataset: Any
    _evaluation_sets: tuple[Any, Any]  # as they were given, and checked
    _logs: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    _tag_names = ["trl", "grpo", "multi-role"]  # noqa: RUF012
    _name = "Multi-role GRPO"

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
            model, workflow, reward_funcs, args, peft_config, quantization_config=quantization_config, tools=tools,
            rollout_func=rollout_func, environment_factory=environment_factory,
        )  # fmt: skip
        assert workflow is not None  # or it has been refused
        processes()  # before anything that would set up torch.distributed its own way, such as vLLM
        args = copy.copy(args) if args is not None else MultiRoleGRPOConfig("multirole-grpo")
        args.check_changes()
        check_thought_rewards(reward_funcs, args)
        use_one_gpu(args)
        use_growing_segments()
        check_processes(args)
        check_dataset("train_dataset", train_dataset, reward_funcs)
        check_streams(train_dataset, eval_dataset, args)
        check_evaluated(eval_dataset, args)
        self._evaluation_sets = (
            eval_dataset,
            None if eval_dataset is None else checked_evaluation(eval_dataset, reward_funcs),
        )
        import_module(ENGINES_PACKAGE).check_engine(args.engine)
        self.workflow = workflow
        policy = parse_policy("sp" if args.policy is None else args.policy, list(workflow.roles))
        self.policy = named_adapters(model, policy)
        self.adapters = adapter_names(self.policy)
        self.role_betas = kl_weights(args, self.policy)
        self._set_initial_state(args)

        if not isinstance(model, PeftModel):
            check_shared_base(peft_config, self.adapters)
        self._set_train_rows(train_dataset, args)
        peft_model = with_adapters(model, peft_config, self.adapters, args)
        check_head_cast(peft_model, args)
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
        args.router_aux_loss_coef = 0.0
        run = PolicyMap(self.policy, gather_objects(StartClock().started)[0])  # of the first process
        self.clock = run.clock
        """The clock of chat templates, which a resumed run takes over from its checkpoint."""
        beta, args.beta = args.beta, 0.0  # or TRL would look for an adapter "default"; set role by role in `_backward`
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*")  # the experimental hook that this stands on
            super().__init__(
                model=peft_model,
                reward_funcs=[checked_reward(function) for function in reward_funcs],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=[*(callbacks or []), run],
                optimizers=optimizers,
                rollout_func=self._rollout_func,
            )
        args.beta = beta  # for logs and records; TRL's loss reads `self.beta`
        self.callback_handler.callbacks.insert(0, EpochCount(self))
        self.peft_model: PeftModel = self.model
        """The model without the wrappers of accelerate."""
        switched_off = disable_noise(self.peft_model, args.neftune_noise_alpha)
        if self.accelerator.is_main_process:
            warn_of_noise(switched_off)
            warn_of_loss_as_metric(args)
        title = Path(args.hub_model_id or args.output_dir).name
        fields = {f"paper_{key}": self._paper.get(key) for key in ("title", "id")}
        self._card = functools.partial(
            write_card, source=self.peft_model.config.name_or_path, policy=self.policy, workflow=self.workflow.name,
            name=title, trainer=fields | {"trainer_name": self._name, "trainer_citation": self._paper.get("citation")},
            hub_id=args.hub_model_id, tags=self._tag_names,
        )  # fmt: skip
        # `save_pretrained` calls this
        self.peft_model.create_or_update_model_card = functools.partial(self._card, keeps=True)
        self._take_over_options()
        self._set_up_passes(has_initial_adapters=isinstance(model, PeftModel) or changes_base(peft_config))
        self._set_up_rollout(engine, render, is_answer)

    def _set_train_rows(self, train_dataset: Dataset | IterableDataset, args: MultiRoleGRPOConfig) -> None:
        """Set `train_rows`, the rows of `train_dataset` with their indices, and `problems`, what is made of them."""
        if isinstance(train_dataset, IterableDataset):
            self.train_rows = stream_rows(train_dataset, args, INDEX)
        else:
            args.set_epochs(len(train_dataset))
            self.train_rows = IndexedRows(train_dataset, INDEX)
        self.problems = Problems(self.train_rows)
        if isinstance(self.train_rows, IndexedRows) and "id" in self.train_rows[0]:
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
        self.correction = Correction.from_args(self.args)
        if not self.is_sharded:
            with self.accelerator.autocast():
                tolerance = 0.01 if self.passes.is_float32 else 0.5
                check_rows(self.peft_model, tolerance)
                check_head(self.peft_model, self.temperature, tolerance)

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
        load_engine = import_module(ENGINES_PACKAGE).load_engine
        maker = engine or load_engine(args.engine, self.peft_model, self.passes.is_float32)
        check_staleness(args, maker, self.is_sharded)
        self.engine = engine or maker.from_trainer(self)
        tokenizer = (
            copy.deepcopy(self._tokenizer) if args.max_staleness else self._tokenizer
        )  # one thread, one tokenizer
        self.rollout = Rollout(
            workflow, self.engine, tokenizer, self.policy, is_answer, args.seed, args.max_prompt_tokens, render,
            args.max_turns, args.turn_seeds, args.max_failed_episodes, self._end_episode, args.strip_thoughts,
            n_embeddings=len(self.peft_model.get_input_embeddings().weight),
        )  # fmt: skip
        self._weight_sums.warns = self.accelerator.is_main_process
        self.ahead: RolloutsAhead | None = None
        if args.max_staleness:
            train_only(self.peft_model, self.adapters)
            self.ahead = RolloutsAhead(self.peft_model, self._play, self._attempts_of, args.max_staleness)
            self.rollout.is_stopped = self.ahead.is_stopped.is_set
            self._order, self._weight_sums.warns = self._get_train_sampler(), False

    def _set_initial_state(self, args: MultiRoleGRPOConfig) -> None:
        """Initialise the attributes that change from one iteration to the next."""
        self._last_grad_norm, self._last_lr = torch.tensor(0.0), 0.0
        self._published: int | tuple[int, int] = -1  # what `_play` knows the engine's adapters by
        self._n_steps = 0  # optimizer steps that were taken
        self._micro_batch: MicroBatch | None = None  # whose loss is being computed
        self._loss_metrics = LossMetrics(OF_ROWS + OF_RATIOS * (args.importance_sampling_level == "sequence"))
        self._weight_sums, self._zero_reward = WeightSums(), ZeroRewardWarning()
        self._evaluated: tuple[str, dict[str, Any]] | None = None  # prefix and table of what is logged next

    def _take_over_options(self) -> None:
        """Switch off TRL's handling of options that act on an optimizer step here, and on a micro-batch or an HF step in TRL."""
        args = self.args
        self.num_iterations = 1  # our passes are in `update`
        self.neftune_noise_alpha = None  # HF's loop would add noise
        self.current_gradient_accumulation_steps = 1  # HF sets it in its loop; an iteration never accumulates
        self._entropy_bonus_enabled = False  # ours is in `_backward`
        self.has_entropy_bonus = bool(args.entropy_coef or args.use_adaptive_entropy)
        # TRL saves these two in checkpoints
        self.entropy_coef = by_adapter(self.adapters, args.entropy_coef or 0.0)
        self._last_world_entropy = by_adapter(self.adapters, math.inf)

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters, of training and of evaluation."""
        return Sampling(self.args.max_completion_length, self.args.temperature)

    @property
    def multirole_callbacks(self) -> list[MultiRoleCallback]:
        """The callbacks that get the events of an iteration, in their order."""
        return [c for c in self.callback_handler.callbacks if isinstance(c, MultiRoleCallback)]

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:  # fmt: skip
        resume_from_checkpoint = resume_argument(resume_from_checkpoint, self.args.resume_from_checkpoint)
        if resume_from_checkpoint is True and (last := last_checkpoint(Path(self.args.output_dir))):
            resume_from_checkpoint = str(last)
        self._forget_unlogged()
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except (WorkflowError, EngineError, RequestRefused) as error:
            # their messages say where; a traceback would show this package
            raise error.with_traceback(None) from error.__cause__
        finally:
            if self.ahead is not None:
                self.ahead.stop()
            self._published = -1  # the engine still has the weights of an interrupted rollout

    def _forget_unlogged(self) -> None:
        """Forget what an iteration that was interrupted has counted, which the first log of this call would take for its own."""
        for counts in (self._metrics["train"], self._pending_metrics, self._pending_extra_logs, self._weight_sums.sums):
            counts.clear()
        self._loss_metrics.values.clear()
        self._evaluated = None

    # ---- data order, optimizer and schedule

    def get_train_dataloader(self) -> DataLoader:
        dataset = self.train_dataset
        is_replaced = dataset is not self._rows_source
        if is_replaced:
            check_dataset("train_dataset", dataset, self.reward_funcs)
        if is_replaced or isinstance(self.train_rows, StreamedRows):  # the length of a stream's rows is that of the run
            self._set_train_rows(dataset, self.args)
        if self.ahead is not None:
            self._order = self._get_train_sampler()
        self.train_dataset = self.train_rows
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = dataset

    def _get_train_sampler(self, dataset: Any = None) -> list[int]:  # type: ignore[override]
        args, length = self.args, self.args.generation_batch_size * self.args.max_steps
        if isinstance(self.train_rows, StreamedRows):  # in its own order
            return [i for i in range(len(self.train_rows)) for _ in range(args.num_generations)]
        return problem_order(len(self.train_rows), args.num_generations, length, args.seed, args.shuffle_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create one optimizer over all adapters of the policy map. A step does not change an adapter that has no gradient."""
        train_only(self.peft_model, self.adapters)
        return super().create_optimizer(model)

    def adapter_learning_rate(self, adapter: str) -> float:
        """Return the learning rate of an adapter's optimizer steps in this iteration: the schedule's, unless a callback changes it.

        It is the rate of the optimizer's first parameter group.
        """
        lr = self.lr_scheduler.get_last_lr()[0]
        for callback in self.multirole_callbacks:
            lr = require_value(callback.on_learning_rate(self, adapter, lr), callback, "on_learning_rate", "a rate")
        return lr

    def _get_learning_rate(self) -> float:
        if any(callback.overrides("on_learning_rate") for callback in self.multirole_callbacks):
            return self._last_lr
        return super()._get_learning_rate()

    # ---- rollouts and rewards

    def play(
        self, attempts: list[Attempt], iteration: int, policy: Mapping[str, str | None] | None = None,
        replays: Sequence[Replay] | None = None,
    ) -> list[Episode]:  # fmt: skip
        """Play episodes under the current adapters, without scoring them. Each process plays a share and gets all of them.

        `policy` replaces the trained map in this call; None runs a role on the base model. `replays`, one per attempt, replay
        episodes that were played before (`forks`).
        """
        if self.ahead is not None:
            self.ahead.wait()
        return self._play(self.peft_model, self.state.global_step, attempts, iteration, policy, replays)

    def _play(
        self, model: PeftModel, version: int, attempts: list[Attempt], iteration: int,
        policy: Mapping[str, str | None] | None = None, replays: Sequence[Replay] | None = None,
    ) -> list[Episode]:  # fmt: skip
        """Play episodes under the adapters of `model`, which are published if the engine has another version."""
        # once per version of the weights; those of the trainer's model also move within an iteration
        weights = (version, self._n_steps) if model is self.peft_model else version
        if self._published != weights:
            self.engine.publish(model, version)
            self._published = weights
        self.rollout.policy, self.rollout.version = policy or self.policy, version
        episodes = self.rollout.run(own_share(attempts), iteration, self.sampling, replays and own_share(replays))
        played = itertools.chain.from_iterable(gather_objects([(e.turns, e.answer, e.failure) for e in episodes]))
        episodes = [
            Episode(*attempt, turns, answer, failure=failure)
            for attempt, (turns, answer, failure) in zip(attempts, played, strict=True)
        ]
        check_failures(episodes, self.args.max_failed_episodes)
        return episodes

    def _attempts_of(self, iteration: int) -> list[Attempt]:
        """Return the attempts of an iteration, in the order of the run; none after the last iteration."""
        size = self.args.generation_batch_size
        return numbered_attempts(
            self.problems[index] for index in self._order[iteration * size : (iteration + 1) * size]
        )

    def _end_episode(self, episode: Episode) -> None:
        for callback in self.multirole_callbacks:
            callback.on_episode_end(self, episode)

    def _rest_engine(self) -> None:
        """Free the engine's memory for the trainer until the next rollout, unless the engine plays during the update."""
        if self.ahead is None:
            self.engine.sleep()
            return_freed_memory(self.passes.base)
        self._published = -1

    def _rollout_func(self, prompts: list, _: GRPOTrainer) -> dict[str, list]:
        """Play the iteration's episodes (TRL's hook). Returns the last turn of each episode of this process, with the episode."""
        iteration = self.state.global_step
        if self.ahead is None:
            self._episodes = self.play(self._attempts, iteration)
        else:
            self._episodes = self.ahead.take(iteration)
            assert [(e.problem.id, e.index) for e in self._episodes] == [(p.id, i) for p, i in self._attempts]
        start = self.accelerator.process_index * len(prompts)
        episodes = self._episodes[start : start + len(prompts)]
        return last_turns(episodes, self._tokenizer.eos_token_id)

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Episode]:
        """Score this process's episodes with TRL; return those of all processes, with TRL's group-relative advantage on each."""
        indices = itertools.chain.from_iterable(gather_objects([row.pop(INDEX) for row in inputs]))
        self._attempts = numbered_attempts(self.problems[index] for index in indices)
        n_tokens = self.state.num_input_tokens_seen
        scored = super()._generate_and_score_completions(inputs)
        # TRL has counted only the last turn of each episode
        turns = [turn for episode in self._episodes for turn in episode.turns]
        n_tokens += sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
        self.state.num_input_tokens_seen = n_tokens
        self._metrics["train"]["num_tokens"] = [n_tokens]
        if self.log_completions:
            shown = self._logs["completion"]
            for i, episode in enumerate(self._episodes, start=len(shown) - len(self._episodes)):
                shown[i] = transcript(episode)
        is_equal = groups_of_equal_rewards(
            self._rewards_by_function, self.reward_weights, self.num_generations, self.multi_objective_aggregation
        )
        start = self.accelerator.process_index * len(inputs)
        is_equal = is_equal[start : start + len(inputs)]
        advantages = scored["advantages"].masked_fill(is_equal, 0.0)  # TRL's are rounding noise there
        share = [(row["episodes"].reward, a) for row, a in zip(inputs, advantages.tolist(), strict=True)]
        scores = itertools.chain.from_iterable(gather_objects(share))
        for episode, (reward, advantage) in zip(self._episodes, scores, strict=True):
            episode.reward, episode.advantage = reward, advantage
        for callback in self.multirole_callbacks:
            callback.on_rollout_end(self, self._episodes)
        return self._episodes

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list
    ) -> Tensor:
        """Return TRL's rewards (N, n_funcs) of the episodes' answers; set `reward` of every episode that its function left unset.

        An episode that failed, or for which every function returned None, keeps None: TRL leaves it out of its group.
        """
        inputs = with_equal_columns(inputs)
        episodes: list[Episode] = [row["episodes"] for row in inputs]
        completions = answers_as_completions(prompts, episodes)
        ids = [answer_ids(self._tokenizer, episode) for episode in episodes]
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)  # (N, F)
        if self.args.max_failed_episodes:
            leave_out_failed(rewards, episodes)
        self._rewards_by_function = rewards
        start = self.accelerator.process_index * len(inputs) if len(rewards) > len(inputs) else 0
        set_rewards(episodes, rewards[start : start + len(inputs)], self.reward_weights)
        return rewards

    # ---- the iteration

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: object = None) -> Tensor:
        """Run one iteration: the rollout, then every optimizer step of every adapter.

        Returns the mean loss of the optimizer steps, detached.
        """
        started = time.perf_counter()
        model.train()
        set_optimizer_mode(self.optimizer, "train")
        episodes = self._generate_and_score_completions(inputs)
        if self.ahead is None:
            self._rest_engine()
        played = time.perf_counter()
        rows = self.prepare_rows(episodes)
        steps, loss = self.update(model, rows)
        return_freed_memory(self.passes.base)
        self._step += 1  # TRL counts training steps here
        seconds = {"rollout": played - started, "update": time.perf_counter() - played}
        self._metrics["train"]["step_time"].append(sum(seconds.values()))
        self._finish_iteration(Iteration(self.state.global_step + 1, episodes, rows, steps, seconds))
        return loss

    def prepare_rows(self, episodes: list[Episode]) -> list[Row]:
        """Return the iteration's rows in the order of training, with their advantages and the log-probs that the loss needs."""
        args = self.args
        rows = episode_rows(episodes, self.policy, args.mask_truncated_completions)
        if not rows:
            self._report_no_turns(episodes)
        for callback in self.multirole_callbacks:
            rows = require_value(callback.on_rows(self, rows), callback, "on_rows", "the rows to train")
        rows = shuffled(rows, turn_seed(args.seed, self.state.global_step, "row order", 0, "", 0, 0))
        if anchored := [row for row in rows if self.role_betas[row.turn.role]]:
            for row, logps in zip(anchored, self.logprobs_of(anchored, base=True), strict=True):
                row.ref_logps = logps
        return rows

    def _report_no_turns(self, episodes: list[Episode]) -> None:
        """Warn of an iteration in which no episode has a turn; ValueError where the run has sampled nothing so far and probably never will."""
        number, n_long = self.state.global_step + 1, n_overflows(episodes)
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        message = (
            f"No episode of iteration {number} has a turn, so there is nothing to train."
            + f" In {n_long} of {len(episodes)} episodes the first prompt is longer than `max_prompt_tokens` ({self.args.max_prompt_tokens}): raise "
            "it, or shorten the prompts."
            * bool(n_long)
            + "".join(f" The last failure: {failure}" for failure in failures[-1:])
        )
        has_reason = bool(n_long or failures)  # perhaps of a few rows; without one, the workflow calls no role
        if not self.state.num_input_tokens_seen and number >= (SILENT_ITERATIONS if has_reason else 1):
            raise ValueError(message)
        if self.accelerator.is_main_process:
            logger.warning("%s The run goes on without an optimizer step.", message)

    def update(self, model: nn.Module, rows: list[Row]) -> tuple[list[OptimizerStep], Tensor]:
        """Take every optimizer step of every adapter; return the steps and their mean loss, detached."""
        steps = plan_steps(rows, self.adapters, self.args)
        for callback in self.multirole_callbacks:
            callback.on_update_begin(self, rows, steps)
        if self.args.old_logprobs == "recomputed":  # of the steps that callbacks have changed
            later = later_rows(steps, self.args.num_iterations)
            for row, logps in zip(later, self.logprobs_of(later), strict=True):
                row.old_logps = logps
        optimizer_steps: list[OptimizerStep] = []
        losses = []
        for adapter, mini_batches in steps.items():
            lr = self.adapter_learning_rate(adapter)
            if mini_batches or not optimizer_steps:
                self._last_lr = lr
            for mini_batch in mini_batches * self.args.num_iterations:
                step, loss = self.optimizer_step(model, adapter, mini_batch.rows, mini_batch.divisor, lr)
                optimizer_steps.append(step)
                losses.append(loss)
        self._loss_metrics.write_to(self._metrics["train"])
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
        self._entropy = step_entropy(
            rows, self._next_entropy_coef(adapter), self.top_entropy_quantile, self.entropies_of
        )
        needs_parts = any(callback.overrides("on_gradient_parts") for callback in self.multirole_callbacks)
        gradient = AdapterGradient(
            self.passes, adapter, rows, needs_parts, self.role_betas, has_bonus=bool(self._entropy.coef)
        )
        mass = divisor * loss_mass(rows, self.args.loss_type) / len(rows)
        backward = functools.partial(self._backward, model, mass)
        loss = gradient.compute(backward, self._record, self.state.global_step + 1)
        if self.has_entropy_bonus:
            self._end_entropy(adapter, loss)
        for callback in self.multirole_callbacks:
            callback.on_gradient_parts(self, adapter, gradient.parts, gradient.values)
        gradient.apply()
        return gradient.params, loss

    def _backward(self, model: nn.Module, mass: float, micro: MicroBatch, group: RowGroup) -> Tensor:
        """Run TRL's loss on one micro-batch and, if it is finite, its backward pass; return the loss, weighted by its share of the `mass`."""
        weight = micro.weight * (loss_mass(micro.rows, self.args.loss_type) / mass)
        micro.batch = collate(micro.rows, self._tokenizer.pad_token_id, self.accelerator.device, self.args.old_logprobs)
        mask = micro.batch["completion_mask"]  # (N, C)
        micro.batch["num_items_in_batch"] = mask.sum() * self.accelerator.num_processes
        with (
            self.passes.pass_over(micro, keeps_activations=True),
            torch.set_grad_enabled(group.has_gradient),
            self._as_trls_loss_expects(micro, group.beta),
        ):
            with self.compute_loss_context_manager(), local_metrics(self.accelerator):
                loss = self.compute_loss(model, micro.batch) * weight
                if self.has_entropy_bonus and weight:
                    loss = loss - self._entropy.bonus(micro.rows, micro.entropies, mask)
            if group.has_gradient and (self.is_sharded or torch.isfinite(loss)):
                # FSDP2 averages gradients over the processes; ours are to be summed
                self.accelerator.backward(loss * self.accelerator.num_processes if self.is_sharded else loss)
        return loss.detach()

    def _record(self, micro: MicroBatch) -> None:
        """Add a micro-batch, whose pass has ended, to the metrics of the iteration, and show it to the callbacks."""
        self._loss_metrics.add(micro.rows if micro.weight else [], micro.logged)
        if not micro.weight:
            return
        mask, entropies = micro.batch["completion_mask"], micro.entropies.detach()  # (N, C) each
        if self.has_entropy_bonus:
            self._entropy.add(micro.rows, entropies, mask)
        if micro.importance is not None:
            self._weight_sums.add(micro.rows, *micro.importance, mask)
        for callback in self.multirole_callbacks:
            callback.on_micro_batch(self, micro.rows, micro.batch, micro.logps.detach(), entropies)

    @contextmanager
    def _as_trls_loss_expects(self, micro: MicroBatch, beta: float) -> Iterator[None]:
        """Context manager: set the attributes that TRL's loss reads, and restore them also if it is interrupted."""
        before, self._metrics["train"] = self._metrics["train"], micro.logged
        self._micro_batch = micro
        self.beta = beta  # elsewhere it is 0, or TRL would look for a reference model
        self.use_vllm = self.correction is not None  # so that the loss takes importance weights
        try:
            yield
        finally:
            self._metrics["train"], self._micro_batch, self.beta, self.use_vllm = before, None, 0.0, False

    def _next_entropy_coef(self, adapter: str) -> float:
        """Return the weight of the entropy bonus in the adapter's next optimizer step."""
        if self.use_adaptive_entropy and value_of(self._last_world_entropy, adapter) > self.args.entropy_target:
            return 0.0
        return value_of(self.entropy_coef, adapter)

    def _end_entropy(self, adapter: str, loss: Tensor) -> None:
        """Log the policy's loss without the bonus, and adapt the coefficient of the adapter's next step."""
        total = loss.new_zeros(()) if self._entropy.total is None else self._entropy.total
        all_reduce([total])
        entropy = total.item() / self._entropy.n_tokens
        self._metrics["train"]["policy_loss"].append(loss.item() + self._entropy.coef * entropy)
        if self.use_adaptive_entropy:
            coef = next_coef(value_of(self.entropy_coef, adapter), entropy, self.args)
            self.entropy_coef = with_value(self.entropy_coef, adapter, coef)
            self._last_world_entropy = with_value(self._last_world_entropy, adapter, entropy)
        self._metrics["train"]["entropy_coef"].append(value_of(self.entropy_coef, adapter))

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return the tokens (N, C) of the current micro-batch that are in the top quantile of its mini-batch; outside a loss, TRL's mask."""
        micro = vars(self).get("_micro_batch")  # TRL's tests call it on a mock
        if micro is None:
            return super().get_high_entropy_mask(entropies, mask, threshold)
        return self._entropy.mask(micro.rows, mask).bool()

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

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: object
    ) -> tuple[Tensor, Tensor, None]:
        """Return log-probs and entropies (N, C), as TRL's method does, from rows moved to the left edge, or packed.

        Adds importance weights to the batch, which need the log-probs; in a first step these are the old log-probs.
        """
        logps, entropies = self.passes.score(input_ids, attention_mask, logits_to_keep)
        micro = self._micro_batch
        if micro is not None:
            micro.logps, micro.entropies = logps, entropies
            old, current = micro.batch.get("old_per_token_logps"), logps.detach()
            # NaN: a token that the engine could not score has the ratio 1, as in TRL
            micro.batch["old_per_token_logps"] = current if old is None else torch.where(old.isnan(), current, old)
            if self.correction is not None:
                micro.importance = self.correction.add_weights(micro.batch)
        return logps, entropies, None

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._last_grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._last_grad_norm

    # ---- logging, evaluation, checkpoints

    def _finish_iteration(self, iteration: Iteration) -> None:
        """Write metrics per role into TRL's log, after the callbacks' `on_iteration_end`."""
        iteration.roles |= role_metrics(iteration.rows, list(self.policy))
        for role, values in self._weight_sums.collect(gather_objects).items():
            iteration.roles[role] |= values
        is_main = self.accelerator.is_main_process
        if iteration.number == 1 and iteration.rows and is_main:
            called = {turn.role for episode in iteration.episodes for turn in episode.turns}
            warn_of_silent_roles(self.workflow, called, "in the first iteration", n_overflows(iteration.episodes))
        for counts in gather_objects(self.passes.take_counts()):
            for name, n in counts.items():
                iteration.repeated_passes[name] = iteration.repeated_passes.get(name, 0) + n
        for callback in self.multirole_callbacks:
            callback.on_iteration_end(self, iteration)
        log_iteration(self._metrics["train"], iteration, bool(self.args.max_failed_episodes))
        if self.ahead is not None:
            for name, value in staleness_metrics(iteration.rows, self.state.global_step).items():
                self._metrics["train"][name].append(value)
        self._zero_reward.count(iteration.episodes, is_main)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is None:
            super().log(logs, start_time)
            return
        prefix, table = evaluated
        trained, self._logs = self._logs, table
        folder = Path(self.args.output_dir) / "completions"
        is_main = self.accelerator.is_main_process  # the others save nothing, and must not move what it has saved
        with save_separately(folder, self.state.global_step, prefix) if is_main else nullcontext():
            super().log(logs, start_time)
        self._logs = trained

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        # with persistent workers, HF would return the loader of the first dataset that was passed for every other one
        self.__dict__.pop("_eval_dataloaders", None)
        return super().evaluate(self._evaluation_set(eval_dataset), ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:  # fmt: skip
        checked = checked_evaluation(test_dataset, self.reward_funcs, "test_dataset")
        try:
            return super().predict(checked, ignore_keys, metric_key_prefix)
        finally:
            self._evaluated = None  # HF logs nothing here, so that the next log is an iteration's

    def _evaluation_set(self, eval_dataset: Any) -> Any:
        """The dataset, or the dict of them, that `evaluate` is asked for: checked, and read where it is a stream."""
        if self.eval_dataset is not None and self.eval_dataset is not self._evaluation_sets[0]:  # replaced
            self._evaluation_sets = self.eval_dataset, checked_evaluation(self.eval_dataset, self.reward_funcs)
        checked = self._evaluation_sets[1]
        if eval_dataset is None:
            return checked
        if isinstance(eval_dataset, str):
            return checked[eval_dataset]
        if any(eval_dataset is part for part in (checked.values() if isinstance(checked, dict) else [checked])):
            return eval_dataset
        return checked_evaluation(eval_dataset, self.reward_funcs)

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
        self._rest_engine()
        metrics = evaluation_metrics(prefix, episodes, means, bool(self.args.max_failed_episodes))
        for callback in self.multirole_callbacks:
            callback.on_episodes_evaluated(self, episodes, metrics, prefix)
        if self._published != -1:  # a callback has played episodes
            self._rest_engine()
        metrics |= mean_of_logged(prefix, self._pending_metrics)
        rewards = [None if episode.reward is None else episode.reward.value for episode in episodes]
        advantages = evaluation_advantages(rewards, n_episodes)
        metrics[f"{prefix}_loss"] = surrogate_loss(episodes, advantages, self.args.loss_type)
        if self.log_completions:
            columns = dict(zip(self.reward_func_names, scores.T.tolist(), strict=True))
            prompts = [row["prompt"] for row in rows for _ in range(n_episodes)]
            extra = dict(self._pending_extra_logs)
            self._evaluated = prefix, evaluation_logs(prompts, episodes, columns, advantages, extra)
        self._pending_metrics.clear()  # or TRL would add them to the next iteration's
        self._pending_extra_logs.clear()
        return EvalLoopOutput(None, None, denumpify_detensorize(metrics), len(episodes))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save and target.exists():  # of an earlier run, perhaps with other adapters
            shutil.rmtree(target)
        self.accelerator.wait_for_everyone()
        with rotating_by_step(self.state.global_step):
            super()._save_checkpoint(model, trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            copy_adapters(Path(checkpoint_folder), Path(self.args.output_dir), self.adapters)
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        if self.is_world_process_zero():
            more = [tags] if isinstance(tags, str) else tags or []
            self._card(
                self.args.output_dir, name=model_name or self._card.keywords["name"], dataset=dataset_name, tags=[*more, *self._tag_names],
                hub_id=self.hub_model_id,
            )  # fmt: skip

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        args, folder = self.args, Path(output_dir or self.args.output_dir)
        options = (
            "temperature",
            "max_prompt_tokens",
            "max_completion_length",
            "chat_template_kwargs",
            "strip_thoughts",
        )
        facts = {
            "policy": self.policy, "eos_token_ids": self.eos_token_ids, "has_own_render": self.has_own_render,
            "started": self.clock.started,
        }  # fmt: skip
        facts |= {name: vars(args)[name] for name in options}
        (folder / SERVING).write_text(json.dumps(facts, indent=2), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        adapters = set(self.peft_model.peft_config)
        check_checkpoint(Path(resume_from_checkpoint), self.policy, adapters, self.is_sharded)
        with loading_on_host(self.peft_model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.clock.started = saved_args(Path(resume_from_checkpoint)).get("started", self.clock.started)
        self._published = -1

    def _load_best_model(self) -> None:
        logger.info("Loading the best adapters from %s (%s).", self.state.best_model_checkpoint, self.state.best_metric)
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
