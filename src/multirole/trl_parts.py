"""All that this package takes from inside TRL, transformers and PEFT, in one file to read when a new version of them comes.

- `PRIVATE` lists every name that is not public, or whose source was relied upon: how it is used, why, and a digest of the source that was read.
- `StockHooks` holds every method of TRL's and transformers' trainer that is overridden, except those of the loop itself, which is `trainer.py`.
- `GRPOTrainer` is imported without vLLM. TRL's module imports its own vLLM engine at the top, and with it all of vLLM where that is installed
  (seconds, and some 200 MB in every process), though `multirole.engines` has another. So while TRL's module is imported, one function stands
  for its engine, and imports the real one when it is called: stock TRL with `use_vllm=True` works later in the same process.

`python -m multirole.trl_parts` prints the table of `PRIVATE` (docs/extending_trl.md), and with `--digests` the digests of the installed versions.
"""

import functools
import hashlib
import inspect
import itertools
import json
import logging
import math
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerControl
from transformers.trainer_utils import PredictionOutput, TrainOutput

from multirole.callbacks import MultiRoleCallback, require_value
from multirole.chat.templates import StartClock
from multirole.credit.advantages import groups_of_equal_rewards
from multirole.credit.rewards import answers_as_completions, leave_out_failed, set_rewards, with_equal_columns
from multirole.credit.role_rewards import TurnRewards, check_one_reward, role_advantages
from multirole.engines.vllm_colocate import base_revision
from multirole.inputs.adapters import train_only
from multirole.inputs.epochs import EpochCount
from multirole.inputs.problems import INDEX, checked_evaluation, to_row
from multirole.inputs.reward_functions import checked_reward
from multirole.inputs.streams import IndexedRows, StreamedRows
from multirole.metrics.completions_table import save_separately
from multirole.metrics.evaluation import score_shares
from multirole.metrics.iteration import UpdateMetrics
from multirole.options import MultiRoleGRPOConfig
from multirole.partners import Partners
from multirole.policy import served_part, shown
from multirole.rollout.player import PLAY_ERRORS, Player
from multirole.rollout.replies import answer_ids, last_turns, transcript
from multirole.rollout.rollout import Attempt
from multirole.saving.checkpoints import (
    PolicyMap,
    check_checkpoint,
    copy_adapters,
    loading_on_host,
    resume_argument,
    rotating_by_step,
)
from multirole.saving.layout import SERVING, is_complete, last_checkpoint, owes_evaluation, saved_args, step_of
from multirole.saving.model_card import write_card
from multirole.schedule import TokenBudget
from multirole.types import Episode
from multirole.update.entropy import StepEntropy, by_adapter, next_coef, value_of, with_value
from multirole.update.importance import Correction
from multirole.update.passes.fast_passes import choose_kernels
from multirole.update.passes.model_passes import MicroBatch, ModelPasses
from multirole.update.processes import all_reduce, gather_objects
from multirole.update.rows import problem_order

logger = logging.getLogger(__name__)

# ---- TRL's trainer, imported without vLLM

ENGINE_OF_TRL = "trl.generation.vllm_generation"


def vllm_generation(*args: Any, **kwargs: Any) -> Any:
    """Import TRL's vLLM engine and return a new one."""
    from trl.generation.vllm_generation import VLLMGeneration

    return VLLMGeneration(*args, **kwargs)


if ENGINE_OF_TRL in sys.modules:
    from trl import GRPOTrainer
else:
    sys.modules[ENGINE_OF_TRL] = module = ModuleType(ENGINE_OF_TRL)
    module.__dict__["VLLMGeneration"] = vllm_generation
    try:
        from trl import GRPOTrainer
    finally:
        del sys.modules[ENGINE_OF_TRL]


# ---- the private names


@dataclass(frozen=True)
class Private:
    """A name inside TRL, transformers or PEFT that this package depends on.

    Args:
        owner: the module and, for a method or an attribute, the class.
        name: the name; several attributes that are used for one reason are separated by ", ".
        use: "overridden"; "read", of a method whose source was relied upon; "called"; "set", of an attribute; "replaced", in a context manager.
        why: what for.
        digests: of the source of each version that was read (`digest`); none for an attribute.
    """

    owner: str
    name: str
    use: Literal["overridden", "read", "called", "set", "replaced"]
    why: str
    digests: str = ""


