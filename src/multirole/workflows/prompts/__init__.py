"""Load prompt templates: one Markdown file per role, `<set>/<role>.md`, with `$field` placeholders.

A set is a folder: one of this package (general, math, code, gym, functions, tiny_chain, tiny_pipe), or one of the user's, given by its path.
"general" passes the dataset's prompt on unchanged and is used if a problem names no set.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template


def read_again(prompts: str | None) -> str | None:
    """Return the name of a set, whose templates are read again: a workflow uses the files as they are when it is made."""
    template.cache_clear()
    return prompts


@cache
def template(prompts: str, name: str) -> Template:
    """Load the template `<prompts>/<name>.md`; ValueError if there is none."""
    try:
        return Template((folder_of(prompts) / f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))
    except OSError as error:
        raise ValueError(
            f'There is no prompt template {name}.md in {prompts!r}. `prompts`, and the column "task" of a dataset, must name a folder with '
            "one <role>.md per role, or one of 'general', 'math' and 'code'."
        ) from error


def folder_of(prompts: str) -> Path:
    """Return the folder of a set: one of this package, or the user's."""
    inside = Path(str(files(__package__).joinpath(prompts or "general")))
    return inside if inside.is_dir() else Path(prompts).expanduser()


def render(prompts: str, name: str, **fields: str) -> str:
    """Fill in every `$field` of the template `<prompts>/<name>.md`; ValueError for a field without a value, or a `$` without a field."""
    text = template(prompts, name)
    try:
        return text.substitute(fields)
    except (KeyError, ValueError) as error:
        fault = f"uses ${error.args[0]}" if isinstance(error, KeyError) else "has a `$` that names no field"
        raise ValueError(
            f"The template {name}.md of {prompts!r} {fault}. Its fields are {sorted(fields)}; write `$$` for a dollar sign."
        ) from error
