"""The rules of a run's settings. Each is one line of data, and each stands here once.

A rule reads settings by their names, and facts that only a run knows (`FACTS`). `MultiRoleGRPOConfig` applies the rules that read settings alone
when it is made, and the trainer applies each of the others as soon as it knows the facts, before it computes anything. Settings of another
class that have the same names can be checked by the same rules (`broken_rules`), so this module imports neither torch nor TRL.

To add a rule, add a line. docs/trl_options.md shows the table `REFUSED`.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SAMPLER = "the loss scores tokens under the full distribution, and this option samples from another one"
BATCHING = "the rollout engine batches continuously by itself"
REFUSED = {
    "top_p": (1.0, SAMPLER),
    "top_k": ((0, -1), SAMPLER),
    "min_p": ((None, 0.0), SAMPLER),
    "repetition_penalty": (1.0, SAMPLER),
    "generation_kwargs": ((None, {}), "the rollout engine takes `temperature` and `max_completion_length` only"),
    "cache_implementation": (None, "the rollout engine manages its own cache"),
    "use_transformers_continuous_batching": (False, BATCHING),
    "use_transformers_paged": (False, BATCHING),
    "transformers_continuous_batching_config": (None, BATCHING),
    "vllm_max_model_length": (None, "it is `max_prompt_tokens + max_completion_length`"),
    "vllm_tensor_parallel_size": (1, "each process has its own engine on its GPU"),
    "vllm_model_impl": (("vllm", "auto"), "adapters are served by vLLM's own models"),
    "vllm_group_port": (51216, "adapters reach the servers as files, and not through a group of processes"),
    "vllm_structured_outputs_regex": (None, "a constrained sampler would differ from the policy that is trained"),
    "sync_ref_model": (False, "the reference of `beta` does not change"),
    "ref_model_mixup_alpha": (0.6, "the reference of `beta` does not change"),
    "ref_model_sync_steps": (512, "the reference of `beta` does not change"),
    "ds3_gather_for_generation": (True, "DeepSpeed is not supported"),
    "deepspeed": (None, "DeepSpeed owns the optimizer step, and an iteration takes several of them"),
    "fp16": (False, "HF's gradient scaler expects one optimizer step per global step; use bf16"),
    "remove_unused_columns": (False, "reward functions receive every column"),
    "torch_empty_cache_steps": (None, "the rollout engine empties the cache when it sleeps"),
    "auto_find_batch_size": (False, "`micro_batch_tokens` bounds the memory of a forward pass; a smaller batch would change the iteration"),
    "bf16_full_eval": (False, "evaluations sample with the weights that are trained"),
    "fp16_full_eval": (False, "evaluations sample with the weights that are trained"),
    "torch_compile": (False, "row lengths differ between micro-batches"),
    "router_aux_loss_coef": (0.0, "the load-balancing loss of a mixture of experts is taken per micro-batch, whose size must not change the gradient"),
    "max_tool_calling_iterations": (None, "`max_rounds` of `call(role, messages, tools=[function])` bounds one call"),
}  # fmt: skip
"""Fields of `GRPOConfig` that mean nothing here: name -> (the only value, or a tuple of the only values, and why)."""
CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
"""Values of fields of `GRPOConfig` that TRL checks only after the first rollout, or not at all."""
POSITIVE = (
    "micro_batch_tokens",
    "max_prompt_tokens",
    "max_turns",
    "max_completion_length",
    "num_iterations",
    "past_every",
    "past_selves",
    "lr_ticks",
)
POSITIVE_OR_NONE = ("step_tokens", "step_rows", "max_sampled_tokens")
"""Numbers of 1 or more."""
NOT_NEGATIVE = ("max_failed_episodes", "max_staleness", "vllm_server_max_retries")
"""Numbers of 0 or more."""
SET_BY_TRAINER = ("add_generation_prompt", "tokenize", "return_dict")
"""Arguments of chat templates that are not the user's."""

