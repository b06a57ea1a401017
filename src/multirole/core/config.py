"""`MultiRoleGRPOConfig`: TRL's `GRPOConfig` and the dozen options that several roles and adapters add to it."""

import json
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from trl import GRPOConfig

SAMPLER = "the loss compares log-probs of the whole distribution with those that were sampled"
BATCHING = "the rollout engine batches continuously by itself"
PER_MICRO_BATCH = "it would be taken per micro-batch, whose size must not change the gradient"
REFUSED = {
    "num_iterations": (1, "each sampled batch is used once; `updates` decides in how many optimizer steps"),
    "top_p": (1.0, SAMPLER),
    "top_k": (0, SAMPLER),
    "min_p": (None, SAMPLER),
    "repetition_penalty": (1.0, SAMPLER),
    "generation_kwargs": (None, "the rollout engine takes `temperature` and `max_completion_length` only"),
    "cache_implementation": (None, "the rollout engine manages its own cache"),
    "use_transformers_continuous_batching": (False, BATCHING),
    "use_transformers_paged": (False, BATCHING),
    "vllm_mode": ("colocate", "requests of several adapters need an engine in this process"),
    "transformers_continuous_batching_config": (None, BATCHING),
    "vllm_enable_sleep_mode": (False, "the vLLM engine always sleeps while a GPU trains"),
    "vllm_max_model_length": (None, "it is `max_prompt_tokens + max_completion_length`"),
    "vllm_tensor_parallel_size": (1, "each process has an engine of its own on its GPU"),
    "vllm_model_impl": ("vllm", "adapters are served by vLLM's own models"),
    "vllm_structured_outputs_regex": (None, "a constrained sampler would differ from the policy that is trained"),
    "sync_ref_model": (False, "the reference of `beta` is the frozen base model"),
    "mask_truncated_completions": (False, "every completion token is trained, so that role masks partition the tokens"),
    "top_entropy_quantile": (1.0, PER_MICRO_BATCH),
    "entropy_coef": (0.0, PER_MICRO_BATCH),
    "use_adaptive_entropy": (False, PER_MICRO_BATCH),
    "deepspeed": (None, "DeepSpeed owns the optimizer step, and an iteration takes several of them"),
    "fp16": (False, "HF's gradient scaler expects one optimizer step per global step; use bf16"),
    "remove_unused_columns": (False, "rewards are given every column"),
    "torch_empty_cache_steps": (None, "the rollout engine empties the cache when it sleeps"),
    "load_best_model_at_end": (False, "transformers does not load adapters from subfolders"),
    "torch_compile": (False, "row lengths differ between micro-batches"),
    "pad_to_multiple_of": ("auto", "rows are padded to the longest of their micro-batch"),
    "max_tool_calling_iterations": (None, "a workflow calls its tools itself"),
}  # fmt: skip
"""Fields of `GRPOConfig` that mean nothing here: name -> (the only value, why)."""


