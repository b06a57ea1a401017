"""One cell of the matrix: workflow x policy x task x scale x seed, and every setting that trains it.

Each setting is one line: its type and bounds, its help, its value in the paper (Table 7; the released code where the paper is
silent), and what the tiny scales and `preset="released_code"` put in its place. The notebooks' parameter cells list the
same lines. Imports neither torch nor trl.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr

from multirole.core.policy import parse_policy
from multirole.core.types import Workflow
from multirole.workflows import WORKFLOWS
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.presets import (
    ROUNDS,
    SMOLLM2,
    SMOLLM2_ARITHMETIC,
    SMOLLM2_LENGTHS,
    TASKS,
    TINY_LENGTHS,
    is_small,
    is_tiny,
    preset_key,
    scale_lengths,
)
from multirole_study.experiment.settings import (
    Parameter,
    Settings,
    looked_in,
    option,
    parameters,
    refusing,
    unknown_name,
)
from multirole_study.experiment.user_files import own_object
from multirole_study.tasks.gym import PREFIX, Gym, is_gym
from multirole_study.tasks.gym import parse as parse_gym

LONGEST_ID = 60
GYM_TRAIN, GYM_VALIDATION = 8192, 256
"""Problems of reasoning-gym at the paper's scales."""
COORDINATES = ("workflow", "policy", "task", "scale", "seed", "preset")
"""Where a cell stands in the matrix."""
IPYTHONS_OWN = re.compile(r"In|Out|_+|_i+|_i?\d+|_[dio]h|_exit_code|__\w+__")
"""Names that a notebook's globals hold besides parameters."""


