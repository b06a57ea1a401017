"""The settings of one cell of the experiment matrix: workflow x policy x task x scale x seed, and how it is trained.

Each setting is declared in one place: type and bounds, help, value in the paper (Table 7; the released code where the paper
gives none), and the values at small scales and under the presets "released_code" and "recommended". The notebooks' parameter cells are generated
from these declarations. This module imports neither torch nor trl.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr

from multirole.credit import ESTIMATORS, load_estimator
from multirole.option_rules import broken_rules, parse_role_weights
from multirole.policy import adapter_names, parse_policy, partner_facts
from multirole.types import Workflow
from multirole.workflows import WORKFLOWS
from multirole_study.experiment.base_config import is_base, recorded_name, scale_of
from multirole_study.experiment.cell_rules import RULES
from multirole_study.experiment.launch import MEMORY_SETTINGS, Launch
from multirole_study.experiment.old_names import OLD_NAMES, current_name, with_current_names, with_old_names
from multirole_study.experiment.presets import (
    OTHER_BASES,
    QWEN,
    QWEN_LENGTHS,
    QWEN_WORD_PROBLEMS,
    ROUNDS,
    SMOLLM2,
    SMOLLM2_ARITHMETIC,
    SMOLLM2_LENGTHS,
    TASKS,
    TINY,
    TINY_LENGTHS,
    is_small,
    is_tiny,
    preset_key,
    scale_lengths,
)
from multirole_study.experiment.settings import (
    Parameter,
    Settings,
    option,
    parameters,
    unknown_name,
    user_errors,
)
from multirole_study.experiment.settings import value as parsed
from multirole_study.experiment.user_files import load_user_object
from multirole_study.tasks.gym import PREFIX, Gym, is_gym
from multirole_study.tasks.gym import PROMPTS as SMALL_PROMPTS
from multirole_study.tasks.gym import parse as parse_gym

MAX_ID_LENGTH = 60
GYM_TRAIN, GYM_VALIDATION = 8192, 256
"""Number of reasoning-gym problems at the paper's scales."""
COORDINATES = ("workflow", "policy", "task", "scale", "seed", "preset")
"""The settings that place a cell in the matrix."""
OF_OTHER_MAPS = ("role_order", "past_every", "past_selves")
"""The settings that fit the roles of one map and do not carry over to another workflow or policy."""
USED_BY = {
    "rounds": ("eval_opt",),
    "n_voters": ("voting",),
    "aggregator_fallback": ("voting",),
    "n_workers": ("orch_workers",),
    "box_rule": ("eval_opt", "voting"),
}
"""The settings of some of the built-in workflows, with these."""
SCORED_BY = {
    "malformed_reward": "malformed_reward",
    "answer_fallback": "fallback",
    "unboxed_reward": "fallback",
    "code_reward": "reward",
}
"""The settings of some of the built-in tasks, with an attribute of these."""
EVALUATION_NAMES = ("adapters", "checkpoints", "num_generations_eval")
"""The parameters that an evaluation has and a training lacks."""
IPYTHON_NAMES = re.compile(r"In|Out|_+|_i+|_i?\d+|_[dio]h|_exit_code|__\w+__")
"""Names that IPython adds to a notebook's globals."""


