"""Checks before training: the model folder, the rows, and a trial of workflow and reward without a model."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import get_reporting_integration_callbacks
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

import multirole_sandbox as sandbox
from multirole.chat.templates import StartClock, check_chats
from multirole.engines.protocol import Completion, Sampling
from multirole.inputs.reward_functions import check_reward
from multirole.rollout.errors import PromptOverflow, is_overflow
from multirole.rollout.rollout import Rollout, warn_of_silent_roles
from multirole.types import Message, Problem, Turn, Workflow, assistant, user, waits_outside
from multirole.watched_thread import in_thread
from multirole_cpu import SERVED
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import blocking_problems, engine_of, preflight_checks
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.released_code import RENDERERS
from multirole_study.tasks.user_task import RewardError, Task

TURN = "<|im_start|>"
DRY_SECONDS = 30.0
REPLIES = ("", "\\boxed{1}")
"""The replies of every role in a dry run."""


def preflight(cell: Cell, launch: Launch = ONE_PROCESS) -> None:
    """Raise one ValueError that lists every problem with the run's model, rows, device or trackers.

    Downloads a missing pinned model and rows if all other checks pass; fails within seconds if the Hub cannot be reached.
    `multirole_study.plan.check` checks memory and disk.
    """
    missing = blocking_problems(preflight_checks(cell, launch))
    trackers = launch.report_to if launch.report_to in ("none", "all") else launch.report_to.split(",")
    checks: dict[str, Callable[[], object]] = {
        "the base model": lambda: check_model(cell, locate(cell, may_download=not missing)),
        "the task's rows": lambda: cell.make_task().problems("validation", cell.n_validation),
        "a tracker": lambda: [tracker() for tracker in get_reporting_integration_callbacks(trackers)],
    }
    for name, check in checks.items():
        try:
            check()
        except (ValueError, OSError, RuntimeError) as error:  # a tracker that is not installed is a RuntimeError
            missing.append(f"{name}: {error}")
    if missing:
        numbered = "\n".join(f"{i}. {problem}" for i, problem in enumerate(missing, start=1))
        raise ValueError(f"{cell.id} at scale={cell.scale!r} cannot run here. Missing:\n{numbered}")
    if cell.allow_unsafe_code or cell.uses_sandbox:  # a task of the user's may grade programs, too
        sandbox.require(cell.allow_unsafe_code)


# ---- the model


def check_model(cell: Cell, folder: Path) -> None:
    """Raise ValueError if a model folder does not work with this cell.

    The tokenizer must have an end-of-sequence token, render the cell's prompts, and use only ids that the model embeds.
    """
    if problem := _model_problem(cell, folder):
        raise ValueError(f"The model folder {str(folder)!r} {problem}")


def _model_problem(cell: Cell, folder: Path) -> str:
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt"):
                pass
    except (ValueError, OSError, SafetensorError) as error:
        return f"is incomplete or damaged ({str(error).splitlines()[0]})."
    kind = (config.architectures or [CAUSAL.get(config.model_type)])[0]
    if kind not in CAUSAL.values():
        return f"holds a {kind}, which is not a causal language model."
    if engine_of(cell) == "transformers" and kind not in SERVED:
        return f"holds a {kind}, and the transformers engine serves {' and '.join(SERVED)}. Use engine='auto' or 'generate'."
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        return f"has a tokenizer with ids up to {highest}, but the model embeds ids up to {config.vocab_size - 1}."
    if tokenizer.eos_token_id is None:
        return "has a tokenizer without an end-of-sequence token, so no turn would end. Set its eos_token."
    if cell.renderer == "released_code" and len(tokenizer.encode(TURN, add_special_tokens=False)) != 1:
        return f"has a tokenizer without {TURN}, which renderer='released_code' writes. Use 'chat_template'."
    render, talk = RENDERERS[cell.renderer], [user("Add 1."), assistant("It is 2."), user("Add 3.")]
    try:
        whole = render(tokenizer, talk)
        for i, message in enumerate(talk):
            if render(tokenizer, [*talk[:i], message | {"content": "Hello."}, *talk[i + 1 :]]) == whole:
                return f"has a chat template that leaves out message {i + 1} of a conversation of {len(talk)}."
    except (jinja2.TemplateError, ValueError) as error:
        return f"has a chat template that cannot write messages ({error})."
    return ""


def check_loaded(folder: Path, loading: dict[str, Any]) -> None:
    """Raise ValueError if weights were missing, had another shape, or belong to layers that the config lacks.

    transformers initialises missing weights at random and only logs it.
    """
    names_by_defect = {"missing": loading["missing_keys"], "of another shape": map(str, loading["mismatched_keys"])}
    names_by_defect["not in its config.json"] = [key for key in loading["unexpected_keys"] if ".layers." in key]
    for defect, names in names_by_defect.items():
        for name in sorted(names)[:1]:
            raise ValueError(f"The model folder {str(folder)!r} has weights that are {defect}, the first is {name}.")


# ---- workflow and reward


class _OneReply:
    """A stub engine and tokenizer that answers every request with one fixed reply."""

    def __init__(self, reply: str) -> None:
        self.reply, self.keys = reply, list[int]()
        self.added_tokens_decoder: dict[int, object] = {}
        self.all_special_ids: list[int] = []

    def add(self, key: int, request: object) -> None:
        self.keys.append(key)

    def step(self) -> list[tuple[int, Completion]]:
        keys, self.keys = self.keys, []
        return [(key, Completion([0], [0.0], "stop")) for key in keys]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self.reply

    def __len__(self) -> int:
        return 1


def dry_run(workflow: Workflow, problem: Problem) -> None:
    """Run one episode per fixed reply without a model. Raises ValueError if the workflow fails, hangs or never ends.

    Warns about roles that were never called.
    """
    called: set[str] = set()
    for reply in REPLIES:
        stub: Any = _OneReply(reply)
        rollout = Rollout(
            workflow, stub, stub, {role: role for role in workflow.roles}, bool, 0, 1, lambda *_, **__: [0]
        )
        rollout.reads_calls = False
        rollout.patience = DRY_SECONDS
        try:
            (episode,) = rollout.run([(problem, 0)], 0, Sampling(1, 1.0))
        except RuntimeError as error:
            raise ValueError(f"In a trial without a model, where every reply was {reply!r}: {error}") from error
        called |= {turn.role for turn in episode.turns}
    if not called:
        raise ValueError(
            f"In a trial without a model, the workflow {workflow.name!r} made no call, so there is nothing to train."
        )
    warn_of_silent_roles(workflow, called, "in a trial")


def try_reward(task: Task, problems: list[Problem]) -> None:
    """Score fixed answers with a user-supplied task. Raises ValueError if the reward fails or returns invalid numbers."""
    try:
        for problem, reward in zip(problems, task.score(problems, list(REPLIES[: len(problems)])), strict=True):
            check_reward(f"The reward of task {task.name!r}", problem, reward.value)
    except (RewardError, ValueError) as error:
        raise ValueError(f"In a trial before training, on the answers {REPLIES}: {error}") from error


# ---- rows


def first_prompts(workflow: Workflow, problems: Sequence[Problem], length: Callable[[list[Message]], int]) -> list[int]:
    """Return the length (by `length`) of the longest prompt in each problem's first stage, without a model call.

    The length is 0 for a workflow that waits for threads or sockets, because its agents are not run an additional time per problem.
    """
    if waits_outside(workflow):
        return [0] * len(problems)

    async def measure(problem: Problem) -> int:
        stage = [0]

        async def call(role: str, messages: list[Message], *_: object, **__: object) -> Turn:
            stage.append(length(messages))
            raise PromptOverflow

        try:
            await workflow.run(problem, call)  # type: ignore[arg-type]
        except Exception as error:
            if not is_overflow(error):
                raise
        return max(stage)

    async def measure_all() -> list[int]:
        return [await measure(problem) for problem in problems]

    return in_thread(lambda: asyncio.run(measure_all()))


def load_problems(
    cell: Cell, tokenizer: PreTrainedTokenizerBase, started: str | None = None
) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    """Try workflow and reward, then return training problems, validation problems, and counts of both.

    Training problems whose first prompt exceeds the cell's prompt cap are dropped. Validation problems are all kept: an
    overlong problem ends without an answer (`prompt_overflow`). `started` is the date of the prompts (`StartClock`).
    """
    task, workflow, cap = cell.make_task(), cell.make_workflow(), cell.max_prompt_tokens
    train, validation = task.problems("train", cell.n_train), task.problems("validation", cell.n_validation)
    if len(train) < cell.n_problems:
        raise ValueError(
            f"`n_problems` must be at most the {len(train)} training problems of task {cell.task_label!r}, got {cell.n_problems}."
        )
    dry_run(workflow, train[0])
    if isinstance(task, Task):
        for problems in (train, validation):
            try_reward(task, problems[: len(REPLIES)])
    render = StartClock(started).bind(RENDERERS[cell.renderer])
    check_chats(render, tokenizer, workflow, [*train, *validation])
    lengths = first_prompts(workflow, [*train, *validation], lambda messages: len(render(tokenizer, messages)))
    fitting = [problem for problem, length in zip(train, lengths, strict=False) if length <= cap]
    counts = {
        "train": len(fitting),
        "train_overlong": len(train) - len(fitting),
        "validation": len(validation),
        "validation_overlong": sum(length > cap for length in lengths[len(train) :]),
    }
    if len(fitting) < cell.n_problems:
        raise ValueError(
            f"`max_prompt_tokens` ({cap}) leaves {len(fitting)} of {len(train)} training problems, whose first prompts have up to "
            f"{max(lengths[: len(train)])} tokens, and one iteration needs {cell.n_problems}. Use a larger max_prompt_tokens"
            f"{' or a smaller n_problems' * bool(fitting)}."
        )
    return fitting, validation, counts