class Cell(Settings):
    """One training run. Raises ValueError for settings that cannot work.

    Settings that are not given, or given as None, take the value of the scale and the preset, so that attributes of a cell
    are settled values. `policy` is settled as the map of roles to adapters.

    Args:
        workflow: a name, "path/to/file.py:Name", or an object with `name`, `roles` and `async def run(problem, call)`.
        policy: "sp", "ip", or a map such as "generator=a,aggregator=b".
        task: "math", "code" (generated tasks of the same kind at a small scale), "gym:KIND?OPTION=VALUE" (`tasks.gym`),
            "path/to/file.py:name", or a task object.
    """

    workflow: Any = option("single, eval_opt, voting, orch_workers, or your own as examples/debate.py:Debate", "voting")
    policy: dict[str, str] = option("sp, ip, or a map of roles to adapters", "sp")
    task: Any = option("math, code, gym:KIND of reasoning-gym, or your own as examples/debate.py:task", "math")
    scale: Literal["tiny-r", "smollm2", "0.6b", "1.7b", "4b"] = option(
        "embedded here, SmolLM2-135M on a CPU, or Qwen3 on a GPU node", "tiny-r"
    )
    seed: int = option("of the adapters, the data order and every sampled token", 0, ge=0, le=2**32 - 1)
    preset: Literal["paper", "released_code"] = option("of all settings below", "paper")

    # how much is trained; an iteration is one batch of rollouts and all optimizer steps taken on it
    iterations: int = option("batches of rollouts", 500, tiny=60, smollm2=30, ge=1, le=10**6)
    n_problems: int = option("problems per iteration", 64, tiny=8, smollm2=4, ge=1, le=10**5)
    n_episodes: int = option("episodes per problem, GRPO's group", 8, ge=2, le=10**4)
    learning_rate: float = option("peak", 2e-5, tiny=2e-3, smollm2=2e-4, ge=0, le=10)

    # model, rows and lengths
    model: str | None = option("a local folder with a model and its tokenizer, in place of the pinned one", None)
    data: str | None = option("a local file of rows, in place of the download", None)
    n_train: int | None = option("the first so many training problems", None, tiny=4096, smollm2=1024, ge=1, le=10**7)
    n_validation: int | None = option(
        "the first so many validation problems", None, tiny=256, smollm2=64, ge=1, le=10**7
    )
    max_prompt_tokens: int = option(
        "cap of one turn's prompt",
        20480,
        tiny=TINY_LENGTHS["math"][0],
        smollm2=SMOLLM2_LENGTHS["math"][0],
        ge=1,
        le=10**7,
    )
    max_response_tokens: int = option(
        "cap of a turn's completion",
        5120,
        tiny=TINY_LENGTHS["math"][1],
        smollm2=SMOLLM2_LENGTHS["math"][1],
        ge=1,
        le=10**7,
    )
    temperature: float = option("of training and validation", 0.7, tiny=1.0, ge=0.01, le=100)
    renderer: Literal["chat_template", "released_code"] = option(
        "of prompts", "chat_template", released="released_code"
    )
    eval_every: int = option("iterations between validations", 10, ge=1, le=10**6)
    save_every: int = option("iterations between checkpoints", 5, tiny=10, smollm2=10, ge=1, le=10**6)

    # sizes of the built-in workflows
    rounds: int = option("drafts, and as many verdicts, of Eval-Opt", 3, tiny=3, ge=1, le=100)
    n_voters: int = option("generators of Voting", 3, ge=1, le=100)
    n_workers: int = option("strategies, and so workers, of Orch-Workers at most", 3, ge=1, le=100)
    aggregator_fallback: Literal["candidate_1", "first_digit"] = option(
        "what a selection without a box is", "candidate_1", released="first_digit"
    )
    box_rule: Literal["last_box", "first_literal"] = option(
        "which box is a verdict or a selection, in any style or literally",
        "last_box", tiny="first_literal", released="first_literal",
    )  # fmt: skip

    # rewards, and what becomes of them
    malformed_reward: float = option("of a math answer without a box (ours)", -0.1, released=0.0, ge=-1, le=1)
    answer_fallback: Literal["none", "last_number"] = option(
        "what answers a problem of reasoning-gym where there is no box", "none", smollm2="last_number"
    )
    unboxed_reward: float = option("part of the reward that such an answer gets", 1.0, smollm2=0.5, ge=0, le=1)
    code_reward: Literal["fraction", "all_pass"] = option(
        "the part of the hidden tests that passed, or 1 if all do", "fraction", released="all_pass"
    )
    advantage_group: Literal["episode", "role", "slot"] = option(
        "what is compared within a problem, episodes or the rows of a role or slot", "episode", released="role"
    )
    process_reward: float = option("weight of whether the turn itself was right", 0.0, ge=0, le=10**6)
    allow_unsafe_code: bool = option("train on code without a sandbox; only in a virtual machine", False)

    # adapters, optimizer and schedule
    lora_rank: int = option("of every linear layer", 64, tiny=16, smollm2=16, ge=1, le=512)
    lora_alpha: int = option("LoRA's scaling is alpha over rank", 32, tiny=16, smollm2=32, ge=1, le=10**6)
    warmup_iterations: int = option("ticks of the clock before the peak", 15, tiny=5, smollm2=3, ge=0, le=10**6)
    lr_schedule: Literal["cosine", "constant"] = option("after warm-up", "cosine", released="constant")
    lr_clock: Literal["iteration", "update_call"] = option(
        "the schedule ticks once per iteration, or once per adapter and iteration", "iteration", released="update_call"
    )
    weight_decay: float = option("of AdamW (not in Table 7)", 0.01, ge=0, le=10**6)
    max_grad_norm: float = option("of one optimizer step", 1.0, ge=1e-6, le=1e30)
    updates: Literal["per_batch", "one", "tokens"] = option(
        "an adapter's optimizer steps, one per batch of episodes, one per iteration, or by step_tokens", "per_batch"
    )
    step_tokens: int | None = option("completion tokens of a step, where updates is tokens", None, ge=1, le=10**9)
    minibatch_split: Literal["even", "sequential"] = option(
        "mini-batches of equal size, or full ones and a partial last one", "even", released="sequential"
    )
    row_order: Literal["shuffled", "mountain"] = option(
        "of an iteration's rows, shuffled or short, long, short", "shuffled", released="mountain"
    )

    # the clipped objective
    clip_low: float = option("of the PPO ratio (verl's default)", 0.2, ge=0, le=10**6)
    clip_high: float = option("the upper side", 0.28, ge=0, le=10**6)
    dual_clip: float = option("largest ratio where the advantage is negative (released code)", 3.0, ge=1, le=10**6)
    old_logprobs: Literal["sampled", "recomputed"] = option(
        "of the ratio, from the engine or from the trainer before the update",
        "recomputed",
        tiny="sampled",
        smollm2="sampled",
    )
    kl_anchor: float | dict[str, float] = option("weight of KL to the base, or a dict of weights by role", 0.0)

    # engine and precision
    engine: Literal["auto", "transformers", "generate", "vllm"] = option(
        "auto takes vllm on a GPU; generate runs any decoder, slowly", "auto", smollm2="transformers"
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "of the base, adapters are float32", "bfloat16", tiny="float32", smollm2="float32"
    )
    micro_batch_tokens: int = option(
        "padded tokens of one forward pass", 40960, tiny=1024, smollm2=1024, ge=1, le=10**9
    )

    _workflow: Workflow | None = PrivateAttr(None)  # one's own
    _task: Any = PrivateAttr(None)
    _gym: Gym | None = PrivateAttr(None)
    _digests: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(
        self,
        workflow: str | Workflow,
        policy: str | dict[str, str],
        task: object = "math",
        scale: str = "tiny-r",
        seed: int = 0,
        preset: str = "paper",
        **settings: object,
    ) -> None:
        gym = parse_gym(task) if is_gym(task) else None
        task = task if gym is None else gym.spec
        found = {
            "workflow": own_object("workflow", workflow, WORKFLOWS),
            "task": None if gym else own_object("task", task, TASKS),
        }
        own = {name: one[0] for name, one in found.items() if one is not None}
        roles = list(own.get("workflow", WORKFLOWS.get(str(workflow), WORKFLOWS["voting"])()).roles)
        given = {name: value for name, value in settings.items() if value is not None}
        Settings.__init__(
            self, workflow=workflow, policy=parse_policy(policy, roles), task=task, scale=scale, seed=seed, preset=preset,
            **preset_values(workflow, task, scale, preset) | given,
        )  # fmt: skip
        self._workflow, self._task, self._gym = own.get("workflow"), own.get("task"), gym
        self._digests = {f"{name}_sha256": one[1] for name, one in found.items() if one is not None}
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Values that are good alone and impossible together, and paths that do not exist."""
        if set(self.anchors) != set(self.policy) or min(self.anchors.values()) < 0:
            yield f"`kl_anchor` must be a number >= 0, or a dict of them by role ({', '.join(self.policy)}), got {self.kl_anchor}."
        if self.n_train is not None and self.n_train < self.n_problems:
            yield f"`n_train` must be at least `n_problems` ({self.n_problems}), got {self.n_train}."
        ticks = self.iterations * (len(set(self.policy.values())) if self.lr_clock == "update_call" else 1)
        if self.warmup_iterations > ticks and "warmup_iterations" in self.changed():  # the preset's may exceed a trial
            yield f"`warmup_iterations` must be at most the {ticks} ticks of `iterations`, got {self.warmup_iterations}."
        if (self.updates == "tokens") != (self.step_tokens is not None):
            yield f"`updates='tokens'` needs `step_tokens`, such as 4096, and nothing else does; got {self.step_tokens}."
        if self.updates == "tokens" and self.minibatch_split == "sequential":
            yield "`updates='tokens'` has no full step to divide a partial one by. Write minibatch_split='even'."
        for name, path in (("model", self.model), ("data", self.data)):
            if path is not None and is_tiny(self.scale):
                yield f"`{name}` replaces what is embedded at scale={self.scale!r}, got {path!r}. Write scale='0.6b'."
            elif path is not None and name == "data" and (is_small(self.scale) or self._gym):
                yield f"`data` replaces the rows of task='math' or 'code' at a paper scale, got {path!r}. Write scale='0.6b'."
            elif path is not None and not Path(path).expanduser().exists():
                yield f"`{name}` must be an existing local path, got {path!r}{looked_in(path)}. Leave it out for the pinned download."
        if self._task is not None and self.data is not None:
            yield "`data` replaces the rows of task='math' or 'code', and a task of your own has its rows already."

    # ---- what a cell is made of

    @property
    def workflow_name(self) -> str:
        """The built-in's name, or the name of one's own."""
        return str(self.workflow) if self._workflow is None else self._workflow.name

    @property
    def task_label(self) -> str:
        """ "math" or "code", the name of a kind of reasoning-gym such as "gym_products", or the name of one's own."""
        if self._gym is not None:
            return self._gym.name
        return str(self.task) if self._task is None else self._task.name

    @property
    def policy_name(self) -> str:
        """ "sp", "ip" or the map as text."""
        return policy_name(self.policy)

    def make_workflow(self) -> Workflow:
        """The workflow that this cell runs (paper Table 7, "workflow caps")."""
        if self._workflow is not None:
            return self._workflow
        sizes: dict[str, tuple] = {
            "eval_opt": (self.rounds, None, self.box_rule),
            "voting": (self.n_voters, self.aggregator_fallback, None, self.box_rule),
            "orch_workers": (self.n_workers,),
        }
        return WORKFLOWS[self.workflow](*sizes.get(self.workflow, ()))

    def make_task(self) -> Any:
        """The task that this cell trains on; a small scale has a generated task of the same kind."""
        from multirole_study.tasks.code import Code  # these import datasets
        from multirole_study.tasks.functions import Functions
        from multirole_study.tasks.math import Math
        from multirole_study.tasks.tiny_chain import TinyChain
        from multirole_study.tasks.tiny_pipe import TinyPipe

        if self._task is not None:
            return self._task
        gym = parse_gym(SMOLLM2_ARITHMETIC) if (self.scale, self.task) == (SMOLLM2, "math") else self._gym
        if gym is not None:
            return replace(
                gym,
                malformed_reward=self.malformed_reward,
                fallback=self.answer_fallback,
                unboxed_reward=self.unboxed_reward,
            )
        if self.scale == SMOLLM2:
            return Functions(self.code_reward)
        if self.task == "math":
            return TinyChain(self.malformed_reward) if is_tiny(self.scale) else Math(self.data, self.malformed_reward)
        return TinyPipe(self.code_reward) if is_tiny(self.scale) else Code(self.data, self.code_reward)

    @property
    def anchors(self) -> dict[str, float]:
        """role -> weight of its KL penalty."""
        by_role = self.kl_anchor if isinstance(self.kl_anchor, dict) else dict.fromkeys(self.policy, self.kl_anchor)
        return dict.fromkeys(self.policy, 0.0) | by_role

    # ---- names and records

    @property
    def id(self) -> str:
        """The name of the run's folder: the coordinates, and a hash of the settings that differ from the preset's."""
        changed = self.changed()
        policy = self.policy_name if self.policy_name in ("sp", "ip") else "map"
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        names, rest = [self.workflow_name, policy, self.task_label], [f"s{self.seed}"]
        rest += [self.preset] * (self.preset != "paper") + [digest] * bool(changed)
        if len("-".join([*names, *rest])) > LONGEST_ID:  # one's own names; the hash tells them apart
            names = [name[:10] for name in names]
        return "-".join([*names, *rest])

    def changed(self) -> dict[str, object]:
        """What distinguishes this cell from others of its coordinates: settings that are not the preset's, own code, a map."""
        held, usual = self.to_dict(), preset_values(self.workflow, self.task, self.scale, self.preset)
        policy = {} if self.policy_name in ("sp", "ip") else {"policy": self.policy}
        options = {"task": self.task} if self._gym is not None and self.task != PREFIX + self._gym.kind else {}
        changed = {name: held[name] for name, value in self if value != usual.get(name, value)}
        return changed | policy | options | self._digests

    def to_dict(self) -> dict[str, object]:
        """Every field as plain JSON data, and the digest of own code; of own paths the name (provenance.json has checksums)."""
        paths = {name: path and Path(path).name for name, path in (("model", self.model), ("data", self.data))}
        task = self.task if self._gym is not None else self.task_label
        return dict(self) | {"workflow": self.workflow_name, "task": task} | paths | self._digests

    def sibling(self, workflow: str, policy: str) -> "Cell":
        """The cell of another workflow and policy with the same options but role maps; all else takes that workflow's preset."""
        changed = self.changed().keys() - {*COORDINATES}
        options = {name: value for name, value in self if name in changed and not isinstance(value, dict)}
        return Cell(workflow, policy, self.task, self.scale, self.seed, self.preset, **options)

    def parameters(self) -> dict[str, object]:
        """Every field, for another process to make this cell again."""
        for name, value in (("workflow", self.workflow), ("task", self.task)):
            if not isinstance(value, str):
                raise ValueError(  # noqa: TRY004
                    f"`{name}` is an object of this process and cannot be sent to others. Write it as 'path/to/file.py:Name', "
                    "or start your script under torchrun with n_processes=1."
                )
        return dict(self)

    @classmethod
    @refusing()
    def from_parameters(cls, given: dict[str, Any], others: Iterable[str] = ()) -> "tuple[Cell, Launch]":
        """A cell and its launch options from a notebook's `globals()`.

        Every plain constant is taken for a parameter, so that a misspelt `-p` name is refused instead of ignored;
        None means "not given". `others` are names that the message may mean as well.
        """
        plain = (str, int, float, bool, dict, list, tuple, type(None))
        given = {name: v for name, v in given.items() if isinstance(v, plain) and not IPYTHONS_OWN.fullmatch(name)}
        known = [parameter.name for parameter in cell_parameters()]
        for name in given:
            if name not in known:
                raise ValueError(unknown_name(name, [*others, *known]))
        given = {"workflow": "voting", "policy": "sp"} | {name: v for name, v in given.items() if v is not None}
        launch = Launch(**{name: given.pop(name) for name in Launch.model_fields if name in given})
        return cls(**given), launch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.scale, self.id))