class Cell(Settings):
    """One training run. Raises ValueError for settings that cannot work.

    A setting that is omitted or None takes the default of the scale and the preset, so every attribute of a cell has its
    final value. `policy` becomes the map of roles to adapters.

    Args:
        workflow: a name, "path/to/file.py:Name", or an object with `name`, `roles` and `async def run(problem, call)`.
        policy: "sp", "ip", or a map such as "generator=a,aggregator=b".
        task: "math", "code" (generated tasks of the same kind at a small scale), "gym:KIND?OPTION=VALUE" (`tasks.gym`),
            "path/to/file.py:name", or a task object.
    """

    workflow: Any = option("single, eval_opt, voting, orch_workers, or your own as examples/debate.py:Debate", "voting")
    policy: dict[str, str] = option("sp, ip, or a map of roles to adapters", "sp")
    task: Any = option("math, code, gym:KIND of reasoning-gym, or your own as examples/debate.py:task", "math")
    scale: Literal["tiny-r", "smollm2", "qwen-0.5b", "0.6b", "1.7b", "4b"] = option(
        "embedded model, SmolLM2-135M or Qwen2.5-Coder-0.5B on a CPU, or Qwen3 on a GPU node; by default that of the model's size, or tiny-r",
        None,
    )
    seed: int = option("seed of adapter initialisation, data order and sampling", 0, ge=0, le=2**32 - 1)
    preset: Literal["paper", "released_code", "recommended"] = option(
        "default values of all settings below; recommended pays each turn for its own part, see docs/recipe.md", "paper"
    )

    # how much is trained; an iteration is one batch of rollouts and all optimizer steps taken on it
    max_steps: int = option("number of iterations", 500, tiny=60, smollm2=16, qwen=16, ge=1, le=10**6)
    max_sampled_tokens: int | None = option(
        "budget of sampled tokens that ends a run before max_steps, and over which the schedule runs",
        None,
        ge=1,
        le=10**12,
    )
    n_problems: int = option("problems per iteration", 64, tiny=8, smollm2=4, qwen=4, ge=1, le=10**5)
    num_generations: int = option("episodes per problem, GRPO's group", 8, ge=2, le=10**4)
    learning_rate: float = option("peak learning rate", 2e-5, tiny=2e-3, smollm2=2e-4, qwen=1e-4, ge=0, le=10)

    # model, rows and lengths
    model: str | None = option(
        "a base in place of the pinned one, as a local folder, a GGUF file, or owner/name of the Hub with @revision",
        None,
    )
    data: str | None = option("a local file of rows, in place of the download", None)
    n_train: int | None = option(
        "use only the first n training problems", None, tiny=4096, smollm2=1024, qwen=1024, ge=1, le=10**7
    )
    n_validation: int | None = option(
        "use only the first n validation problems", 256, tiny=256, smollm2=64, qwen=64, ge=1, le=10**7
    )
    max_prompt_tokens: int = option(
        "largest prompt of a turn, in tokens",
        20480,
        tiny=TINY_LENGTHS["math"][0],
        smollm2=SMOLLM2_LENGTHS["math"][0],
        qwen=QWEN_LENGTHS["math"][0],
        ge=1,
        le=10**7,
    )
    max_completion_length: int = option(
        "largest completion of a turn, in tokens",
        5120,
        tiny=TINY_LENGTHS["math"][1],
        smollm2=SMOLLM2_LENGTHS["math"][1],
        qwen=QWEN_LENGTHS["math"][1],
        ge=1,
        le=10**7,
    )
    temperature: float = option("sampling temperature in training and validation", 0.7, tiny=1.0, ge=0.01, le=100)
    renderer: Literal["chat_template", "released_code"] = option(
        "how prompts are rendered", "chat_template", released="released_code"
    )
    eval_steps: int = option("iterations between validations", 10, smollm2=4, qwen=4, ge=1, le=10**6)
    save_steps: int = option("iterations between checkpoints", 5, tiny=10, smollm2=4, qwen=4, ge=1, le=10**6)

    # sizes of the built-in workflows
    rounds: int = option("number of drafts (and of verdicts) of Eval-Opt", 3, tiny=3, ge=1, le=100)
    n_voters: int = option("number of generators of Voting", 3, ge=1, le=100)
    n_workers: int = option("largest number of workers of Orch-Workers", 3, ge=1, le=100)
    aggregator_fallback: Literal["candidate_1", "first_digit"] = option(
        "candidate selected when the aggregator writes no box",
        "candidate_1",
        smollm2="first_digit",
        qwen="first_digit",
        released="first_digit",
    )
    box_rule: Literal["last_box", "box_or_line", "first_literal"] = option(
        "box that is read as a verdict or selection, in any style or literally",
        "last_box", tiny="first_literal", released="first_literal",
    )  # fmt: skip

    # rewards, and what becomes of them
    malformed_reward: float = option("reward of a math answer without a box (ours)", -0.1, released=0.0, ge=-1, le=1)
    answer_fallback: Literal["none", "last_number"] = option(
        "answer to a reasoning-gym problem when the reply has no box", "none", smollm2="last_number"
    )
    unboxed_reward: float = option("share of the reward that an unboxed answer gets", 1.0, smollm2=0.5, ge=0, le=1)
    code_reward: Literal["fraction", "all_pass"] = option(
        "share of the hidden tests that pass, or 1 if all pass", "fraction", released="all_pass"
    )
    advantage_group: Literal["episode", "role", "slot"] = option(
        "unit that GRPO compares within a problem, episodes or the rows of a role or slot", "episode", released="role"
    )
    credit: str = option(
        "estimator of each turn's credit, such as outcome, critic or shapley, see docs/credit.md",
        "outcome",
        recommended="critic",
    )
    credit_branches: int = option(
        "replies compared at each turn, if credit is branches or leave_one_out", 4, ge=2, le=100
    )
    process_reward: float = option("weight of each turn's own correctness", 0.0, ge=0, le=10**6)
    allow_unsafe_code: bool = option("run model-written code without a sandbox; only in a virtual machine", False)

    # adapters, optimizer and schedule
    lora_r: int = option("LoRA rank, on every linear layer", 64, tiny=16, smollm2=16, qwen=16, ge=1, le=512)
    lora_alpha: int = option("LoRA's scaling is alpha over rank", 32, tiny=16, smollm2=32, qwen=32, ge=1, le=10**6)
    warmup_steps: int = option("length of warm-up, in ticks of lr_clock", 15, tiny=5, smollm2=2, qwen=2, ge=0, le=10**6)
    lr_schedule: Literal["cosine", "constant"] = option(
        "learning rate schedule after warm-up", "cosine", released="constant"
    )
    lr_clock: Literal["iteration", "update_call", "update_call_wrapped"] = option(
        "the schedule ticks once per iteration, or once per adapter and iteration; wrapped, a cosine then rises again",
        "iteration",
        released="update_call",
    )
    lr_clock_ticks: int | None = option(
        "ticks of the schedule per iteration with a clock per update call, by default one per adapter",
        None,
        ge=1,
        le=100,
    )
    weight_decay: float = option("weight decay of AdamW (not in Table 7)", 0.01, ge=0, le=10**6)
    max_grad_norm: float = option("gradient norm at which an optimizer step is clipped", 1.0, ge=1e-6, le=1e30)
    updates: Literal["per_batch", "one", "tokens"] = option(
        "optimizer steps of an adapter, one per batch of episodes, one per iteration, or by step_tokens", "per_batch"
    )
    step_tokens: int | None = option("completion tokens per optimizer step, if updates is tokens", None, ge=1, le=10**9)
    role_order: str | None = option(
        "the roles that are trained one per iteration, in turn, such as generator,aggregator; all by default", None
    )
    target_kl: float | None = option(
        "bound of the KL to the sampling policy at which a role takes no more steps in an iteration",
        None,
        gt=0,
        le=10**6,
    )
    past_every: int = option("iterations between two copies of an adapter that past:NAME plays", 10, ge=1, le=10**6)
    past_selves: int = option("number of copies of which past:NAME plays one per episode", 4, ge=1, le=100)
    minibatch_split: Literal["even", "sequential"] = option(
        "mini-batches of equal size, or full ones and a partial last one", "even", released="sequential"
    )
    row_order: Literal["shuffled", "mountain"] = option(
        "order of an iteration's rows, shuffled or by length as short, long, short", "shuffled", released="mountain"
    )

    # the clipped objective
    epsilon: float = option("lower clip range of the PPO ratio (verl's default)", 0.2, ge=0, le=10**6)
    epsilon_high: float = option("upper clip range of the PPO ratio", 0.28, ge=0, le=10**6)
    delta: float = option("largest PPO ratio for negative advantages (released code)", 3.0, ge=1, le=10**6)
    old_logprobs: Literal["sampled", "recomputed"] = option(
        "old log-probs of the PPO ratio, from the engine or recomputed before the update",
        "recomputed",
        tiny="sampled",
        smollm2="sampled",
        qwen="sampled",
    )
    beta: float = option("weight of the KL penalty to the base model", 0.0, ge=0, le=10**6)
    role_beta: dict[str, float] | None = option("a dict of KL weights by role, which replace beta", None)

    # rollouts during the update
    max_staleness: int = option("updates between the adapters that sample and those that train", 0, ge=0, le=100)
    max_failed_episodes: int = option("episodes of one rollout whose workflow may raise", 0, ge=0, le=10**6)

    # engine and precision
    engine: Literal["auto", "transformers", "generate", "vllm", "vllm_server"] = option(
        "auto takes vllm on a GPU; vllm_server uses servers elsewhere; generate runs any decoder, slowly",
        "auto",
        smollm2="transformers",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "dtype of the base model; adapters are float32. auto is bfloat16 where the processor multiplies it in hardware, else float32",
        "bfloat16", tiny="float32", smollm2="auto", qwen="auto",
    )  # fmt: skip
    fixed_launch: str = option(
        "launch options for memory that this run compares, as in an A/A arm, so that its name contains them", ""
    )

    _workflow: Workflow | None = PrivateAttr(None)  # user-supplied
    _task: Any = PrivateAttr(None)
    _gym: Gym | None = PrivateAttr(None)
    _digests: dict[str, str] = PrivateAttr(default_factory=dict)
    _is_scale_by_size: bool = PrivateAttr(False)

    def __init__(
        self,
        workflow: str | Workflow,
        policy: str | dict[str, str],
        task: object = "math",
        scale: str | None = None,
        seed: int = 0,
        preset: str = "paper",
        **settings: object,
    ) -> None:
        gym = parse_gym(task) if is_gym(task) else None
        task = task if gym is None else gym.spec
        model = settings.get("model")
        is_by_size = scale is None and isinstance(model, str) and model not in OTHER_BASES and is_base(model)
        scale = scale_of(str(model)) if is_by_size else TINY if scale is None else scale
        user_objects = {
            "workflow": load_user_object("workflow", workflow, WORKFLOWS),
            "task": None if gym else load_user_object("task", task, TASKS),
        }
        objects_by_name = {name: entry[0] for name, entry in user_objects.items() if entry is not None}
        roles = list(objects_by_name.get("workflow", WORKFLOWS.get(str(workflow), WORKFLOWS["voting"])()).roles)
        explicit = {name: value for name, value in with_current_names(settings).items() if value is not None}
        if isinstance(weights := explicit.get("role_beta"), str) and not weights.lstrip().startswith("{"):
            explicit["role_beta"] = parse_role_weights(weights, "role_beta")
        Settings.__init__(
            self, workflow=workflow, policy=parse_policy(policy, roles), task=task, scale=scale, seed=seed, preset=preset,
            **preset_values(workflow, task, scale, preset, explicit.get("data")) | explicit,
        )  # fmt: skip
        self._workflow, self._task, self._gym = objects_by_name.get("workflow"), objects_by_name.get("task"), gym
        self._is_scale_by_size = is_by_size
        self._digests = {f"{name}_sha256": entry[1] for name, entry in user_objects.items() if entry is not None}
        if broken := self._broken_rules():
            raise ValueError("\n".join(broken))

    def _broken_rules(self) -> list[str]:
        """Return a message for each rule of the library and of cells that the settings break."""
        shared = {"roles": list(self.policy), "changed": self.changed()} | partner_facts(self.policy)
        facts = shared | {
            "ticks": self.ticks, "treatment": self.treatment,
            "task_label": self.task_label, "has_own_task": self._task is not None, "has_gym_task": self._gym is not None,
            "replays_episodes": self.credit in ESTIMATORS and self.replays_episodes,
            "credit_misfit": self._credit_misfit(),
        }  # fmt: skip
        return [
            *broken_rules(dict(self) | shared),
            *broken_rules(dict(self) | facts, RULES),
        ]

    def _credit_misfit(self) -> str:
        """Return why the estimator of credit has no meaning for a user-supplied workflow; "" if it has one."""
        if self._workflow is None or self.credit == "outcome" or self.credit not in ESTIMATORS:
            return ""
        try:
            load_estimator(self.credit).check(self._workflow)
        except ValueError as error:
            return str(error)
        return ""

    @property
    def ticks(self) -> int:
        """The number of ticks of the learning-rate schedule."""
        return self.max_steps * self.ticks_per_iteration

    @property
    def ticks_per_iteration(self) -> int:
        """The number of ticks of the schedule in an iteration, by `lr_clock` and `lr_clock_ticks`."""
        if self.lr_clock == "iteration":
            return 1
        return self.lr_clock_ticks or len(adapter_names(self.policy))

    def remarks(self) -> list[str]:
        """Return a sentence for each setting that is allowed and does less than its name says; a run prints them when it starts."""
        said = []
        if self._is_scale_by_size:
            chosen = ("max_prompt_tokens", "max_completion_length", "n_problems", "learning_rate", "lora_r", "dtype")
            said.append(
                f"model={recorded_name(str(self.model))!r} is nearest in size to the base of scale={self.scale!r}, so its tasks, prompts and settings "
                f"are that scale's: {', '.join(f'{name}={getattr(self, name)}' for name in chosen)}. `scale` chooses others."
            )
        if self.scale == QWEN and "learning_rate" not in self.changed():
            said.append(
                f"The default learning_rate={self.learning_rate:g} of scale={QWEN!r} is not tuned. In single runs on programs Voting-SP rose at 5e-5 and fell at "
                "1e-4, and a single agent rose at 2e-4 (docs/language_models.md). Set it."
            )
        if self.warmup_steps >= self.ticks:
            said.append(
                f"The warm-up of {self.warmup_steps} ticks does not end within the run's {self.ticks}, so the learning rate stays below "
                f"{self.learning_rate:g}. Write warmup_steps=0 for a trial at full rate."
            )
        if self.max_sampled_tokens is not None:
            said.append(
                f"The run ends once it has sampled {self.max_sampled_tokens:,} tokens, over which its warm-up and schedule run: {self.max_steps} iterations "
                f"are the most, and the warm-up takes {self.warmup_steps / self.max_steps:.0%} of the budget."
            )
        if idle := list(filter(self._is_idle, self.changed())):
            said.append(
                f"Not used by workflow={self.workflow_name!r} and task={self.task_label!r} with credit={self.credit!r}: {', '.join(idle)}. Only the "
                "run's name changes."
            )
        return said

    def _is_idle(self, name: str) -> bool:
        """Return whether a setting is of other workflows, tasks or estimators than this cell's."""
        if name in SCORED_BY:
            is_built_in = self._task is None and hasattr(self.make_task(), SCORED_BY[name])
            return not is_built_in or (name == "unboxed_reward" and self.answer_fallback == "none")
        if name == "credit_branches":
            return not load_estimator(self.estimator).has_branches
        return self.workflow_name not in USED_BY.get(name, (self.workflow_name,))

    # ---- workflow, task and policy

    @property
    def estimator(self) -> str:
        """The library's `credit`: of the released code's `advantage_group`, or the cell's."""
        released = {"role": "agent", "slot": "multirole_study.experiment.released_code:SlotCredit"}
        return released.get(self.advantage_group, self.credit)

    @property
    def replays_episodes(self) -> bool:
        """Whether the estimator of credit plays episodes again."""
        return self.estimator != "outcome" and load_estimator(self.estimator).replays_episodes

    @property
    def workflow_name(self) -> str:
        """The name of the built-in or user-supplied workflow."""
        return str(self.workflow) if self._workflow is None else self._workflow.name

    @property
    def task_label(self) -> str:
        """The task's name: "math", "code", a kind of reasoning-gym such as "gym_products", or a user-supplied task's."""
        if self._gym is not None:
            return self._gym.name
        return str(self.task) if self._task is None else self._task.name

    @property
    def policy_name(self) -> str:
        """ "sp", "ip" or the map as text."""
        return policy_name(self.policy)

    def make_workflow(self) -> Workflow:
        """Return the workflow that this cell runs, with the paper's sizes (Table 7, "workflow caps")."""
        if self._workflow is not None:
            return self._workflow
        sizes: dict[str, tuple] = {
            "eval_opt": (self.rounds, None, self.box_rule),
            "voting": (self.n_voters, self.aggregator_fallback, None, self.box_rule),
            "orch_workers": (self.n_workers,),
        }
        return WORKFLOWS[self.workflow](*sizes.get(self.workflow, ()))

    def make_task(self) -> Any:
        """Return the task that this cell trains on; small scales use a generated task of the same kind."""
        from multirole_study.tasks.code import Code  # these import datasets
        from multirole_study.tasks.functions import Functions
        from multirole_study.tasks.math import Math
        from multirole_study.tasks.programs import Programs
        from multirole_study.tasks.tiny_chain import TinyChain
        from multirole_study.tasks.tiny_pipe import TinyPipe

        if self._task is not None:
            return self._task
        of_scale = {SMOLLM2: SMOLLM2_ARITHMETIC, QWEN: QWEN_WORD_PROBLEMS} if self.task == "math" else {}
        gym = parse_gym(of_scale[self.scale]) if self.scale in of_scale else self._gym
        if gym is not None:
            return replace(
                gym,
                prompts=SMALL_PROMPTS if self.scale in (TINY, SMOLLM2) else "math",
                malformed_reward=self.malformed_reward,
                fallback=self.answer_fallback,
                unboxed_reward=self.unboxed_reward,
            )
        if self.scale == SMOLLM2:
            return Functions(self.code_reward)
        if self.scale == QWEN:
            return Programs(self.code_reward)
        if self.task == "math":
            return TinyChain(self.malformed_reward) if is_tiny(self.scale) else Math(self.data, self.malformed_reward)
        return TinyPipe(self.code_reward) if is_tiny(self.scale) else Code(self.data, self.code_reward)

    # ---- names and records

    @property
    def id(self) -> str:
        """The name of the run's folder: the coordinates and a hash of the settings that differ from the preset, by their earlier names."""
        return self._id

    @cached_property  # with an underscore: `dict(self)` has all other attributes
    def _id(self) -> str:
        def digest() -> list[str]:
            return [hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]] * bool(changed)

        changed = with_old_names(self.changed())
        policy = self.policy_name if self.policy_name in ("sp", "ip") else "map"
        names, rest = [self.workflow_name, policy, self.task_label], [f"s{self.seed}"]
        rest += [self.preset] * (self.preset != "paper")
        if len("-".join([*names, *rest, *digest()])) > MAX_ID_LENGTH:  # the hash has what is cut
            names = [name[:10] for name in names]
            changed |= {"task": self.task} if self._gym is not None else {}
        return "-".join([*names, *rest, *digest()])

    def changed(self) -> dict[str, object]:
        """Return what distinguishes this cell from others with the same coordinates.

        That is: settings that differ from the preset, digests of user-supplied code, and a policy map.
        """
        return dict(self._changed)

    @cached_property
    def _changed(self) -> dict[str, object]:
        current, preset = self.to_dict(), preset_values(self.workflow, self.task, self.scale, self.preset, self.data)
        policy = {} if self.policy_name in ("sp", "ip") else {"policy": self.policy}
        options = {"task": self.task} if self._gym is not None and self.task != PREFIX + self._gym.kind else {}
        changed = {name: current[name] for name, value in self if name in current and value != preset.get(name, value)}
        return changed | policy | options | self.treatment | self._digests

    @property
    def uses_sandbox(self) -> bool:
        """Whether a built-in task grades in the sandbox: programs, reasoning-gym's scores, and mathematics at the paper's scales."""
        return self.task == "code" or self._gym is not None or (self.task == "math" and not is_tiny(self.scale))

    def to_dict(self) -> dict[str, object]:
        """Return every field as JSON data, with digests of user-supplied code.

        Paths are reduced to their last part; provenance.json has the checksums.
        """
        paths = {"model": self.model and recorded_name(self.model), "data": self.data and Path(self.data).name}
        task = self.task if self._gym is not None else self.task_label
        settings = {name: value for name, value in self if name != "fixed_launch"} | self.treatment
        return settings | {"workflow": self.workflow_name, "task": task} | paths | self._digests

    @classmethod
    def from_record(cls, settings: dict[str, Any]) -> "Cell":
        """Return the cell whose `to_dict` a run has recorded, without user-supplied code.

        Older records have `micro_batch_tokens`, which is a treatment where it is not the scale's.
        """
        settings = with_current_names(settings)
        launched = {name: value for name, value in settings.items() if name in MEMORY_SETTINGS}
        usual = Launch().memory(settings["scale"])
        fixed = {name: value for name, value in launched.items() if value != usual[name]}
        fields = {name: value for name, value in settings.items() if name in cls.model_fields}
        return cls(**fields, fixed_launch=as_text(fixed))

    @property
    def treatment(self) -> dict[str, Any]:
        """The launch options that belong to this run."""
        pairs = [item.partition("=") for item in self.fixed_launch.split(",") if item]
        return with_current_names({name.strip(): parsed(text.strip()) for name, _, text in pairs})

    def launched(self, launch: Launch) -> Launch:
        """Return the launch with the options that belong to this run."""
        return launch.replace(**self.treatment)

    def sibling(self, workflow: str, policy: str) -> "Cell":
        """Return the cell of another workflow and policy with the same changed options, except those of other workflows, of roles and of partners."""
        changed = {"fixed_launch", *self.changed()} - {*COORDINATES, *OF_OTHER_MAPS}
        changed -= {name for name, workflows in USED_BY.items() if workflow not in workflows}
        options = {name: value for name, value in self if name in changed and not isinstance(value, dict)}
        return Cell(workflow, policy, self.task, self.scale, self.seed, self.preset, **options)

    def parameters(self) -> dict[str, object]:
        """Return every field, so that another process can rebuild this cell."""
        for name, value in (("workflow", self.workflow), ("task", self.task)):
            if not isinstance(value, str):
                raise ValueError(  # noqa: TRY004
                    f"`{name}` is an object of this process and cannot be sent to other processes. Write it as 'path/to/file.py:Name', "
                    "or start your script under torchrun with n_processes=1."
                )
        chosen = {"scale"} if self._is_scale_by_size else set()  # which that process chooses again, and says so
        return {name: value for name, value in self if name not in chosen}

    @classmethod
    @user_errors()
    def from_parameters(cls, values: dict[str, Any], others: Iterable[str] = ()) -> "tuple[Cell, Launch]":
        """Build a cell and its launch options from a notebook's `globals()`.

        Every plain constant counts as a parameter, so a misspelt `-p` name is an error and is not ignored. None means
        "use the default". `others` are further names that the error message may suggest.
        """
        plain = (str, int, float, bool, dict, list, tuple, type(None))
        values = {name: v for name, v in values.items() if isinstance(v, plain) and not IPYTHON_NAMES.fullmatch(name)}
        known = [parameter.name for parameter in cell_parameters()]
        for name in values:
            if current_name(name) in EVALUATION_NAMES and not others:
                raise ValueError(
                    f"`{name}` is not a known parameter of a training, but of an evaluation. Leave it out, or evaluate the trained cell "
                    "with `multirole evaluate` or notebooks/eval_cell.ipynb."
                )
            if name not in known and name not in OLD_NAMES:
                raise ValueError(unknown_name(name, [*others, *known]))
        values = {name: value for name, value in with_current_names(values).items() if value is not None}
        values = {"workflow": "voting", "policy": "sp"} | values
        launch = Launch(**{name: values.pop(name) for name in Launch.model_fields if name in values})
        return cls(**values), launch

    def replace(self, **changes: Any) -> "Cell":
        """Return a cell with some settings changed."""
        return super().replace(**with_current_names(changes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.scale, self.id))


