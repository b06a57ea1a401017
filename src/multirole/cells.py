"""One cell of the matrix: workflow x policy x task x scale x seed, and every number that trains it.

The only copy of the matrix. `PAPER` holds Table 7; a tiny scale replaces the numbers that belong to its size
(`TINY`), a preset replaces the options in which the released code departs from the paper's text (`PRESETS`).
`Cell.grpo_config()` is the only translation to TRL.
"""

import hashlib
import inspect
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from types import CodeType

from trl import GRPOConfig

from multirole.episodes import Workflow
from multirole.policies import parse_policy
from multirole.workflows import WORKFLOWS, EvalOpt, Voting

TASKS = ("math", "code")
SCALES = ("tiny-s", "tiny-m", "tiny-l")
PRESETS = ("paper", "released_code")

PAPER = {  # paper Table 7
    "learning_rate": 2e-5,
    "warmup_iterations": 15,
    "max_grad_norm": 1.0,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "lora_rank": 64,
    "lora_alpha": 32,
    "n_problems": 64,
    "n_episodes": 8,
    "temperature": 0.7,
    "iterations": 500,
    "eval_every": 10,
    "save_every": 5,
}
TINY = PAPER | {  # the embedded scales: smaller batches, larger steps, shorter runs
    "learning_rate": 2e-3,
    "warmup_iterations": 5,
    "lora_rank": 16,
    "lora_alpha": 16,
    "n_problems": 16,
    "temperature": 1.0,
    "iterations": 60,
    "save_every": 10,
}
TEXT_OPTIONS = {  # preset="paper": what the paper's text says
    "code_reward": "fraction",
    "malformed_reward": -0.1,
    "advantage_group": "episode",
    "lr_clock": "iteration",
    "lr_schedule": "cosine",
    "minibatch_split": "even",
    "row_order": "shuffled",
    "aggregator_fallback": "candidate_1",
}
CODE_OPTIONS = {  # preset="released_code": what the authors' code does
    "code_reward": "all_pass",
    "malformed_reward": 0.0,
    "advantage_group": "role",  # "slot" for Voting on math, see `Cell.__post_init__`
    "lr_clock": "update_call",
    "lr_schedule": "constant",
    "minibatch_split": "sequential",
    "row_order": "mountain",
    "aggregator_fallback": "first_digit",
}
CHOICES = {
    "task": TASKS,
    "scale": SCALES,
    "preset": PRESETS,
    "engine": ("auto", "transformers", "vllm"),
    "old_logprobs": ("sampled", "recomputed"),
    "code_reward": ("fraction", "all_pass"),
    "advantage_group": ("episode", "role", "slot"),
    "lr_clock": ("iteration", "update_call"),
    "lr_schedule": ("cosine", "constant", "cosine_wrap"),
    "minibatch_split": ("even", "sequential"),
    "row_order": ("shuffled", "mountain"),
    "aggregator_fallback": ("candidate_1", "first_digit"),
}

NOTEBOOK_PARAMETERS = ("results_dir",)
LEAST = {
    "seed": 0, "warmup_iterations": 0, "n_episodes": 2, "temperature": 0.01, "malformed_reward": -1.0,
    "max_grad_norm": 1e-6,
}  # fmt: skip
MOST = {"seed": 2**32 - 1}  # NumPy's


def _source(code: CodeType) -> str:
    """What a function does, wherever its lines stand: bytecode, names and constants, of nested functions too."""
    constants = [_source(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])


def _refuse(name: str, value: object, why: str, instead: str) -> None:
    raise ValueError(f"{name}={value!r} {why}. {instead}")