GRPO, HF = "trl.trainer.grpo_trainer.GRPOTrainer", "transformers.trainer.Trainer"
PRIVATE = (
    Private(GRPO, "__init__", "overridden", "one adapter per name of the policy map; options that act on a micro-batch in TRL are switched off", "18f01b7a46c9544b"),
    Private(GRPO, "get_train_dataloader", "overridden", "rows carry their index; also of a `train_dataset` that was replaced", "2bffe5a57c539e17"),
    Private(GRPO, "_get_train_sampler", "overridden", "the run is one long epoch, so that a resume continues the order of problems", "36497afb4d311dc9"),
    Private(HF, "create_optimizer", "overridden", "one AdamW over all adapters", "daff86cde6ccc56d c798977d9dca3601"),
    Private(GRPO, "_generate_and_score_completions", "overridden", "TRL scores episodes; their advantages go to all of their turns", "1fa48922792dcd5c"),
    Private(GRPO, "_calculate_rewards", "overridden", "the episodes' answers are the completions", "736ae29b083840b5"),
    Private(GRPO, "training_step", "overridden", "the iteration", "9e18632f7dd8e8d8"),
    Private(GRPO, "_get_per_token_logps_and_entropies", "overridden", "the same numbers from right-padded or packed rows without an attention mask", "ea73c3909275851d"),
    Private(GRPO, "get_high_entropy_mask", "overridden", "the top quantile is that of the mini-batch", "ce6e86287bac23d6"),
    Private(HF, "_clip_grad_norm", "overridden", "reports the largest norm of the iteration's steps, since HF finds no gradient to clip", "ebfa9dc91d3088ab"),
    Private(HF, "_get_grad_norm", "overridden", "as `_clip_grad_norm`", "913ba6f52f074d10"),
    Private(HF, "_get_learning_rate", "overridden", "reports the rate of the last adapter that took a step, if a callback changes the schedule's", "158d12f9b9501acb"),
    Private(GRPO, "log", "overridden", "the table of completions of an evaluation holds its own episodes", "1e7772819cc8cf09"),
    Private(HF, "train", "overridden", "resumes from the highest step, and hides this package's frames when a workflow fails", "f2ab74639cb0528d 9a3c2bcd066d8f99"),
    Private(HF, "evaluate", "overridden", "checks the dataset, or `eval_dataset` if it was replaced, and reads a stream", "47001f3acc991bc4"),
    Private(HF, "predict", "overridden", "an evaluation of the dataset; only metrics, no predictions", "7220207e2dd42725"),
    Private(HF, "evaluation_loop", "overridden", "episodes on the evaluation problems, scored by the reward functions", "35a11f83d269fdca a0fe4d6536f8a84a"),
    Private(HF, "_load_from_checkpoint", "overridden", "refuses checkpoints of other adapters or another policy map", "4711d0506786db15 a2804e8d93a297e3"),
    Private(HF, "_load_callback_state", "overridden", "leaves the trainer's own callbacks as they are", "2d0eae17b14b314d"),
    Private(HF, "_load_best_model", "overridden", "loads every adapter, as a resumed run does", "0e183d55a9db7414"),
    Private(GRPO, "_save_checkpoint", "overridden", "`save_total_limit` goes by steps, not by the clock; the adapters that play iterations in flight are saved", "ec91bde123649111"),
    Private(HF, "_push_from_checkpoint", "overridden", "also copies the adapters' folders", "b336b2f27274f0a5 2523da925347bd9a"),
    Private(HF, "_save", "overridden", "also writes what serving the adapters takes", "bf720120f407bab3 b136889e87928376"),
    Private("trl.trainer.base_trainer._BaseTrainer", "create_model_card", "overridden", "of several adapters, without local paths", "4f8a407fd9fd3f6e"),
    Private("trl.trainer.grpo_trainer", "VLLMGeneration", "replaced", "for good, by a function that imports TRL's engine when it is called, so that importing TRL does not import vLLM"),
    Private("transformers.trainer_utils", "rotate_checkpoints", "replaced", "while a checkpoint is saved (`saving/checkpoints.py`)", "4aac03e039844595"),
    Private(GRPO, "_generate", "read", "passes what `rollout_func` returns to the scoring", "2a27fdf8f5e6f356"),
    Private(GRPO, "_compute_loss", "read", "the loss of a micro-batch: what it reads from the batch and from the trainer", "80295546bbdbf6f7"),
    Private(GRPO, "compute_loss", "read", "calls `_compute_loss`", "a2d6ef8bd29c3e26"),
    Private(GRPO, "get_eval_dataloader", "read", "its dataset is what `evaluation_loop` plays", "301561e842dd5fbe"),
    Private(GRPO, "_load_optimizer_and_scheduler", "read", "restores the adaptive entropy coefficient", "5c1772becdfd7fdb"),
    Private("trl.trainer.grpo_config.GRPOConfig", "__post_init__", "read", "the sizes of a batch, which `options.py` sets again", "e833cd8d6b4619ad"),
    Private(HF, "_run_epoch", "read", "one HF step per iteration: its optimizer step finds no gradient", "ebe374933064ecd6 31aff00f34c302a2"),
    Private(HF, "create_scheduler", "read", "the schedule counts iterations", "a9edec70a59bffa5"),
    Private(HF, "_maybe_log_save_evaluate", "read", "what is logged after an iteration", "af101534f0f7b2d7"),
    Private(HF, "_save_checkpoint", "read", "what a checkpoint holds", "a9111e30faa99339"),
    Private("trl.trainer.utils", "add_fused_lm_head", "read", "TRL attaches the fused head that scores rows (`update/passes/logprobs.py`)", "422d009f04b66659"),
    Private("trl.kernels.chunked_logprob.ChunkedLogProbFunction", "forward", "read", "the kernel of the fused head", "1d8220b44273cdf3"),
    Private("trl.trainer.utils", "_use_triton", "replaced", "while rows are scored, so that a CPU scores completion tokens only (`update/passes/logprobs.py`)"),
    Private("trl.trainer.utils", "_ChunkedLogProbFunction", "replaced", "while a role with a teacher is scored, to read the head and its hidden states (`update/passes/logprobs.py`)"),
    Private("trl.kernels.chunked_divergence.ChunkedDivergenceFunction", "forward", "called", "the KL from a teacher (`update/distillation.py`)", "ca2ff98ab97c5c7c"),
    Private("trl.trainer.utils", "generate_model_card", "called", "TRL's sections on training, versions and citations", "ae772451da9a7a3d"),
    Private("peft.tuners.lora.layer.Linear", "forward", "read", "adapters are computed merged into the base (`update/gradients.py`)", "ec0a80f5c5ce05f5"),
    Private("peft.tuners.tuners_utils.BaseTuner", "set_adapter", "read", "one adapter is active at a time", "6bc3435dcb256f28"),
    Private("peft.tuners.tuners_utils.BaseTunerLayer", "set_adapter", "read", "as above", "428fe38e3c1100d9"),
    Private("peft.peft_model.PeftModel", "set_requires_grad", "read", "which adapters have a gradient", "2a4eaff3142ddfd7"),
    Private("peft.peft_model.PeftModel", "create_or_update_model_card", "replaced", "on this run's model: a card of several adapters", "188582665d331da0"),
    Private(GRPO, "rollout_func", "set", "TRL's experimental hook that runs the episodes"),
    Private(GRPO, "_metrics, _logs, _step", "set", "TRL's log"),
    Private(GRPO, "beta, use_vllm", "set", "while a micro-batch is computed: its KL weight, and whether TRL's loss applies importance weights"),
    Private(GRPO, "_pending_metrics, _pending_extra_logs", "set", "the metrics that reward functions log during an evaluation; none of replays"),
    Private(GRPO, "num_iterations, _entropy_bonus_enabled", "set", "switched off: both act on the optimizer steps of the iteration"),
    Private(GRPO, "entropy_coef, _last_world_entropy", "set", "the adaptive entropy coefficient of each adapter, which TRL saves in checkpoints"),
    Private("transformers.modeling_utils.PreTrainedModel", "_is_stateful, _hf_peft_config_loaded", "read", "prompts of such a model may not be padded; an adapter loaded without PEFT is refused"),
    Private("transformers.configuration_utils.PreTrainedConfig", "_attn_implementation", "set", "while prompts that rows share are computed once (`update/passes/tree_attention.py`)"),
    Private("transformers.modeling_layers.GradientCheckpointingLayer", "_gradient_checkpointing_func", "set", "on layers that recompute their activations (`update/passes/recomputation.py`)"),
    Private(HF, "_get_output_dir", "called", "the folder of checkpoints"),
    Private("peft.peft_model.PeftModel", "load_adapter", "replaced", "while a checkpoint is loaded, to read files into host memory (`saving/checkpoints.py`)"),
    Private("accelerate.Accelerator", "gather, reduce", "replaced", "while TRL's loss is computed, whose metrics are gathered once per iteration (`update/processes.py`)"),
    Private(GRPO, "_tokenizer, _paper, _tag_names, _name", "read", "the tokenizer of a processor; the model card"),
    Private(HF, "current_gradient_accumulation_steps, neftune_noise_alpha", "set", "one HF step per iteration; no noise"),
    Private(HF, "_eval_dataloaders", "set", "forgotten before an evaluation, or persistent workers would evaluate the first dataset again"),
    Private("transformers.training_args.TrainingArguments", "_n_gpu, _setup_devices", "set", "one device per process"),
)  # fmt: skip
"""Sorted by use. A method that differs between the oldest and the newest version that pyproject.toml admits has a digest of each."""


