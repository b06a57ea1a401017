"""Define `MultiRoleGRPOConfig`: TRL's `GRPOConfig` and the options that several roles and adapters add to it."""

import json
import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

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
    "deepspeed": (None, "DeepSpeed owns the optimizer step, and an iteration takes several of them"),
    "ds3_gather_for_generation": (True, "DeepSpeed is not supported"),
    "fp16": (False, "HF's gradient scaler expects one optimizer step per global step; use bf16"),
    "remove_unused_columns": (False, "reward functions receive every column"),
    "torch_empty_cache_steps": (None, "the rollout engine empties the cache when it sleeps"),
    "auto_find_batch_size": (False, "`micro_batch_tokens` bounds the memory of a forward pass; a smaller batch would change the iteration"),
    "bf16_full_eval": (False, "evaluations sample with the weights that are trained"),
    "fp16_full_eval": (False, "evaluations sample with the weights that are trained"),
    "torch_compile": (False, "row lengths differ between micro-batches"),
    "router_aux_loss_coef": (0.0, "the load-balancing loss of a mixture of experts is taken per micro-batch, whose size must not change the gradient"),
    "max_tool_calling_iterations": (None, "a workflow calls its tools itself"),
}  # fmt: skip
"""Fields of `GRPOConfig` that mean nothing here: name -> (the only value, or a tuple of the only values, and why)."""
IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's values of `vllm_importance_sampling_mode`, for which `GRPOConfig` accepts any text."""
CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
"""Values of fields of `GRPOConfig` that TRL checks only after the first rollout."""


def parse_role_beta(text: str) -> dict[str, float]:
    """Return role -> KL weight from text such as "judge=0.1,solver=0", or from JSON; ValueError for anything else."""
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        pairs = (item.split("=") for item in text.split(","))
        return {role.strip(): float(weight) for role, weight in pairs}
    except ValueError as error:
        raise ValueError(f"`role_beta` must map roles to numbers, such as 'judge=0.1', got {text!r}.") from error