FACTS = {
    "changed": "option -> (its value, its default), of the options that have another value than their default",
    "split_batches": "of `accelerator_config`",
    "dispatch_batches": "of `accelerator_config`",
    "accumulated_steps": "`num_steps` of gradient accumulation in `accelerator_config`",
    "asked_steps": "optimizer steps per rollout that `steps_per_generation` asks for; a fraction where that is no multiple",
    "is_settled": "True once the configuration is made, which derives some options from others",
    "world_size": "number of processes",
    "n_rows": "rows of the training set",
    "is_stream": "whether the training set is a stream",
    "has_stream": "whether any dataset is a stream",
    "has_eval_dataset": "whether there is an `eval_dataset`",
    "thought_reward": "name of a reward function that reads thoughts, or None",
    "roles": "the workflow's roles",
    "partner_roles": "the roles that are played and not trained",
    "local_partners": "those of them that this run's base model plays",
    "frozen_adapter_roles": "those that saved adapters play",
    "past_roles": "those that past selves play",
    "endpoint_roles": "those that servers play",
    "replaying_credit": "name of a callback that plays episodes again, or None",
    "teachers": "role -> its teacher as text, of the roles that have one",
    "loaded_teachers": "the same, of those whose weight is not 0",
    "local_teachers": "the roles that the base, or an adapter on it, teaches",
    "server_teachers": "the roles that servers teach",
    "n_new_adapters": "number of adapters that are added to the base",
    "base_change": "`init_lora_weights` of new adapters, if it moves a part of the base's weights into them; else None",
    "ties_embeddings": "whether the model's head and embeddings are one matrix",
    "is_sharded": "whether FSDP2 shards the model",
    "engine_class": "name of the engine's class",
    "plays_during_update": "whether the engine can sample while the trainer computes",
}
"""What rules read besides settings."""


@dataclass(frozen=True)
class Rule:
    """A condition on settings and facts, and what to say where it does not hold.

    holds: its parameters are named as the settings and facts that it reads.
    message: a format string over their names, or a function of the same parameters: what was given, why it cannot work, what to write instead.
    """

    holds: Callable[..., Any]
    message: str | Callable[..., str]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of the settings and facts."""
        parameters = inspect.signature(self.holds).parameters.values()
        return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)

    def broken(self, values: Mapping[str, Any]) -> str:
        """Return the message if the values break the rule, and "" if they keep it."""
        read = [values[name] for name in self.reads]
        if self.holds(*read):
            return ""
        return self.message.format(**values) if isinstance(self.message, str) else self.message(*read)


def reading(name: str, holds: Callable[[Any], Any], message: str) -> Rule:
    """Return a rule that reads one setting, given by name; "NAME" stands for it in the message."""

    def holds_of(value: Any) -> Any:
        return holds(value)

    parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    holds_of.__dict__["__signature__"] = inspect.Signature([parameter])
    return Rule(holds_of, message.replace("NAME", name))


def one_of(name: str, words: tuple[object, ...]) -> Rule:
    """Return the rule that an option has one of several values."""
    return reading(name, lambda value: value in words, f"`NAME` must be one of {list(words)}, got {{NAME!r}}.")


def left_at(name: str, only: Any, why: str) -> Rule:
    """Return the rule that an option has its only value, or None."""
    accepted = only if isinstance(only, tuple) else (only,)
    message = f"`NAME={{NAME!r}}` is not supported by multi-role training: {why}. Leave it at {in_format(accepted[0])}."
    return reading(name, lambda value: value in (*accepted, None), message)


def in_format(value: object) -> str:
    """Return the repr of a value as a part of a format string."""
    return repr(value).replace("{", "{{").replace("}", "}}")


def is_count(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`."""
    return isinstance(value, int) and value >= least


def first_of(names: Iterable[str], prefix: str) -> str | None:
    """Return the first name with a prefix, or None."""
    return next((name for name in names if name.startswith(prefix)), None)


def server_option(changed: Mapping[str, Any]) -> str | None:
    """Return an option of vLLM's servers that has another value than its default, or None."""
    return "vllm_mode" if "vllm_mode" in changed else first_of(changed, "vllm_server_")


def idle_correction(changed: Mapping[str, Any]) -> str | None:
    """Return an option of importance weights that was changed, or None; switching the correction off is no change where there is none."""
    names = (name for name in changed if name != "vllm_importance_sampling_correction")
    return first_of(names, "vllm_importance_sampling_")


