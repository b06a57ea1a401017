"""Give a model its adapters: load it, check the adapters that it has, or add new ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch.nn import Parameter
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl.trainer.utils import create_model_from_path

from multirole.options import MultiRoleGRPOConfig

BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of PEFT's LoRA initialisations that modify the base weights."""


def with_adapters(
    model: str | PreTrainedModel | PeftModel,
    peft_config: PeftConfig | None,
    adapters: list[str],
    args: MultiRoleGRPOConfig,
) -> PeftModel:
    """Return the model with one trainable adapter per name."""
    set_seed(args.seed)  # adapters are initialised at random
    if isinstance(model, str):  # as TRL's GRPOTrainer does
        check_base_folder(model)
        options = {"trust_remote_code": args.trust_remote_code} | dict(args.model_init_kwargs or {})
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED") or "device_map" not in options:
            options["device_map"] = None  # TRL's "auto" would spread the model over all GPUs, and an adapter with it
        model = create_model_from_path(model, **options)
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError("`model` is a PeftModel already, so `peft_config` cannot apply. Pass only one of the two.")
        if missing := [name for name in adapters if name not in model.peft_config]:
            raise ValueError(
                f"The policy map needs adapters {missing}, but the model holds {list(model.peft_config)}. Pass the base model and "
                "a `peft_config`, or a PeftModel with an adapter for each name. An adapter that a map calls 'a' is named 'adapter_a'."
            )
        for name in adapters:
            check_adapter(model.peft_config[name], f"model.peft_config[{name!r}]")
    elif getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"`model` has the adapters {list(model.peft_config)}, loaded by transformers, and new ones would replace them. Load them with "
            "`PeftModel.from_pretrained(base, folder, is_trainable=True)` to train them, or merge them and save the model to train from it."
        )
    else:
        model = add_adapters(model, peft_config, adapters)
    train_only(model, adapters)  # all of them: TRL casts the trainable weights of a quantised model
    return model


def check_frozen(folders: Mapping[str, str], option: str = "policy") -> None:
    """Raise ValueError for a folder, given with the name of its adapter, that holds no saved adapter, or one that is not LoRA."""
    for folder in folders.values():
        path = Path(folder)
        if not (path / "adapter_config.json").is_file():
            inside = sorted(file.parent.name for file in path.glob("*/adapter_config.json"))
            advice = (
                f"Write one of those in it, such as 'frozen:{path / inside[0]}'."
                if inside
                else "Give the folder of a saved adapter."
            )
            raise ValueError(
                f"`{option}` has 'frozen:{folder}', but there is no adapter_config.json in this folder. {advice}"
            )
        check_adapter(PeftConfig.from_pretrained(folder), f"frozen:{folder}")


def load_frozen(model: PeftModel, folders: Mapping[str, str]) -> None:
    """Load saved adapters, name -> folder, which are not trained. ValueError for one of another base."""
    for name, folder in folders.items():
        if name in model.peft_config:  # it plays a role and teaches another
            continue
        try:
            model.load_adapter(folder, name, is_trainable=False, torch_device="cpu")
        except RuntimeError as error:  # torch's, for weights of another shape
            raise ValueError(f"The adapter in {folder} does not fit the base model: {error}") from error


def add_adapters(base: PreTrainedModel, peft_config: PeftConfig, adapters: list[str]) -> PeftModel:
    """Add one new adapter per name to the base, initialised in this order."""
    first, *rest = adapters
    model = get_peft_model(base, peft_config, adapter_name=first)
    for name in rest:
        model.add_adapter(name, peft_config)
    return model


def check_adapter(config: Any, source: str = "peft_config") -> None:
    """Raise TypeError or ValueError for the configuration of an adapter that is not LoRA, that changes the base, that acts on some of the tokens only, or that is noisy."""
    if config is None or isinstance(config, LoraConfig):
        if config is not None and config.bias != "none":
            raise ValueError(
                f"`{source}` has `bias={config.bias!r}`, with which PEFT trains biases of the base model itself: all adapters, the KL's reference "
                "and frozen roles would change with them. Write `bias='none'`."
            )
        if config is not None and config.alora_invocation_tokens:
            raise ValueError(
                f"`{source}` has `alora_invocation_tokens={config.alora_invocation_tokens}`, but an activated LoRA acts only after these "
                "tokens: PEFT looks for them in its own forward pass, which neither TRL's loss nor the rollout engines run. Leave them out."
            )
        if config is not None and getattr(config, "monteclora_config", None) is not None:
            raise ValueError(
                f"`{source}` has a `monteclora_config`, but MonteCLoRA adds noise to an adapter in every pass of the trainer, and replies are sampled "
                "without it: the ratio of a policy that was not trained yet would not be 1. Leave it out."
            )
        return
    if not isinstance(config, PeftConfig):
        raise TypeError(
            f"`{source}` must be a `peft.LoraConfig`, got a `{type(config).__name__}`. Write, for example, "
            "`LoraConfig(r=64, target_modules='all-linear')`."
        )
    raise ValueError(
        f"`{source}` must be a `peft.LoraConfig`, got a `{type(config).__name__}`: the rollout engines serve each role's adapter "
        "as a low-rank change of the base's matrices, which other PEFT methods do not have."
    )


def named_adapters(model: Any, policy: dict[str, str], adapters: list[str]) -> dict[str, str]:
    """Rename the only adapter that a policy map trains to "default", PEFT's and TRL's name, if `model` holds just that one."""
    if len(adapters) == 1 and isinstance(model, PeftModel) and list(model.peft_config) == ["default"]:
        (name,) = adapters
        renamed = {name: "default", f"past:{name}": "past:default"}
        return {role: renamed.get(value, value) for role, value in policy.items()}
    return policy


def adapter_parameters(model: PeftModel, adapter: str) -> list[tuple[str, Parameter]]:
    """Return the named parameters of one adapter. Those of an embedding end with the adapter's name."""
    return [(name, p) for name, p in model.named_parameters() if f".{adapter}." in name or name.endswith(f".{adapter}")]


def train_only(model: PeftModel, adapters: list[str]) -> None:
    """Require a gradient of these adapters and of no other that the model holds, whichever is active."""
    model.set_requires_grad(list(model.peft_config), False)
    model.set_requires_grad(adapters, True)


def check_base_folder(folder: str) -> None:
    """Raise ValueError for the folder of an adapter, which holds no model."""
    path = Path(folder)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(
            f"`model={folder!r}` is the folder of an adapter. Load its base, and pass `PeftModel.from_pretrained(base, {folder!r}, is_trainable=True)`."
        )


def load_processor(model: str, args: MultiRoleGRPOConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model given by name, at the same revision."""
    return AutoProcessor.from_pretrained(
        model, revision=(args.model_init_kwargs or {}).get("revision"), truncation_side="left", padding_side="left",
        trust_remote_code=args.trust_remote_code,
    )  # fmt: skip


def changes_base(peft_config: PeftConfig | None) -> bool:
    """Return whether new adapters with this configuration take over a part of the base's weights."""
    initialisation = getattr(peft_config, "init_lora_weights", True)
    return isinstance(initialisation, str) and initialisation.startswith(BASE_CHANGING)


def check_base_alone(model: PeftModel, advice: str) -> None:
    """Raise ValueError, which ends in `advice`, if the base without adapters is not the untrained model: an adapter took over a part of it."""
    for name, peft_config in model.peft_config.items():
        if changes_base(peft_config):
            raise ValueError(
                f"`init_lora_weights={peft_config.init_lora_weights!r}` moved a part of the base's weights into adapter {name!r}, so no role can "
                f"be played by the base alone. {advice}"
            )
