"""What a cell refuses before any compute: ValueErrors that say what was given, why it cannot work, what to write instead."""

import inspect
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from multirole.experiment.presets import CHOICES, LEAST, MOST, is_tiny
from multirole.workflows import WORKFLOWS

if TYPE_CHECKING:
    from multirole.experiment.cell import Cell


def refuse(name: str, value: object, why: str, instead: str) -> NoReturn:
    """Raise the error."""
    raise ValueError(f"{name}={value!r} {why}. {instead}")


def check_workflow(given: object) -> None:
    """A workflow's name, or an object with what the trainer needs of one."""
    if isinstance(given, str):
        if given not in WORKFLOWS:
            refuse("workflow", given, "is no workflow of this project",
                   f"Write one of {sorted(WORKFLOWS)}, or pass a workflow object from Python.")  # fmt: skip
        return
    example = "Pass an object with `name`, `roles` such as {'judge': 1} and `async def run(self, problem, call)`."
    if isinstance(given, type) or not inspect.iscoroutinefunction(inspect.getattr_static(given, "run", None)):
        refuse("workflow", given, "has no coroutine `run` to play an episode with", example)
    if not isinstance(given.name, str) or not isinstance(given.roles, dict) or not given.roles:
        refuse("workflow", given, "does not say its name and its roles", example)
    if given.name in WORKFLOWS:
        refuse("workflow", given.name, "is a built-in workflow, whose results it would share", "Rename it.")


def check_choice(name: str, value: object) -> None:
    """One of the words that a field knows."""
    if value not in CHOICES[name]:
        refuse(name, value, "is not known", f"Write one of {list(CHOICES[name])}.")


def check_number(field: Field, value: object) -> None:
    """A field of a number or a bool: its type and its range. Fields of any other type pass."""
    name = field.name
    if value is None and field.default is None:  # left open by the scale, too
        return
    if field.type is bool and not isinstance(value, bool):
        refuse(name, value, "is neither True nor False", f"Write {name}=False, say.")
    is_int, is_float = field.type in (int, int | None), field.type in (float, float | None)
    if is_int and (not isinstance(value, int) or isinstance(value, bool)):
        refuse(name, value, f"is a {type(value).__name__}, and a count is whole", f"Write {name}=3, say.")
    if is_float and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        refuse(name, value, f"is a {type(value).__name__}, not a number", f"Write {name}=0.5, say.")
    least, most = LEAST.get(name, 1 if is_int else 0.0), MOST.get(name, 1e300)
    if (is_int or is_float) and not least <= value <= most:
        refuse(name, value, "is out of range", f"Write a finite number of at least {least} and at most {most}.")


def check_together(cell: "Cell") -> None:
    """Values that are good alone and impossible together, and folders that are not there."""
    if cell.n_train is not None and cell.n_train < cell.n_problems:
        refuse("n_train", cell.n_train, f"is less than the {cell.n_problems} problems of one iteration",
               "Write a larger n_train or a smaller n_problems.")  # fmt: skip
    if cell.updates == "tokens" and cell.step_tokens is None:
        refuse("updates", cell.updates, "cuts rows by tokens, and does not know into how many",
               "Write step_tokens=4096 beside it, say.")  # fmt: skip
    if cell.updates != "tokens" and cell.step_tokens is not None:
        refuse("step_tokens", cell.step_tokens, f"stands beside updates={cell.updates!r}, which does not count tokens",
               "Write updates='tokens', or leave it out.")  # fmt: skip
    if cell.updates == "tokens" and cell.minibatch_split == "sequential":
        refuse("minibatch_split", cell.minibatch_split, "divides a partial step by the rows of a full one, and steps of "
               "updates='tokens' have no such number", "Write minibatch_split='even', or updates='per_batch'.")  # fmt: skip
    check_served(cell, cell.engine)
    if is_tiny(cell.scale):
        for name in ("model", "data"):
            if vars(cell)[name] is not None:
                refuse(name, vars(cell)[name], f"stands beside scale={cell.scale!r}, whose model and task are embedded",
                       "Write scale='0.6b' for a model or rows of your own.")  # fmt: skip
        if cell.renderer != "chat_template":
            refuse("renderer", cell.renderer, "is a format that the embedded models never saw",
                   "Write renderer='chat_template', or a scale of the paper.")  # fmt: skip
    for name in ("model", "data"):
        path = vars(cell)[name]
        if path is not None and not Path(path).expanduser().exists():
            refuse(name, path, "does not exist", "Write a local folder, or leave it out for the pinned download.")


def check_served(cell: "Cell", engine: str) -> None:
    """Adapters that an engine can serve; `engine` is what the cell's resolves to, where that is known."""
    if cell.lora_rank == 0 and engine == "vllm":
        refuse("lora_rank", 0, "trains copies of the base's layers, and vLLM serves LoRA adapters of one base",
               "Write engine='transformers' beside it, or a rank of 1 to 512.")  # fmt: skip


def check_cell(cell: "Cell") -> None:
    """Everything about a cell's fields but its workflow, its policy and its role maps."""
    for name in CHOICES:
        check_choice(name, vars(cell)[name])
    for field in fields(cell):
        check_number(field, vars(cell)[field.name])
    check_together(cell)


def role_numbers(name: str, given: object, roles: list[str], kind: type[int] | type[float]) -> dict[str, int | float]:
    """A number for every role from a text such as "generator=0.01,aggregator=0.1"; 0 for roles that it does not name."""
    example = f"{roles[-1]}={20 if kind is int else 0.01}"
    advice = f"Write {name}={example!r}, say: numbers of at least 0, each role once at most."
    pairs = [tuple(part.strip() for part in item.partition("=")[::2]) for item in str(given).split(",")]
    values = dict.fromkeys(roles, kind(0))
    if len({role for role, _ in pairs}) < len(pairs):
        refuse(name, given, "names a role twice", advice)
    for role, text in pairs:
        if role not in values:
            refuse(name, given, f"names {role!r}, and the roles are {roles}", advice)
        try:
            values[role] = kind(text)
        except ValueError:
            refuse(name, given, f"gives {role!r} {text!r}, which is no {kind.__name__}", advice)
        if not 0 <= values[role] < 1e300:
            refuse(name, given, f"gives {role!r} {text!r}, which is out of range", advice)
    return values


def _as_text(numbers: dict[str, int | float]) -> str:
    """A role map as one writes it, in the order of the roles; those at 0 are left out."""
    return ",".join(f"{role}={value}" for role, value in numbers.items() if value)


def settled_anchor(given: object, roles: list[str]) -> float | str:
    """`Cell.kl_anchor` in one spelling: a number where it is the same for all roles, else a role map."""
    if isinstance(given, str):
        anchors = role_numbers("kl_anchor", given, roles, float)
        return anchors[roles[0]] if len(set(anchors.values())) == 1 else _as_text(anchors)
    if type(given) not in (int, float) or not 0 <= given < 1e300:
        refuse("kl_anchor", given, "is no weight of a penalty",
               f"Write a number of at least 0, or one for each role, such as '{roles[-1]}=0.01'.")  # fmt: skip
    return given


def settled_starts(given: str | None, roles: list[str]) -> str | None:
    """`Cell.train_after` in one spelling; None where every role is trained from the first iteration."""
    if given is None:
        return None
    starts = role_numbers("train_after", given, roles, int)
    if min(starts.values()) > 0:
        refuse("train_after", given, "leaves no role to train in the first iteration",
               f"Leave a role out, or write 0 for it: {roles[0]}=0.")  # fmt: skip
    return _as_text(starts) or None
