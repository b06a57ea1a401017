"""Load prompt templates: one Markdown file per role, `<set>/<role>.md`, with `$field` placeholders.

A set is a folder: one of this package (general, math, code, gym, functions, tiny_chain, tiny_pipe), or one of the user's, given by its path.
"general" passes the dataset's prompt on unchanged and is used if a problem names no set.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template


@cache
def template(prompts: str, name: str) -> Template:
    """Load the template `<prompts>/<name>.md`; ValueError if there is none."""
    inside = files(__package__).joinpath(prompts or "general")
    path = inside if inside.is_dir() else Path(prompts).expanduser()
    try:
        return Template(path.joinpath(f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))
    except OSError as error:
        raise ValueError(
            f"There is no prompt template {name}.md in {prompts!r}. `prompts` must be a folder with one <role>.md per role, or one of "
            "'general', 'math' and 'code'."
        ) from error


def render(prompts: str, name: str, **fields: str) -> str:
    """Fill in every `$field` of the template `<prompts>/<name>.md`; ValueError for a field without a value."""
    try:
        return template(prompts, name).substitute(fields)
    except KeyError as error:
        raise ValueError(
            f"The template {name}.md of {prompts!r} uses ${error.args[0]}, but has only {sorted(fields)}."
        ) from error
