"""Build a cell's model, reward and trainer from its settings, as a user of the library would by hand."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
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
from transformers.utils.logging import disable_progress_bar

from multirole.callbacks import MultiRoleCallback, OptimizerStep, Trainer
from multirole.engines.protocol import Engine
from multirole.inputs.adapters import add_adapters
from multirole.inputs.reward_functions import check_reward
from multirole.options import MultiRoleGRPOConfig
from multirole.policy import adapter_names
from multirole.roles.diagnostics import RoleDiagnostics
from multirole.roles.skill import SkillWatch
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.types import Answer, Episode, Problem, Reward, Workflow, begin_rollout, structure_of, waits_outside
from multirole.update.processes import full_tensor, gather_objects, local_shard, processes
from multirole_study.experiment.base_models import layer_class, locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.grades_ahead import GradesAhead, grades_ahead
from multirole_study.experiment.hardware import dtype_of, engine_of
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.preflight import check_loaded, load_problems
from multirole_study.experiment.record import Recorder, Recording, TextSignatures
from multirole_study.experiment.released_code import RENDERERS, RowCuts
from multirole_study.experiment.run_folder import adapters_folder
from multirole_study.experiment.storage import reporting, writing
from multirole_study.tasks import Task

ARGUMENTS = (
    "seed", "policy", "max_steps", "num_generations", "max_completion_length", "max_prompt_tokens", "temperature", "learning_rate", "warmup_steps",
    "weight_decay", "max_grad_norm", "epsilon", "epsilon_high", "delta", "beta", "role_beta", "old_logprobs", "updates", "step_tokens", "eval_steps",
    "save_steps", "max_staleness", "max_failed_episodes", "credit_branches", "process_reward", "max_sampled_tokens", "role_order", "target_kl",
    "past_every", "past_selves",
)  # fmt: skip
"""Settings of a cell that `MultiRoleGRPOConfig` takes."""


def load_model(cell: Cell) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load the frozen base and its tokenizer, and add one new float32 LoRA adapter per name in the policy map (Table 7)."""
    set_seed(cell.seed)  # adapters are initialised at random
    disable_progress_bar()  # the bar would stay in the executed notebook
    path = locate(cell)
    dtype = getattr(torch, dtype_of(cell))
    base, loading = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    check_loaded(path, loading)
    tokenizer = AutoTokenizer.from_pretrained(path)
    lora = LoraConfig(
        r=cell.lora_r, lora_alpha=cell.lora_alpha, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = add_adapters(base, lora, adapter_names(cell.policy))
    for config in model.peft_config.values():  # sets would be saved in a different order by each process
        config.target_modules = sorted(config.target_modules)
    return model, tokenizer


def load_adapters(model: PeftModel, folder: Path) -> None:
    """Load the weights of every adapter of `model` from a run's `adapters/step_*`."""
    for name in model.peft_config:
        set_peft_model_state_dict(model, load_peft_weights(str(folder / name), device="cpu"), adapter_name=name)


def training_args(cell: Cell, output_dir: str, launch: Launch = ONE_PROCESS) -> MultiRoleGRPOConfig:
    """Return the configuration of a cell's trainer."""
    fsdp = {"version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": False}  # fmt: skip
    if cell.model is None:  # a user-supplied model declares its own unsplit layers
        fsdp["transformer_layer_cls_to_wrap"] = [layer_class(cell)]
    n_episodes, launch = cell.n_problems * cell.num_generations, cell.launched(launch)
    return MultiRoleGRPOConfig(
        **{name: value for name, value in cell if name in ARGUMENTS},
        output_dir=output_dir,
        generation_batch_size=n_episodes,
        per_device_train_batch_size=n_episodes // processes().num_processes,
        credit=cell.estimator,
        lr_ticks=cell.ticks_per_iteration,
        lr_wraps=cell.lr_clock == "update_call_wrapped" and cell.ticks_per_iteration > 1,
        lr_scheduler_type="cosine" if cell.lr_schedule == "cosine" else "constant_with_warmup",
        engine=engine_of(cell),
        micro_batch_tokens=launch.pass_tokens(cell.scale),
        vllm_gpu_memory_utilization=launch.vllm_gpu_memory_utilization,
        **launch.vllm_sizes(),
        **launch.vllm_servers(),
        eval_strategy="steps",
        save_strategy="steps",
        logging_steps=1,
        report_to=launch.report_to.split(","),
        run_name=cell.id,
        gradient_checkpointing=launch.recomputes(cell.scale),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=dtype_of(cell) == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        fsdp=launch.is_sharded,
        fsdp_config=fsdp if launch.is_sharded else None,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class TaskReward:
    """Wraps a task's outcome reward (paper A.7) as a TRL reward function."""

    __name__ = "outcome_reward"

    def __init__(self, task: Any, problems: list[Problem]) -> None:
        self.task, self.problems = task, {problem.id: problem for problem in problems}

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Return the task's rewards; `problems` may be the trainer's, which lack reference answers."""
        rewards = self.task.score([self.problems[problem.id] for problem in problems], texts)
        for problem, reward in zip(problems, rewards, strict=True):
            check_reward(f"The task {self.task.name!r}", problem, reward.value)
        return rewards

    def __call__(self, prompts: list, completions: list, episodes: list[Episode], **_: object) -> list[float]:
        return self.score_answers(episodes)

    def score_answers(self, episodes: list[Episode]) -> list[float]:
        """Set `reward` of episodes by their answers, and return the values."""
        answers = [episode.answer or Answer("") for episode in episodes]
        rewards = self.score([episode.problem for episode in episodes], [answer.text for answer in answers])
        for episode, answer, reward in zip(episodes, answers, rewards, strict=True):
            episode.reward = reward if answer.reason is None else replace(reward, reason=answer.reason)
        return [reward.value for reward in rewards]


class WithColumns:
    """A user's workflow whose problems have the columns of their rows in `reference`, as in the library; the dataset has the prompts only."""

    def __init__(self, workflow: Workflow, problems: Iterable[Problem]) -> None:
        self.workflow, self.name, self.roles = workflow, workflow.name, workflow.roles
        self.structure, self.waits_outside = structure_of(workflow), waits_outside(workflow)
        self.references = {problem.id: problem.reference for problem in problems}

    def on_rollout_begin(self, tokenizer: Any, sampling: Any, render: Any) -> None:
        """Pass the event on to the workflow."""
        begin_rollout(self.workflow, tokenizer, sampling, render)

    async def run(self, problem: Problem, call: Any) -> Answer:
        """Play an episode of the workflow, on a copy of its row, which `run` may change."""
        return await self.workflow.run(replace(problem, reference=deepcopy(self.references[problem.id])), call)


def to_dataset(problems: list[Problem]) -> Dataset:
    """Build the trainer's dataset of prompts, without reference answers. Prompts are messages where any problem has a history."""
    are_chats = any(p.history for p in problems)
    prompts = [p.messages if are_chats else p.question for p in problems]
    return Dataset.from_dict({"prompt": prompts, "id": [p.id for p in problems], "task": [p.task for p in problems]})


class Divergence(MultiRoleCallback):
    """Stops training with FloatingPointError at the first optimizer step after which a weight is not finite."""

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        weights = [
            local_shard(p.detach()) for name, p in trainer.peft_model.named_parameters() if f".{step.adapter}." in name
        ]
        is_finite = bool(torch.nn.utils.get_total_norm(weights).isfinite())
        if not all(gather_objects(is_finite)):
            raise FloatingPointError(
                f"The weights of adapter {step.adapter!r} are not finite after an optimizer step of iteration "
                f"{trainer.state.global_step + 1}."
            )


class CellTrainer(MultiRoleGRPOTrainer):
    """The library's trainer with atomic checkpoints (`run_folder`) that include the run's record."""

    recorder: Recorder | None
    saved_dtype: torch.dtype

    def save_adapters(self) -> None:
        """Write `adapters/step_N` in `saved_dtype` unless it exists. Collective: every rank must call this.

        Checkpoints keep the exact float32 weights.
        """
        lora_prefix, parameters = self.peft_model.base_model.prefix, self.peft_model.named_parameters()
        weights = {name: full_tensor(p.detach()).to(self.saved_dtype) for name, p in parameters if lora_prefix in name}
        if self.recorder is None:
            return
        target = adapters_folder(self.recorder.folder, self.state.global_step)
        if not target.exists():  # the last step may be evaluated twice
            with writing(target) as temporary:
                self.peft_model.save_pretrained(temporary, state_dict=weights)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with reporting(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # every process writes a file of its own into the checkpoint, which is then moved
            if self.recorder is not None:
                self.recorder.save(self.state.global_step)


def update_rules(cell: Cell) -> list[MultiRoleCallback]:
    """Return the callbacks that replace the library's update rules where the cell's settings differ from them."""
    rules: list[MultiRoleCallback] = []
    if cell.row_order != "shuffled" or cell.minibatch_split != "even":
        rules.append(RowCuts(cell.row_order, cell.minibatch_split))
    return rules


def make_trainer(
    cell: Cell, output_dir: str, launch: Launch = ONE_PROCESS, callbacks: Sequence[TrainerCallback] = (),
    recorder: Recorder | None = None, problems: tuple[list[Problem], list[Problem]] | None = None,
    model: tuple[PeftModel, PreTrainedTokenizerBase] | None = None, engine: Engine | None = None,
    started: str | None = None,
) -> CellTrainer:  # fmt: skip
    """Build the trainer of a cell, with its diagnostics and record as callbacks.

    Args:
        recorder: receives metrics, outcomes and turns; None records nothing. Only the first of several processes has one.
        problems, model: training and validation problems, and the model with its tokenizer; loaded if not given.
        started: start of the run that is resumed or measured, the date of its prompts (`StartClock`); by default now.
    """
    workflow, task = cell.make_workflow(), cell.make_task()
    train, validation = problems or load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)), started)[:2]
    if "task_sha256" in cell.to_dict():  # of the user's
        workflow = WithColumns(workflow, [*train, *validation])
    peft_model, tokenizer = model or load_model(cell)
    ahead = [GradesAhead(task, [*train, *validation])] if grades_ahead(cell) else []
    reward = TaskReward(ahead[0] if ahead else task, [*train, *validation])
    diagnostics = RoleDiagnostics()
    study_callbacks: list[TrainerCallback] = [*update_rules(cell), *ahead, Divergence(), TextSignatures(), diagnostics]
    skills = SkillWatch()
    study_callbacks += [
        skills,
        Recording(
            recorder, diagnostics, skills, counts_forks=cell.replays_episodes, with_questions=isinstance(task, Task)
        ),
    ]
    trainer = CellTrainer(
        model=peft_model,
        workflow=workflow,
        reward_funcs=reward,
        args=training_args(cell, output_dir, launch),
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(validation),
        processing_class=tokenizer,
        callbacks=[*study_callbacks, *callbacks],
        engine=engine,
        is_answer=lambda text: task.extract(text) is not None,
        render=RENDERERS[cell.renderer],
    )
    trainer.saved_dtype = getattr(torch, dtype_of(cell))  # evaluations serve adapters in the base's dtype anyway
    trainer.recorder = recorder
    trainer.clock.started = started or trainer.clock.started
    trainer.remove_callback(PrinterCallback)
    return trainer
