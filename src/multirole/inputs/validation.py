"""Validate and prepare the trainer's inputs: model, datasets, reward functions."""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, overload

from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import IntervalStrategy
from trl.rewards import reasoning_accuracy_reward, think_format_reward
from trl.trainer.utils import create_model_from_path, get_callable_name, is_async_callable

from multirole.chat.messages import conversation_of
from multirole.inputs.arguments import check_adapter
from multirole.inputs.streams import IndexedRows, StreamedRows, first_row, read_whole
from multirole.options import MultiRoleGRPOConfig
from multirole.types import (
    MAX_REWARD,
    REWARD_ARGUMENTS,
    TRL_REWARD_ARGUMENTS,
    Episode,
    Problem,
    accepts,
    check_columns,
)

logger = logging.getLogger(__name__)

BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of PEFT's LoRA initialisations that modify the base weights."""
INDEX = "_index"
"""Column that carries a row's index in the dataset through TRL's data loader."""


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


def train_only(model: PeftModel, adapters: list[str]) -> None:
    """Require a gradient of these adapters and of no other that the model holds, whichever is active."""
    model.set_requires_grad(list(model.peft_config), False)
    model.set_requires_grad(adapters, True)


def check_head_cast(model: PeftModel, args: MultiRoleGRPOConfig) -> None:
    """Raise ValueError if TRL cannot cast the head to float32: it looks for the embeddings that share its matrix, and does not find a PeftModel's."""
    if args.cast_lm_head_to_fp32 and model.config.tie_word_embeddings:
        raise ValueError(
            "`cast_lm_head_to_fp32=True` does not work with this model, whose head and embeddings are one matrix: TRL looks for the embeddings "
            "in a place where a PeftModel does not have them. Leave it at False, or load the whole model in float32."
        )


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
    start = getattr(peft_config, "init_lora_weights", True)
    return isinstance(start, str) and start.startswith(BASE_CHANGING)


def check_base_alone(model: PeftModel, advice: str) -> None:
    """Raise ValueError, which ends in `advice`, if the base without adapters is not the untrained model: an adapter took over a part of it."""
    for name, peft_config in model.peft_config.items():
        if changes_base(peft_config):
            raise ValueError(
                f"`init_lora_weights={peft_config.init_lora_weights!r}` moved a part of the base's weights into adapter {name!r}, so no role can "
                f"be played by the base alone. {advice}"
            )


def check_shared_base(peft_config: Any, adapters: list[str]) -> None:
    """Raise ValueError if several adapters would each take over a part of one base."""
    if changes_base(peft_config) and len(adapters) > 1:
        raise ValueError(
            f"`init_lora_weights={peft_config.init_lora_weights!r}` changes the base model, so {len(adapters)} adapters cannot share it. "
            "Use True, or policy='sp'."
        )


def add_adapters(base: PreTrainedModel, peft_config: PeftConfig, adapters: list[str]) -> PeftModel:
    """Add one new adapter per name to the base, initialised in this order."""
    first, *rest = adapters
    model = get_peft_model(base, peft_config, adapter_name=first)
    for name in rest:
        model.add_adapter(name, peft_config)
    return model