def policy_name(policy: dict[str, str]) -> str:
    """ "sp", "ip" or the map as text."""
    for name in ("sp", "ip"):
        if policy == parse_policy(name, list(policy)):
            return name
    return ",".join(f"{role}={adapter}" for role, adapter in policy.items())


def cell_parameters() -> list[Parameter]:
    """The parameters of the notebooks, in their order."""
    return parameters(Cell, Launch)


def preset_values(workflow: object, task: Any, scale: object, preset: object) -> dict[str, Any]:
    """The value of every setting that is not given."""
    values: dict[str, Any] = {}
    for name, field in Cell.model_fields.items():
        if name not in COORDINATES:
            special: Any = field.json_schema_extra
            values[name] = special.get(preset_key(scale), field.default)
            if preset == "released_code" and not (is_small(scale) and name == "renderer"):
                values[name] = special.get("released", values[name])
    is_own = not isinstance(task, str) or (task not in TASKS and not is_gym(task))
    kind = task if task in TASKS else "math"
    like = workflow if isinstance(workflow, str) and workflow in WORKFLOWS else "voting"
    values["rounds"] = ROUNDS[kind]
    values["max_prompt_tokens"], values["max_response_tokens"] = scale_lengths(scale, like, kind)
    if is_own or (scale, task) == (SMOLLM2, "code"):
        values |= {"n_train": None, "n_validation": None}  # all rows
    elif is_gym(task) and values["n_train"] is None:  # they have no end
        values |= {"n_train": GYM_TRAIN, "n_validation": GYM_VALIDATION}
    if preset == "released_code" and (workflow, task) == ("voting", "math"):
        values["advantage_group"] = "slot"
    return values
