"""Train one cell from its configuration to DONE: builds the library's stock arguments from a `Cell` and records the run."""

import asyncio
import logging
import math
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils.logging import disable_progress_bar

from multirole import sandbox
from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.distributed import full, gather_objects, local, processes
from multirole.core.engine import Completion, Engine, Sampling
from multirole.core.hooks import MultiRoleCallback, OptimizerStep, Trainer
from multirole.core.inputs import add_adapters, check_reward
from multirole.core.policy import adapter_names
from multirole.core.rollout import PromptOverflow, Rollout, warn_of_silent_roles
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Message, Problem, Reward, Turn, Workflow
from multirole.core.watch import in_thread, user_lines
from multirole.diagnostics.alarm_callback import AlarmCallback
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.judging import judge
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.diagnostics.process_reward import ProcessReward
from multirole.diagnostics.skills import SkillWatch
from multirole.engines import load_engine
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import newest_whole, staging
from multirole.experiment.folders import folder_of, is_done, open_folder
from multirole.experiment.launch import ONE_PROCESS, Launch, is_launched, spawn
from multirole.experiment.machine import engine_of
from multirole.experiment.model_checks import check_loaded, check_model
from multirole.experiment.models import locate
from multirole.experiment.preflight import look, stopping
from multirole.experiment.presets import is_tiny
from multirole.experiment.progress import Progress, alive, announced, conclude, introduce, say
from multirole.experiment.provenance import add_session
from multirole.experiment.record import Recorder, Recording
from multirole.experiment.released_code import RENDERERS, RowCuts
from multirole.experiment.settings import refusing
from multirole.experiment.stops import Stop, heeding
from multirole.experiment.storage import reporting, writing
from multirole.tasks.own import RewardError, Task

logger = logging.getLogger(__name__)

DRY_SECONDS = 30.0
REPLIES = ("", "\\boxed{1}")
"""What every role answers when a workflow is tried."""

SAME_NAME = (
    "seed", "policy", "temperature", "learning_rate", "lr_clock", "weight_decay", "max_grad_norm", "updates", "step_tokens",
    "advantage_group", "old_logprobs", "max_prompt_tokens", "micro_batch_tokens",
)  # fmt: skip
"""Settings of a cell that are options of `MultiRoleGRPOConfig`."""


def preflight(cell: Cell, launch: Launch = ONE_PROCESS) -> None:
    """Refuse, all at once, a run whose model, rows or device are missing or cannot serve it (ValueError).

    Downloads the pinned model and rows where they are missing and everything else is there; fails within seconds where the
    Hub cannot be reached. Memory and disk are `multirole.plan.check`'s.
    """
    missing = stopping(look(cell, launch))
    trackers = launch.report_to if launch.report_to in ("none", "all") else launch.report_to.split(",")
    checks: dict[str, Callable[[], object]] = {
        "the base model": lambda: check_model(cell, locate(cell, may_download=not missing), engine_of(cell)),
        "the task's rows": lambda: cell.make_task().problems("validation", cell.n_validation),
        "a tracker": lambda: [tracker() for tracker in get_reporting_integration_callbacks(trackers)],
    }
    for what, check in checks.items():
        try:
            check()
        except (ValueError, OSError, RuntimeError) as error:  # a tracker that is not installed is a RuntimeError
            missing.append(f"{what}: {error}")
    if missing:
        numbered = "\n".join(f"{i}. {what}" for i, what in enumerate(missing, start=1))
        raise ValueError(f"{cell.id} at scale={cell.scale!r} cannot run here. Missing:\n{numbered}")
    if cell.task == "code":
        sandbox.require(cell.allow_unsafe_code)


