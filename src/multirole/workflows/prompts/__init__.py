"""Prompt templates, one Markdown file per task and role: `prompts/<task>/<role>.md`, with `$field` placeholders."""

from functools import cache
from importlib.resources import files
from string import Template


@cache
def _template(task: str, name: str) -> Template:
    return Template(files(__package__).joinpath(task, f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))


def render(task: str, name: str, **fields: str) -> str:
    """The template `prompts/<task>/<name>.md` with every `$field` filled in; a missing field raises KeyError."""
    return _template(task, name).substitute(fields)
