"""The trainer's arguments that are checked before anything is loaded: what a user of TRL may write, and what cannot work here."""

import inspect
from collections.abc import Callable
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from trl import GRPOConfig

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.types import check_workflow

OTHER_THAN_TRL = {
    "quantization_config": "the rollout engine would sample from the base as it was before quantisation. Load the model in bfloat16",
    "tools": "a workflow calls its tools itself, between two model calls. Call them in `Workflow.run`",
    "rollout_func": "the workflow is the rollout. Write a class with `async def run(problem, call)`",
    "environment_factory": "a workflow holds its environment itself. Create it in `Workflow.run`, and score the episode in a reward function",
}
"""Arguments of TRL's trainer that mean nothing here: name -> why, and what to write."""
ORDER = "MultiRoleGRPOTrainer(model, workflow, reward_funcs, args, train_dataset, eval_dataset, ...)"


def check_arguments(workflow: Any, reward_funcs: Any, args: Any, peft_config: Any, **others: Any) -> list[Any]:
    """The reward functions as a list. Raises TypeError or ValueError for arguments that cannot work; see `OTHER_THAN_TRL`."""
    for name, value in others.items():
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
    _check_peft_config(peft_config)
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
    """Refuse arguments in TRL's order (TypeError): its second is `reward_funcs`, ours is `workflow`."""
    is_reward = isinstance(workflow, (str, nn.Module, list)) or inspect.isroutine(workflow)
    if workflow is None or is_reward or isinstance(reward_funcs, GRPOConfig):
        given = "none was given" if workflow is None else f"{describe(workflow)} is in its place"
        raise TypeError(
            f"`workflow` must be an object with `name`, `roles` and `async def run(problem, call)`, and {given}. TRL's trainer takes the "
            f"reward functions second; here the order is {ORDER}. `multirole.Single()` plays one role, as TRL does."
        )


def describe(value: Any) -> str:
    """A few words for an error message: a function's name, or a value's type."""
    return f"the function `{value.__name__}`" if inspect.isroutine(value) else f"a `{type(value).__name__}`"


def _check_peft_config(peft_config: Any) -> None:
    if peft_config is None or isinstance(peft_config, LoraConfig):
        return
    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"`peft_config` must be a `peft.LoraConfig`, got a `{type(peft_config).__name__}`. Write, for example, "
            "`LoraConfig(r=64, target_modules='all-linear')`."
        )
    raise ValueError(
        f"`peft_config` must be a `peft.LoraConfig`, got a `{type(peft_config).__name__}`: the rollout engines serve each role's adapter "
        "as a low-rank change of the base's matrices, which other PEFT methods do not have."
    )


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword argument called `name`; True where its signature is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return True
    return any(
        p.kind is p.VAR_KEYWORD or p.name == name and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def named_adapters(model: Any, policy: dict[str, str]) -> dict[str, str]:
    """The policy map with the name "default" for its one adapter, where `model` holds no other, as PEFT and TRL name it."""
    one = len(set(policy.values())) == 1
    if one and isinstance(model, PeftModel) and list(model.peft_config) == ["default"]:
        return dict.fromkeys(policy, "default")
    return policy
