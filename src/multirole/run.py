"""Train one cell from its configuration to DONE: what the notebook calls, in one function."""

import logging
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)

from multirole.cells import Cell
from multirole.engine import Engine
from multirole.policies import adapter_names
from multirole.record import Recorder, add_session, is_done, open_folder
from multirole.tasks import TASKS
from multirole.trainer import MultiRoleGRPOTrainer

logger = logging.getLogger(__name__)


def load_model(cell: Cell) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The frozen base with one fresh LoRA adapter per name of the policy map (paper Table 7), and its tokenizer."""
    set_seed(cell.seed)  # adapters are initialised at random
    base = AutoModelForCausalLM.from_pretrained(cell.model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(cell.model_path)
    lora = LoraConfig(
        r=cell.lora_rank, lora_alpha=cell.lora_alpha, lora_dropout=0.0, target_modules="all-linear", bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    first, *others = adapter_names(cell.policy)
    model = get_peft_model(base, lora, adapter_name=first)
    for name in others:
        model.add_adapter(name, lora)
    return model, tokenizer


def make_engine(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The cell's rollout engine; "auto" is vLLM on a GPU and the transformers engine on a CPU."""
    name = cell.engine
    if name == "auto":
        name = "vllm" if torch.cuda.is_available() else "transformers"
    PartialState()  # torch.distributed belongs to accelerate: vLLM would otherwise set it up its own way
    max_length = cell.max_prompt_tokens + cell.max_response_tokens
    if name == "vllm":
        from multirole.engine_vllm import VLLMEngine

        return VLLMEngine(str(cell.model_path), adapter_names(cell.policy), cell.lora_rank, max_length)
    from multirole.engine_torch import TransformersEngine

    return TransformersEngine(tokenizer.eos_token_id, max_length=max_length)


def run_cell(cell: Cell, results_dir: str | Path = "runs", callbacks: list[TrainerCallback] | None = None) -> Path:
    """Train and evaluate a cell; returns its results folder (see `record`).

    A finished cell is not trained again; an interrupted one continues from its newest complete checkpoint and ends as
    if it had never stopped.
    """
    folder = open_folder(cell, results_dir)
    if is_done(folder):
        logger.info("%s is done already", folder)
        return folder
    task = TASKS[cell.task_name]
    model, tokenizer = load_model(cell)
    engine = make_engine(cell, tokenizer)
    recorder = Recorder(folder)
    try:
        trainer = MultiRoleGRPOTrainer(
            cell, model, tokenizer, engine,
            problems=task.problems("train", cell.n_train),
            validation=task.problems("validation", cell.n_validation),
            output_dir=str(folder / "checkpoints"), recorder=recorder, callbacks=callbacks,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        checkpoint = recorder.resume()
        add_session(folder, cell, checkpoint)
        if checkpoint is None:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if not any(row["step"] == cell.iterations for row in recorder.tables["eval"]):
            trainer.evaluate()
    finally:
        engine.close()
    recorder.finish()
    return folder
