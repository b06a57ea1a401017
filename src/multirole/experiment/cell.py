"""One cell of the matrix: workflow x policy x task x scale x seed, and every number that trains it.

The numbers themselves are in `presets`: Table 7, what a tiny scale replaces, and the options in which the released code
departs from the paper's text. `Cell.grpo_config()` is the only translation to TRL.
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from types import CodeType
from typing import get_args

import torch
from trl import GRPOConfig

from multirole.core.policy import parse_policy
from multirole.core.rollout import Sampling
from multirole.core.types import Workflow
from multirole.experiment.launch import LAUNCH_OPTIONS, Launch
from multirole.experiment.presets import defaults, is_tiny
from multirole.experiment.refusals import (
    check_cell,
    check_choice,
    check_workflow,
    refuse,
    role_numbers,
    settled_anchor,
    settled_starts,
)
from multirole.sandbox import Limits
from multirole.workflows import WORKFLOWS, EvalOpt, OrchWorkers, Voting

LONGEST_ID = 200
"""Characters; file systems take 255 bytes."""


def _source(code: CodeType) -> str:
    """What a function does, wherever its lines stand: bytecode, names and constants, of nested functions too."""
    constants = [_source(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])


@dataclass(frozen=True)
class Cell:
    """One training run. Fields left at None take the value of the scale and the preset; bad values raise ValueError.

    Units: lengths in tokens, rates per iteration. An *iteration* is one rollout batch of `n_problems` x `n_episodes`
    episodes and all optimizer steps taken on it.

    Args:
        workflow: "single", "eval_opt", "voting", "orch_workers", or a workflow object of your own.
        policy: "sp", "ip", or a role-to-adapter map such as "generator=a,aggregator=b".
        task: "math" or "code". At the tiny scales these are the embedded tasks tiny_math and tiny_code.
        scale: "0.6b", "1.7b", "4b": the paper's models and tasks; "tiny-s", "tiny-m", "tiny-l": embedded ones.
        preset: "paper" follows the paper's text; "released_code" follows the authors' code where the two differ.
        model: a local folder with a Qwen3 or a Llama and its tokenizer, used in place of the pinned download. Other dense
            decoders need engine="vllm".
        data: a local file or folder with rows in the schema of the task's dataset, used in place of the pinned download.
        n_train, n_validation: the first so many problems of each split; None takes all of a dataset.
        rounds: drafts, and as many verdicts, of Eval-Opt (Table 7 "revision rounds": 3 on math, 2 on code, counted as the
            released code counts them; reading them as revisions after the first draft is one more).
        n_voters, n_workers: generators of Voting; strategies, and so workers, of Orch-Workers at most.
        learning_rate: peak AdamW learning rate.
        lora_rank: 0 trains every linear layer of the decoder whole, a float32 copy per adapter, on the transformers engine
            alone; embeddings, norms and head stay frozen, `lora_alpha` is unused, and weight decay pulls copies towards 0 and
            not towards the base. Write a lower learning_rate than LoRA's: half of it was best of a few short tiny-s runs.
        dtype: of the frozen base; adapters are always float32.
        micro_batch_tokens: padded tokens of one forward pass; changes memory and speed, not the gradient.
        old_logprobs: pi_old in the PPO ratio: the engine's "sampled" log-probs, or "recomputed" by the trainer.
        code_reward: "fraction" of hidden tests passed (paper A.7), or 1 if "all_pass" (released code).
        malformed_reward: reward of a math answer without a box. The paper prints no value; -0.1 is our choice.
        advantage_group: rewards are compared within the n episodes of a problem, one value per "episode"; or within
            (problem, "role") or (problem, role, "slot") rows, as the released code does; or (problem, role, round):
            "role_round". "role" is also Dr. MAS's agent-wise normalisation (arXiv 2602.08847), as we read it.
        advantage_norm: a reward minus its "group"'s mean, over the group's standard deviation; minus and over mean and
            deviation of all the iteration's rows of the role, whatever the problem ("agent"); minus the group's mean alone
            ("none": Dr. GRPO); or minus the mean of the other members ("leave_one_out": RLOO).
        lr_clock: the schedule ticks once per "iteration", or once per "update_call" (one per adapter and iteration; with
            "cosine" a cell of k adapters then reaches 0 after 1/k of its iterations).
        lr_schedule: after warm-up: "cosine" over the run, "constant", or "cosine_wrap" (cosine that rises again
            past its horizon, as a schedule clocked per update call would).
        updates: an adapter takes one optimizer step "per_batch" of n_problems x n_episodes rows (paper sec 5.1: a role with
            three slots takes three); "one" per iteration, on all its rows at once; or one per about `step_tokens`
            completion tokens ("tokens").
        step_tokens: with updates="tokens": ceil(tokens / step_tokens) steps of near-equal tokens, at most one per row.
        loss_aggregation: over an optimizer step, the mean over rows of token means ("grpo"), the mean over all its tokens
            ("token": DAPO), or the sum over tokens divided by rows x `max_response_tokens` ("dr_grpo").
        minibatch_split: ragged row counts are cut into "even" mini-batches, each normalised by its own size; or
            "sequential" full ones and a partial one that is still divided by the full size (released code).
        row_order: rows are "shuffled" by the seed, or length-stratified short-long-short ("mountain", released code).
        aggregator_fallback: a selection without a valid box uses "candidate_1", or the "first_digit" in the reply.
        renderer: prompts by the model's own "chat_template", thinking off; or as the "released_code" writes them.
        code_rows: all rows of "deepcoder"; or the public "reconstruction" of the authors' unpublished runtime filter.
        dual_clip: the ratio is cut at this value where the advantage is negative (released code: 3); None: never.
        eval_sampling: "training" temperature alone; or "qwen3": with top_p 0.95 and top_k 20 besides, which the authors'
            evaluation server may have taken from the model's folder.
        eval_response_tokens: response cap of evaluations; None is the training cap, as in the paper.
        test_seconds, problem_seconds: CPU limits of one hidden test and of all tests of a program (released code: 3, 120);
            the tiny tasks have their own.
        diagnostics: whether gradients are taken apart by role and slot, sampled rows scored again and texts read; False leaves
            those metrics NaN (METRICS.md) and changes no weight.
        on_alarm: what a training alarm does besides being recorded: "log" it, save a "checkpoint", "stop" the run, or "rollback":
            the adapters return to the best evaluated and saved step, AdamW's moments are cleared, and the learning rate is
            multiplied by `rollback_rate`. Where nothing has been evaluated and saved yet, it is only logged.
        rollback_rate: what each rollback leaves of the learning rate; 1 keeps it.
        kl_anchor: weight of a penalty KL(policy || frozen base) in the loss, aggregated as the loss is: one number, or one per
            role, such as "generator=0.01,aggregator=0.1". The estimate is k3, without importance weights.
        coherence_penalty: how much of an adapter's gradient is taken away where it repeats its own running mean: it is
            multiplied by max(`coherence_floor`, 1 - penalty x cosine), the cosine cut to [0, 1].
        coherence_floor: the smallest such factor; at 0 a penalty of 1 freezes a coherent adapter.
        coherence_window: optimizer steps that the running mean covers.
        balance_roles: on an adapter of several roles, each role's part of the gradient is multiplied by (mean norm / its
            norm) ** balance_roles; 1 makes them equally long.
        slot_scaling: the gradient of a role with N slots is multiplied by N ** -slot_scaling. AdamW undoes a constant factor on
            an adapter that the role has for itself.
        process_reward: weight of a second advantage: whether the turn itself was right (`judging`), normalised within (problem,
            role, round).
        train_after: iterations in which a role is left out of the updates, such as "aggregator=20"; as many as `iterations`
            freeze it.
        allow_unsafe_code: train on code also where this machine cannot contain it. Never do this outside a virtual machine.
    """

    workflow: str | Workflow
    policy: str | dict[str, str]
    task: str = "math"
    scale: str = "tiny-s"
    seed: int = 0
    preset: str = "paper"
    model: str | None = None
    data: str | None = None
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
    n_train: int | None = None
    n_validation: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    rounds: int | None = None
    n_voters: int | None = None
    n_workers: int | None = None
    weight_decay: float | None = None
    micro_batch_tokens: int | None = None
    engine: str = "auto"
    dtype: str | None = None
    old_logprobs: str | None = None
    code_reward: str | None = None
    malformed_reward: float | None = None
    advantage_group: str | None = None
    lr_clock: str | None = None
    lr_schedule: str | None = None
    updates: str | None = None
    step_tokens: int | None = None
    minibatch_split: str | None = None
    row_order: str | None = None
    aggregator_fallback: str | None = None
    renderer: str | None = None
    code_rows: str | None = None
    dual_clip: float | None = None
    eval_sampling: str = "training"
    eval_response_tokens: int | None = None
    diagnostics: bool = True
    on_alarm: str = "log"
    rollback_rate: float = 0.5
    advantage_norm: str = "group"
    loss_aggregation: str = "grpo"
    kl_anchor: float | str = 0.0
    coherence_penalty: float = 0.0
    coherence_floor: float = 0.5
    coherence_window: int = 128
    balance_roles: float = 0.0
    slot_scaling: float = 0.0
    process_reward: float = 0.0
    train_after: str | None = None
    test_seconds: float = 3.0
    problem_seconds: float = 120.0
    allow_unsafe_code: bool = False

    def __post_init__(self) -> None:
        check_workflow(self.workflow)
        for name in ("task", "scale", "preset"):
            check_choice(name, vars(self)[name])
        for name, value in defaults(self.workflow_name, self.task, self.scale, self.preset).items():
            if vars(self)[name] is None:
                object.__setattr__(self, name, value)
        for field in fields(self):  # 1 and 1.0 are one cell with one id
            if float in (field.type, *get_args(field.type)) and type(vars(self)[field.name]) is int:
                object.__setattr__(self, field.name, float(vars(self)[field.name]))
        check_cell(self)
        roles = list(self.make_workflow().roles)
        object.__setattr__(self, "policy", parse_policy(self.policy, roles))
        object.__setattr__(self, "kl_anchor", settled_anchor(self.kl_anchor, roles))
        object.__setattr__(self, "train_after", settled_starts(self.train_after, roles))

    @property
    def workflow_name(self) -> str:
        return self.workflow if isinstance(self.workflow, str) else self.workflow.name

    def make_workflow(self) -> Workflow:
        """The workflow object that this cell runs (paper Table 7, "workflow caps")."""
        if not isinstance(self.workflow, str):
            return self.workflow
        if self.workflow == "voting":
            return Voting(self.n_voters, self.aggregator_fallback)
        if self.workflow == "eval_opt":
            return EvalOpt(self.rounds)
        if self.workflow == "orch_workers":
            return OrchWorkers(self.n_workers)
        return WORKFLOWS[self.workflow]()

    def step_rows(self, n_rows: int) -> int:
        """Rows of a full optimizer step of an adapter that owns `n_rows` rows of an iteration."""
        return max(1, n_rows) if self.updates == "one" else self.n_problems * self.n_episodes

    def n_steps(self, n_rows: int, n_tokens: int) -> int:
        """Optimizer steps of an adapter that owns so many rows, with so many completion tokens, of an iteration."""
        if self.updates == "tokens":
            return min(n_rows, -(-n_tokens // self.step_tokens))
        return -(-n_rows // self.step_rows(n_rows))

    @property
    def anchors(self) -> dict[str, float]:
        """role -> weight of its KL penalty."""
        if isinstance(self.kl_anchor, str):
            return role_numbers("kl_anchor", self.kl_anchor, list(self.policy), float)
        return dict.fromkeys(self.policy, self.kl_anchor)

    @property
    def train_starts(self) -> dict[str, int]:
        """role -> the first iteration, counted from 0, that trains it."""
        if self.train_after is None:
            return dict.fromkeys(self.policy, 0)
        return role_numbers("train_after", self.train_after, list(self.policy), int)

    @property
    def id(self) -> str:
        """Names the run's folder: the matrix coordinates, then every field that differs from the preset's value.

        Where that is too long for a file name, the fields are counted and hashed instead; config.json holds them.
        """
        policy = self.policy_name.replace("=", "-").replace(",", "_")
        changed = self.changed()
        own = [f"-{Path(path).name[:40]}" for path in (self.model, self.data) if path]  # wherever it lies
        shown = {name: value for name, value in changed.items() if name not in ("model", "data")}
        suffix = "".join(f"-{name}-{value}" for name, value in shown.items()).replace("=", "-").replace(",", "_")
        preset = "" if self.preset == "paper" else f"-{self.preset}"
        start = f"{self.workflow_name}-{policy}-{self.task}-s{self.seed}{preset}{''.join(own)}"
        if len(start + suffix) > LONGEST_ID:
            suffix = f"-{len(shown)}-fields-{hashlib.sha256(suffix.encode()).hexdigest()[:10]}"
        return start + suffix

    def changed(self) -> dict[str, object]:
        """The fields besides the matrix coordinates and the preset that differ from the preset's value."""
        plain = Cell(self.workflow, self.policy, self.task, self.scale, self.seed, self.preset)
        return {f.name: vars(self)[f.name] for f in fields(self)[1:] if vars(self)[f.name] != vars(plain)[f.name]}

    def sibling(self, workflow: str, policy: str) -> "Cell":
        """The cell of another workflow and policy with the same options but role maps; all else takes that workflow's preset."""
        options = self.changed()
        for name in ("kl_anchor", "train_after"):  # they name this workflow's roles
            if isinstance(options.get(name), str):
                del options[name]
        return Cell(workflow, policy, self.task, self.scale, self.seed, self.preset, **options)

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
        return f"tiny_{self.task}" if is_tiny(self.scale) else self.task

    @property
    def data_options(self) -> dict[str, object]:
        """What the task's `problems` takes besides split and count."""
        if is_tiny(self.scale):
            return {}
        return {"data": self.data} | ({"rows": self.code_rows} if self.task == "code" else {})

    @property
    def reward_options(self) -> dict[str, object]:
        """What the task's `score_batch` takes besides problems and texts."""
        if self.task == "math":
            return {"malformed": self.malformed_reward}
        own = {} if is_tiny(self.scale) else {"limits": Limits(self.test_seconds, self.problem_seconds)}
        return {"code_reward": self.code_reward} | own

    def sampling(self, is_evaluation: bool = False) -> Sampling:
        """How replies are sampled, in training and where they are only scored."""
        if not is_evaluation:
            return Sampling(self.max_response_tokens, self.temperature)
        top_p, top_k = (0.95, 20) if self.eval_sampling == "qwen3" else (1.0, 0)
        return Sampling(self.eval_response_tokens or self.max_response_tokens, self.temperature, top_p, top_k)

    def to_dict(self) -> dict[str, object]:
        """Every field as plain JSON data; a workflow object becomes its name and a digest of its code."""
        values = {f.name: vars(self)[f.name] for f in fields(self)}
        if not isinstance(self.workflow, str):
            code = type(self.workflow).run.__code__
            digest = hashlib.sha256(f"{self.workflow.roles} {_source(code)}".encode()).hexdigest()
            values |= {"workflow": self.workflow.name, "workflow_code": digest}
        for name in ("model", "data"):
            if values[name] is not None:
                values[name] = Path(values[name]).name  # provenance.json holds the checksums
        return values

    def parameters(self) -> dict[str, object]:
        """Every field, for another process to make this cell again."""
        if not isinstance(self.workflow, str):
            refuse("workflow", self.workflow_name, "is an object of this process, and others cannot be sent it",
                    "Start your script under torchrun with n_processes=1.")  # fmt: skip
        return {f.name: vars(self)[f.name] for f in fields(self)}

    @classmethod
    def from_parameters(cls, parameters: dict[str, object]) -> "tuple[Cell, Launch]":
        """A cell and its launch options from a notebook's `globals()`.

        Every plain constant is taken for a parameter, so that a misspelt `-p` name is refused instead of ignored;
        None means "not given".
        """
        plain = (str, int, float, bool, dict, list, tuple, type(None))
        given = {
            name: value
            for name, value in parameters.items()
            if not name.startswith("_") and isinstance(value, plain) and name not in ("In", "Out")
        }
        allowed = [*(f.name for f in fields(cls)), *LAUNCH_OPTIONS]
        for name, value in given.items():
            if name not in allowed:
                refuse(name, value, "is no parameter of a cell", f"Write one of {allowed}.")
        given = {name: value for name, value in given.items() if value is not None}
        for name, choices in (("workflow", sorted(WORKFLOWS)), ("policy", ["sp", "ip", "role=adapter,..."])):
            if given.get(name, "") == "":
                why = "was not given, and no cell is trained by default"
                refuse(name, "", why, f"Write -p {name} with one of {choices}.")
        launch = Launch(**{name: given.pop(name) for name in LAUNCH_OPTIONS if name in given})
        return cls(**given), launch

    def grpo_config(self, output_dir: str, n_processes: int = 1, sharding: str = "none") -> GRPOConfig:
        """This cell as TRL's configuration. One HF step is one iteration; `per_device_train_batch_size` is episodes."""
        episodes = self.n_problems * self.n_episodes // n_processes
        fsdp = {"version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT",
                "cpu_ram_efficient_loading": False}  # fmt: skip
        if self.model is None:  # a model of one's own says itself which of its layers are not split
            fsdp["transformer_layer_cls_to_wrap"] = ["Qwen3DecoderLayer"]
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
            loss_type="bnpo" if self.loss_aggregation == "token" else self.loss_aggregation,
            beta=0.0,  # the trainer sets it role by role (`kl_anchor`)
            use_bias_correction_kl=False,
            epsilon=self.clip_low,
            epsilon_high=self.clip_high,
            delta=self.dual_clip,
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
            gradient_checkpointing=not is_tiny(self.scale),
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=self.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            fsdp=sharding == "fsdp2",
            fsdp_config=fsdp if sharding == "fsdp2" else None,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