def load_model(cell: Cell) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The frozen base with one fresh float32 LoRA adapter per name of the policy map (paper Table 7), and its tokenizer."""
    set_seed(cell.seed)  # adapters are initialised at random
    disable_progress_bar()  # it would stay in the executed notebook
    path = locate(cell)
    dtype = getattr(torch, cell.dtype)
    base, loading = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    check_loaded(path, loading)
    tokenizer = AutoTokenizer.from_pretrained(path)
    lora = LoraConfig(
        r=cell.lora_rank, lora_alpha=cell.lora_alpha, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = add_adapters(base, lora, adapter_names(cell.policy))
    for config in model.peft_config.values():  # sets, which each process would save in another order
        config.target_modules = sorted(config.target_modules)
    return model, tokenizer


def make_engine(
    cell: Cell, model: PeftModel, tokenizer: PreTrainedTokenizerBase, launch: Launch = ONE_PROCESS
) -> Engine:
    """The cell's rollout engine, where there is no trainer to build it: for evaluations."""
    processes()  # torch.distributed belongs to accelerate: vLLM would otherwise set it up its own way
    max_length = cell.max_prompt_tokens + cell.max_response_tokens
    engine: Any = load_engine(engine_of(cell))
    declared = model.generation_config.eos_token_id or []
    ends = {tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else declared)}  # as TRL in training
    if engine_of(cell) == "vllm":
        return engine(
            str(locate(cell)), adapter_names(cell.policy), cell.lora_rank, max_length, dtype=getattr(torch, cell.dtype),
            gpu_memory_utilization=launch.vllm_memory, tensor_parallel_size=launch.vllm_tensor_parallel, stop_ids=list(ends),
            **{name.removeprefix("vllm_"): size for name, size in launch.vllm_sizes().items()},
        )  # fmt: skip
    return engine(*ends, max_length=max_length)


class _Trial:
    """An engine and a tokenizer that answer every request with one reply."""

    def __init__(self, reply: str) -> None:
        self.reply, self.keys = reply, list[int]()

    def add(self, key: int, request: object) -> None:
        self.keys.append(key)

    def step(self) -> list[tuple[int, Completion]]:
        keys, self.keys = self.keys, []
        return [(key, Completion([0], [0.0], "stop")) for key in keys]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self.reply


def dry_run(workflow: Workflow, problem: Problem) -> None:
    """Play one episode per made-up reply, without a model; ValueError where the workflow fails, hangs or never ends.

    Warns of roles that were not called.
    """
    called: set[str] = set()
    for reply in REPLIES:
        said: Any = _Trial(reply)
        rollout = Rollout(workflow, said, said, {role: role for role in workflow.roles}, bool, 0, 1, lambda *_: [0])
        rollout.patience = DRY_SECONDS
        try:
            (episode,) = rollout.run([(problem, 0)], 0, Sampling(1, 1.0))
        except RuntimeError as error:
            where = user_lines(traceback.walk_tb(error.__cause__.__traceback__)) if error.__cause__ else ""
            raise ValueError(
                f"Tried without a model, where every reply was {reply!r}: {error}\n{where}".rstrip()
            ) from error
        called |= {turn.role for turn in episode.turns}
    if not called:
        raise ValueError(
            f"Tried without a model, the workflow {workflow.name!r} made no call, so there is nothing to train."
        )
    warn_of_silent_roles(workflow, called, "in a trial")


def try_reward(task: Task, problems: list[Problem]) -> None:
    """Score made-up answers with a task of one's own; ValueError where its reward fails or returns no fitting numbers."""
    try:
        for problem, reward in zip(problems, task.score(problems, list(REPLIES[: len(problems)])), strict=True):
            check_reward(f"The reward of task {task.name!r}", problem, reward.value)
    except (RewardError, ValueError) as error:
        raise ValueError(f"Tried before training, on the answers {REPLIES}: {error}") from error


