"""Load prompt templates: one Markdown file per role, `<set>/<role>.md`, with `$field` placeholders.

A set is a folder: one of this package (general, math, code), one given by its path, or one inside an installed package, such as
"my_package:prompts/math". "general" passes the dataset's prompt on unchanged and is used if a problem names no set.
"""

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template


def read_again(prompts: str | None, *names: str) -> str | None:
    """Return the name of a set, whose templates are read again: a workflow uses the files as they are when it is made.

    ValueError if the set lacks one of the templates `names`, which the workflow uses.
    """
    template.cache_clear()
    if prompts:
        for name in names:
            template(prompts, name)
    return prompts


@cache
def template(prompts: str, name: str) -> Template:
    """Load the template `<prompts>/<name>.md`; ValueError if there is none."""
    try:
        return Template((folder_of(prompts) / f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))
    except OSError as error:
        raise ValueError(
            f'There is no prompt template {name}.md in {prompts!r}. `prompts` of the workflow, or else the column "task" of a dataset, must name a folder '
            "with one <role>.md per role, and refine.md for Eval-Opt (its path, or 'package:folder' for one inside an installed package), or one of "
            "'general', 'math' and 'code'. If the column means something else, rename it, or pass prompts='general'."
        ) from error


def folder_of(prompts: str) -> Path:
    """Return the folder of a set: one of this package, the user's, or one of another package."""
    inside = Path(str(files(__package__).joinpath(prompts or "general")))
    users_folder = Path(prompts).expanduser()
    package, colon, folder = prompts.partition(":")
    if inside.is_dir() or users_folder.is_dir() or not (colon and package.isidentifier() and find_spec(package)):
        return inside if inside.is_dir() else users_folder
    return Path(str(files(package).joinpath(folder)))


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
