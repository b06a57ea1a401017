"""Define `MultiRoleGRPOConfig`: TRL's `GRPOConfig` and the options that several roles and adapters add to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from multirole.option_rules import RULES, broken_rules, listed, parse_role_weights


def plain(value: Any) -> Any:
    """Return the value of a member of an enumeration, and anything else unchanged."""
    return value.value if isinstance(value, Enum) else value


def accelerator_facts(args: GRPOConfig) -> Mapping[str, Any]:
    """Return the facts of `multirole.option_rules` that stand in `accelerator_config`."""
    config = args.accelerator_config
    return {
        "split_batches": config.split_batches,
        "dispatch_batches": config.dispatch_batches,
        "accumulated_steps": (config.gradient_accumulation_kwargs or {}).get("num_steps", 1),
    }


@dataclass
class MultiRoleGRPOConfig(GRPOConfig):
    """Configuration of [`MultiRoleGRPOTrainer`]. All other fields are those of TRL's `GRPOConfig`, with these meanings:

    - One global step is one *iteration*: `generation_batch_size` episodes (`generation_batch_size / num_generations` problems x
      `num_generations` episodes) and every optimizer step taken on them. `per_device_train_batch_size` and
      `gradient_accumulation_steps` are used to compute it, as in TRL. If it is given beside a `gradient_accumulation_steps` above 1, the two are
      the rows of an optimizer step (`step_rows`), as in TRL. `max_steps`, `eval_steps`, `save_steps`, `logging_steps` and `warmup_steps` count
      iterations.
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
        policy (`str` or `dict[str, Any]`, defaults to `"sp"`):
            Role to adapter map (paper section 3): `"sp"`, one adapter for all roles; `"ip"`, one for each role; or a map such as
            `{"generator": "a", "aggregator": "b"}`, also as text, `"generator=a,aggregator=b"`. A role of a map may also be played without being trained:
            by `"frozen"`, the base without an adapter; by `"frozen:FOLDER"`, a saved adapter; by `"past:a"`, earlier weights of the adapter `a`; or
            by a model behind an OpenAI-compatible server, `{"url": "http://host:8000/v1", "model": "name", "key_env": "VARIABLE"}`.
        updates (`str`, defaults to `"per_batch"`):
            Optimizer steps of an adapter in an iteration: `"per_batch"`, one per `step_rows` rows (paper section 5.1: a role with three slots takes
            three); `"one"`, one on all its rows; `"tokens"`, one per about `step_tokens` completion tokens.
        step_tokens (`int`, *optional*):
            Completion tokens per optimizer step with `updates="tokens"`.
        step_rows (`int`, *optional*):
            Rows per optimizer step with `updates="per_batch"`; by default `generation_batch_size`. TRL's `steps_per_generation` sets it: k times
            `gradient_accumulation_steps` are k optimizer steps, each on a k-th of the rows.
        old_logprobs (`str`, defaults to `"sampled"`):
            Denominator of the PPO ratio: `"sampled"` uses the engine's log-probs, `"recomputed"` the trainer's, computed before the update.
        max_staleness (`int`, defaults to `0`):
            Largest number of iterations between the adapters that sample a row and those that train it. With 0, the rollout waits for the update; with k, the
            next k iterations are played while it runs, by an engine that supports this (`"vllm_server"`, or `"transformers"` in float32). The correction is
            the PPO ratio with `old_logprobs="sampled"`, and TRL's importance weights with `"recomputed"`.
        credit (`str`, defaults to `"outcome"`):
            Estimator of each turn's advantage: a name in `multirole.credit.ESTIMATORS`, such as `"critic"` or `"leave_one_out"`, or `"module:Class"` of a
            [`CreditEstimator`]. By default every turn has TRL's group-relative advantage of its episode.
        credit_branches (`int`, defaults to `4`):
            Replies to each prompt, the episode's own included, with `credit="branches"` or `"leave_one_out"`; at least 2.
        process_reward (`float`, defaults to `0.0`):
            Weight of a second advantage, that of a turn's own correctness within its problem, role and round. A reward function must set
            `episode.reward` to a [`Reward`] with `is_correct`.
        role_order (`list[str]`, *optional*):
            Train one role per iteration, in this order and then again from its start: only the rows of that role take optimizer steps, on a
            rollout of the adapters that the last iteration has left. A role may stand in it several times, and one that does not is never trained.
            Also as text, `"generator,aggregator"`. By default every iteration trains all roles.
        target_kl (`float`, *optional*):
            Bound of KL(sampling policy || current policy) in nats per token, by role. It is estimated (k3) on the rows of every optimizer step but
            an adapter's first one in an iteration; once a role exceeds it, its rows take no more steps in that iteration. The name is that of
            TRL's earlier PPO and of stable-baselines3. It costs a forward pass per step.
        lr_ticks (`int`, defaults to `1`):
            Ticks by which the learning-rate schedule advances in an iteration; with 2, its `max_steps` ticks end in the middle of the run. With n
            adapters the k-th update (from 0) of iteration t is at tick `t * lr_ticks + k * lr_ticks // n`: as many ticks as adapters are one for
            each adapter's update, as in verl. It needs a schedule that is a function of the step, such as "cosine".
        lr_wraps (`bool`, defaults to `False`):
            With `lr_ticks` above 1, evaluate the schedule's formula beyond its end, where a cosine rises again. By default the rate stays at its
            final value.
        max_sampled_tokens (`int`, *optional*):
            Budget of sampled tokens: training ends with the iteration that spends it, or at `max_steps`, whichever is first. All completion tokens
            that the engine samples for training count, of every role, replays included; those of evaluations do not. Warm-up and schedule are read at
            the share of the budget that was spent before the iteration, where `max_steps` ticks are the whole: with `warmup_steps=0.1` the warm-up
            takes a tenth of the budget. A resumed run continues its count.
        role_beta (`dict[str, float]`, *optional*):
            KL weights of individual roles, which replace `beta`; also as text, `"judge=0.1,solver=0"`, or as JSON.
        teacher (`dict[str, Any]`, *optional*):
            The teachers of roles, whose reverse KL is added to the loss on the tokens that the role sampled (`multirole.teachers`): `"frozen"`,
            the base; `"frozen:FOLDER"`, a saved adapter on it; `"base:NAME"`, another model with the same vocabulary; or a vLLM server,
            `{"url": ..., "model": ..., "key_env": ...}`. Also as text, `"solver=frozen"`, or as JSON.
        distillation_weight (`dict[str, float]`, *optional*):
            Weights of the teachers' KL by role, 1 where none is given; also as text, `"solver=0.5"`, or as JSON. A role with weight 0 has no teacher.
        micro_batch_tokens (`int`, defaults to `16384`):
            Largest number of tokens in one forward pass, padding included. Changes memory and speed, not the gradient.
        past_every (`int`, defaults to `10`), past_selves (`int`, defaults to `4`):
            For roles of the policy map that are played by `"past:NAME"`, earlier weights of the adapter NAME: the iterations between two copies, and the
            number of copies that are kept. Each episode draws one of them.
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
            a GPU is visible and the model computes in half precision; else `"transformers"` if it is installed and implements the model (Llama, Mistral,
            Qwen2 and Qwen3 with LoRA); else `"generate"`, which runs any decoder and is slower. vLLM reads the base from where `model` was loaded: save a base
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

    policy: dict[str, Any] | str | None = "sp"  # with None, `TrlParser` takes text too
    updates: Literal["per_batch", "one", "tokens"] = "per_batch"
    step_tokens: int | None = None
    step_rows: int | None = None
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    max_staleness: int = 0
    credit: str = "outcome"
    credit_branches: int = 4
    process_reward: float = 0.0
    role_order: list[str] | str | None = None
    target_kl: float | None = None
    lr_ticks: int = 1
    lr_wraps: bool = False
    max_sampled_tokens: int | None = None
    role_beta: dict[str, float] | str | None = None
    teacher: dict[str, Any] | str | None = None
    distillation_weight: dict[str, float] | str | None = None
    micro_batch_tokens: int = 16384
    past_every: int = 10
    past_selves: int = 4
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
            self.role_beta = parse_role_weights(self.role_beta, "role_beta")
        if isinstance(self.distillation_weight, str):
            self.distillation_weight = parse_role_weights(self.distillation_weight, "distillation_weight")
        self.role_order = listed(self.role_order)
        self.check()
        if self.bf16 is None and not self.fp16:  # type: ignore[has-type]
            self.bf16 = not self.use_cpu and is_torch_bf16_gpu_available()
        if self.use_vllm:
            self.__dict__.update(engine="vllm_server" if self.vllm_mode == "server" else "vllm", use_vllm=False)
        n_eval, steps = self.num_generations_eval or 1, self.steps_per_generation
        self.__dict__.update(num_generations_eval=n_eval, per_device_eval_batch_size=n_eval)
        if self.generation_batch_size is not None and self.gradient_accumulation_steps == 1:
            self.per_device_train_batch_size = 1  # TRL wants a divisor of `generation_batch_size`; set below
        super().__post_init__()
        self.check()  # what TRL has read from text, and what other fields have set: `torch_compile_backend`, say, sets `torch_compile`
        self.check(**accelerator_facts(self))
        if steps or self.gradient_accumulation_steps > 1:
            asked_steps = self.steps_per_generation / self.gradient_accumulation_steps
            self.check(asked_steps=asked_steps)
            if asked_steps > 1:
                self.step_rows = self.generation_batch_size // int(asked_steps)
        # One HF step is one iteration, and its dataloader yields all episodes of this process at once.
        self.__dict__.update(
            per_device_train_batch_size=self.generation_batch_size // self.world_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
        )

    def check(self, **facts: Any) -> None:
        """Raise ValueError for the first of `multirole.option_rules` that is broken: of those that read one of `facts`, or, without facts, of all.

        Facts stay known in later calls, so that rules may read facts of several calls. A call without facts forgets them.
        """
        if not facts:
            self._check_types()
        known = self.__dict__["_facts"] = self.__dict__.get("_facts", {}) | facts if facts else {}
        options = {option.name: plain(vars(self)[option.name]) for option in fields(self)}
        defaults = {option.name: option.default for option in fields(self)}
        changed = {name: (value, defaults[name]) for name, value in options.items() if value != defaults[name]}
        rules = [rule for rule in RULES if not facts or facts.keys() & {*rule.reads}]
        for message in broken_rules(options | {"changed": changed} | known, rules):
            raise ValueError(message)

    def _check_types(self) -> None:
        """Refuse unknown words, and numbers given as text (ValueError)."""
        for option in fields(self):
            allowed, value = get_args(option.type), vars(self)[option.name]
            if get_origin(option.type) is Literal and value not in allowed:
                raise ValueError(f"`{option.name}` must be one of {list(allowed)}, got {value!r}.")
            if isinstance(value, str) and {int, float} & {option.type, *allowed} and str not in allowed:
                raise ValueError(
                    f"`{option.name}` must be a number, got the text {value!r}. YAML reads 1e-5 as text: write 1.0e-5 there, and without quotes."
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
        self.check(n_rows=n_rows)
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