def parse_role_weights(text: str, option: str) -> dict[str, float]:
    """Return role -> weight from text such as "judge=0.1,solver=0", or from JSON; ValueError for anything else."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        pairs = (item.split("=") for item in text.split(","))
        return {role.strip(): float(weight) for role, weight in pairs}
    except ValueError as error:
        raise ValueError(f"`{option}` must map roles to numbers, such as 'judge=0.1', got {text!r}.") from error


def listed(roles: Any) -> Any:
    """Return roles that are written as text, "generator,aggregator", as a list, and anything else unchanged."""
    return [role.strip() for role in roles.split(",")] if isinstance(roles, str) else roles


POSITIVE_INTEGER = "`NAME` must be a positive integer, got {NAME!r}."
OPTIMIZER_ADVICE = "Use an optimizer with a schedule, such as 'adamw_torch'."
SET_AFTERWARDS = (
    "does not fit `generation_batch_size={generation_batch_size}` on {world_size} process(es): one of the two was set after the configuration was "
    "made. Pass them to `MultiRoleGRPOConfig`."
)
NO_LENGTH = (
    "`train_dataset` is a stream, whose length is not known, so {} cannot be counted. Set `max_steps` to the number of iterations, and strategies "
    "to 'steps'."
)
RULES = [
    # values of one option
    *(one_of(name, words) for name, words in CHOICES.items()),
    *(reading(name, lambda value: is_count(value, 0), "`NAME` must be 0 or more, got {NAME!r}.") for name in NOT_NEGATIVE),
    *(reading(name, lambda value: is_count(value, 1), POSITIVE_INTEGER) for name in POSITIVE),
    *(reading(name, lambda value: value is None or is_count(value, 1), POSITIVE_INTEGER) for name in POSITIVE_OR_NONE),
    *(reading(name, lambda value: value > 0, "`NAME` must be a positive number of seconds, got {NAME!r}.")
      for name in ("vllm_server_timeout", "vllm_server_request_timeout")),
    Rule(lambda vllm_mode: vllm_mode in ("colocate", "server"), "`vllm_mode` must be 'colocate' or 'server', got {vllm_mode!r}."),
    Rule(lambda pad_to_multiple_of: not isinstance(pad_to_multiple_of, int) or pad_to_multiple_of >= 1,
         "`pad_to_multiple_of` must be a positive number of tokens, got {pad_to_multiple_of}."),
    Rule(lambda temperature: temperature > 0, "`temperature` must be positive, got {temperature!r}: the loss needs the log-probs of sampled tokens."),
    Rule(lambda top_entropy_quantile: 0 <= top_entropy_quantile <= 1,
         "`top_entropy_quantile` must be a fraction of the tokens between 0 and 1, got {top_entropy_quantile!r}."),
    Rule(lambda vllm_importance_sampling_clip_max: vllm_importance_sampling_clip_max is None or vllm_importance_sampling_clip_max > 0,
         "`vllm_importance_sampling_clip_max` must be positive, got {vllm_importance_sampling_clip_max!r}: every weight would be clipped."),
    Rule(lambda chat_template_kwargs: not {*SET_BY_TRAINER} & {*(chat_template_kwargs or {})},
         lambda chat_template_kwargs: f"`chat_template_kwargs` sets {sorted({*SET_BY_TRAINER} & {*chat_template_kwargs})}, which the trainer sets "
         "itself. Leave them out, or pass `render` to the trainer."),
    Rule(lambda optim: not optim.startswith("schedule_free"),
         "`optim={optim!r}` counts steps in which an adapter has no gradient, which occur in every iteration, and so averages the wrong weights. "
         + OPTIMIZER_ADVICE),
    Rule(lambda optim: not any(part in optim.lower() for part in ("lomo", "layerwise")),
         "`optim={optim!r}` steps in the backward pass, but the gradient of a mini-batch is the sum of several passes. Use an optimizer that steps "
         "afterwards, such as 'adamw_torch'."),
    # KL weights
    Rule(lambda beta: not beta or beta >= 0, "The KL weight of `beta` must not be negative, got {beta!r}."),
    Rule(lambda role_beta: role_beta is None or (
             isinstance(role_beta, dict) and all(isinstance(weight, (int, float)) for weight in role_beta.values())),
         "`role_beta` must map roles to numbers, such as {{'judge': 0.1}}, got {role_beta!r}."),
    Rule(lambda role_beta: all(weight >= 0 for weight in (role_beta or {}).values()),
         lambda role_beta: "\n".join(f"The KL weight of `{role}` must not be negative, got {weight!r}."
                                     for role, weight in role_beta.items() if not weight >= 0)),
    Rule(lambda role_beta, roles: set(role_beta or {}) <= set(roles),
         lambda role_beta, roles: f"`role_beta` names {sorted(set(role_beta) - set(roles))}, but the roles are {list(roles)}."),
    Rule(lambda role_beta, partner_roles: not set(role_beta or {}) & set(partner_roles),
         lambda role_beta, partner_roles: (
             f"`role_beta` weighs the KL penalty of {sorted(set(role_beta) & set(partner_roles))}, which `policy` does not train. Leave them out.")),
    # roles that are not trained
    Rule(lambda changed, past_roles: past_roles or not {"past_every", "past_selves"} & set(changed),
         "`past_every={past_every}` and `past_selves={past_selves}` are for roles that past selves play, and `policy` has none. Write 'past:NAME' for "
         "such a role, or leave them out."),
    Rule(lambda max_staleness, past_roles: not (max_staleness and past_roles),
         "`max_staleness={max_staleness}` plays episodes during the update, which copies the past selves that play {past_roles}. Leave it at 0."),
    Rule(lambda is_sharded, past_roles, frozen_adapter_roles: not (is_sharded and (past_roles or frozen_adapter_roles)),
         lambda is_sharded, past_roles, frozen_adapter_roles: (
             "FSDP2 shards the model, and frozen adapters and past selves were not made to work with it, but `policy` has them for "
             f"{[*frozen_adapter_roles, *past_roles]}. Train with data parallelism, or write 'frozen', the base.")),
    Rule(lambda base_change, local_partners: not (base_change and local_partners),
         "`init_lora_weights={base_change!r}` moves a part of the base's weights into the new adapters, so neither the base nor another adapter can "
         "play {local_partners} on it. Use True."),
    Rule(lambda replaying_credit, endpoint_roles: not (replaying_credit and endpoint_roles),
         "{replaying_credit} replays episodes, and the endpoints that play {endpoint_roles} would have to be asked again for each of them. Do "
         "without it; of the values of `credit`, 'outcome' replays none."),
    # teachers
    Rule(lambda distillation_weight: distillation_weight is None or (
             isinstance(distillation_weight, dict) and all(isinstance(weight, (int, float)) and weight >= 0 for weight in distillation_weight.values())),
         "`distillation_weight` must map roles to numbers of 0 or more, such as {{'solver': 0.5}}, got {distillation_weight!r}."),
    Rule(lambda distillation_weight, teachers: set(distillation_weight or {}) <= set(teachers),
         lambda distillation_weight, teachers: (
             f"`distillation_weight` weighs the teachers of {sorted(set(distillation_weight) - set(teachers))}, and `teacher` names none for them: it "
             f"has {list(teachers)}. Name a teacher for each, or leave them out.")),
    Rule(lambda teachers, roles: set(teachers) <= set(roles),
         lambda teachers, roles: f"`teacher` names {sorted(set(teachers) - set(roles))}, but the roles are {list(roles)}."),
    Rule(lambda teachers, partner_roles: not set(teachers) & set(partner_roles),
         lambda teachers, partner_roles: (
             f"`teacher` names teachers of {sorted(set(teachers) & set(partner_roles))}, which `policy` does not train. Leave them out.")),
    Rule(lambda server_teachers, temperature: not server_teachers or temperature == 1,
         "Servers teach {server_teachers}, and tell log-probs at temperature 1, but `temperature` is {temperature}. Set it to 1, or load the teacher "
         "here, with 'frozen:FOLDER' or 'base:NAME'."),
    Rule(lambda is_sharded, loaded_teachers: not (is_sharded and loaded_teachers),
         lambda is_sharded, loaded_teachers: (
             f"FSDP2 shards the model, and teachers were not made to work with it, but `teacher` has one for {list(loaded_teachers)}. "
             "Train with data parallelism.")),
    Rule(lambda base_change, local_teachers: not (base_change and local_teachers),
         "`init_lora_weights={base_change!r}` moves a part of the base's weights into the new adapters, so neither the base nor another adapter can "
         "teach {local_teachers} on it. Use True."),
    # optimizer steps of an iteration
    Rule(lambda role_order: role_order is None or (
             isinstance(listed(role_order), list) and role_order and all(isinstance(role, str) for role in listed(role_order))),
         "`role_order` must be a list of roles, such as ['generator', 'aggregator'], got {role_order!r}."),
    Rule(lambda role_order, roles: set(listed(role_order) or ()) <= set(roles),
         lambda role_order, roles: f"`role_order` names {sorted(set(listed(role_order)) - set(roles))}, but the roles are {list(roles)}."),
    Rule(lambda role_order, partner_roles: not set(listed(role_order) or ()) & set(partner_roles),
         lambda role_order, partner_roles: (
             f"`role_order` gives iterations to {sorted(set(listed(role_order)) & set(partner_roles))}, which `policy` does not train. Leave them out.")),
    Rule(lambda role_order, role_beta: not role_order or set(role_beta or {}) <= set(listed(role_order)),
         lambda role_order, role_beta: (
             f"`role_beta` weighs the KL penalty of {sorted(set(role_beta) - set(listed(role_order)))}, to which `role_order` gives no iteration. Leave them out.")),
    Rule(lambda role_order, teachers: not role_order or set(teachers) <= set(listed(role_order)),
         lambda role_order, teachers: (
             f"`teacher` names teachers of {sorted(set(teachers) - set(listed(role_order)))}, to which `role_order` gives no iteration. Leave them out.")),
    Rule(lambda target_kl: target_kl is None or (isinstance(target_kl, (int, float)) and target_kl > 0),
         "`target_kl` must be a positive number of nats per token, such as 5e-4, got {target_kl!r}."),
    Rule(lambda target_kl, updates, num_iterations: target_kl is None or updates != "one" or num_iterations > 1,
         "`target_kl={target_kl}` is asked before each step of an adapter in an iteration but its first, and `updates='one'` takes one step. Leave "
         "it out, or write updates='per_batch'."),
    Rule(lambda updates, step_tokens: (updates == "tokens") == (step_tokens is not None),
         "`step_tokens` must be set if `updates='tokens'` and only then, got {step_tokens} with updates={updates!r}: `updates='tokens'` needs "
         "`step_tokens`, such as 4096, and nothing else uses it."),
    Rule(lambda updates, step_rows: updates == "per_batch" or step_rows is None,
         "`step_rows={step_rows}` needs `updates='per_batch'`, got {updates!r}. Leave it out."),
    Rule(lambda asked_steps: asked_steps >= 1 and asked_steps % 1 == 0,
         "`steps_per_generation` ({steps_per_generation}) is no multiple of `gradient_accumulation_steps` ({gradient_accumulation_steps}), so in TRL an "
         "optimizer step accumulates rows of two rollouts, and here it is taken on one. Set only `generation_batch_size`, or write a multiple. "
         "By default it is `generation_batch_size` over `per_device_train_batch_size` and the number of processes."),
    Rule(lambda asked_steps, updates, step_rows: asked_steps <= 1 or (updates == "per_batch" and step_rows is None),
         "`steps_per_generation` ({steps_per_generation}) asks for {asked_steps:.0f} optimizer steps per rollout, and `updates={updates!r}` with "
         "`step_rows={step_rows}` for others. Leave out one of the two."),
    Rule(lambda split_batches: not split_batches,
         "`accelerator_config` sets `split_batches`, but an iteration plays `generation_batch_size` episodes, and every process already gets its share "
         "of them. Leave it out."),
    Rule(lambda accumulated_steps: accumulated_steps == 1,
         "`accelerator_config` sets `num_steps={accumulated_steps}` for gradient accumulation, but an iteration takes its optimizer steps itself, on "
         "mini-batches of any size. Leave it out, and set `generation_batch_size`."),
    # the schedule
    Rule(lambda lr_ticks, lr_wraps: lr_ticks > 1 or not lr_wraps,
         "`lr_wraps=True` is for a schedule that ends before the run does, which needs `lr_ticks` above 1, got {lr_ticks}. Leave it out."),
    Rule(lambda lr_ticks, max_sampled_tokens: lr_ticks == 1 or max_sampled_tokens is None,
         "`max_sampled_tokens={max_sampled_tokens}` reads the schedule at the share of the budget that is spent, and `lr_ticks={lr_ticks}` at a count "
         "of iterations. Leave out one of the two."),
    Rule(lambda max_staleness, max_sampled_tokens: not max_staleness or max_sampled_tokens is None,
         "`max_sampled_tokens={max_sampled_tokens}` counts what was sampled before an iteration, and `max_staleness={max_staleness}` samples later ones "
         "meanwhile. Leave max_staleness at 0."),
    # importance weights
    Rule(lambda changed, old_logprobs: old_logprobs != "sampled" or not idle_correction(changed),
         lambda changed, old_logprobs: (
             f"`{idle_correction(changed)}={changed[idle_correction(changed)][0]!r}` has no effect with `old_logprobs='sampled'`, whose PPO ratio "
             "divides by the probability with which a token was sampled and needs no importance weight. Write old_logprobs='recomputed' too, or leave "
             f"it at {changed[idle_correction(changed)][1]!r}.")),
    Rule(lambda loss_type, old_logprobs, vllm_importance_sampling_correction, vllm_importance_sampling_mode: (
             loss_type != "vespo" or old_logprobs == "sampled" or not vllm_importance_sampling_correction
             or vllm_importance_sampling_mode.startswith("token")),
         "`loss_type='vespo'` multiplies the importance weights of a sequence's tokens itself, but "
         "`vllm_importance_sampling_mode={vllm_importance_sampling_mode!r}` has one weight per sequence. As in TRL, set it to 'token_truncate' or "
         "'token_mask'."),
    # rollouts during the update
    Rule(lambda max_staleness, old_logprobs, vllm_importance_sampling_correction: (
             not max_staleness or old_logprobs == "sampled" or vllm_importance_sampling_correction),
         "`max_staleness={max_staleness}` needs a correction for older rows, but `old_logprobs='recomputed'` with "
         "`vllm_importance_sampling_correction=False` has none. Leave the latter at True, or use old_logprobs='sampled'."),
    Rule(lambda max_staleness, ignore_data_skip: not (max_staleness and ignore_data_skip),
         "`max_staleness={max_staleness}` plays the problems that come next in the run's order, but `ignore_data_skip=True` would restart that order "
         "when a run is resumed. Leave it at False."),
    Rule(lambda max_staleness, is_sharded: not (max_staleness and is_sharded),
         "`max_staleness={max_staleness}` needs the whole model in one process, but FSDP2 shards it. Leave it at 0, or train without FSDP2."),
    Rule(lambda max_staleness, engine_class, plays_during_update: not max_staleness or plays_during_update,
         "`max_staleness={max_staleness}` plays episodes while the update runs, but {engine_class} cannot: it shares weights or memory with the trainer. "
         "Leave it at 0, or use engine='vllm_server', engine='transformers' in float32, or your own engine that says `plays_during_update = True`."),
    # vLLM's servers
    Rule(lambda vllm_server_copy_command, vllm_server_adapter_dir: vllm_server_copy_command is None or (
             "{folder}" in vllm_server_copy_command and vllm_server_adapter_dir is not None),
         "`vllm_server_copy_command={vllm_server_copy_command!r}` copies `{{folder}}`, a part of `vllm_server_adapter_dir`, to `{{host}}`. Name both, as "
         'in "rsync -a --mkpath --delete {{folder}}/ {{host}}:{{folder}}/".'),
    Rule(lambda changed, engine, use_vllm, vllm_mode: (
             engine == "vllm_server" or (use_vllm and vllm_mode == "server") or not server_option(changed)),
         lambda changed, engine, use_vllm, vllm_mode: (
             f"`{server_option(changed)}={changed[server_option(changed)][0]!r}` is for rollouts on vLLM's servers, but `engine` is {engine!r}. Write "
             "engine='vllm_server' too.")),
    # options that mean nothing here
    *(left_at(name, only, why) for name, (only, why) in REFUSED.items()),
    # what was changed after the configuration was made
    Rule(lambda is_settled, use_vllm: not use_vllm,
         "`use_vllm` was set after the configuration was made. Pass it to `MultiRoleGRPOConfig`."),
    Rule(lambda is_settled, gradient_accumulation_steps: gradient_accumulation_steps == 1,
         "`gradient_accumulation_steps={gradient_accumulation_steps}` " + SET_AFTERWARDS),
    Rule(lambda is_settled, steps_per_generation: steps_per_generation == 1, "`steps_per_generation={steps_per_generation}` " + SET_AFTERWARDS),
    Rule(lambda is_settled, per_device_train_batch_size, generation_batch_size, world_size: (
             per_device_train_batch_size == generation_batch_size // world_size),
         "`per_device_train_batch_size={per_device_train_batch_size}` " + SET_AFTERWARDS),
    Rule(lambda is_settled, num_generations, generation_batch_size: num_generations >= 2 and generation_batch_size % num_generations == 0,
         "`num_generations={num_generations}` must be 2 or more and divide `generation_batch_size` ({generation_batch_size})."),
    # processes, datasets and reward functions
    Rule(lambda generation_batch_size, num_generations, world_size: generation_batch_size // num_generations % world_size == 0,
         lambda generation_batch_size, num_generations, world_size: (
             f"The {generation_batch_size // num_generations} problems of an iteration cannot be shared evenly by {world_size} processes. Change "
             "`generation_batch_size` so that they can.")),
    Rule(lambda n_rows, max_steps, num_train_epochs: max_steps > 0 or num_train_epochs > 0,
         "`num_train_epochs={num_train_epochs}` and `max_steps={max_steps}` train nothing. Set one of them above 0."),
    *(Rule(holds, NO_LENGTH.format(f"`{name}='epoch'`")) for name, holds in {
        "eval_strategy": lambda is_stream, eval_strategy: not is_stream or eval_strategy != "epoch",
        "logging_strategy": lambda is_stream, logging_strategy: not is_stream or logging_strategy != "epoch",
        "save_strategy": lambda is_stream, save_strategy: not is_stream or save_strategy != "epoch",
    }.items()),
    Rule(lambda is_stream, max_steps: not is_stream or max_steps > 0, NO_LENGTH.format("`num_train_epochs`")),
    Rule(lambda has_stream, dispatch_batches: not (has_stream and dispatch_batches),
         "Iterable datasets require `dispatch_batches=False`, but `accelerator_config` sets it to True. Leave it out of `accelerator_config`: every "
         "process reads its own rows."),
    Rule(lambda has_eval_dataset, eval_strategy: has_eval_dataset or eval_strategy == "no",
         "`eval_strategy={eval_strategy!r}` evaluates, and there is no `eval_dataset`. Pass one, or leave `eval_strategy` at 'no'."),
    Rule(lambda thought_reward, strip_thoughts: not (thought_reward and strip_thoughts),
         "The reward function {thought_reward!r} reads the thought of a completion, but `strip_thoughts=True` cuts thoughts out. Set "
         "`strip_thoughts=False` in the configuration."),
    # the model
    Rule(lambda base_change, n_new_adapters: not base_change or n_new_adapters <= 1,
         "`init_lora_weights={base_change!r}` changes the base model, so {n_new_adapters} adapters cannot share it. Use True, or policy='sp'."),
    Rule(lambda ties_embeddings, cast_lm_head_to_fp32: not (ties_embeddings and cast_lm_head_to_fp32),
         "`cast_lm_head_to_fp32=True` does not work with this model, whose head and embeddings are one matrix: TRL looks for the embeddings in a place "
         "where a PeftModel does not have them. Leave it at False, or load the whole model in float32."),
]  # fmt: skip
"""All rules. Where several are broken, the first is reported."""


def broken_rules(values: Mapping[str, Any], rules: Iterable[Rule] = RULES) -> Iterator[str]:
    """Yield the message of every rule that the values of settings and facts break, of those rules whose values are all known."""
    for rule in rules:
        if values.keys() >= {*rule.reads} and (message := rule.broken(values)):
            yield message