@dataclass(frozen=True)
class Cell:
    """One training run. Fields left at None take the value of the scale and the preset; bad values raise ValueError.

    Units: lengths in tokens, rates per iteration. An *iteration* is one rollout batch of `n_problems` x `n_episodes`
    episodes and all optimizer steps taken on it.

    Args:
        workflow: "single", "eval_opt", "voting", "orch_workers", or a workflow object of your own.
        policy: "sp", "ip", or a role-to-adapter map such as "generator=a,aggregator=b".
        task: "math" or "code". At the tiny scales these are the embedded tasks tiny_math and tiny_code.
        preset: "paper" follows the paper's text; "released_code" follows the authors' code where the two differ.
        learning_rate: peak AdamW learning rate.
        old_logprobs: pi_old in the PPO ratio: the engine's "sampled" log-probs, or "recomputed" by the trainer.
        code_reward: "fraction" of hidden tests passed (paper A.7), or 1 if "all_pass" (released code).
        malformed_reward: reward of a math answer without a box. The paper prints no value; -0.1 is our choice.
        advantage_group: rewards are compared within the n episodes of a problem, one value per "episode"; or within
            (problem, "role") or (problem, role, "slot") rows, as the released code does.
        lr_clock: the schedule ticks once per "iteration", or once per "update_call" (one per adapter and iteration; with
            "cosine" a cell of k adapters then reaches 0 after 1/k of its iterations).
        lr_schedule: after warm-up: "cosine" over the run, "constant", or "cosine_wrap" (cosine that rises again
            past its horizon, as a schedule clocked per update call would).
        minibatch_split: ragged row counts are cut into "even" mini-batches, each normalised by its own size; or
            "sequential" full ones and a partial one that is still divided by the full size (released code).
        row_order: rows are "shuffled" by the seed, or length-stratified short-long-short ("mountain", released code).
        aggregator_fallback: a selection without a valid box uses "candidate_1", or the "first_digit" in the reply.
    """

    workflow: str | Workflow
    policy: str | dict[str, str]
    task: str = "math"
    scale: str = "tiny-s"
    seed: int = 0
    preset: str = "paper"
    iterations: int | None = None
    n_problems: int | None = None
    n_episodes: int | None = None
    learning_rate: float | None = None
    warmup_iterations: int | None = None
    max_grad_norm: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    lora_rank: int | None = None
    lora_alpha: int | None = None
    temperature: float | None = None
    eval_every: int | None = None
    save_every: int | None = None
    n_train: int = 4096
    n_validation: int = 256
    max_prompt_tokens: int = 512
    max_response_tokens: int = 96
    weight_decay: float = 0.01
    micro_batch_tokens: int = 1024
    engine: str = "auto"
    old_logprobs: str = "sampled"
    code_reward: str | None = None
    malformed_reward: float | None = None
    advantage_group: str | None = None
    lr_clock: str | None = None
    lr_schedule: str | None = None
    minibatch_split: str | None = None
    row_order: str | None = None
    aggregator_fallback: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workflow, str) and self.workflow not in WORKFLOWS:
            _refuse("workflow", self.workflow, "is no workflow of this project",
                    f"Write one of {sorted(WORKFLOWS)}, or pass a workflow object from Python.")  # fmt: skip
        if not isinstance(self.workflow, str):
            self._check_own_workflow()
        for name in ("task", "scale", "preset"):
            self._check_choice(name)
        options = dict(TEXT_OPTIONS if self.preset == "paper" else CODE_OPTIONS)
        if self.preset == "released_code" and (self.workflow_name, self.task) == ("voting", "math"):
            options["advantage_group"] = "slot"
        for name, value in (TINY | options).items():
            if vars(self)[name] is None:
                object.__setattr__(self, name, value)
        for name in CHOICES:
            self._check_choice(name)
        self._check_numbers()
        if self.n_train < self.n_problems:
            _refuse("n_train", self.n_train, f"is less than the {self.n_problems} problems of one iteration",
                    "Write a larger n_train or a smaller n_problems.")  # fmt: skip
        object.__setattr__(self, "policy", parse_policy(self.policy, list(self.make_workflow().roles)))

    def _check_own_workflow(self) -> None:
        example = "Pass an object with `name`, `roles` such as {'judge': 1} and `async def run(self, problem, call)`."
        given = self.workflow
        if isinstance(given, type) or not inspect.iscoroutinefunction(inspect.getattr_static(given, "run", None)):
            _refuse("workflow", given, "has no coroutine `run` to play an episode with", example)
        if not isinstance(given.name, str) or not isinstance(given.roles, dict) or not given.roles:
            _refuse("workflow", given, "does not say its name and its roles", example)
        if given.name in WORKFLOWS:
            _refuse("workflow", given.name, "is a built-in workflow, whose results it would share", "Rename it.")

    def _check_choice(self, name: str) -> None:
        if vars(self)[name] not in CHOICES[name]:
            _refuse(name, vars(self)[name], "is not known", f"Write one of {list(CHOICES[name])}.")

    def _check_numbers(self) -> None:
        for field in fields(self):
            name, value = field.name, vars(self)[field.name]
            is_int, is_float = field.type in (int, int | None), field.type in (float, float | None)
            if is_int and (not isinstance(value, int) or isinstance(value, bool)):
                _refuse(name, value, f"is a {type(value).__name__}, and a count is whole", f"Write {name}=3, say.")
            if is_float and (not isinstance(value, (int, float)) or isinstance(value, bool)):
                _refuse(name, value, f"is a {type(value).__name__}, not a number", f"Write {name}=0.5, say.")
            least = LEAST.get(name, 1 if is_int else 0.0)
            most = MOST.get(name, 1e300)
            if (is_int or is_float) and not least <= value <= most:
                _refuse(
                    name, value, "is out of range", f"Write a finite number of at least {least} and at most {most}."
                )

    @property
    def workflow_name(self) -> str:
        return self.workflow if isinstance(self.workflow, str) else self.workflow.name

    def make_workflow(self) -> Workflow:
        """The workflow object that this cell runs (paper Table 7, "workflow caps")."""
        if not isinstance(self.workflow, str):
            return self.workflow
        if self.workflow == "voting":
            return Voting(n_voters=3, fallback=self.aggregator_fallback)
        if self.workflow == "eval_opt":
            return EvalOpt(rounds=3 if self.task == "math" else 2)
        return WORKFLOWS[self.workflow]()

    @property
    def id(self) -> str:
        """Names the run's folder: the matrix coordinates, then every field that differs from the preset's value."""
        policy = self.policy_name.replace("=", "-").replace(",", "_")
        plain = Cell(self.workflow, self.policy, self.task, self.scale, self.seed, self.preset)
        changed = [f.name for f in fields(self) if f.name != "workflow" and vars(self)[f.name] != vars(plain)[f.name]]
        suffix = "".join(f"-{name}-{vars(self)[name]}" for name in changed)
        preset = "" if self.preset == "paper" else f"-{self.preset}"
        return f"{self.workflow_name}-{policy}-{self.task}-s{self.seed}{preset}{suffix}"

    @property
    def policy_name(self) -> str:
        """ "sp", "ip" or the map as text."""
        roles = list(self.policy)
        for name in ("sp", "ip"):
            if self.policy == parse_policy(name, roles):
                return name
        return ",".join(f"{role}={adapter}" for role, adapter in self.policy.items())

    @property
    def task_name(self) -> str:
        """The task module: tiny scales train on the embedded task of the same kind."""
        return f"tiny_{self.task}"

    @property
    def model_path(self) -> Path:
        """Folder of the base model's weights and tokenizer."""
        return Path(str(files("multirole").joinpath("models", self.scale)))

    @property
    def reward_options(self) -> dict[str, object]:
        """What the task's `score_batch` takes besides problems and texts."""
        return {"malformed": self.malformed_reward} if self.task == "math" else {"code_reward": self.code_reward}

    def to_dict(self) -> dict[str, object]:
        """Every field as plain JSON data; a workflow object becomes its name and a digest of its code."""
        values = {f.name: vars(self)[f.name] for f in fields(self)}
        if not isinstance(self.workflow, str):
            code = type(self.workflow).run.__code__
            digest = hashlib.sha256(f"{self.workflow.roles} {_source(code)}".encode()).hexdigest()
            values |= {"workflow": self.workflow.name, "workflow_code": digest}
        return values

    @classmethod
    def from_parameters(cls, parameters: dict[str, object]) -> "tuple[Cell, dict[str, object]]":
        """A cell from a notebook's `globals()`, and the values of NOTEBOOK_PARAMETERS, which are no cell fields.

        Every plain constant is taken for a parameter, so that a misspelt `-p` name is refused instead of ignored;
        None means "not given".
        """
        plain = (str, int, float, bool, dict, list, tuple, type(None))
        given = {
            name: value
            for name, value in parameters.items()
            if not name.startswith("_") and isinstance(value, plain) and name not in ("In", "Out")
        }
        allowed = [*(f.name for f in fields(cls)), *NOTEBOOK_PARAMETERS]
        for name, value in given.items():
            if name not in allowed:
                _refuse(name, value, "is no parameter of a cell", f"Write one of {allowed}.")
        given = {name: value for name, value in given.items() if value is not None}
        for name, choices in (("workflow", sorted(WORKFLOWS)), ("policy", ["sp", "ip", "role=adapter,..."])):
            if given.get(name, "") == "":
                why = "was not given, and no cell is trained by default"
                _refuse(name, "", why, f"Write -p {name} with one of {choices}.")
        extra = {name: given.pop(name) for name in NOTEBOOK_PARAMETERS if name in given}
        return cls(**given), extra

    def grpo_config(self, output_dir: str) -> GRPOConfig:
        """This cell as TRL's configuration. One HF step is one iteration; `per_device_train_batch_size` is episodes."""
        episodes = self.n_problems * self.n_episodes
        return GRPOConfig(
            output_dir=output_dir,
            seed=self.seed,
            max_steps=self.iterations,
            per_device_train_batch_size=episodes,
            per_device_eval_batch_size=self.n_episodes,  # unused, but TRL checks that n divides it
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=self.n_episodes,
            num_iterations=1,
            max_completion_length=self.max_response_tokens,
            temperature=self.temperature,
            loss_type="grpo",  # sequence-mean of token-means
            beta=0.0,
            epsilon=self.clip_low,
            epsilon_high=self.clip_high,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            use_vllm=False,  # the rollout engine is ours: TRL's colocated engine serves one adapter
            eval_strategy="steps",
            eval_steps=self.eval_every,
            save_strategy="steps",
            save_steps=self.save_every,
            save_total_limit=2,
            logging_steps=1,
            report_to="none",
            remove_unused_columns=False,
            shuffle_dataset=False,
            gradient_checkpointing=not self.scale.startswith("tiny"),
            bf16=not self.scale.startswith("tiny"),
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