@dataclass
class MultiRoleGRPOConfig(GRPOConfig):
    """Configuration of [`MultiRoleGRPOTrainer`]. All else is TRL's `GRPOConfig`, with these meanings:

    - One global step is one *iteration*: `generation_batch_size` episodes (`generation_batch_size / num_generations` problems x
      `num_generations` episodes) and every optimizer step taken on them. `per_device_train_batch_size` and
      `gradient_accumulation_steps` only serve to compute it, as in TRL. `max_steps`, `eval_steps`, `save_steps`,
      `logging_steps` and `warmup_steps` count iterations. With `max_steps=-1`, `num_train_epochs` passes are made.
    - `max_completion_length` and `temperature` hold for every turn.
    - `beta` weighs KL(policy || frozen base) for every role (`role_beta`: for one). The estimate is k3.
    - `use_vllm=True` is `engine="vllm"`; `vllm_gpu_memory_utilization` is passed on.
    - `num_generations_eval` episodes per evaluation problem, 1 by default.
    - `loss_type` is the paper's "grpo" by default, `use_bias_correction_kl` is off, and processes wait for each other two hours
      (`ddp_timeout`).
    - Qwen3's thinking is off; `chat_template_kwargs={"enable_thinking": True}` turns it on.
    - Fields that cannot mean anything here raise a ValueError that says why.

    Args:
        policy (`str` or `dict[str, str]`, defaults to `"sp"`):
            Role to adapter map (paper section 3): `"sp"`, one adapter for all roles; `"ip"`, one for each role; or a map such as
            `{"generator": "a", "aggregator": "b"}`, also as text, `"generator=a,aggregator=b"`.
        updates (`str`, defaults to `"per_batch"`):
            Optimizer steps of an adapter in an iteration: one `"per_batch"` of `generation_batch_size` rows (paper section 5.1: a role
            with three slots takes three), `"one"` on all its rows, or one per about `step_tokens` completion tokens (`"tokens"`).
        step_tokens (`int`, *optional*):
            Completion tokens of an optimizer step with `updates="tokens"`.
        advantage_group (`str`, defaults to `"episode"`):
            Rewards are compared among the `num_generations` episodes of a problem, one value per `"episode"`; or within the
            (problem, `"role"`) or (problem, role, `"slot"`) rows, as the authors' released code does.
        old_logprobs (`str`, defaults to `"sampled"`):
            The PPO ratio's denominator: log-probs of the engine that `"sampled"`, or `"recomputed"` by the trainer before the update.
        lr_clock (`str`, defaults to `"iteration"`):
            The learning-rate schedule ticks once per `"iteration"`, or once per `"update_call"`, that is per adapter and iteration,
            as the authors' released code does: with several adapters it then ends before the last iteration.
        role_beta (`dict[str, float]`, *optional*):
            KL weight of single roles, in place of `beta`; also as JSON.
        micro_batch_tokens (`int`, defaults to `16384`):
            Padded tokens of one forward pass. Changes memory and speed, not the gradient.
        max_prompt_tokens (`int`, defaults to `2048`):
            A turn whose prompt is longer ends its episode without an answer.
        max_turns (`int`, defaults to `256`):
            Model calls of one episode, at most.
        engine (`str`, defaults to `"auto"`):
            Rollout engine: `"transformers"`, `"vllm"`, `"module:Class"`, or `"auto"`, which is vLLM where its CUDA build is installed,
            a GPU is visible and the model computes in half precision. vLLM reads the base from where `model` was loaded: save a base
            that was changed in memory first, and load it from that folder.
        vllm_max_num_seqs (`int`, defaults to `512`), vllm_max_num_batched_tokens (`int`, defaults to `8192`):
            Requests that vLLM runs at once, and the tokens of one of its steps.
    """

    policy: dict[str, str] | str | None = "sp"  # with None, `TrlParser` takes text too
    updates: Literal["per_batch", "one", "tokens"] = "per_batch"
    step_tokens: int | None = None
    advantage_group: Literal["episode", "role", "slot"] = "episode"
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    lr_clock: Literal["iteration", "update_call"] = "iteration"
    role_beta: dict[str, float] | str | None = None
    micro_batch_tokens: int = 16384
    max_prompt_tokens: int = 2048
    max_turns: int = 256
    engine: str = "auto"
    vllm_max_num_seqs: int = 512
    vllm_max_num_batched_tokens: int = 8192

    ddp_timeout: int = 7200
    loss_type: str = "grpo"
    use_bias_correction_kl: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.role_beta, str):
            self.role_beta = json.loads(self.role_beta)
        self._check_options()
        self._check_refused()
        if self.use_vllm:
            self.__dict__.update(engine="vllm", use_vllm=False)
        n_eval, given = self.num_generations_eval or 1, self.steps_per_generation
        self.__dict__.update(num_generations_eval=n_eval, per_device_eval_batch_size=n_eval)
        if self.generation_batch_size is not None and self.gradient_accumulation_steps == 1:
            self.per_device_train_batch_size = 1  # TRL wants a divisor of `generation_batch_size`; set below
        super().__post_init__()
        self._check_refused()  # what other fields have set: `torch_compile_backend`, say, sets `torch_compile`
        several = self.steps_per_generation != self.gradient_accumulation_steps
        if several and (given or self.gradient_accumulation_steps > 1):
            raise ValueError(
                f"`steps_per_generation` ({self.steps_per_generation}) differs from `gradient_accumulation_steps` "
                f"({self.gradient_accumulation_steps}), which in TRL means several optimizer steps per sampled batch. Here `updates` "
                "decides on those. Set only `generation_batch_size`."
            )
        # One HF step is one iteration, and its dataloader yields all episodes of this process at once.
        self.__dict__.update(
            per_device_train_batch_size=self.generation_batch_size // self.world_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
        )

    def _check_refused(self) -> None:
        for name, (only, why) in REFUSED.items():
            value = vars(self)[name]
            if value != only and value is not None:
                raise ValueError(
                    f"`{name}={value!r}` is not supported by multi-role training: {why}. Leave it at {only!r}."
                )

    def _check_options(self) -> None:
        """Refuse, before anything is loaded, what cannot work (ValueError)."""
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if vars(self)[name] == "epoch":
                raise ValueError(
                    f"`{name}='epoch'` is not supported: a run is one long epoch, so that a resume continues the order of problems. Use "
                    "'steps', which are iterations."
                )
        for option in fields(self):
            allowed, value = get_args(option.type), vars(self)[option.name]
            if get_origin(option.type) is Literal and value not in allowed:
                raise ValueError(f"`{option.name}` must be one of {list(allowed)}, got {value!r}.")
        for name in ("micro_batch_tokens", "max_prompt_tokens", "max_turns", "max_completion_length", "step_tokens"):
            value = vars(self)[name]
            if not (isinstance(value, int) and value >= 1 or name == "step_tokens" and value is None):
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        betas = {} if self.role_beta is None else self.role_beta
        if not isinstance(betas, dict) or not all(isinstance(value, (int, float)) for value in betas.values()):
            raise ValueError(
                f"`role_beta` must map roles to numbers, such as {{'judge': 0.1}}, got {self.role_beta!r}."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` must be positive, got {self.temperature!r}: the loss needs log-probs of what was sampled."
            )
        if (self.updates == "tokens") != (self.step_tokens is not None):
            raise ValueError(
                f"`updates={self.updates!r}` and `step_tokens={self.step_tokens}` do not fit together: `updates='tokens'` needs "
                "`step_tokens`, and nothing else uses it."
            )
        for name, value in ({"beta": self.beta or 0.0} | self.role_betas).items():
            if not value >= 0:
                raise ValueError(f"The KL weight of `{name}` must not be negative, got {value!r}.")
        for name, bad, use in (
            ("scale_rewards", "batch", "'group' or 'none'"),
            ("multi_objective_aggregation", "normalize_then_sum", "'sum_then_normalize'"),
        ):
            if self.advantage_group != "episode" and vars(self)[name] == bad:
                raise ValueError(
                    f"`{name}={bad!r}` with `advantage_group={self.advantage_group!r}` is not supported. Use {use}."
                )

    @property
    def role_betas(self) -> dict[str, float]:
        """`role_beta` as it is once JSON has been read, empty without it."""
        return self.role_beta if isinstance(self.role_beta, dict) else {}

    @property
    def n_problems(self) -> int:
        """Problems of an iteration, over all processes."""
        return self.generation_batch_size // self.num_generations