def first_prompts(
    workflow: Workflow, problems: Sequence[Problem], encode: Callable[[list[Message]], list[int]]
) -> list[int]:
    """Tokens of the longest prompt of each problem's first stage, found without any model call."""

    async def measure(problem: Problem) -> int:
        stage: list[int] = []

        async def call(role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
            stage.append(len(encode(messages)))
            raise PromptOverflow

        try:
            await workflow.run(problem, call)
        except PromptOverflow:
            pass
        return max(stage, default=0)

    async def measure_all() -> list[int]:
        return [await measure(problem) for problem in problems]

    return in_thread(lambda: asyncio.run(measure_all()))


def load_problems(
    cell: Cell, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    """Training and validation problems, and how many are over the cell's prompt cap.

    Training problems whose first prompt is over the cap are left out. Validation problems all stay: one that is too
    long ends without an answer (`prompt_overflow`).
    """
    task, workflow, cap = cell.make_task(), cell.make_workflow(), cell.max_prompt_tokens
    train, validation = task.problems("train", cell.n_train), task.problems("validation", cell.n_validation)
    if len(train) < cell.n_problems:
        raise ValueError(
            f"`n_problems` must be at most the {len(train)} training problems of task {cell.task_label!r}, got {cell.n_problems}."
        )
    dry_run(workflow, train[0])
    if isinstance(task, Task):
        for problems in (train, validation):
            try_reward(task, problems[: len(REPLIES)])
    lengths = first_prompts(workflow, [*train, *validation], lambda chat: RENDERERS[cell.renderer](tokenizer, chat))
    kept = [problem for problem, length in zip(train, lengths, strict=False) if length <= cap]
    counts = {
        "train": len(kept),
        "train_overlong": len(train) - len(kept),
        "validation": len(validation),
        "validation_overlong": sum(length > cap for length in lengths[len(train) :]),
    }
    if len(kept) < cell.n_problems:
        raise ValueError(
            f"`max_prompt_tokens` ({cap}) leaves {len(kept)} of {len(train)} training problems, whose first prompts have up to "
            f"{max(lengths[: len(train)])} tokens, and one iteration needs {cell.n_problems}. Use a larger max_prompt_tokens"
            f"{' or a smaller n_problems' * bool(kept)}."
        )
    return kept, validation, counts


def training_args(cell: Cell, output_dir: str, launch: Launch = ONE_PROCESS) -> MultiRoleGRPOConfig:
    """The cell's settings under TRL's names."""
    fsdp = {"version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": False}  # fmt: skip
    if cell.model is None:  # a model of one's own says itself which of its layers are not split
        fsdp["transformer_layer_cls_to_wrap"] = ["Qwen3DecoderLayer"]
    n_episodes = cell.n_problems * cell.n_episodes
    return MultiRoleGRPOConfig(
        **{name: value for name, value in cell if name in SAME_NAME},
        output_dir=output_dir,
        max_steps=cell.iterations,
        generation_batch_size=n_episodes,
        per_device_train_batch_size=n_episodes // processes().num_processes,
        num_generations=cell.n_episodes,
        max_completion_length=cell.max_response_tokens,
        role_beta=cell.anchors,
        epsilon=cell.clip_low,
        epsilon_high=cell.clip_high,
        delta=cell.dual_clip,
        lr_scheduler_type="cosine" if cell.lr_schedule == "cosine" else "constant_with_warmup",
        warmup_steps=cell.warmup_iterations,
        engine=engine_of(cell),
        vllm_gpu_memory_utilization=launch.vllm_memory,
        vllm_tensor_parallel_size=launch.vllm_tensor_parallel,
        **launch.vllm_sizes(),
        eval_strategy="steps",
        eval_steps=cell.eval_every,
        save_strategy="steps",
        save_steps=cell.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to=launch.report_to.split(","),
        run_name=cell.id,
        gradient_checkpointing=launch.recomputes(cell.scale),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=cell.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        fsdp=launch.is_sharded,
        fsdp_config=fsdp if launch.is_sharded else None,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class TaskReward:
    """A task's outcome reward (paper A.7) as a TRL reward function, and its scorer for single turns."""

    __name__ = "outcome_reward"

    def __init__(self, task: Any, problems: list[Problem]) -> None:
        self.task, self.problems = task, {problem.id: problem for problem in problems}

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """The task's rewards; `problems` may be the trainer's, which know the dataset's columns only."""
        rewards = self.task.score([self.problems[problem.id] for problem in problems], texts)
        for problem, reward in zip(problems, rewards, strict=True):
            check_reward(f"The task {self.task.name!r}", problem, reward.value)
        return rewards

    def __call__(self, prompts: list, completions: list, episodes: list[Episode], **_: object) -> list[float]:
        answers = [episode.answer or Answer("") for episode in episodes]
        rewards = self.score([episode.problem for episode in episodes], [answer.text for answer in answers])
        for episode, answer, reward in zip(episodes, answers, rewards, strict=True):
            episode.reward = reward if answer.reason is None else replace(reward, reason=answer.reason)
        return [reward.value for reward in rewards]


def to_dataset(problems: list[Problem]) -> Dataset:
    """What the trainer sees of problems: no reference answers."""
    return Dataset.from_dict(
        {"prompt": [p.question for p in problems], "id": [p.id for p in problems], "task": [p.task for p in problems]}
    )


class Divergence(MultiRoleCallback):
    """Ends the training (FloatingPointError) at the first optimizer step whose gradient or whose weights are not finite."""

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        weights = [
            local(p.detach()) for name, p in trainer.peft_model.named_parameters() if f".{step.adapter}." in name
        ]
        is_finite = math.isfinite(step.grad_norm) and bool(torch.nn.utils.get_total_norm(weights).isfinite())
        if not all(gather_objects(is_finite)):
            raise FloatingPointError(
                f"The weights of adapter {step.adapter!r} are not finite after an optimizer step of iteration "
                f"{trainer.state.global_step + 1}, whose gradient had the norm {step.grad_norm:g}."
            )


class CellTrainer(MultiRoleGRPOTrainer):
    """The library's trainer with checkpoints that are whole or absent (`checkpoints`) and hold the record."""

    recorder: Recorder | None
    alarms: Alarms
    saved_dtype: torch.dtype

    def save_adapters(self) -> None:
        """Write `adapters/step_N` in `saved_dtype`, unless it is there; for all processes to call. Checkpoints are exact."""
        own, named = self.peft_model.base_model.prefix, self.peft_model.named_parameters()
        weights = {name: full(p.detach()).to(self.saved_dtype) for name, p in named if own in name}
        if self.recorder is None:
            return
        target = self.recorder.folder / "adapters" / f"step_{self.state.global_step:05d}"
        if not target.exists():  # the last step may be evaluated twice
            with writing(target) as aside:
                self.peft_model.save_pretrained(aside, state_dict=weights)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with reporting(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)
            if self.recorder is not None:
                self.recorder.save(self.state.global_step)


def load_adapters(model: PeftModel, folder: Path) -> None:
    """Read the weights of every adapter of `model` from a run's `adapters/step_*`."""
    for name in model.peft_config:
        set_peft_model_state_dict(model, load_peft_weights(str(folder / name), device="cpu"), adapter_name=name)


def make_trainer(
    cell: Cell, output_dir: str, launch: Launch = ONE_PROCESS, callbacks: Sequence[TrainerCallback] = (),
    recorder: Recorder | None = None, problems: tuple[list[Problem], list[Problem]] | None = None,
    model: tuple[PeftModel, PreTrainedTokenizerBase] | None = None, engine: Engine | None = None,
) -> CellTrainer:  # fmt: skip
    """The trainer of a cell, with its diagnostics, alarms and record as callbacks.

    Args:
        recorder: where metrics, outcomes and turns go; None keeps nothing. Only the first of several processes has one.
        problems, model: training and validation problems, and the model with its tokenizer; loaded if not given.
    """
    workflow, task = cell.make_workflow(), cell.make_task()
    train, validation = problems or load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)))[:2]
    peft_model, tokenizer = model or load_model(cell)
    reward = TaskReward(task, [*train, *validation])
    diagnostics, alarms = RoleDiagnostics(cell.diagnostics), Alarms(cell.policy)
    watchers: list[TrainerCallback] = [Divergence(), diagnostics, AlarmCallback(alarms, cell.on_alarm)]
    if cell.row_order != "shuffled" or cell.minibatch_split != "even":
        watchers.insert(0, RowCuts(cell.row_order, cell.minibatch_split))
    if cell.process_reward:
        watchers.append(ProcessReward(cell.process_reward, lambda episodes: judge(episodes, reward)))
    skills = SkillWatch(reward)
    watchers += [skills] * cell.diagnostics + [Recording(recorder, diagnostics, skills)]
    trainer = CellTrainer(
        model=peft_model,
        workflow=workflow,
        reward_funcs=reward,
        args=training_args(cell, output_dir, launch),
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(validation),
        processing_class=tokenizer,
        callbacks=[*watchers, *callbacks],
        engine=engine,
        is_answer=lambda text: task.extract(text) is not None,
    )
    trainer.rollout.render = RENDERERS[cell.renderer]
    trainer.saved_dtype = getattr(torch, cell.dtype)  # evaluations serve adapters in the base's anyway
    trainer.recorder, trainer.alarms = recorder, alarms
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_cell(
    cell: Cell, launch: Launch | str | Path = ONE_PROCESS, callbacks: list[TrainerCallback] | None = None
) -> Path:
    """Train and evaluate a cell; returns its results folder (see `record`). A path for `launch` is its `results_dir`.

    A finished cell is not trained again; an interrupted one continues from its newest whole checkpoint and ends as if it
    had never stopped. Raises ValueError where another process is at it, and `Stopped` when it is told to stop (`stops`).
    """
    launch = launch if isinstance(launch, Launch) else Launch(results_dir=str(launch))
    folder, is_main = folder_of(cell, launch.results_dir), processes().is_main_process
    with heeding() as stop, ExitStack() as held:
        with refusing():
            if is_main:
                held.enter_context(open_folder(folder, launch.results_dir, cell.to_dict()))
            processes().wait_for_everyone()
            if is_done(folder):
                conclude(folder, "was finished before")
                return folder
            if is_launched():
                launch = launch.replace(n_processes=processes().num_processes)
            launch.check_processes(launch.n_processes, cell.n_problems)
            preflight(cell, launch)
        if launch.n_processes > 1 and not is_launched():
            held.close()  # and the first of them claims the folder
            spawn(cell.parameters(), launch, stop.run)
        else:
            with alive(is_main):
                _train(cell, launch, folder, stop, callbacks or [])
    return folder


