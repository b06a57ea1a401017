"""Check the trainer's arguments before a model or dataset is loaded, and refuse those of TRL that cannot work here."""

import inspect
import logging
import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

from datasets import IterableDataset
from peft import PeftModel
from torch import nn
from trl import GRPOConfig

from multirole.inputs.adapters import changes_base, check_adapter
from multirole.inputs.reward_functions import thought_reward
from multirole.option_rules import OPTIMIZER_ADVICE
from multirole.options import MultiRoleGRPOConfig, accelerator_facts
from multirole.types import check_workflow

logger = logging.getLogger(__name__)

OTHER_THAN_TRL = {
    "quantization_config": "the rollout engine would sample from the base as it was before quantisation. Load the model in bfloat16",
    "tools": "which role has which tools is the workflow's to say. Pass them in `Workflow.run`: `await call(role, messages, tools=[function])`",
    "rollout_func": "the workflow is the rollout. Write a class with `async def run(problem, call)`",
    "environment_factory": "a workflow holds its environment itself. Create it in `Workflow.run`, and score the episode in a reward function",
}
"""Arguments of TRL's trainer that are not supported: name -> the reason, and what to write instead."""
ORDER = "MultiRoleGRPOTrainer(model, workflow, reward_funcs, args, train_dataset, eval_dataset, ...)"


def check_arguments(
    model: Any, workflow: Any, reward_funcs: Any, args: Any, peft_config: Any, engine: Any, optimizer: Any = None,
    **unsupported: Any,
) -> list[Any]:  # fmt: skip
    """Return the reward functions as a list; raise TypeError or ValueError for arguments that cannot work."""
    if isinstance(engine, str):
        raise TypeError(
            f"`engine` must be an engine that is built already, got the name {engine!r}. Write `args=MultiRoleGRPOConfig(..., engine={engine!r})`."
        )
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"`{name}` is not supported by multi-role training: {OTHER_THAN_TRL[name]}.")
    _check_order(workflow, reward_funcs)
    check_workflow(workflow)
    if args is not None and not isinstance(args, MultiRoleGRPOConfig):
        raise TypeError(
            f"`args` must be a `MultiRoleGRPOConfig`, got a `{type(args).__name__}`. "
            + "It takes every field of `GRPOConfig`: write `MultiRoleGRPOConfig(...)` with the same arguments."
            * isinstance(args, GRPOConfig)
        )
    if not isinstance(model, (str, nn.Module)):
        raise TypeError(
            f"`model` must be a model, or the name or folder of one as text, got {model!r}."
            + f" Write {str(model)!r}." * isinstance(model, PathLike)
        )
    if peft_config is None and not isinstance(model, PeftModel):
        raise ValueError(
            "Roles are trained as adapters of one base model, and no `peft_config` was given. "
            "Pass, for example, `peft_config=LoraConfig(r=64, target_modules='all-linear')`."
        )
    check_adapter(peft_config)
    if any("weight_sum" in group for group in getattr(optimizer, "param_groups", ())):
        raise ValueError(
            f"`optimizers` has {describe(optimizer)}, a schedule-free optimizer, which counts steps in which an adapter has no gradient. They occur in every "
            f"iteration, so it would average the wrong weights. {OPTIMIZER_ADVICE}"
        )
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if reward_funcs is None or not functions:
        raise ValueError(
            "No reward source provided: `reward_funcs` must be a function such as `f(prompts, completions, **columns)`, a reward "
            "model, or a list of these."
        )
    for function in functions:
        if not (callable(function) or isinstance(function, (str, nn.Module))):
            raise TypeError(
                f"`reward_funcs` must be functions, reward models or their names, got {function!r}. The order of arguments is {ORDER}."
            )
    return functions


def _check_order(workflow: Any, reward_funcs: Any) -> None:
    """Raise TypeError for arguments in TRL's order: its second is `reward_funcs`, ours is `workflow`."""
    is_reward = isinstance(workflow, (str, nn.Module, list)) or inspect.isroutine(workflow)
    if workflow is None or is_reward or isinstance(reward_funcs, GRPOConfig):
        got = "none was given" if workflow is None else f"{describe(workflow)} is in its place"
        raise TypeError(
            f"`workflow` must be an object with `name`, `roles` and `async def run(problem, call)`, and {got}. TRL's trainer takes the "
            f"reward functions second; here the order is {ORDER}. `multirole.Single()` plays one role, as TRL does."
        )


def describe(value: Any) -> str:
    """Describe a value in an error message: a function by its name, anything else by its type."""
    return f"the function `{value.__name__}`" if inspect.isroutine(value) else f"a `{type(value).__name__}`"


def use_one_gpu(args: MultiRoleGRPOConfig) -> None:
    """Make this process use the first GPU, and warn if it sees more, which TRL refuses (it does not support `nn.DataParallel`)."""
    if args.n_gpu > 1:
        logger.warning(
            "This process sees %d GPUs and trains on the first. To use them all, start the script with `accelerate launch --num_processes %d` or "
            "torchrun; to hide the others, set CUDA_VISIBLE_DEVICES.", args.n_gpu, args.n_gpu,
        )  # fmt: skip
        args._n_gpu = 1


def facts_before_loading(
    args: MultiRoleGRPOConfig, policy: dict[str, str], model: Any, peft_config: Any, reward_funcs: Sequence[Any], train_dataset: Any,
    eval_dataset: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts of `multirole.option_rules` that are known before a model is loaded; `policy` has the roles that are trained."""
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    return {
        **accelerator_facts(args),
        "is_settled": True,
        "world_size": args.world_size,
        # set by `accelerate launch`, or by `fsdp`; the accelerator, which knows it, does not exist yet
        "is_sharded": args.world_size > 1
        and (os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" or bool(args.fsdp)),
        "has_stream": any(isinstance(dataset, IterableDataset) for dataset in (train_dataset, *evaluated)),
        "has_eval_dataset": eval_dataset is not None,
        "thought_reward": thought_reward(reward_funcs),
        "n_new_adapters": 0 if isinstance(model, PeftModel) else len(set(policy.values())),
        "base_change": peft_config.init_lora_weights if changes_base(peft_config) else None,
    }


def kl_weights(args: MultiRoleGRPOConfig, policy: dict[str, str]) -> dict[str, float]:
    """Return the KL weight of every role of `policy`."""
    return {role: args.role_betas.get(role, args.beta) or 0.0 for role in policy}