def check_dataset(name: str, dataset: Any, reward_funcs: Iterable[Any] = ()) -> None:
    """Raise ValueError or TypeError if a dataset's rows are not prompts, or a reward function cannot take its columns."""
    if dataset is None:
        raise ValueError(
            f"`{name}` is required: the workflow plays its prompts. `Dataset.from_list` makes one of a list of rows."
        )
    if not isinstance(dataset, (Dataset, IterableDataset)):
        is_dict = isinstance(dataset, dict)
        advice = (
            f"Pass one of its splits, {list(dataset)}." if is_dict else "`Dataset.from_list` converts a list of rows."
        )
        raise TypeError(f"`{name}` must be a `Dataset` or `IterableDataset`, got `{type(dataset).__name__}`. {advice}")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` is empty.")
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    if is_transformed or not dataset.column_names:  # a stream may not know its columns
        columns = list(first_row(name, dataset))
    else:
        columns = list(dataset.column_names)
    if "prompt" not in columns:
        raise ValueError(f'`{name}` needs a "prompt" column; it has {columns}.')
    if images := {"image", "images"} & set(columns):
        raise ValueError(
            f"`{name}` has a column {images.pop()!r}, but only text prompts are supported. Remove or rename it."
        )
    if INDEX in columns:
        raise ValueError(f"`{name}` has a column {INDEX!r}, where the trainer stores row indices. Rename it.")
    check_columns(f"`{name}`", columns)
    if isinstance(dataset, Dataset):  # the rows of a stream are checked as they are read
        check_prompts(name, dataset)
        if "id" in columns and not is_transformed:  # a transform may draw ids, which are checked where they are used
            check_ids(f"`{name}`", (problem_name(one, i) for i, one in enumerate(dataset["id"])))
    for function in reward_funcs:
        check_signature(function, name, columns)


def check_evaluated(eval_dataset: Any, args: MultiRoleGRPOConfig) -> None:
    """Raise ValueError for a strategy that evaluates without an `eval_dataset`."""
    strategy = IntervalStrategy(args.eval_strategy)
    if eval_dataset is None and strategy != IntervalStrategy.NO:
        raise ValueError(
            f"`eval_strategy={strategy.value!r}` evaluates, and there is no `eval_dataset`. Pass one, or leave `eval_strategy` at 'no'."
        )


def checked_evaluation(dataset: Any, reward_funcs: Iterable[Any], argument: str = "eval_dataset") -> Any:
    """Check an evaluation set, or a dict of several, as `check_dataset` does, and read streams into datasets."""
    several = dataset if isinstance(dataset, dict) else {"": dataset}
    checked = {}
    for key, evaluation_set in several.items():
        name = f"{argument}[{key!r}]" if isinstance(dataset, dict) else argument
        check_dataset(name, evaluation_set, reward_funcs)
        checked[key] = (
            read_whole(name, evaluation_set) if isinstance(evaluation_set, IterableDataset) else evaluation_set
        )
    return checked if isinstance(dataset, dict) else checked[""]


def to_problems(rows: Iterable[dict[str, Any]]) -> list[Problem]:
    """Convert each row to a problem. The optional columns "id" and "task" give its name and its prompt templates."""
    problems = [to_problem(row, i) for i, row in enumerate(rows)]
    check_ids("the dataset", (problem.id for problem in problems))
    return problems


def check_ids(name: str, ids: Iterable[str]) -> None:
    """Raise ValueError if two rows of a dataset have one id."""
    for one, count in Counter(ids).items():
        if count > 1:
            raise ValueError(
                f'The "id" column of {name} names {count} rows {one!r}, but an id seeds the sampling of its problem and groups its episodes. '
                "Make ids unique, or leave the column out."
            )


def problem_name(name: Any, index: int) -> str:
    """Return the name of a problem: its "id" or else its index."""
    return str(index if name is None else name)


def to_problem(row: dict[str, Any], index: int) -> Problem:
    """Convert a row of a dataset to a problem, named by its "id" or else by its index."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", INDEX)}
    try:
        *history, question = conversation_of(row["prompt"])
    except ValueError as error:
        raise ValueError(f"Row {index}: {error}") from error
    name = problem_name(row.get("id"), index)
    return Problem(name, str(row.get("task") or ""), question["content"], columns, history, row["prompt"])


def to_row(problem: Problem) -> dict[str, Any]:
    """Return the row that a problem was made of (`to_problem`), or one with its prompt, id and task if it was made otherwise."""
    if problem.prompt is None:
        prompt = problem.messages if problem.history else problem.question
        return {"prompt": prompt, "id": problem.id, "task": problem.task}
    return problem.reference | {"prompt": problem.prompt}


class Problems(Sequence[Problem]):
    """The problems of a training set's rows. Each is made when it is read, so that a large set takes no memory."""

    def __init__(self, rows: IndexedRows | StreamedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Problem]:
        return (to_problem(row, i) for i, row in enumerate(self.rows))

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        at = range(len(self))[index]
        return to_problem(self.rows[at], at) if isinstance(at, int) else [to_problem(self.rows[i], i) for i in at]


def check_prompts(name: str, dataset: "Dataset") -> None:
    """Raise ValueError for a prompt that is neither text nor a conversation of texts that ends with a user message."""
    is_transformed = dataset.format["type"] == "custom"
    prompts = (row["prompt"] for row in dataset) if is_transformed else dataset["prompt"]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            try:
                conversation_of(prompt)
            except ValueError as error:
                raise ValueError(f"Row {index} of `{name}`: {error}") from error


def check_reward(source: str, problem: Problem, reward: float) -> None:
    """Raise ValueError for a reward that is not a number, or larger than `MAX_REWARD`."""
    try:
        is_fine = bool(abs(reward) <= MAX_REWARD)
    except (TypeError, ValueError, RuntimeError):  # a text, a list, a tensor of several numbers
        is_fine = False
    if not is_fine:
        raise ValueError(
            f"{source} gave problem {problem.id!r} the reward {reward!r}. A reward must be a number between {-MAX_REWARD:g} and "
            f"{MAX_REWARD:g}."
        )


def check_signature(function: Any, name: str, columns: list[str]) -> None:
    """Raise ValueError if a reward function cannot take the arguments that TRL passes for a dataset with these columns."""
    if isinstance(function, (str, nn.Module)):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    columns = [column for column in columns if column not in ("prompt", "completion", "completion_ids")]
    passed = REWARD_ARGUMENTS if accepts(function, "episodes") else TRL_REWARD_ARGUMENTS
    try:
        signature.bind(**dict.fromkeys([*passed, *columns]))
    except TypeError as error:
        raise ValueError(
            f"The reward function {get_callable_name(function)!r} does not fit `{name}`: {error}. It gets {', '.join(passed)} and the "
            f"columns {columns}, all by keyword. Name those that it reads, and end its parameters with `**kwargs`."
        ) from error


def is_nan(reward: Any) -> bool:
    """Return whether a reward is the number NaN."""
    return isinstance(reward, (float, int)) and math.isnan(reward)


def as_number(reward: Any) -> Any:
    """Return a reward as a float: of NumPy, a tensor with one element, a fraction. What is no number stays as it is, and so does None."""
    if reward is None or isinstance(reward, (str, bytes)):
        return reward
    try:
        return float(reward)
    except (TypeError, ValueError, RuntimeError):
        return reward


def as_list(rewards: Any) -> list[float | None]:
    """Return a reward function's result as a list; TypeError if it is a single value, or has no order."""
    if isinstance(rewards, (str, bytes, dict, set)) or not isinstance(rewards, Iterable):
        raise TypeError(f"it must return a list with one number per completion, got {rewards!r}.")
    return list(rewards)


def check_thought_rewards(reward_funcs: Iterable[Any], args: MultiRoleGRPOConfig) -> None:
    """Raise ValueError for TRL's rewards of `<think>`, which find nothing in texts without thoughts."""
    for function in reward_funcs:
        called = function.func if isinstance(function, partial) else function
        if args.strip_thoughts and called in (think_format_reward, reasoning_accuracy_reward):
            raise ValueError(
                f"The reward function {get_callable_name(function)!r} reads the thought of a completion, but `strip_thoughts=True` cuts thoughts out. Set "
                "`strip_thoughts=False` in the configuration."
            )


def checked_reward(function: Any) -> Any:
    """Wrap a reward function so that an exception, or a reward that `check_reward` refuses, is reported under its name.

    None and NaN are allowed (TRL leaves that episode out); the first NaN gives a warning. `episodes` are passed to functions
    that accept them. Reward models and their names are returned unchanged.
    """
    if isinstance(function, (str, nn.Module)):
        return function
    name, takes_episodes = get_callable_name(function), accepts(function, "episodes")
    nan_problems: list[str] = []

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the user's own code
            raise RuntimeError(f"The reward function {name!r} failed: {type(error).__name__}: {error}") from error

    def check(rewards: list[float | None], episodes: list[Episode]) -> list[float | None]:
        rewards = [as_number(reward) for reward in rewards]
        for reward, episode in zip(rewards, episodes, strict=False):  # TRL refuses a wrong number of rewards
            if is_nan(reward) and not nan_problems:
                nan_problems.append(episode.problem.id)
                logger.warning("The reward function %r gave problem %r the reward NaN. The episode is left out of its group, as "
                               "for None. Further NaN rewards are not reported.", name, episode.problem.id)  # fmt: skip
            elif reward is not None and not is_nan(reward):
                check_reward(f"The reward function {name!r}", episode.problem, reward)
        return rewards

    def keywords(episodes: list[Episode]) -> dict[str, list[Episode]]:
        return {"episodes": episodes} if takes_episodes else {}

    @wraps(function)
    def call(*args: Any, episodes: list[Episode], **kwargs: Any) -> list[float | None]:
        with named():
            rewards = as_list(function(*args, **keywords(episodes), **kwargs))
        return check(rewards, episodes)

    @wraps(function)
    async def call_async(*args: Any, episodes: list[Episode], **kwargs: Any) -> list[float | None]:
        with named():
            rewards = as_list(await function(*args, **keywords(episodes), **kwargs))
        return check(rewards, episodes)

    wrapper: Callable[..., Any] = call_async if is_async_callable(function) else call
    wrapper.__name__ = name
    return wrapper