def _train(cell: Cell, launch: Launch, folder: Path, stop: Stop, callbacks: list[TrainerCallback]) -> None:
    """Everything between an open folder and its DONE, on each process."""
    is_main, recorder, outcome = processes().is_main_process, Recorder(folder), None
    with refusing():
        # before the model, since it may refuse the rows
        train, validation, counts = load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)))
        checkpoint = gather_objects(newest_whole(folder) if is_main else None)[0]
        if is_main:
            recorder.rewind(checkpoint)
            add_session(folder, cell, checkpoint, counts)
            introduce(cell, launch.n_processes, folder, counts, checkpoint)
            callbacks = [Progress(), *callbacks]
            # or it would go with the staged checkpoint
            os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
        is_said = is_main and not is_tiny(cell.scale)
        with announced("loading the model and the rollout engine", is_said):
            trainer = make_trainer(
                cell, str(staging(folder)), launch, [stop, *(callbacks if is_main else [])], recorder if is_main else None,
                problems=(train, validation),
            )  # fmt: skip
    try:
        if not torch.cuda.is_available() and not launch.is_sharded:  # transformers would read the optimizer to "cpu:0"
            trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
        processes().wait_for_everyone()
        trainer.args.eval_on_start = checkpoint is None  # inside train(), where FSDP2 has sharded and placed the model
        if checkpoint:
            trainer.alarms.replay(gather_objects(recorder.tables["roles"])[0])
        if is_said and checkpoint is None:
            say(f"  validating on {len(validation)} problems before the first iteration ...")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        stop.end()
        if not gather_objects(any(row["step"] == cell.iterations for row in recorder.tables["eval"]))[0]:
            trainer.evaluate()
    except FloatingPointError as error:  # a result, not a failure: continued, it would diverge again
        outcome = {"state": "diverged", "iteration": trainer.state.global_step + 1, "reason": str(error)}
        logger.warning("%s The run ends as diverged.", error)
    finally:
        trainer.engine.close()
    if is_main:
        recorder.finish(outcome)
        conclude(folder, f"diverged in iteration {outcome['iteration']}" if outcome else "is finished")
    processes().wait_for_everyone()