def as_text(options: dict[str, Any]) -> str:
    """Return launch options as `Cell.fixed_launch`."""
    return ",".join(f"{name}={option}" for name, option in options.items())


def policy_name(policy: dict[str, str]) -> str:
    """Return "sp", "ip" or the map as text."""
    for name in ("sp", "ip"):
        if policy == parse_policy(name, list(policy)):
            return name
    return ",".join(f"{role}={adapter}" for role, adapter in policy.items())


def cell_parameters() -> list[Parameter]:
    """Return the parameters of the training notebook, in order."""
    return parameters(Cell, Launch)


def preset_values(workflow: object, task: Any, scale: object, preset: object, data: object = None) -> dict[str, Any]:
    """Return the default of every setting for a workflow, task, scale, preset and `data`."""
    values: dict[str, Any] = {}
    for name, field in Cell.model_fields.items():
        if name not in COORDINATES:
            special: Any = field.json_schema_extra
            values[name] = special.get(preset_key(scale), field.default)
            if preset == "recommended":
                values[name] = special.get("recommended", values[name])
            elif preset == "released_code" and not (is_small(scale) and name == "renderer"):
                values[name] = special.get("released", values[name])
    is_user_task = not isinstance(task, str) or (task not in TASKS and not is_gym(task))
    kind = task if task in TASKS else "math"
    like = workflow if isinstance(workflow, str) and workflow in WORKFLOWS else "voting"
    values["rounds"] = ROUNDS[kind]
    values["max_prompt_tokens"], values["max_completion_length"] = scale_lengths(scale, like, kind)
    if is_user_task or data is not None or (scale == SMOLLM2 and task == "code"):
        values |= {"n_train": None, "n_validation": None}  # all rows
    elif scale == QWEN and task == "code":
        values["n_train"] = None  # all rows; to validate on all would cost more than an iteration
    elif is_gym(task) and values["n_train"] is None:  # these tasks are endless
        values |= {"n_train": GYM_TRAIN, "n_validation": GYM_VALIDATION}
    if preset == "released_code" and (workflow, task) == ("voting", "math"):
        values["advantage_group"] = "slot"
    return values
