"""Train one cell from its configuration to DONE: what the notebook calls, in one function."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.ln_tuning.layer import LNTuningLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from multirole import sandbox
from multirole.core.distributed import gather_objects, processes
from multirole.core.engine import Engine
from multirole.core.policy import adapter_names
from multirole.core.renderers import RENDERERS
from multirole.core.rollout import first_prompts
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Problem
from multirole.doctor import admit
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import staging
from multirole.experiment.launch import ONE_PROCESS, Launch, is_launched, spawn
from multirole.experiment.locks import claim
from multirole.experiment.machine import check_vllm, engine_of
from multirole.experiment.models import check_model, locate
from multirole.experiment.presets import is_tiny
from multirole.experiment.record import Recorder, add_session, folder_of, is_done, make_writable, open_folder
from multirole.experiment.refusals import check_served
from multirole.experiment.stops import Stop, heeding
from multirole.plan import check_disk, plan
from multirole.tasks import TASKS
from multirole.tasks.sources import forget_rows

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def preflight(cell: Cell, launch: Launch = ONE_PROCESS, folder: Path | None = None) -> None:
    """Refuse, all at once, a run whose model, rows or device are not here or cannot serve it (ValueError).

    `folder` is where checkpoints will be saved; None saves none. Downloads the pinned model and rows where they are missing
    and everything else is here; says so within seconds where the Hub cannot be reached.
    """
    check_served(cell, engine_of(cell))
    missing, needs = [], []
    has_device = is_tiny(cell.scale) or cell.model is not None or torch.cuda.is_available()
    if not has_device:
        missing.append(
            f"a GPU: none is visible, and scale={cell.scale!r} is no work for a CPU. Write scale='tiny-s' to try the same "
            "code here, or model=FOLDER with a small model of yours."
        )
    try:
        check_model(cell, locate(cell, may_download=not missing), engine_of(cell))
        needs.append(("memory", lambda: plan(cell, launch).check()))
        if folder is not None:
            needs.append(("disk space", lambda: check_disk(cell, folder)))
    except ValueError as error:
        missing.append(f"the base model: {error}")
    try:
        TASKS[cell.task_name].problems("validation", cell.n_validation, **cell.data_options)
    except (ValueError, OSError) as error:
        missing.append(f"the task's rows: {error}")
    if engine_of(cell) == "vllm":
        needs.append(("vLLM", lambda: check_vllm(cell)))
    for what, check in needs if has_device else []:
        try:
            check()
        except ValueError as error:
            missing.append(f"{what}: {error}")
    if missing:
        numbered = "\n".join(f"{i}. {what}" for i, what in enumerate(missing, start=1))
        raise ValueError(f"{cell.id} at scale={cell.scale!r} cannot run here. Missing:\n{numbered}")
    if cell.task == "code":
        sandbox.require(cell.allow_unsafe_code)


def load_model(cell: Cell) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The frozen base with one fresh float32 adapter per name of the policy map, and its tokenizer.

    An adapter is a LoRA (paper Table 7); at rank 0 a copy of every linear layer, which PEFT's LN tuning makes of any layer.
    """
    set_seed(cell.seed)  # adapters are initialised at random
    disable_progress_bar()  # it would stay in the executed notebook
    path = locate(cell)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[cell.dtype])
    tokenizer = AutoTokenizer.from_pretrained(path)
    which = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapter = (
        LoraConfig(r=cell.lora_rank, lora_alpha=cell.lora_alpha, lora_dropout=0.0, bias="none", **which)
        if cell.lora_rank
        else LNTuningConfig(**which)
    )
    first, *others = adapter_names(cell.policy)
    model = get_peft_model(base, adapter, adapter_name=first)
    for name in others:
        model.add_adapter(name, adapter)
    for module in model.modules():
        if isinstance(module, LNTuningLayer):
            module.ln_tuning_layers.float()  # PEFT leaves copies in the base's dtype
    return model, tokenizer


def make_engine(cell: Cell, tokenizer: PreTrainedTokenizerBase, launch: Launch = ONE_PROCESS) -> Engine:
    """The cell's rollout engine."""
    processes()  # torch.distributed belongs to accelerate: vLLM would otherwise set it up its own way
    max_length = cell.max_prompt_tokens + max(cell.sampling(is_evaluation=e).max_tokens for e in (False, True))
    if engine_of(cell) == "vllm":
        from multirole.engines.vllm_engine import VLLMEngine

        return VLLMEngine(
            str(locate(cell)), adapter_names(cell.policy), cell.lora_rank, max_length,
            gpu_memory_utilization=launch.vllm_memory, tensor_parallel_size=launch.vllm_tensor_parallel,
        )  # fmt: skip
    from multirole.engines.transformers_engine import TransformersEngine

    return TransformersEngine(tokenizer.eos_token_id, max_length=max_length)


