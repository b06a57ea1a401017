"""`MultiRoleGRPOTrainer`: stock TRL GRPO, with several roles per episode and several adapters per model.

TRL 1.16 samples one completion per prompt and takes one optimizer step per HF step. Here one HF step is one
*iteration*: TRL scores the episode (reward functions, group baseline, metrics), every turn of the episode becomes a
training row that carries the episode's advantage, and `training_step` takes all optimizer steps of the iteration,
adapter by adapter and mini-batch by mini-batch. HF's own closing `optimizer.step()` then finds no gradient and does
nothing, so schedule, logging, evaluation, checkpoints and resume are per iteration, and inherited.

Read `training_step`, `update`, `optimizer_step` and `accumulate`, in this order: they are the loop.
"""

import copy
import functools
import itertools
import logging
import math
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from multirole.core.advantages import groups_of_equal_rewards, set_advantages
from multirole.core.arguments import check_arguments, named_adapters
from multirole.core.bfloat16 import HALF, half_layers, needs_no_autocast
from multirole.core.chat import Renderer, chat_template, check_chats
from multirole.core.checkpoints import PolicyMap, check_checkpoint
from multirole.core.completions_table import evaluation_logs, kept_apart
from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.distributed import (
    all_reduce,
    gather_objects,
    keep_float32,
    local,
    local_metrics,
    own_share,
    processes,
    shard,
)
from multirole.core.engine import Engine, Sampling
from multirole.core.entropy import StepEntropy, next_coef, select_tokens
from multirole.core.episode_metrics import (
    accuracy,
    evaluation_advantages,
    mean_reward,
    n_failed,
    over_micro_batches,
    overflow_rate,
    surrogate_loss,
    text_metrics,
)
from multirole.core.gradients import PartSums, clip, gradient_of, keeps_rows, merged, part_of, plain_lora, set_gradient
from multirole.core.hooks import Iteration, MultiRoleCallback, OptimizerStep
from multirole.core.importance import Correction, WeightSums
from multirole.core.logprobs import check_head, compact_head, has_large_head, score, score_packed
from multirole.core.noise import disable_noise
from multirole.core.policy import adapter_names, parse_policy
from multirole.core.prefix_tree import Packing, block_lengths, block_runs, pack, packing_pays, tree_batches
from multirole.core.recomputation import fits, without_recomputation
from multirole.core.reference import given_adapters, swapped
from multirole.core.rollout import (
    Attempt,
    Rollout,
    WorkflowError,
    answer_ids,
    check_failures,
    transcript,
    turn_seed,
    warn_of_silent_roles,
)
from multirole.core.rows import (
    Row,
    Steps,
    collate,
    loss_mass,
    micro_batches,
    optimizer_steps,
    padded,
    problem_order,
    trained_tokens,
)
from multirole.core.stock import GRPOTrainer
from multirole.core.streams import StreamedRows
from multirole.core.threads import use_fitting_threads
from multirole.core.tree_attention import can_share_prefixes, packed_attention
from multirole.core.types import OVERFLOW, Episode, Reward, Turn, Workflow
from multirole.core.validation import (
    INDEX,
    StreamedProblems,
    check_dataset,
    checked_evaluation,
    checked_reward,
    load_processor,
    to_problems,
    with_adapters,
)

logger = logging.getLogger(__name__)

ENGINES = "multirole.engines"
"""Package of the engines that have a name; imported late, because it imports this one."""

SILENT_ITERATIONS = 10
"""Iterations in a row without any reward after which it is said."""
ZERO_REWARD = (
    "Every episode of %d iterations in a row has the reward 0, so nothing has been learned. Likely causes: the reward function does not "
    "find the answer (print what it gets in `completions`), replies are cut off at `max_completion_length` (see the roles' "
    "`truncated_rate`), or the problems are too hard for the model."
)


def no_key(row: Row) -> int:
    """The key of a tree that rows of all parts share."""
    return 0