def owner_of(private: Private) -> Any:
    """Import and return the module or class that has a private name."""
    try:
        return import_module(private.owner)
    except ModuleNotFoundError:
        module, _, name = private.owner.rpartition(".")
        return getattr(import_module(module), name)


def digest(private: Private) -> str:
    """Return 16 hex digits of the SHA-256 of a function's source in the installed version."""
    source = inspect.getsource(vars(owner_of(private))[private.name])
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def private_table() -> str:
    """Return `PRIVATE` as a table in Markdown."""
    rows = [
        f"| {' '.join(f'`{name}`' for name in p.name.split(', '))} of `{p.owner.rpartition('.')[2]}` | {p.use} | {p.why} |"
        for p in PRIVATE
    ]
    return "\n".join(["| name | use | why |", "|---|---|---|", *rows])


# ---- the trainer's hooks


@dataclass
class Underway:
    """What TRL's code is computing, for the methods that it calls without passing it.

    Args:
        attempts: the problems, in the order of the iteration's episodes.
        episodes: the iteration's episodes, of all processes.
        rewards: (N, F) of the episodes that were scored last, by reward function.
        turn_rewards: (T, F) of each of their turns, of all processes, if a function rewards single roles or turns.
        micro_batch: whose loss is being computed; None outside of a loss.
        evaluation: the prefix and the table of completions of the evaluation that is logged next.
        is_before_update: whether an iteration has begun, and none of its optimizer steps.
        n_tokens: the tokens that the log had counted before the iteration.
        is_evaluating: whether the episodes of an evaluation are being played.
        has_unsaved: whether iterations were trained after the last checkpoint.
    """

    attempts: list[Attempt] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    turn_rewards: list[Tensor] | None = None
    micro_batch: MicroBatch | None = None
    evaluation: tuple[str, dict[str, Any]] | None = None
    is_before_update: bool = False
    n_tokens: int | float = 0
    is_evaluating: bool = False
    has_unsaved: bool = False


