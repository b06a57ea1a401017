"""The model card of an embedded base, written from its `skills.json`."""

import json
from pathlib import Path

CARD = """---
license: apache-2.0
library_name: transformers
tags: [multirole, tiny, qwen3]
---
# tiny-s

A Qwen3 of {parameters:,} parameters, started from scratch.
It learned from synthetic dialogues of the tiny tasks' roles, so that multi-role GRPO can be run whole on a CPU; it knows
no language beyond them. Answers come in habits of different quality on purpose, so that reinforcement has something to
select: the share of right answers is bounded by the mix of habits, and what it knows shows best where careful work
is asked for.

* Training: {training_tokens:,} tokens (padding included), {minutes:.0f} CPU-minutes on one thread, seed {seed}:
  {dialogue_tokens:,} on scripted dialogues, then {critic_tokens:,} with critics of its own graded answers.
* Rebuild: `python -m tiny_base.pretrain --out FOLDER`; the loss curve is in `loss.jsonl`.
* Measured below: {validation_problems} validation problems per task and one episode of each workflow per problem,
  temperature {temperature}, sampling seed {seed}, at most 96 reply tokens, untrained adapters. A share of n turns has a
  standard error of at most 0.5 / sqrt(n). All numbers come from `skills.json`.

{tables}
"""

COLUMNS = {
    "accuracy": "right",
    "careful_accuracy": "right when asked for careful work",
    "gain": "gain over its candidates",
    "balanced_accuracy": "balanced verdict accuracy",
    "repairs_wrong": "wrong drafts repaired",
    "parsed": "parsed",
    "truncated": "cut off",
    "prompt_tokens": "prompt tokens",
    "reply_tokens": "reply tokens",
    "n": "n",
}


def load_skills(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Task -> role -> measured facts."""
    return json.loads((folder / "skills.json").read_text(encoding="utf-8"))["skills"]


def load_losses(folder: Path) -> list[tuple[str, list[int], list[float]]]:
    """(phase, tokens since the start, losses) per training phase."""
    steps = [json.loads(line) for line in (folder / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    curves, offset = [], 0
    for phase in dict.fromkeys(step["phase"] for step in steps):
        part = [step for step in steps if step["phase"] == phase]
        curves.append((phase, [offset + step["tokens"] for step in part], [step["loss"] for step in part]))
        offset += part[-1]["tokens"]
    return curves


def write_card(folder: Path) -> None:
    """Write `folder/README.md` from `folder/skills.json`."""
    facts = json.loads((folder / "skills.json").read_text(encoding="utf-8"))
    tables = "\n\n".join(f"## {task}\n\n{skill_table(roles)}" for task, roles in facts["skills"].items())
    minutes = facts["training_cpu_s"] / 60
    text = CARD.format(**facts, **facts["plan"], minutes=minutes, tables=tables)
    (folder / "README.md").write_text(text, encoding="utf-8")


def skill_table(roles: dict[str, dict[str, float]]) -> str:
    """A Markdown table, one line per role; a dash where a column does not apply."""
    lines = ["| role | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for role, facts in roles.items():
        lines.append(f"| {role} | " + " | ".join(_cell(key, facts.get(key)) for key in COLUMNS) + " |")
    return "\n".join(lines)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "n":
        return f"{value:.0f}"
    return f"{value:.1f}" if key.endswith("tokens") else f"{value:+.3f}" if key == "gain" else f"{value:.3f}"