@dataclass
class MultiRoleGRPOConfig(GRPOConfig):
    """Configuration of [`MultiRoleGRPOTrainer`]. All other fields are those of TRL's `GRPOConfig`, with these meanings:

    - One global step is one *iteration*: `generation_batch_size` episodes (`generation_batch_size / num_generations` problems x
      `num_generations` episodes) and every optimizer step taken on them. `per_device_train_batch_size` and
      `gradient_accumulation_steps` are only used to compute it, as in TRL. `max_steps`, `eval_steps`, `save_steps`,
      `logging_steps` and `warmup_steps` count iterations.
    - With `max_steps=-1`, an epoch is as many iterations as in TRL: the dataset's rows divided by the problems of an iteration, rounded
      down. Leftover rows start the next pass. A strategy `"epoch"` acts once per that many iterations.
    - `bf16` is off by default if no GPU supports it, or with `use_cpu=True`.
    - `max_completion_length` and `temperature` apply to every turn.
    - `beta` is the weight of KL(policy || reference) for every role; `role_beta` sets it by role. The reference is the frozen base or, if a
      `PeftModel` with trained adapters was passed, the initial weights of these adapters. The estimator is k3.
    - `use_vllm=True` means `engine="vllm"`, and with `vllm_mode="server"` it means `engine="vllm_server"`; `vllm_gpu_memory_utilization` is
      passed on.
    - `vllm_server_base_url` may name several servers, separated by commas. `vllm_server_timeout` is the number of seconds to wait for a server
      that does not answer, at the start and in a rollout. The servers' API key is read from the environment variable `VLLM_API_KEY`.
    - `num_iterations` is the number of passes over the same mini-batches, against the same old log-probs; it multiplies the optimizer steps. The
      schedule, `max_steps` and the logs still count iterations.
    - `entropy_coef`, `use_adaptive_entropy` and `top_entropy_quantile` act on the mini-batch of an optimizer step, not on a
      micro-batch. Each adapter has its own adaptive coefficient. The quantile costs another forward pass.
    - `mask_truncated_completions` leaves turns that reached `max_completion_length` out of the loss, but not the other turns of their episodes.
    - Dropout and NEFTune are switched off, because the ratio compares the trainer's log-probs with the engine's.
    - `num_generations_eval` is the number of episodes per evaluation problem, 1 by default.
    - `loss_type` is the paper's "grpo" by default, `use_bias_correction_kl` is off, and processes wait for each other two hours
      (`ddp_timeout`).
    - Qwen3's thinking is off; `chat_template_kwargs={"enable_thinking": True}` turns it on.
    - Fields that have no meaning here raise a ValueError that says why.

    Args:
        policy (`str` or `dict[str, str]`, defaults to `"sp"`):
            Role to adapter map (paper section 3): `"sp"`, one adapter for all roles; `"ip"`, one for each role; or a map such as
            `{"generator": "a", "aggregator": "b"}`, also as text, `"generator=a,aggregator=b"`.
        updates (`str`, defaults to `"per_batch"`):
            Optimizer steps of an adapter in an iteration. `"per_batch"`: one per `step_rows` rows (paper section 5.1: a role
            with three slots takes three). `"one"`: one on all its rows. `"tokens"`: one per about `step_tokens` completion tokens.
        step_tokens (`int`, *optional*):
            Completion tokens per optimizer step with `updates="tokens"`.
        step_rows (`int`, *optional*):
            Rows per optimizer step with `updates="per_batch"`; by default `generation_batch_size`. TRL's `steps_per_generation` sets it: k times
            `gradient_accumulation_steps` are k optimizer steps, each on a k-th of the rows.
        old_logprobs (`str`, defaults to `"sampled"`):
            Denominator of the PPO ratio: `"sampled"` uses the engine's log-probs, `"recomputed"` the trainer's, computed before the update.
        max_staleness (`int`, defaults to `0`):
            Largest number of updates between the adapters that sample a row and those that train it. With 0, the rollout waits for the update; with k, the
            next k iterations are played while it runs, by an engine that supports this (`"vllm_server"`, or `"transformers"` in float32). The correction is
            the PPO ratio with `old_logprobs="sampled"`, and TRL's importance weights with `"recomputed"`.
        role_beta (`dict[str, float]`, *optional*):
            KL weights of individual roles, which replace `beta`; also as text, `"judge=0.1,solver=0"`, or as JSON.
        micro_batch_tokens (`int`, defaults to `16384`):
            Largest number of tokens in one forward pass, padding included. Changes memory and speed, not the gradient.
        max_prompt_tokens (`int`, defaults to `2048`):
            A turn whose prompt is longer ends its episode without an answer.
        max_turns (`int`, defaults to `256`):
            Largest number of model calls in one episode.
        turn_seeds (`str`, defaults to `"position"`):
            What seeds the sampling of a turn besides run, iteration, problem and episode: `"position"` is (role, slot, round), `"prompt"`
            is (role, prompt, occurrence), as for calls without a slot.
        strip_thoughts (`bool`, defaults to `True`):
            Cut thoughts such as `<think>...</think>` out of `turn.text`, which other roles read and reward functions score. With False, `turn.text`
            is the whole reply, tags included.
        max_failed_episodes (`int`, defaults to `0`):
            Number of episodes of one rollout whose workflow may raise. Such an episode is logged, counted (`failed_episodes`), gets no reward and is
            not trained on; its group is compared without it. One more failure ends the run; by default the first one does.
        engine (`str`, defaults to `"auto"`):
            Rollout engine: `"transformers"`, `"generate"`, `"vllm"`, `"vllm_server"`, `"module:Class"`, or `"auto"`: vLLM if its CUDA build is installed,
            a GPU is visible and the model computes in half precision; else `"transformers"` if it is installed and implements the model (Qwen3 and Llama
            with LoRA); else `"generate"`, which runs any decoder and is slower. vLLM reads the base from where `model` was loaded: save a base
            that was changed in memory first, and load it from that folder.
        vllm_max_num_seqs (`int`, defaults to `512`):
            Maximum number of concurrent requests of vLLM. With several servers, the limit of all together is this times their number.
        vllm_max_num_batched_tokens (`int`, defaults to `8192`):
            Maximum number of tokens of one vLLM step.
        vllm_server_model (`str`, *optional*):
            Name under which the servers serve the base model; by default the name or folder that `model` was loaded from.
        vllm_server_adapter_dir (`str`, *optional*):
            Folder for the published adapters, which the servers see under the same path. Not needed if all servers run on this machine.
        vllm_server_copy_command (`str`, *optional*):
            Command that copies `{folder}`, this run's part of that folder, to the same path on `{host}`, for servers that do not share it:
            for example `"rsync -a --mkpath --delete {folder}/ {host}:{folder}/"`.
        vllm_server_request_timeout (`float`, defaults to `1800.0`), vllm_server_max_retries (`int`, defaults to `3`):
            Timeout of a request in seconds, and how often a request that failed or timed out is sent again (with the same seed).
        vllm_server_evict (`bool`, defaults to `False`):
            Unload adapters that other runs have left on the servers. By default such servers are refused.
    """

    policy: dict[str, str] | str | None = "sp"  # with None, `TrlParser` takes text too
    updates: Literal["per_batch", "one", "tokens"] = "per_batch"
    step_tokens: int | None = None
    step_rows: int | None = None
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    max_staleness: int = 0
    role_beta: dict[str, float] | str | None = None
    micro_batch_tokens: int = 16384
    max_prompt_tokens: int = 2048
    max_turns: int = 256
    turn_seeds: Literal["position", "prompt"] = "position"
    strip_thoughts: bool = True
    max_failed_episodes: int = 0
    engine: str = "auto"
    vllm_max_num_seqs: int = 512
    vllm_max_num_batched_tokens: int = 8192
    vllm_server_model: str | None = None
    vllm_server_adapter_dir: str | None = None
    vllm_server_copy_command: str | None = None
    vllm_server_request_timeout: float = 1800.0
    vllm_server_max_retries: int = 3
    vllm_server_evict: bool = False

    ddp_timeout: int = 7200
    loss_type: str = "grpo"
    use_bias_correction_kl: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.role_beta, str):
            self.role_beta = parse_role_beta(self.role_beta)
        self._check_options()
        self._check_refused()
        if self.bf16 is None and not self.fp16:  # type: ignore[has-type]
            self.bf16 = not self.use_cpu and is_torch_bf16_gpu_available()
        if self.use_vllm:
            self.__dict__.update(engine="vllm_server" if self.vllm_mode == "server" else "vllm", use_vllm=False)
        n_eval, steps = self.num_generations_eval or 1, self.steps_per_generation
        self.__dict__.update(num_generations_eval=n_eval, per_device_eval_batch_size=n_eval)
        if self.generation_batch_size is not None and self.gradient_accumulation_steps == 1:
            self.per_device_train_batch_size = 1  # TRL wants a divisor of `generation_batch_size`; set below
        super().__post_init__()
        self._check_options()  # of what TRL has read from text
        self._check_loop()
        self._check_refused()  # what other fields have set: `torch_compile_backend`, say, sets `torch_compile`
        if steps or self.gradient_accumulation_steps > 1:
            self._take_steps_per_generation()
        # One HF step is one iteration, and its dataloader yields all episodes of this process at once.
        self.__dict__.update(
            per_device_train_batch_size=self.generation_batch_size // self.world_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
        )

    def _take_steps_per_generation(self) -> None:
        """Set `step_rows` from TRL's number of optimizer steps per rollout; ValueError where that is not a whole number."""
        n_steps, rest = divmod(self.steps_per_generation, self.gradient_accumulation_steps)
        setting = f"`steps_per_generation` ({self.steps_per_generation})"
        if rest or not n_steps:
            raise ValueError(
                f"{setting} is no multiple of `gradient_accumulation_steps` ({self.gradient_accumulation_steps}), so in TRL an optimizer step "
                "accumulates rows of two rollouts, and here it is taken on one. Set only `generation_batch_size`, or write a multiple."
            )
        if n_steps > 1 and (self.updates != "per_batch" or self.step_rows is not None):
            raise ValueError(
                f"{setting} asks for {n_steps} optimizer steps per rollout, and `updates={self.updates!r}` with `step_rows={self.step_rows}` for "
                "others. Leave out one of the two."
            )
        if n_steps > 1:
            self.step_rows = self.generation_batch_size // n_steps

    def check_changes(self) -> None:
        """Check options that were set after the configuration was made, as a new one would (ValueError)."""
        self._check_options()
        self._check_loop()
        self._check_refused()
        if self.use_vllm:
            raise ValueError("`use_vllm` was set after the configuration was made. Pass it to `MultiRoleGRPOConfig`.")
        settled = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
        settled["per_device_train_batch_size"] = self.generation_batch_size // self.world_size
        for name, value in settled.items():
            if vars(self)[name] != value:
                raise ValueError(
                    f"`{name}={vars(self)[name]}` does not fit `generation_batch_size={self.generation_batch_size}` on {self.world_size} process(es): one of the "
                    "two was set after the configuration was made. Pass them to `MultiRoleGRPOConfig`."
                )
        if self.num_generations < 2 or self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"`num_generations={self.num_generations}` must be 2 or more and divide `generation_batch_size` ({self.generation_batch_size})."
            )

    def _check_refused(self) -> None:
        for name, (only, why) in REFUSED.items():
            accepted, value = only if isinstance(only, tuple) else (only,), vars(self)[name]
            if value not in accepted and value is not None:
                raise ValueError(
                    f"`{name}={value!r}` is not supported by multi-role training: {why}. Leave it at {accepted[0]!r}."
                )

    def _check_loop(self) -> None:
        """Refuse settings that would have HF's loop or an optimizer take its own steps inside an iteration (ValueError)."""
        if self.accelerator_config.split_batches:
            raise ValueError(
                "`accelerator_config` sets `split_batches`, but an iteration plays `generation_batch_size` episodes, and every process already gets its "
                "share of them. Leave it out."
            )
        accumulated = (self.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
        if accumulated != 1:
            raise ValueError(
                f"`accelerator_config` sets `num_steps={accumulated}` for gradient accumulation, but an iteration takes its optimizer "
                "steps itself, on mini-batches of any size. Leave it out, and set `generation_batch_size`."
            )
        optimizer = OptimizerNames(self.optim).value
        if optimizer.startswith("schedule_free"):
            raise ValueError(
                f"`optim={optimizer!r}` counts steps in which an adapter has no gradient, which occur in every iteration, and so averages the "
                "wrong weights. Use an optimizer with a schedule, such as 'adamw_torch'."
            )
        if any(part in optimizer.lower() for part in ("lomo", "layerwise")):
            raise ValueError(
                f"`optim={optimizer!r}` steps in the backward pass, but the gradient of a mini-batch is the sum of several passes. "
                "Use an optimizer that steps afterwards, such as 'adamw_torch'."
            )

    def _check_options(self) -> None:
        """Refuse, before anything is loaded, what cannot work (ValueError)."""
        for option in fields(self):
            allowed, value = get_args(option.type), vars(self)[option.name]
            if get_origin(option.type) is Literal and value not in allowed:
                raise ValueError(f"`{option.name}` must be one of {list(allowed)}, got {value!r}.")
            if isinstance(value, str) and {int, float} & {option.type, *allowed} and str not in allowed:
                raise ValueError(
                    f"`{option.name}` must be a number, got the text {value!r}. YAML reads 1e-5 as text: write 1.0e-5 there, and without quotes."
                )
        for name, choices in CHOICES.items():
            if vars(self)[name] not in choices:
                raise ValueError(f"`{name}` must be one of {list(choices)}, got {vars(self)[name]!r}.")
        for name in ("max_failed_episodes", "max_staleness"):
            value = vars(self)[name]
            if not (isinstance(value, int) and value >= 0):
                raise ValueError(f"`{name}` must be 0 or more, got {value!r}.")
        is_corrected = self.old_logprobs == "sampled" or self.vllm_importance_sampling_correction
        if self.max_staleness and not is_corrected:
            raise ValueError(
                f"`max_staleness={self.max_staleness}` needs a correction for older rows, but `old_logprobs='recomputed'` with "
                "`vllm_importance_sampling_correction=False` has none. Leave the latter at True, or use old_logprobs='sampled'."
            )
        if self.max_staleness and self.ignore_data_skip:
            raise ValueError(
                f"`max_staleness={self.max_staleness}` plays the problems that come next in the run's order, but `ignore_data_skip=True` would "
                "restart that order when a run is resumed. Leave it at False."
            )
        self._check_importance()
        for name in (
            "micro_batch_tokens",
            "max_prompt_tokens",
            "max_turns",
            "max_completion_length",
            "step_tokens",
            "step_rows",
            "num_iterations",
        ):
            value = vars(self)[name]
            if not (isinstance(value, int) and value >= 1 or name.startswith("step_") and value is None):
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        self._check_server()
        role_betas = {} if self.role_beta is None else self.role_beta
        if not isinstance(role_betas, dict) or not all(
            isinstance(value, (int, float)) for value in role_betas.values()
        ):
            raise ValueError(
                f"`role_beta` must map roles to numbers, such as {{'judge': 0.1}}, got {self.role_beta!r}."
            )
        if reserved := {"add_generation_prompt", "tokenize", "return_dict"} & set(self.chat_template_kwargs or {}):
            raise ValueError(
                f"`chat_template_kwargs` sets {sorted(reserved)}, which the trainer sets itself. Leave them out, or pass `render` to the trainer."
            )
        if isinstance(self.pad_to_multiple_of, int) and self.pad_to_multiple_of < 1:
            raise ValueError(
                f"`pad_to_multiple_of` must be a positive number of tokens, got {self.pad_to_multiple_of}."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` must be positive, got {self.temperature!r}: the loss needs the log-probs of sampled tokens."
            )
        if not 0 <= self.top_entropy_quantile <= 1:
            raise ValueError(
                f"`top_entropy_quantile` must be a fraction of the tokens between 0 and 1, got {self.top_entropy_quantile!r}."
            )
        if (self.updates == "tokens") != (self.step_tokens is not None):
            raise ValueError(
                f"`updates={self.updates!r}` and `step_tokens={self.step_tokens}` do not fit together: `updates='tokens'` needs "
                "`step_tokens`, and nothing else uses it."
            )
        if self.updates != "per_batch" and self.step_rows is not None:
            raise ValueError(
                f"`step_rows={self.step_rows}` needs `updates='per_batch'`, got {self.updates!r}. Leave it out."
            )
        for name, value in ({"beta": self.beta or 0.0} | self.role_betas).items():
            if not value >= 0:
                raise ValueError(f"The KL weight of `{name}` must not be negative, got {value!r}.")

    def _check_importance(self) -> None:
        """Refuse settings of the importance weights that would have no effect or leave nothing to train (ValueError)."""
        if self.vllm_importance_sampling_mode not in IMPORTANCE_MODES:
            raise ValueError(
                f"`vllm_importance_sampling_mode` must be one of {list(IMPORTANCE_MODES)}, got {self.vllm_importance_sampling_mode!r}."
            )
        most = self.vllm_importance_sampling_clip_max
        if most is not None and not most > 0:
            raise ValueError(
                f"`vllm_importance_sampling_clip_max` must be positive, got {most!r}: every weight would be clipped."
            )
        if self.old_logprobs != "sampled":
            is_by_token = self.vllm_importance_sampling_mode.startswith("token")
            if self.loss_type == "vespo" and self.vllm_importance_sampling_correction and not is_by_token:
                raise ValueError(
                    f"`loss_type='vespo'` multiplies the importance weights of a sequence's tokens itself, but "
                    f"`vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}` has one weight per sequence. As in TRL, set it to "
                    "'token_truncate' or 'token_mask'."
                )
            return
        for option in fields(self):
            name, value = option.name, vars(self)[option.name]
            if name == "vllm_importance_sampling_correction":
                continue  # there is none either way
            if name.startswith("vllm_importance_sampling_") and value != option.default:
                raise ValueError(
                    f"`{name}={value!r}` has no effect with `old_logprobs='sampled'`, whose PPO ratio divides by the probability with which "
                    "a token was sampled and needs no importance weight. Write old_logprobs='recomputed' too, or leave it at "
                    f"{option.default!r}."
                )

    def _check_server(self) -> None:
        """Refuse settings of `engine="vllm_server"` that cannot work (ValueError)."""
        if self.vllm_mode not in ("colocate", "server"):
            raise ValueError(f"`vllm_mode` must be 'colocate' or 'server', got {self.vllm_mode!r}.")
        is_server = self.engine == "vllm_server" or (self.use_vllm and self.vllm_mode == "server")
        for name in ("vllm_server_timeout", "vllm_server_request_timeout"):
            if not vars(self)[name] > 0:
                raise ValueError(f"`{name}` must be a positive number of seconds, got {vars(self)[name]!r}.")
        if not (isinstance(self.vllm_server_max_retries, int) and self.vllm_server_max_retries >= 0):
            raise ValueError(f"`vllm_server_max_retries` must be 0 or more, got {self.vllm_server_max_retries!r}.")
        command = self.vllm_server_copy_command
        if command is not None and ("{folder}" not in command or self.vllm_server_adapter_dir is None):
            raise ValueError(
                f"`vllm_server_copy_command={command!r}` copies `{{folder}}`, a part of `vllm_server_adapter_dir`, to `{{host}}`. Name "
                'both, as in "rsync -a --mkpath --delete {folder}/ {host}:{folder}/".'
            )
        for option in fields(self):
            name, value = option.name, vars(self)[option.name]
            is_servers = name == "vllm_mode" or name.startswith("vllm_server_")
            if is_servers and value != option.default and not is_server:
                raise ValueError(
                    f"`{name}={value!r}` is for rollouts on vLLM's servers, but `engine` is {self.engine!r}. Write "
                    "engine='vllm_server', or use_vllm=True with vllm_mode='server'."
                )

    @property
    def role_betas(self) -> dict[str, float]:
        """`role_beta` as a dict, empty if it is not set."""
        return self.role_beta if isinstance(self.role_beta, dict) else {}

    @property
    def n_problems(self) -> int:
        """Problems of an iteration, over all processes."""
        return self.generation_batch_size // self.num_generations

    def set_epochs(self, n_rows: int) -> None:
        """Turn epochs of a dataset of `n_rows` rows into iterations: `max_steps`, and the strategies that are "epoch"."""
        if self.max_steps <= 0 and self.num_train_epochs <= 0:  # type: ignore[has-type]
            raise ValueError(
                f"`num_train_epochs={self.num_train_epochs}` and `max_steps={self.max_steps}` train nothing. Set one of them above 0."  # type: ignore[has-type]
            )
        for name, (setting, derived) in self.__dict__.pop("_from_epochs", {}).items():
            if vars(self)[name] == derived:  # of another dataset
                setattr(self, name, setting)
        names = (
            "max_steps",
            *(f"{kind}_{what}" for kind in ("eval", "logging", "save") for what in ("strategy", "steps")),
            "eval_delay",
        )
        settings = {name: vars(self)[name] for name in names}
        whole = n_rows // self.n_problems  # TRL leaves out what is left over in an epoch
        if self.max_steps <= 0:  # type: ignore[has-type]
            self.max_steps = math.ceil(self.num_train_epochs * (whole or n_rows / self.n_problems))
        for kind, strategies in (("eval", IntervalStrategy), ("logging", IntervalStrategy), ("save", SaveStrategy)):
            if vars(self)[f"{kind}_strategy"] == "epoch":
                if kind == "eval":
                    self.eval_delay *= whole or 1  # in iterations, as `eval_steps`
                self.__dict__.update({f"{kind}_strategy": strategies.STEPS, f"{kind}_steps": whole or 1})
        self.__dict__["_from_epochs"] = {n: (old, vars(self)[n]) for n, old in settings.items() if old != vars(self)[n]}