class StockHooks(GRPOTrainer):
    """TRL's trainer, fitted to a loop that takes several optimizer steps on one adapter after another within one HF step.

    `MultiRoleGRPOTrainer` is the loop. Everything that neither of the two overrides is TRL's, the loss included.
    """

    args: MultiRoleGRPOConfig
    control: TrainerControl
    entropy_coef: float | dict[str, float]  # of each adapter, if there are several
    policy: dict[str, str]
    adapters: list[str]
    partners: Partners
    passes: ModelPasses
    correction: Correction | None
    player: Player
    update_metrics: UpdateMetrics
    train_rows: IndexedRows | StreamedRows
    train_dataset: Any
    eval_dataset: Any
    has_own_render: bool
    _evaluation_sets: tuple[Any, Any]  # as they were given, and checked
    _logs: dict[str, Any]
    _pending_metrics: dict[str, list[float]]
    _pending_extra_logs: dict[str, list[Any]]
    chat_template_kwargs: dict[str, Any]
    _tag_names = ["trl", "grpo", "multi-role"]  # noqa: RUF012
    _name = "Multi-role GRPO"

    def init_stock(
        self, model: PeftModel, reward_funcs: list[Any], args: MultiRoleGRPOConfig, callbacks: list[Any], workflow_name: str,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Call `GRPOTrainer.__init__`, and switch off what acts on an optimizer step here and on a micro-batch or an HF step in TRL.

        Args:
            arguments: other arguments of TRL's trainer, unchanged.
        """
        self.underway = Underway()
        self._last_grad_norm, self._last_lr = torch.tensor(0.0), 0.0  # what HF's loop logs
        self.run_state = PolicyMap(
            self.policy, gather_objects(StartClock().started)[0], self.partners.past_numbers
        )  # of the first process
        self.clock = self.run_state.clock
        """The clock of chat templates, which a resumed run takes over from its checkpoint."""
        args.router_aux_loss_coef = 0.0
        beta = args.beta
        args.beta = 0.0  # or TRL would look for an adapter "default"; `computing_loss` sets it role by role
        self.turn_rewards = TurnRewards()
        functions = [
            checked_reward(function, list(self.policy), self.turn_rewards.recorder(i))
            for i, function in enumerate(reward_funcs)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*")  # the experimental hook that this stands on
            super().__init__(
                model=model, reward_funcs=functions, args=args,
                callbacks=[*callbacks, self.run_state], rollout_func=self._rollout_func, **arguments,
            )  # fmt: skip
        args.beta = beta  # for logs and records; TRL's loss reads `self.beta`
        self.callback_handler.callbacks.insert(0, EpochCount(self))
        self.budget = next((c for c in self.callback_handler.callbacks if isinstance(c, TokenBudget)), None)
        self.peft_model: PeftModel = self.model
        """The model without the wrappers of accelerate."""
        self.num_iterations = 1  # the passes over a mini-batch are in `update`
        self.neftune_noise_alpha = None  # HF's loop would add noise
        self.current_gradient_accumulation_steps = 1  # HF sets it in its loop; an iteration never accumulates
        self._entropy_bonus_enabled = False  # the loop adds the bonus itself
        self.has_entropy_bonus = bool(args.entropy_coef or args.use_adaptive_entropy)
        # TRL saves these two in checkpoints
        self.entropy_coef = by_adapter(self.adapters, args.entropy_coef or 0.0)
        self._last_world_entropy = by_adapter(self.adapters, math.inf)
        fields = {f"paper_{key}": self._paper.get(key) for key in ("title", "id")}
        self._card = functools.partial(
            write_card, source=self.peft_model.config.name_or_path, policy={role: shown(value) for role, value in self.policy.items()}, adapter=self.adapters[0], workflow=workflow_name,
            name=Path(args.hub_model_id or args.output_dir).name, hub_id=args.hub_model_id, tags=self._tag_names,
            trainer=fields | {"trainer_name": self._name, "trainer_citation": self._paper.get("citation")},
        )  # fmt: skip
        # `save_pretrained` calls this
        self.peft_model.create_or_update_model_card = functools.partial(self._card, keeps=True)

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
        self.forget_unlogged()
        self.partners.past.begin()
        eval_on_start = self.args.eval_on_start
        with self._ended_by_budget(resume_from_checkpoint):
            try:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            except PLAY_ERRORS as error:
                self._save_finished(trial)
                # their messages say where; a traceback would show this package
                raise error.with_traceback(None) from error.__cause__
            except (
                Exception
            ):  # such as a reward function's; the others of several processes wait for this one, and cannot save
                if self.accelerator.num_processes == 1:
                    self._save_finished(trial)
                raise
            finally:
                self.args.eval_on_start = eval_on_start
                self.player.stop()

    @contextmanager
    def _ended_by_budget(self, checkpoint: str | bool | None) -> Iterator[None]:
        """Context manager: the budget counts from a checkpoint on, and a run that has spent it there has no iteration left."""
        is_there = isinstance(checkpoint, str) and is_complete(
            Path(checkpoint)
        )  # others are refused when they are loaded
        last = None if self.budget is None else self.budget.begin(Path(str(checkpoint)) if is_there else None)
        if last is None:
            yield
            return
        usual, self.args.max_steps = self.args.max_steps, last
        try:
            yield
        finally:
            self.args.max_steps = usual

    # ---- what the loop defines

    def play_iteration(self, attempts: list[Attempt]) -> list[Episode]:
        """Play the episodes of the iteration; each process plays a share and returns all of them."""
        raise NotImplementedError

    def take_dataset(self, dataset: Any) -> None:
        """Set `train_rows` from a training set."""
        raise NotImplementedError

    def attempts_at(self, indices: list[int]) -> list[Attempt]:
        """Return the attempts at the training problems of these indices."""
        raise NotImplementedError

    # ---- data order, optimizer and schedule

    def get_train_dataloader(self) -> DataLoader:
        dataset = self.train_dataset
        self.take_dataset(dataset)
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

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._last_grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._last_grad_norm

    # ---- episodes and rewards

    def _rollout_func(self, prompts: list, _: GRPOTrainer) -> dict[str, list]:
        """Play the iteration's episodes (TRL's hook). Returns the last turn of each episode of this process, with the episode."""
        self.underway.episodes = self.play_iteration(self.underway.attempts)
        start = self.accelerator.process_index * len(prompts)
        return last_turns(self.underway.episodes[start : start + len(prompts)], self._tokenizer.eos_token_id)

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Episode]:
        """Score this process's episodes with TRL; return those of all processes, with TRL's group-relative advantage on each."""
        indices = itertools.chain.from_iterable(gather_objects([row.pop(INDEX) for row in inputs]))
        self.underway.attempts = self.attempts_at(list(indices))
        n_tokens = self.state.num_input_tokens_seen
        scored = super()._generate_and_score_completions(inputs)
        episodes = self.underway.episodes
        # TRL has counted only the last turn of each episode
        n_tokens += sum(len(t.prompt_ids) + len(t.completion_ids) for episode in episodes for t in episode.turns)
        self.state.num_input_tokens_seen = n_tokens
        self._metrics["train"]["num_tokens"] = [n_tokens]
        is_equal = groups_of_equal_rewards(
            self.underway.rewards, self.reward_weights, self.num_generations, self.multi_objective_aggregation
        )
        start = self.accelerator.process_index * len(inputs)
        is_equal = is_equal[start : start + len(inputs)]
        advantages = scored["advantages"].masked_fill(is_equal, 0.0)  # TRL's are rounding noise there
        share = [(row["episodes"].reward, a) for row, a in zip(inputs, advantages.tolist(), strict=True)]
        scores = itertools.chain.from_iterable(gather_objects(share))
        for episode, (reward, advantage) in zip(episodes, scores, strict=True):
            episode.reward, episode.advantage = reward, advantage
        if self.underway.turn_rewards is not None:
            self._compare_roles(episodes, self.underway.turn_rewards)
        if self.log_completions:
            texts, advantages_shown = self._logs["completion"], self._logs["advantages"]
            for i, episode in enumerate(episodes, start=len(texts) - len(episodes)):
                texts[i] = transcript(episode)
                advantages_shown[i] = math.nan if episode.turn_advantages else episode.advantage
        for callback in self.multirole_callbacks:
            callback.on_rollout_end(self, episodes)
        return episodes

    def _compare_roles(self, episodes: list[Episode], of_turns: list[Tensor]) -> None:
        """Set `turn_advantages` of episodes whose reward functions reward single roles or turns, and log how many roles of groups are silent."""
        check_one_reward(self.multirole_callbacks)
        advantages, share_equal = role_advantages(
            of_turns, [[turn.role for turn in episode.turns] for episode in episodes], self.reward_weights.to(self.underway.rewards.device),
            self.num_generations, self.scale_rewards, self.multi_objective_aggregation,
        )  # fmt: skip
        for episode, of_episode in zip(episodes, advantages, strict=True):
            episode.turn_advantages = of_episode
        self._metrics["train"]["frac_reward_zero_std"][-1] = share_equal  # TRL's is of the episodes' means

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
        self.underway.rewards = rewards
        start = self.accelerator.process_index * len(inputs) if len(rewards) > len(inputs) else 0
        share = rewards[start : start + len(inputs)]
        of_turns = self.turn_rewards.take(episodes, share)
        set_rewards(episodes, share, self.reward_weights, of_turns)
        self.underway.turn_rewards = of_turns and list(itertools.chain.from_iterable(gather_objects(of_turns)))
        return rewards

    def score(self, episodes: list[Episode]) -> None:
        """Set `reward` of episodes that `play` has returned, by the reward functions; those that failed keep None. Nothing is logged.

        Each process scores a share and gets all rewards.
        """
        played = [episode for episode in episodes if episode.failure is None]
        logged = self._pending_metrics, self._pending_extra_logs
        self._pending_metrics, self._pending_extra_logs = defaultdict(list), defaultdict(list)
        try:
            if played:
                rows = [to_row(episode.problem) for episode in played]
                score_shares(played, rows, self._calculate_rewards, self.accelerator)
        finally:
            self._pending_metrics, self._pending_extra_logs = logged

    # ---- TRL's loss of a micro-batch

    @contextmanager
    def computing_loss(self, micro: MicroBatch, beta: float) -> Iterator[None]:
        """Context manager in which `compute_loss` computes TRL's loss of a micro-batch with the KL weight `beta`.

        TRL reads both, and where it logs, from attributes. They are restored also if the loss is interrupted.
        """
        before, self._metrics["train"] = self._metrics["train"], micro.logged
        self.underway.micro_batch = micro
        self.beta = beta  # elsewhere it is 0, or TRL would look for a reference model
        self.use_vllm = self.correction is not None  # so that the loss takes importance weights
        try:
            yield
        finally:
            self._metrics["train"], self.underway.micro_batch, self.beta, self.use_vllm = before, None, 0.0, False

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: object
    ) -> tuple[Tensor, Tensor, None]:
        """Return log-probs and entropies (N, C), as TRL's method does, from rows moved to the left edge, or packed.

        Adds importance weights to the batch, which need the log-probs; in a first step these are the old log-probs.
        """
        logps, entropies = self.passes.score(input_ids, attention_mask, logits_to_keep)
        micro = self.underway.micro_batch
        if micro is not None:
            micro.logps, micro.entropies = logps, entropies
            old, current = micro.batch.get("old_per_token_logps"), logps.detach()
            # NaN: a token that the engine could not score has the ratio 1, as in TRL
            micro.batch["old_per_token_logps"] = current if old is None else torch.where(old.isnan(), current, old)
            if self.correction is not None:
                micro.importance = self.correction.add_weights(micro.batch)
        return logps, entropies, None

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return the tokens (N, C) of the current micro-batch that are in the top quantile of its mini-batch; outside a loss, TRL's mask."""
        underway = vars(self).get("underway")  # TRL's tests call it on a mock
        if underway is None or underway.micro_batch is None:
            return super().get_high_entropy_mask(entropies, mask, threshold)
        micro = underway.micro_batch
        return micro.entropy.mask(micro.rows, mask).bool()

    def entropy_weight(self, adapter: str) -> float:
        """Return the weight of the entropy bonus in the adapter's next optimizer step."""
        if self.use_adaptive_entropy and value_of(self._last_world_entropy, adapter) > self.args.entropy_target:
            return 0.0
        return value_of(self.entropy_coef, adapter)

    def end_entropy(self, adapter: str, terms: StepEntropy, loss: Tensor) -> None:
        """Log the policy's loss without the bonus, and adapt the coefficient of the adapter's next step."""
        total = loss.new_zeros(()) if terms.total is None else terms.total
        all_reduce([total])
        entropy = total.item() / terms.n_tokens
        self._metrics["train"]["policy_loss"].append(loss.item() + terms.coef * entropy)
        if self.use_adaptive_entropy:
            coef = next_coef(value_of(self.entropy_coef, adapter), entropy, self.args)
            self.entropy_coef = with_value(self.entropy_coef, adapter, coef)
            self._last_world_entropy = with_value(self._last_world_entropy, adapter, entropy)
        self._metrics["train"]["entropy_coef"].append(value_of(self.entropy_coef, adapter))

    # ---- logging and evaluation

    def forget_unlogged(self) -> None:
        """Forget what an iteration that was interrupted has counted, which the first log of the next `train` would take for its own."""
        for counts in (self._metrics["train"], self._pending_metrics, self._pending_extra_logs):
            counts.clear()
        self.update_metrics.clear()
        self.underway = Underway()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        evaluation, self.underway.evaluation = self.underway.evaluation, None
        if evaluation is None:
            super().log(logs, start_time)
            return
        prefix, table = evaluation
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
        self.underway.is_evaluating = True
        metrics = super().evaluate(self._evaluation_set(eval_dataset), ignore_keys, metric_key_prefix)
        self.underway.is_evaluating = False
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:  # fmt: skip
        checked = checked_evaluation(test_dataset, self.reward_funcs, "test_dataset")
        try:
            return super().predict(checked, ignore_keys, metric_key_prefix)
        finally:
            self.underway.evaluation = None  # HF logs nothing here, so that the next log is an iteration's

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

    # ---- checkpoints and model cards

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save and target.exists():  # of an earlier run, perhaps with other adapters
            shutil.rmtree(target)
        self.accelerator.wait_for_everyone()
        if self.player.ahead is not None and self.args.should_save:
            target.mkdir(parents=True)
            self.player.ahead.save(target, self.state.global_step)
        with rotating_by_step(self.state.global_step):
            super()._save_checkpoint(model, trial)
        self.underway.has_unsaved = False

    def _save_finished(self, trial: Any) -> None:
        """Save a checkpoint if an engine, a workflow or a reward function failed before the update, and iterations were trained since the last one.

        Weights and counts are those after the last iteration. If the episodes were those of an evaluation, the resumed run begins with it, but not if
        the evaluation was to choose the best checkpoint, which HF does after an iteration only.
        """
        args, underway = self.args, self.underway
        owes = underway.is_evaluating and args.eval_strategy != "no" and args.metric_for_best_model is None
        if underway.has_unsaved and (underway.is_before_update or owes) and args.save_strategy in ("steps", "epoch"):
            if underway.is_before_update:
                self.state.num_input_tokens_seen = underway.n_tokens
            self.run_state.owes_evaluation = owes
            self._save_checkpoint(self.model, trial)
            self.run_state.owes_evaluation = False
            self.callback_handler.on_save(args, self.state, self.control)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            names = [name for name in served_part(self.policy).values() if name is not None]
            copy_adapters(Path(checkpoint_folder), Path(self.args.output_dir), dict.fromkeys(names))
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
            "policy": served_part(self.policy), "eos_token_ids": self.eos_token_ids, "has_own_render": self.has_own_render,
            "started": self.clock.started, "revision": base_revision(self),
        }  # fmt: skip
        facts |= {name: vars(args)[name] for name in options}
        (folder / SERVING).write_text(json.dumps(facts, indent=2), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        adapters = set(self.peft_model.peft_config)
        check_checkpoint(
            Path(resume_from_checkpoint), self.policy, adapters, self.is_fsdp_enabled, self.partners.served,
            self.partners.past_numbers,
        )  # fmt: skip
        with loading_on_host(self.peft_model):
            if "default" in adapters and len(adapters) > 1 and not self.is_fsdp_enabled:
                # PEFT saves it in the folder itself, where transformers does not look if there are subfolders
                self.peft_model.load_adapter(resume_from_checkpoint, "default", is_trainable="default" in self.adapters)
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.player.ahead is not None:
            self.player.ahead.load(Path(resume_from_checkpoint))
        self.args.eval_on_start |= owes_evaluation(Path(resume_from_checkpoint))
        saved = saved_args(Path(resume_from_checkpoint))
        self.clock.started = saved.get("started", self.clock.started)
        self.run_state.has_trained = saved.get("has_trained", True)
        self.run_state.sampler_gaps.update(saved.get("sampler_gaps", {}))
        self.use_kernels(saved.get("kernels"))
        self.player.forget_published()

    def use_kernels(self, recorded: Mapping[str, Any] | None) -> None:
        """Compute with the kernels that an earlier run has recorded (`run_state.kernels`), if any: a choice of this start may give other bits."""
        if recorded:
            self.run_state.kernels = choose_kernels(self.passes.base, self.passes.is_half, recorded)

    def _load_callback_state(self) -> None:
        """Restore the user's callbacks. The trainer's own have read their state from the checkpoint, and stay the objects that it knows."""
        saved = self.state.stateful_callbacks
        if self.budget is None:
            saved.pop(TokenBudget.__name__, None)  # later checkpoints would repeat the counts of a part of the run
        self.state.stateful_callbacks = {
            k: v for k, v in saved.items() if k not in (PolicyMap.__name__, TokenBudget.__name__)
        }
        super()._load_callback_state()
        self.state.stateful_callbacks = saved

    def _load_best_model(self) -> None:
        logger.info("Loading the best adapters from %s (%s).", self.state.best_model_checkpoint, self.state.best_metric)
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        self.partners.past.loaded_at = step_of(Path(str(self.state.best_model_checkpoint)))


if __name__ == "__main__":
    if "--digests" in sys.argv:
        for private in PRIVATE:
            if private.digests:
                print(f"{private.owner}.{private.name}: {digest(private)}")
    else:
        print(private_table())