class MultiRoleGRPOTrainer(GRPOTrainer):
    """Trains every role of a workflow with GRPO on one outcome reward per episode.

    Overrides of TRL 1.16 / transformers 5.17; everything else, the loss included, is inherited:

    - `train`: resumes from `args.resume_from_checkpoint`, and shows the failure of a workflow without the frames of this package.
    - `_get_train_sampler`: one long epoch, so that a resume continues the order of problems.
    - `create_optimizer`: one AdamW over all adapters.
    - `_calculate_rewards`: TRL's, with the episodes' answers as completions.
    - `_generate_and_score_completions`: TRL's; returns episodes with their advantages.
    - `training_step`: the iteration.
    - `_get_per_token_logps_and_entropies`: the same numbers from right-padded rows without an attention mask.
    - `get_high_entropy_mask`: the tokens of the mini-batch's top quantile.
    - `_clip_grad_norm`: reports the norm of our last step, since HF finds no gradient to clip.
    - `_get_learning_rate`: reports the rate of our last step, where the schedule does not tick per iteration.
    - `log`: TRL's; `epoch` counts passes over the dataset, and the table of completions of an evaluation holds its own episodes.
    - `evaluate`: checks a dataset that it is given, and reads a stream.
    - `evaluation_loop`: episodes on the evaluation problems, scored by the reward functions.
    - `_load_from_checkpoint`: HF's, of a checkpoint of this run's adapters and policy map.
    - `_push_from_checkpoint`: also copies the adapters' folders.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As in TRL. A `PeftModel` must hold an adapter for each name of the policy map, or the one adapter "default" for a policy with
            one. Otherwise pass `peft_config`.
        workflow ([`Workflow`]):
            Any object with `name`, `roles` (role to its number of slots) and `async def run(problem, call) -> Answer`.
        reward_funcs (`Callable`, `str`, `PreTrainedModel` or a list of these):
            As in TRL: `f(prompts, completions, **columns) -> list[float | None]`, one number per episode. `completions` are the
            episodes' answers: texts, or message lists where the prompts are messages; `completion_ids` are their tokens. A function that
            takes `episodes` gets the episodes with all their turns. A function may set `episode.reward` to a [`Reward`] with a reason and
            `is_correct`, which accuracy counts; its value is then the weighted sum of all functions.
        args ([`MultiRoleGRPOConfig`], *optional*):
            Configuration; by default that of TRL with shared policy.
        train_dataset, eval_dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            A "prompt" column (text, or messages that end with a user's) and any others. "id" names a problem; without it, its index does.
            "task" names the prompt templates of the built-in workflows. A stream is read as training goes on, which needs `max_steps`;
            an evaluation set that is one, or a dict of several, is read whole.
        processing_class (`PreTrainedTokenizerBase`, *optional*), reward_processing_classes, callbacks, optimizers:
            As in TRL. Callbacks that are [`MultiRoleCallback`] take part in the iteration.
        peft_config (`LoraConfig`, *optional*):
            One adapter with this configuration is made per name of the policy map.
        engine ([`Engine`], *optional*):
            What generates the replies; by default `args.engine`.
        is_answer (`Callable[[str], bool]`, *optional*):
            Whether a reply holds an answer, for the rate of unparsed turns. By default any text does.
        render (`Callable[[PreTrainedTokenizerBase, list[Message]], list[int]]`, *optional*):
            Turns messages into the token ids of a prompt. By default the tokenizer's chat template, with `args.chat_template_kwargs`.
        quantization_config, tools, rollout_func, environment_factory:
            TRL's, which mean nothing here and must be None.
    """

    args: MultiRoleGRPOConfig
    control: TrainerControl
    entropy_coef: dict[str, float]  # of each adapter
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
            workflow, reward_funcs, args, peft_config, quantization_config=quantization_config, tools=tools,
            rollout_func=rollout_func, environment_factory=environment_factory,
        )  # fmt: skip
        assert workflow is not None  # or it has been refused
        processes()  # before anything that would set up torch.distributed its own way, such as vLLM
        args = copy.copy(args) if args is not None else MultiRoleGRPOConfig("multirole-grpo")
        if args.n_gpu > 1:  # one process of a node with several: it uses the first; TRL refuses to spread it over all
            args._n_gpu = 1
        check_dataset("train_dataset", train_dataset, reward_funcs)
        eval_dataset = None if eval_dataset is None else checked_evaluation(eval_dataset, reward_funcs)
        import_module(ENGINES).check_engine(args.engine)
        self.workflow = workflow
        policy = parse_policy("sp" if args.policy is None else args.policy, list(workflow.roles))
        self.policy = named_adapters(model, policy)
        self.adapters = adapter_names(self.policy)
        if unknown := set(args.role_betas) - set(self.policy):
            raise ValueError(f"`role_beta` names {sorted(unknown)}, but the roles are {list(self.policy)}.")
        self.betas = {role: args.role_betas.get(role, args.beta) or 0.0 for role in self.policy}
        args.router_aux_loss_coef = 0.0
        beta, args.beta = args.beta, 0.0  # or TRL would look for an adapter "default"; set role by role in `_backward`
        self._last_grad_norm, self._last_lr, self._published = torch.tensor(0.0), 0.0, -1
        self._loss_metrics: list[tuple[str, int, float]] = []  # name, completion tokens and value, by micro-batch
        self._n_without_reward = 0  # iterations in a row whose rewards were all 0
        self._evaluated: tuple[str, dict[str, Any]] | None = (
            None  # prefix and episodes of the evaluation that is logged next
        )
        self._active: dict[str, tuple[list[nn.Parameter], list[LoraLinear]]] = {}

        if isinstance(train_dataset, IterableDataset):
            rows = self._stream_rows(train_dataset, args)
        else:
            args.set_epochs(len(train_dataset))
            train_dataset = train_dataset.add_column(INDEX, list(range(len(train_dataset))))
        peft_model = with_adapters(model, peft_config, self.adapters, args)
        if args.device.type == "cpu":
            use_fitting_threads(sum(p.numel() for p in peft_model.parameters()))
        if isinstance(model, str):
            processing_class = processing_class or load_processor(model, args)
        self.model_options = dict(args.model_init_kwargs or {}) if isinstance(model, str) else {}
        if isinstance(model, str) and not any(isinstance(function, str) for function in reward_funcs):
            args.model_init_kwargs = None  # used; TRL would warn that they are not, or load reward models with them
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
                callbacks=[*(callbacks or []), PolicyMap(self.policy)],
                optimizers=optimizers,
                rollout_func=self._rollout_func,
            )
        args.beta = beta  # for logs and records; TRL's loss reads `self.beta`
        self.peft_model: PeftModel = self.model
        """The model without the wrappers of accelerate."""
        self._disable_noise()
        self._take_over_options()
        self.is_sharded = self.is_fsdp_enabled
        anchored = isinstance(model, PeftModel) and any(self.betas.values())
        self._given_adapters = given_adapters(self.peft_model, self.adapters) if anchored else []
        if self._given_adapters and self.is_sharded:
            raise ValueError(
                "`beta` measures KL from the adapters as they were given, which FSDP2 would have to shard as well. Use data parallelism "
                "alone, or merge the adapters into the base and pass a `peft_config`."
            )
        if self.is_deepspeed_enabled or self.accelerator.scaler or (self.is_sharded and not self.accelerator.is_fsdp2):
            raise ValueError(
                "This run was launched with DeepSpeed, FSDP1 or float16, none of which can take several optimizer steps per iteration. "
                "Launch it with FSDP2 (`fsdp_version: 2`) or with data parallelism alone, in bfloat16 or float32."
            )
        if self.is_sharded:
            keep_float32(self.accelerator)
        self.is_half = self.accelerator.mixed_precision == "bf16"
        is_known = self.is_half or self.accelerator.mixed_precision == "no"
        self.merges = not self.is_sharded and is_known and keeps_rows(self.peft_model)
        base = self.peft_model.get_base_model()
        self.packs = can_share_prefixes(base)
        self.correction = None  # with old_logprobs="sampled" the ratio of the loss starts from the sampler
        if args.vllm_importance_sampling_correction and args.old_logprobs == "recomputed":
            self.correction = Correction(
                args.vllm_importance_sampling_mode,
                args.vllm_importance_sampling_clip_min,
                args.vllm_importance_sampling_clip_max,
            )
        self._weight_sums, self._packing, self._batch = WeightSums(), None, {}
        if self.is_half:  # PEFT would cast the inputs of adapters to float32, and autocast back
            for module in base.modules():
                if isinstance(module, LoraLayer):
                    module.cast_input_dtype_enabled = False
        is_float32 = base.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        if not self.is_sharded:
            with self.accelerator.autocast():
                check_head(self.peft_model, self.temperature, 0.01 if is_float32 else 0.5)
        self.current_gradient_accumulation_steps = 1  # HF sets it in its loop; an iteration never accumulates
        if args.n_problems % args.world_size:
            raise ValueError(
                f"The {args.n_problems} problems of an iteration cannot be shared evenly by {args.world_size} processes. Change "
                "`generation_batch_size` so that they can."
            )
        if isinstance(train_dataset, IterableDataset):
            self.train_dataset, self.problems = rows, StreamedProblems(rows)
        else:
            self.problems = to_problems(train_dataset)
        render_chat = functools.partial(chat_template, **(args.chat_template_kwargs or {}))
        if render is None:
            tried = self.problems if isinstance(self.problems, list) else [self.problems[0]]  # a stream has no end
            check_chats(render_chat, self._tokenizer, workflow, tried)
        load_engine = import_module(ENGINES).load_engine
        self.engine = engine or load_engine(args.engine, self.peft_model, is_float32).from_trainer(self)
        self.rollout = Rollout(
            workflow, self.engine, self._tokenizer, self.policy, is_answer, args.seed, args.max_prompt_tokens,
            render or render_chat, args.max_turns, args.turn_seeds, args.max_failed_episodes, self._end_episode,
        )  # fmt: skip

    def _take_over_options(self) -> None:
        """Keep TRL's methods from acting on options that mean an optimizer step here, where TRL means a micro-batch or an HF step."""
        args = self.args
        self.num_iterations = 1  # our passes are in `update`
        self._entropy_bonus_enabled = False  # ours is in `_backward`
        self.has_entropy_bonus = bool(args.entropy_coef or args.use_adaptive_entropy)
        self.entropy_coef = dict.fromkeys(
            self.adapters, args.entropy_coef or 0.0
        )  # in TRL's checkpoints, as is the next
        self._last_world_entropy = dict.fromkeys(self.adapters, math.inf)

    def _disable_noise(self) -> None:
        """Compute all log-probs without dropout and NEFTune, as the engine does that samples; say so where there was any."""
        noise = disable_noise(self.peft_model)
        if self.args.neftune_noise_alpha is not None:
            noise.append(f"neftune_noise_alpha={self.args.neftune_noise_alpha}")
            self.neftune_noise_alpha = None  # what HF's loop reads
        if noise and self.accelerator.is_main_process:
            logger.warning(
                "%s: switched off. The ratio of the loss compares the trainer's log-probs with those of the engine, which samples without "
                "noise.", ", ".join(noise),
            )  # fmt: skip

    @property
    def sampling(self) -> Sampling:
        """How replies are sampled, in training and in evaluation."""
        return Sampling(self.args.max_completion_length, self.args.temperature)

    @property
    def watchers(self) -> list[MultiRoleCallback]:
        """The callbacks that take part in an iteration, in their order."""
        return [c for c in self.callback_handler.callbacks if isinstance(c, MultiRoleCallback)]

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:  # fmt: skip
        if resume_from_checkpoint is None:
            named = self.args.resume_from_checkpoint
            resume_from_checkpoint = True if str(named).lower() == "true" else named
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except WorkflowError as error:  # its message has the lines of the workflow; those of this package say nothing
            raise error.with_traceback(None) from None

    # ---- data order, optimizer and schedule

    @staticmethod
    def _stream_rows(stream: IterableDataset, args: MultiRoleGRPOConfig) -> StreamedRows:
        """The rows of a run on a stream. TRL's streams are shuffled the same way."""
        epochs = [
            f"{kind}_strategy" for kind in ("eval", "logging", "save") if vars(args)[f"{kind}_strategy"] == "epoch"
        ]
        if args.max_steps <= 0 or epochs:
            cause = f"`{epochs[0]}='epoch'`" if epochs else "`num_train_epochs`"
            raise ValueError(
                f"`train_dataset` is a stream, whose length is not known, so {cause} cannot be counted. Set `max_steps` to the number of "
                "iterations, and strategies to 'steps'."
            )
        ordered = stream.shuffle(seed=args.seed) if args.shuffle_dataset else stream
        ahead = 4  # iterations that may be in the hands of the data loader
        return StreamedRows(ordered, args.max_steps * args.n_problems, ahead * args.n_problems, INDEX)

    def _get_train_sampler(self, dataset: Any = None) -> list[int]:  # type: ignore[override]
        args, length = self.args, self.args.generation_batch_size * self.args.max_steps
        if isinstance(self.train_dataset, StreamedRows):  # in its own order
            return [i for i in range(len(self.train_dataset)) for _ in range(args.num_generations)]
        return problem_order(len(self.problems), args.num_generations, length, args.seed, args.shuffle_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimizer over every adapter. An adapter without gradients is not touched by a step."""
        self.peft_model.set_requires_grad(self.adapters, True)
        return super().create_optimizer(model)

    def learning_rate_of(self, call: int) -> float:
        """The learning rate of the `call`-th adapter's optimizer steps in this iteration; of the first parameter group."""
        if self.args.lr_clock == "iteration":
            return self.lr_scheduler.get_last_lr()[0]
        if not isinstance(self.lr_scheduler, LambdaLR):
            raise TypeError("`lr_clock='update_call'` needs a schedule that is a function of the step.")
        tick = self.state.global_step * len(self.adapters) + call
        factor = self.lr_scheduler.lr_lambdas[0](min(tick, self.state.max_steps))
        return float(self.lr_scheduler.base_lrs[0]) * factor

    def _get_learning_rate(self) -> float:
        return super()._get_learning_rate() if self.args.lr_clock == "iteration" else self._last_lr

    # ---- rollouts and rewards

    def play(
        self, attempts: list[Attempt], iteration: int, policy: Mapping[str, str | None] | None = None
    ) -> list[Episode]:
        """Episodes under the current adapters, not yet scored. Each process plays a share and gets all of them.

        `policy` takes the place of the trained map for once; None runs a role on the base model.
        """
        if self._published != self.state.global_step:  # once per version of the weights
            self.engine.publish(self.peft_model, self.state.global_step)
            self._published = self.state.global_step
        self.rollout.policy = policy or self.policy
        episodes = self.rollout.run(own_share(attempts), iteration, self.sampling)
        played = itertools.chain.from_iterable(gather_objects([(e.turns, e.answer, e.failure) for e in episodes]))
        episodes = [
            Episode(*attempt, turns, answer, failure=failure)
            for attempt, (turns, answer, failure) in zip(attempts, played, strict=True)
        ]
        check_failures(episodes, self.args.max_failed_episodes)
        return episodes

    def _end_episode(self, episode: Episode) -> None:
        for callback in self.watchers:
            callback.on_episode_end(self, episode)

    def _rest_engine(self) -> None:
        """Give the engine's memory to the trainer until the next rollout."""
        self.engine.sleep()
        self._published = -1

    def _rollout_func(self, prompts: list, _: GRPOTrainer) -> dict[str, list]:
        """TRL's hook: one row per episode of this process, its last turn; the episode travels along for the rewards."""
        self._episodes = self.play(self._attempts, self.state.global_step)
        start = self.accelerator.process_index * len(prompts)
        episodes = self._episodes[start : start + len(prompts)]
        eos = self._tokenizer.eos_token_id
        nothing = Turn("", 0, 0, [eos], [eos], [0.0], "", "stop")  # an episode whose first prompt was too long
        last = [episode.turns[-1] if episode.turns else nothing for episode in episodes]
        return {
            "prompt_ids": [turn.prompt_ids for turn in last],
            "completion_ids": [turn.completion_ids for turn in last],
            "logprobs": [turn.logprobs for turn in last],
            "episodes": episodes,
        }

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Episode]:
        """TRL's scoring of this process's episodes; returns those of all, with TRL's group-relative advantage on each."""
        seen: dict[str, int] = defaultdict(int)
        self._attempts: list[Attempt] = []
        for index in itertools.chain.from_iterable(gather_objects([row.pop(INDEX) for row in inputs])):
            problem = self.problems[index]
            self._attempts.append((problem, seen[problem.id]))
            seen[problem.id] += 1
        n_tokens = self.state.num_input_tokens_seen
        scored = super()._generate_and_score_completions(inputs)
        turns = [turn for episode in self._episodes for turn in episode.turns]  # TRL saw the last of each episode
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
        advantages = scored["advantages"].masked_fill(
            is_equal[start : start + len(inputs)], 0.0
        )  # TRL's are rounding noise there
        own = [(row["episodes"].reward, a) for row, a in zip(inputs, advantages.tolist(), strict=True)]
        for episode, (reward, advantage) in zip(
            self._episodes, itertools.chain.from_iterable(gather_objects(own)), strict=True
        ):
            episode.reward, episode.advantage = reward, advantage
        for watcher in self.watchers:
            watcher.on_rollout_end(self, self._episodes)
        return self._episodes

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list
    ) -> Tensor:
        """TRL's rewards (N, n_funcs) of the episodes' answers; sets `reward` of every episode that its function left unset.

        An episode that failed, or for which every function returned None, keeps None: TRL leaves it out of its group.
        """
        names = dict.fromkeys(
            name for row in inputs for name in row
        )  # TRL reads the first row's; a stream's rows may have others
        inputs = [dict.fromkeys(names) | row for row in inputs]
        episodes: list[Episode] = [row["episodes"] for row in inputs]
        answers = [episode.answer.text if episode.answer else "" for episode in episodes]
        completions = [
            answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        ids = [answer_ids(self._tokenizer, episode) for episode in episodes]
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)  # (N, F)
        if self.args.max_failed_episodes:
            failed = itertools.chain.from_iterable(
                gather_objects([episode.failure is not None for episode in episodes])
            )
            rewards[torch.tensor(list(failed), device=rewards.device)] = math.nan
        self._rewards_by_function = rewards
        start = self.accelerator.process_index * len(inputs) if len(rewards) > len(inputs) else 0
        own = rewards[start : start + len(inputs)]
        values = (own * self.reward_weights.to(own.device)).nansum(1).tolist()
        for episode, value, is_left_out in zip(episodes, values, own.isnan().all(1).tolist(), strict=True):
            if is_left_out:
                episode.reward = None
            elif episode.reward is None:
                episode.reward = Reward(value)
            elif not math.isclose(episode.reward.value, value, rel_tol=1e-6):  # TRL's rewards are float32
                episode.reward = replace(episode.reward, value=value)
            if episode.reward is not None and episode.answer is not None and episode.answer.reason is not None:
                episode.reward = replace(episode.reward, reason=episode.answer.reason)
        return rewards

    # ---- the iteration

    def training_step(self, model: nn.Module, inputs: list[dict], num_items_in_batch: object = None) -> Tensor:
        """One iteration: roll out, then every optimizer step of every adapter.

        Returns the mean loss of the optimizer steps, detached.
        """
        started = time.perf_counter()
        model.train()
        episodes = self._generate_and_score_completions(inputs)
        self._rest_engine()
        played = time.perf_counter()
        rows = self.prepare_rows(episodes)
        steps, loss = self.update(model, rows)
        self._step += 1  # TRL counts training steps here
        seconds = {"rollout": played - started, "update": time.perf_counter() - played}
        self._metrics["train"]["step_time"].append(sum(seconds.values()))
        self._finish_iteration(Iteration(self.state.global_step + 1, episodes, rows, steps, seconds))
        return loss

    def prepare_rows(self, episodes: list[Episode]) -> list[Row]:
        """The iteration's rows in the order of training, with their advantages and the log-probs that the loss needs."""
        args = self.args
        rows = [Row(episode, turn, self.policy[turn.role]) for episode in episodes for turn in episode.turns]
        for row in rows:
            row.is_masked = args.mask_truncated_completions and row.turn.finish_reason == "length"
        if not rows:
            reasons = sorted({str(episode.answer and episode.answer.reason) for episode in episodes})
            raise ValueError(
                f"No episode of iteration {self.state.global_step + 1} has a turn, so there is nothing to train. Reasons: {reasons}; after "
                f"{OVERFLOW!r}, raise `max_prompt_tokens` ({args.max_prompt_tokens})."
            )
        set_advantages(rows, args)
        for watcher in self.watchers:
            rows = watcher.on_rows(self, rows)
        seed = turn_seed(args.seed, self.state.global_step, "row order", 0, "", 0, 0)
        rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()]
        if anchored := [row for row in rows if self.betas[row.turn.role]]:
            for row, logps in zip(anchored, self.logprobs_of(anchored, base=True), strict=True):
                row.ref_logps = logps
        return rows

    def update(self, model: nn.Module, rows: list[Row]) -> tuple[list[OptimizerStep], Tensor]:
        """Every optimizer step of every adapter, and their mean loss, detached."""
        steps = self.plan_steps(rows)
        if self.args.old_logprobs == "recomputed":
            self.score_later_steps(steps)
        taken, losses = [], []
        for watcher in self.watchers:
            watcher.on_update_begin(self, rows, steps)
        for call, (adapter, mini_batches) in enumerate(steps.items()):
            lr = self.learning_rate_of(call)
            for mini_batch, divisor in mini_batches * self.args.num_iterations:
                step, loss = self.optimizer_step(model, adapter, mini_batch, divisor, lr)
                taken.append(step)
                losses.append(loss)
        self._log_loss_metrics()
        for watcher in self.watchers:
            watcher.on_update_end(self, rows)
        return taken, torch.stack(losses).mean() if losses else torch.zeros((), device=self.accelerator.device)

    def plan_steps(self, rows: list[Row]) -> Steps:
        """The optimizer steps of every adapter on an iteration's rows."""
        rows_by_adapter = {name: [row for row in rows if row.adapter == name] for name in self.adapters}
        return {name: optimizer_steps(rows, self.args) for name, rows in rows_by_adapter.items()}

    def score_later_steps(self, steps: Steps) -> None:
        """Set `old_logps` of rows that are trained after a step has moved their adapter. For others the loss takes the present ones."""
        n_first = 1 if self.args.num_iterations == 1 else 0  # steps on rows that are not trained again
        later = [row for taken in steps.values() for mini_batch, _ in taken[n_first:] for row in mini_batch]
        for row, logps in zip(later, self.logprobs_of(later), strict=True):
            row.old_logps = logps

    def _log_loss_metrics(self) -> None:
        """Make one number of each metric that TRL's loss has logged by micro-batch."""
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for name, tokens, value in itertools.chain.from_iterable(gather_objects(self._loss_metrics)):
            found[name].append((tokens, value))
        for name, values in found.items():
            self._metrics["train"][name].append(over_micro_batches(name, values))
        self._loss_metrics.clear()

    def optimizer_step(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int, lr: float
    ) -> tuple[OptimizerStep, Tensor]:
        """One AdamW step of one adapter on one mini-batch; no other tensor moves. Also returns the loss, detached."""
        params, loss = self.accumulate(model, adapter, rows, divisor)
        self._last_grad_norm, norm_after = clip(params, self.args.max_grad_norm)
        first = self.optimizer.param_groups[0].get("initial_lr")
        for group in self.optimizer.param_groups:  # which may have rates of their own, in proportion
            group["lr"] = lr * (group["initial_lr"] / first) if first else lr
        self._last_lr = lr
        self.optimizer.step()
        self.optimizer.zero_grad()  # to None: zeros would move the other adapters (momentum, decay)
        step = OptimizerStep(adapter, rows, lr, self._last_grad_norm.item(), norm_after.item())
        for watcher in self.watchers:
            watcher.on_adapter_step(self, step)
        return step, loss

    def accumulate(
        self, model: nn.Module, adapter: str, rows: list[Row], divisor: int
    ) -> tuple[list[nn.Parameter], Tensor]:
        """The gradient of one mini-batch, left in the adapter's tensors; returns those and the loss, detached.

        All parts come from one pass over the rows where the adapter can be merged for it, and otherwise from a pass for each
        part. Rows whose gradient is zero are only scored. Each micro-batch's loss is a mean over its rows or tokens; its
        weight makes the sum a mean over the mini-batch. Every process raises FloatingPointError if one has no finite loss.
        """
        self._entropy = self.step_entropy(adapter, rows)
        params, layers = self.activate(adapter)
        # a merged pass has the parts for nothing and always sums them, so that callbacks do not change the order of additions; but
        # where prompts are shared, a tree per part costs tokens
        are_free = self.merges and bool(layers) and not (self.packs and packing_pays(rows, self.n_parameters, no_key))
        wants_parts = are_free or any(
            type(w).on_gradient_parts is not MultiRoleCallback.on_gradient_parts for w in self.watchers
        )
        parts = {part: i for i, part in enumerate(dict.fromkeys(map(part_of, rows)))} if wants_parts else {("", 0): 0}
        losses: list[tuple[list[Row], Tensor]] = []
        gradients = torch.zeros(
            len(parts), sum(local(p).numel() for p in params), device=self.accelerator.device
        )  # (K, n)
        whole = divisor * loss_mass(rows, self.args.loss_type) / len(rows)
        sums = PartSums(params, gradients) if self.merges and layers else None

        def part_index(row: Row) -> int:
            return parts[part_of(row)] if wants_parts else 0

        groups: dict[tuple, list[Row]] = defaultdict(list)
        for row in [row for row in rows if not row.is_masked]:
            beta = self.betas[row.turn.role]
            has_gradient = bool(row.advantage or beta or self._entropy.coef)
            groups[has_gradient, beta, None if sums else part_index(row)].append(row)
        loads = [0.0] * self.accelerator.num_processes
        with self.layers_with(layers, adapter, sums) if sums else nullcontext():
            for (has_gradient, beta, part), group in groups.items():
                for parameter in params:
                    parameter.grad = None
                is_packed = self.packs and packing_pays(group, self.n_parameters, part_index)
                for micro, weight in self.shard(
                    group, loads, 3.0 if has_gradient else 1.0, part_index if is_packed else None
                ):
                    packing = pack(micro, part_index, self.accelerator.device) if is_packed else None
                    if packing is None:
                        micro.sort(key=part_index)
                    if sums:
                        width = max(row.length for row in micro)
                        width += -width % (self.pad_to_multiple_of or 1)
                        sums.set_tokens(
                            block_runs(micro, packing.blocks if packing else [width] * len(micro), part_index)
                        )
                    weight *= loss_mass(micro, self.args.loss_type) / whole
                    losses.append((micro, self._backward(model, micro, weight, beta, has_gradient, packing)))
                if not sums and has_gradient:
                    gradients[part] += gradient_of(params)
        loss = sum((one for _, one in losses), torch.zeros((), device=gradients.device))
        all_reduce([loss] if self.is_sharded else [loss, gradients])  # FSDP2 has reduced the gradients already
        if not torch.isfinite(loss):
            self._refuse(losses)
        if self.has_entropy_bonus:
            self._end_entropy(adapter, loss)
        for watcher in self.watchers:
            watcher.on_gradient_parts(self, adapter, list(parts), gradients)
        set_gradient(params, functools.reduce(torch.add, gradients))
        return params, loss

    def step_entropy(self, adapter: str, rows: list[Row]) -> StepEntropy:
        """The entropy terms of one optimizer step on `rows`, under the adapter's present weights."""
        coef, trained = self.entropy_coef[adapter], [row for row in rows if not row.is_masked]
        if self.use_adaptive_entropy and self._last_world_entropy[adapter] > self.args.entropy_target:
            coef = 0.0
        if self.top_entropy_quantile == 1 or not trained:
            return StepEntropy(coef, max(1, trained_tokens(rows)))
        selected = select_tokens(self.entropies_of(trained), self.top_entropy_quantile)
        n_tokens = sum(int(tokens.sum()) for tokens in selected)
        return StepEntropy(coef, n_tokens, dict(zip(map(id, trained), selected, strict=True)))

    def _end_entropy(self, adapter: str, loss: Tensor) -> None:
        """Log the policy's loss without the bonus, and adapt the coefficient of the adapter's next step."""
        total = loss.new_zeros(()) if self._entropy.total is None else self._entropy.total
        all_reduce([total])
        entropy = total.item() / self._entropy.n_tokens
        self._metrics["train"]["policy_loss"].append(loss.item() + self._entropy.coef * entropy)
        if self.use_adaptive_entropy:
            self.entropy_coef[adapter] = next_coef(self.entropy_coef[adapter], entropy, self.args)
            self._last_world_entropy[adapter] = entropy
        self._metrics["train"]["entropy_coef"].append(self.entropy_coef[adapter])

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """The tokens (N, C) of the present micro-batch that are in the top quantile of its mini-batch; outside a loss, TRL's."""
        micro = vars(self).get("_micro_batch")
        if micro is None:
            return super().get_high_entropy_mask(entropies, mask, threshold)
        return self._entropy.mask(micro, mask).bool()

    def activate(self, adapter: str) -> tuple[list[nn.Parameter], list[LoraLinear]]:
        """Make the model compute with `adapter`; return its tensors, and its layers if they can be merged.

        All adapters keep `requires_grad`, as optimizer and checkpoints expect; the others get no gradient.
        """
        model = self.peft_model
        if self.is_sharded or model.active_adapter != adapter or adapter not in self._active:
            model.set_requires_grad(self.adapters, False)  # `set_adapter` leaves the others' `modules_to_save` on
            model.set_adapter(adapter)
            params = [p for p in model.parameters() if p.requires_grad]
            dtypes = (torch.float32, HALF) if self.is_half else (torch.float32,)
            self._active = {adapter: (params, plain_lora(model, adapter, params, dtypes))}
            model.set_requires_grad(self.adapters, True)
        return self._active[adapter]

    @property
    def n_parameters(self) -> int:
        """Parameters of the model, without those of a quantised one's packing."""
        return self.peft_model.get_base_model().num_parameters()

    def layers_with(
        self, layers: list[LoraLinear], adapter: str | None, sums: PartSums | None
    ) -> AbstractContextManager[None]:
        """The context in which the adapter's layers give its gradient by part, into `sums`."""
        if self.is_half:
            return half_layers(layers, adapter, sums, self.peft_model.get_base_model())
        return merged(layers, adapter, sums)

    def shard(
        self, rows: list[Row], loads: list[float], cost: float = 1.0, tree_key: Callable[[Row], int] | None = None
    ) -> list[tuple[list[Row], float]]:
        """The micro-batches of `rows` that this process computes, with their weights; `loads` of `distributed.shard`.

        With `tree_key` they are for `prefix_tree.pack`, by this key.
        """
        cut, size = micro_batches, padded
        if tree_key is not None:
            cut = functools.partial(tree_batches, key=tree_key)
            size = lambda micro: sum(block_lengths(micro, tree_key))
        rank = self.accelerator.process_index
        return shard(rows, self.args.micro_batch_tokens, rank, loads, self.is_sharded, cost, cut, size)

    def _refuse(self, losses: list[tuple[list[Row], Tensor]]) -> None:
        """Raise for the first micro-batch of any process whose loss is not finite; for all processes to call."""
        bad = [(loss.item(), micro) for micro, loss in losses if not torch.isfinite(loss)]
        named = [(loss, [(r.episode.problem.id, r.episode.index, r.turn.role, r.turn.slot, r.turn.round) for r in micro])
                 for loss, micro in bad]  # fmt: skip
        loss, rows = next(itertools.chain(*gather_objects(named)), (math.inf, []))
        raise FloatingPointError(
            f"The loss is {loss} at iteration {self.state.global_step + 1} in one of the rows (problem, episode, role, slot, "
            f"round) {rows}. Lower `learning_rate`, or resume from an earlier checkpoint."
        )

    def _backward(
        self, model: nn.Module, micro: list[Row], weight: float, beta: float, has_gradient: bool, packing: Packing | None
    ) -> Tensor:  # fmt: skip
        """TRL's loss of one micro-batch, weighted by its share of the mini-batch, and its gradient."""
        batch = collate(micro, self._tokenizer.pad_token_id, self.accelerator.device, self.args.old_logprobs)
        batch["num_items_in_batch"] = batch["completion_mask"].sum() * self.accelerator.num_processes
        logged, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        n_tokens = sum(packing.blocks) if packing else padded(micro)
        self._micro_batch, self._batch, self._packing = micro, batch, packing
        self.beta = beta  # which TRL's loss reads; elsewhere it is 0, or TRL would look for a reference model
        self.use_vllm = self.correction is not None  # so that TRL's loss takes importance weights
        with self.pass_over(n_tokens, packing), torch.set_grad_enabled(has_gradient):
            with self.compute_loss_context_manager(), local_metrics(self.accelerator):
                loss = self.compute_loss(model, batch) * weight
                if self.has_entropy_bonus and weight:
                    loss = loss - self._entropy.bonus(micro, self._entropies, batch["completion_mask"])
            self.beta, self.use_vllm = 0.0, False
            if has_gradient:  # FSDP2 averages gradients over the processes; ours are to be summed
                self.accelerator.backward(loss * self.accelerator.num_processes if self.is_sharded else loss)
        self._micro_batch, self._packing, self._batch = None, None, {}
        tokens = sum(len(row.turn.completion_ids) for row in micro) if weight else 0
        self._loss_metrics += [(name, tokens, value) for name, (value,) in self._metrics["train"].items()]
        self._metrics["train"] = logged
        if weight:
            if self.correction:
                self._weight_sums.add(micro, *self._weights, batch["completion_mask"])
            for watcher in self.watchers:
                watcher.on_micro_batch(self, micro, batch, *self._logps)
        return loss.detach()

    @contextmanager
    def pass_over(self, n_tokens: int, packing: Packing | None) -> Iterator[None]:
        """The context of a forward pass over so many tokens, and of its backward pass."""
        base = self.peft_model.get_base_model()
        with ExitStack() as stack:
            if packing is not None:
                stack.enter_context(packed_attention(base))
            is_off = not self.is_sharded and fits(base, n_tokens, self.is_half)
            stack.enter_context(without_recomputation(base, is_off))
            stack.enter_context(compact_head(has_large_head(base)))
            yield

    # ---- log-probs

    def logprobs_of(self, rows: list[Row], base: bool = False) -> list[Tensor]:
        """The log-probs (C,) of each row's completion under its adapter's present weights; on the host.

        With `base`, under the reference of `beta`: the base model, or the adapters as they were given. At the sampling temperature. With several processes each computes a shard and gets them all.
        """
        return self._scores_of(rows, 0, base)

    def entropies_of(self, rows: list[Row]) -> list[Tensor]:
        """The entropies (C,) in nats of the distributions that `logprobs_of` takes its log-probs from."""
        return self._scores_of(rows, 1)

    @torch.no_grad()
    def _scores_of(self, rows: list[Row], which: int, base: bool = False) -> list[Tensor]:
        """The log-probs (`which` 0) or the entropies (1) of each row's completion (C,)."""
        computed, place, device = {}, {id(row): i for i, row in enumerate(rows)}, self.accelerator.device
        with self._reference() if base else nullcontext():
            for adapter in dict.fromkeys(row.adapter for row in rows):
                _, layers = self.activate(adapter)
                group, loads = [row for row in rows if row.adapter == adapter], [0.0] * self.accelerator.num_processes
                is_packed = self.packs and packing_pays(group, self.n_parameters, no_key)
                is_half = self.is_half and self.merges and layers
                name = None if base and not self._given_adapters else adapter
                with self.layers_with(layers, name, None) if is_half else nullcontext():
                    for micro, _ in self.shard(group, loads, tree_key=no_key if is_packed else None):
                        self._packing = pack(micro, no_key, device) if is_packed else None
                        batch = collate(micro, self._tokenizer.pad_token_id, device)
                        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (N, P + C)
                        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (N, P + C)
                        with self.pass_over(0, self._packing):
                            scores = self._score(ids, mask, batch["completion_ids"].size(1))[which]  # (N, C)
                        for row, values in zip(micro, scores, strict=True):
                            computed[place[id(row)]] = values[: len(row.turn.completion_ids)].cpu()
        self._packing = None
        self.peft_model.set_requires_grad(self.adapters, True)
        gathered = {i: values for part in gather_objects(computed) for i, values in part.items()}
        return [gathered[i] for i in range(len(rows))]

    def _reference(self) -> AbstractContextManager:
        """Within it, the model computes what KL is measured from."""
        return swapped(self._given_adapters) if self._given_adapters else self.peft_model.disable_adapter()

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: object
    ) -> tuple[Tensor, Tensor, None]:
        """TRL's numbers, log-probs and entropies (N, C), from rows moved to the left edge, or packed.

        Adds importance weights to the batch: they need the log-probs, which are a first step's own.
        """
        logps, entropies = self._score(input_ids, attention_mask, logits_to_keep)
        self._logps, self._entropies = (logps.detach(), entropies.detach()), entropies
        old = self._batch.setdefault("old_per_token_logps", self._logps[0])
        if self.use_vllm and self.correction:
            sampled = self._batch["sampling_per_token_logps"]
            weights, unclipped = self.correction.weigh(old, sampled, self._batch["completion_mask"])
            self._batch["importance_sampling_ratio"] = weights
            self._weights = weights, unclipped, old, sampled
        return logps, entropies, None

    def _score(self, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N, C), of the packed rows if there are any. Data parallelism is ours (`distributed`): unwrapped."""
        base = self.peft_model.get_base_model()
        is_replaced = self.is_half and needs_no_autocast(base) and "forward" in vars(base.model.rotary_emb)
        with nullcontext() if is_replaced else self.accelerator.autocast():
            model = base if is_replaced else self.peft_model  # whose forward has an autocast of its own
            if self._packing is not None:
                return score_packed(model, self._packing)
            return score(model, input_ids, attention_mask, n_completion, self.pad_to_multiple_of)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._last_grad_norm

    # ---- logging, evaluation, checkpoints

    def _finish_iteration(self, iteration: Iteration) -> None:
        """Metrics per role into TRL's log, after the callbacks' `on_iteration_end`."""
        metrics = self._metrics["train"]
        by_role = {role: [row for row in iteration.rows if row.turn.role == role] for role in self.policy}
        iteration.roles |= {role: text_metrics(rows) for role, rows in by_role.items() if rows}
        for role, values in self._weight_sums.collect(gather_objects).items():
            iteration.roles[role] |= values
        if iteration.number == 1 and self.accelerator.is_main_process:
            called = {turn.role for episode in iteration.episodes for turn in episode.turns}
            warn_of_silent_roles(self.workflow, called, "in the first iteration")
        for watcher in self.watchers:
            watcher.on_iteration_end(self, iteration)
        for role, values in iteration.roles.items():
            for name, value in values.items():
                if value is not None:
                    metrics[f"{role}/{name}"].append(value)
        for name in [name for name in metrics if name.startswith("completions/")]:
            del metrics[name]  # TRL's lengths are of each episode's last turn: ours are per role
        if (right := accuracy(iteration.episodes)) is not None:
            metrics["accuracy"].append(right)
        metrics["prompt_overflow_rate"].append(overflow_rate(iteration.episodes))
        if self.args.max_failed_episodes:
            metrics["failed_episodes"].append(n_failed(iteration.episodes))
        self._warn_of_zero_reward(iteration.episodes)

    def _warn_of_zero_reward(self, episodes: list[Episode]) -> None:
        """Warn, once, when no episode of `SILENT_ITERATIONS` iterations in a row had a reward other than 0."""
        rewards = [episode.reward.value for episode in episodes if episode.reward is not None]
        if not rewards:
            return
        self._n_without_reward = 0 if any(rewards) else self._n_without_reward + 1
        if self._n_without_reward == SILENT_ITERATIONS and self.accelerator.is_main_process:
            logger.warning(ZERO_REWARD, SILENT_ITERATIONS)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not isinstance(self.train_dataset, StreamedRows):  # HF's counts our one long epoch
            self.state.epoch = self.state.global_step * self.args.n_problems / len(self.problems)
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is None:
            super().log(logs, start_time)
            return
        prefix, shown = evaluated
        trained, self._logs = self._logs, shown
        with kept_apart(Path(self.args.output_dir) / "completions", self.state.global_step, prefix):
            super().log(logs, start_time)
        self._logs = trained

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = checked_evaluation(eval_dataset, self.reward_funcs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """`num_generations_eval` episodes per problem with the current adapters: `eval_reward`, and `eval_accuracy` if known.

        `eval_loss` is the objective at a ratio of 1 without KL. It is about 0 whatever the policy, as TRL's is.
        """
        dataset: Any = dataloader.dataset
        logged: dict[str, list[float]] = defaultdict(list)
        self.model.eval()
        attempts = [(p, i) for p in to_problems(dataset) for i in range(self.args.num_generations_eval or 1)]
        episodes = self.play(attempts, -1)
        by_function = self.score_episodes(episodes, dataset)  # (N, F)
        means = dict(zip(self.reward_func_names, by_function.nanmean(0).tolist(), strict=True))
        self._rest_engine()
        metrics = {f"{metric_key_prefix}_reward": mean_reward(episodes)}
        metrics |= {f"{metric_key_prefix}_rewards/{name}/mean": value for name, value in means.items()}
        if (right := accuracy(episodes)) is not None:
            metrics[f"{metric_key_prefix}_accuracy"] = right
        metrics[f"{metric_key_prefix}_prompt_overflow_rate"] = overflow_rate(episodes)
        if self.args.max_failed_episodes:
            metrics[f"{metric_key_prefix}_failed_episodes"] = n_failed(episodes)
        for watcher in self.watchers:
            watcher.on_episodes_evaluated(self, episodes, metrics)
        for own in gather_objects(dict(self._pending_metrics)):  # what reward functions have logged
            for name, values in own.items():
                logged[f"{metric_key_prefix}_{name}"] += values
        metrics |= {name: sum(values) / len(values) for name, values in logged.items()}
        rewards = [episode.reward and episode.reward.value for episode in episodes]
        advantages = evaluation_advantages(rewards, self.args.num_generations_eval or 1)
        metrics[f"{metric_key_prefix}_loss"] = surrogate_loss(episodes, advantages, self.args.loss_type)
        if self.log_completions:
            columns = dict(zip(self.reward_func_names, by_function.T.tolist(), strict=True))
            prompts = [dataset[i // (len(episodes) // len(dataset))]["prompt"] for i in range(len(episodes))]
            logs = evaluation_logs(prompts, episodes, columns, advantages, dict(self._pending_extra_logs))
            self._evaluated = metric_key_prefix, logs
        self._pending_metrics.clear()  # or TRL would add them to the next iteration's
        self._pending_extra_logs.clear()
        return EvalLoopOutput(None, None, metrics, len(episodes))

    def score_episodes(self, episodes: list[Episode], dataset: Any) -> Tensor:
        """Set `reward` of evaluation episodes by the reward functions; each process scores a share. Returns all rewards (N, F).

        TRL gathers the rewards, which needs shares of equal size: the last episode is scored more than once where they are not.
        """
        repeats, share = len(episodes) // len(dataset), -(-len(episodes) // self.accelerator.num_processes)
        start = self.accelerator.process_index * share
        own = [min(i, len(episodes) - 1) for i in range(start, start + share)]
        inputs = [dataset[i // repeats] | {"episodes": episodes[i]} for i in own]
        rewards = self._calculate_rewards(inputs, [row["prompt"] for row in inputs], [], [])  # (N, F), of all processes
        order = itertools.chain.from_iterable(gather_objects([(i, episodes[i].reward) for i in own]))
        firsts: dict[int, int] = {}  # episode -> the first of its rows
        for n, (i, reward) in enumerate(order):
            episodes[i].reward = reward
            firsts.setdefault(i, n)
        return rewards[list(firsts.values())]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():  # HF copies a single adapter's files
            for name in self.adapters:
                if name != "default":  # whose files HF copies
                    shutil.copytree(
                        Path(checkpoint_folder) / name, Path(self.args.output_dir) / name, dirs_exist_ok=True
                    )
        super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        held = set(self.peft_model.peft_config)
        check_checkpoint(Path(resume_from_checkpoint), self.policy, held, self.is_sharded)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