def load_problems(
    cell: Cell, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    """Training and validation problems, and how many are over the cell's prompt cap.

    Training problems whose first prompt is over the cap are left out. Validation problems all stay: one that is too
    long ends without an answer (`prompt_overflow`).
    """
    task, workflow, cap = TASKS[cell.task_name], cell.make_workflow(), cell.max_prompt_tokens
    train = task.problems("train", cell.n_train, **cell.data_options)
    validation = task.problems("validation", cell.n_validation, **cell.data_options)
    lengths = first_prompts(workflow, [*train, *validation], lambda chat: RENDERERS[cell.renderer](tokenizer, chat))
    kept = [problem for problem, length in zip(train, lengths, strict=False) if length <= cap]
    counts = {
        "train": len(kept),
        "train_overlong": len(train) - len(kept),
        "validation": len(validation),
        "validation_overlong": sum(length > cap for length in lengths[len(train) :]),
    }
    logger.info("problems: %s", counts)
    if len(kept) < cell.n_problems:
        raise ValueError(
            f"max_prompt_tokens={cap} leaves {len(kept)} of {len(train)} training problems, and one iteration needs "
            f"{cell.n_problems}. Write a larger max_prompt_tokens or a smaller n_problems."
        )
    return kept, validation, counts


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
        if is_main:
            make_writable(folder, launch.results_dir)
            held.enter_context(claim(folder))
            open_folder(cell, launch.results_dir)
        processes().wait_for_everyone()
        if is_done(folder):
            logger.info("%s is done already", folder)
            return folder
        if is_launched():
            launch = replace(launch, n_processes=processes().num_processes)
        preflight(cell, launch, folder if is_main else None)
        if launch.n_processes > 1 and not is_launched():
            launch.check_processes(launch.n_processes, cell.n_problems)
            forget_rows()  # the processes to come read their own
            held.close()  # and the first of them claims the folder
            spawn(cell.parameters(), launch, stop.run)
        else:
            _train(cell, launch, folder, stop, callbacks or [])
    return folder


def _train(cell: Cell, launch: Launch, folder: Path, stop: Stop, callbacks: list[TrainerCallback]) -> None:
    """Everything between an open folder and its DONE, on each process."""
    is_main = processes().is_main_process
    # before the model, since it may refuse the rows
    problems, validation, counts = load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)))
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, tokenizer, launch)
    recorder = Recorder(folder)
    try:
        dataset = TASKS[cell.task_name].describe(**cell.data_options)
        forget_rows()
        trainer = MultiRoleGRPOTrainer(
            cell, model, tokenizer, engine, problems, validation, output_dir=str(staging(folder)),
            recorder=recorder if is_main else None, launch=launch, callbacks=[stop, *(callbacks if is_main else [])],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if not is_tiny(cell.scale) and launch.n_processes == 1:
            admit(trainer)  # minutes of a GPU against a day of it; leaves no trace
        checkpoint = gather_objects(recorder.newest_checkpoint() if is_main else None)[0]
        if checkpoint and launch.n_processes > 1 and not launch.is_sharded and not torch.cuda.is_available():
            raise ValueError(
                f"{checkpoint} cannot be continued by {launch.n_processes} CPU processes: transformers reads the optimizer "
                "to the device 'cpu:0', which torch refuses. Continue with n_processes=1; it ends the same."
            )
        if is_main:
            recorder.rewind(checkpoint)
            add_session(folder, cell, checkpoint, counts, dataset)
        processes().wait_for_everyone()
        trainer.args.eval_on_start = checkpoint is None  # inside train(), where FSDP2 has sharded and placed the model
        if checkpoint:
            trainer.alarms.replay(gather_objects(recorder.tables["roles"])[0])
            trainer.updates.load(checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        stop.end()
        trainer.saving.require()
        if not gather_objects(any(row["step"] == cell.iterations for row in recorder.tables["eval"]))[0]:
            trainer.evaluate()
    finally:
        engine.close()
    if is_main:
        recorder.finish()
    processes().wait_for_everyone()
