"""What a run leaves on disk: Parquet tables, turns, provenance, and DONE, written last.

    config.json  provenance.json        the cell and where it ran
    metrics.parquet                     one row per iteration
    roles.parquet                       iteration x role
    ledger.parquet                      one row per optimizer step
    steps.parquet                       optimizer step x role
    cosines.parquet                     iteration x adapter x pair of roles that share it
    alarms.parquet                      one row per alarm, if there was any
    eval.parquet                        evaluation step x problem
    turns/step_*.parquet                every turn of the first `N_INSPECTED` validation episodes
    adapters/step_*/<adapter>/          PEFT adapters
    checkpoints/                        what a resume needs (`checkpoints`); the newest two
    LOCK                                which process is writing all this (`locks`); gone when it ends
    DONE                                sha256 of every file above but adapters and checkpoints: the run is complete

Files are whole or absent (`storage`). The tables in memory are flushed with each checkpoint, which says how many rows each
had, and a resumed run drops what came after it: the record never disagrees with the weights.
"""

import time
from pathlib import Path

import numpy as np

from multirole import sandbox
from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode, Turn
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.experiment.checkpoints import newest_whole, prune, publish, read_manifest, seal, staging, step_of
from multirole.experiment.folders import write_done
from multirole.experiment.storage import read_table, remove, sha256, write_table

N_INSPECTED = 32
TABLES = ("metrics", "roles", "ledger", "steps", "cosines", "alarms", "eval")


def outcome_row(step: int, episode: Episode) -> dict[str, object]:
    """What became of one episode of an evaluation."""
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
    """One turn of an evaluation as a row."""
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
    }


class Recorder:
    """A run's tables; `save(step)` makes them durable, `rewind(checkpoint)` undoes what came after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables: dict[str, list[dict]] = {name: [] for name in TABLES}

    def flush(self) -> None:
        """Write every table that has rows."""
        for name, rows in self.tables.items():
            if rows:
                write_table(self.folder / f"{name}.parquet", rows)

    def seal(self, step: int) -> None:
        """Make the staged checkpoint of `step` verifiable: it holds for the tables as they are now."""
        seal(self.folder, step, {name: len(rows) for name, rows in self.tables.items()})

    def save(self, step: int) -> None:
        """Flush every table, then publish the sealed checkpoint of `step` and its adapters."""
        self.flush()
        publish(self.folder, step)

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; None starts afresh. ValueError where there are some and none is whole."""
        return newest_whole(self.folder)

    def rewind(self, checkpoint: Path | None) -> None:
        """Read the tables back as they were at a checkpoint, and drop what came after it and what a kill left behind.

        Raises ValueError, before anything is dropped, where a table is not what the checkpoint says.
        """
        step, staged = 0, staging(self.folder)
        manifest: dict[str, dict] = {"rows": {}, "turns": {}}
        if checkpoint is not None:
            step, manifest = step_of(checkpoint), read_manifest(checkpoint)
        elif (self.folder / "metrics.parquet").exists() and not any(staged.glob("checkpoint-*")):
            # a kill while the first one was saved leaves that one staged
            raise ValueError(
                f"{self.folder} holds tables and no checkpoints, so the run cannot continue, and starting it afresh would "
                "overwrite them. Put its checkpoints folder back, or move that folder away."
            )
        tables = {name: self._read(name, rows, checkpoint) for name, rows in manifest["rows"].items()}
        for name, digest in manifest["turns"].items():
            path = self.folder / "turns" / name
            if not path.exists() or sha256(path) != digest:
                raise _altered(path, checkpoint, "missing or not as it was written")
        self.tables |= tables
        later = [*self.folder.glob("adapters/step_*"), *self.folder.glob("checkpoints/checkpoint-*")]
        later = [path for path in later if step_of(path) > step]
        later += [path for path in self.folder.glob("turns/step_*") if path.name not in manifest["turns"]]
        later += [path for name in TABLES if not self.tables[name] for path in self.folder.glob(f"{name}.parquet")]
        for path in [*later, *self.folder.rglob("*.tmp"), staged]:
            remove(path)

    def _read(self, table: str, rows: int, checkpoint: Path | None) -> list[dict]:
        """The first rows of a table: those that it had at the checkpoint."""
        path = self.folder / f"{table}.parquet"
        try:
            found = read_table(path) if rows else []
        except OSError as error:
            raise _altered(path, checkpoint, f"unreadable ({error})") from error
        if len(found) < rows:
            raise _altered(path, checkpoint, f"only {len(found)} rows long, where {rows} were written")
        return found[:rows]

    def finish(self) -> None:
        """Flush, then write DONE with the checksum of every table."""
        self.flush()
        remove(staging(self.folder))
        prune(self.folder)
        write_done(self.folder)

    def restorable(self, save_every: int) -> dict[int, tuple[float, Path]]:
        """step -> validation accuracy and adapters of the steps that were evaluated and, on schedule, saved so far.

        Steps that were saved for another reason do not count: a resumed run would have others than an unbroken one.
        """
        right: dict[int, list[bool]] = {}
        for row in self.tables["eval"]:
            right.setdefault(row["step"], []).append(row["correct"])
        folders = {step: self.folder / "adapters" / f"step_{step:05d}" for step in right if step % save_every == 0}
        return {step: (sum(right[step]) / len(right[step]), path) for step, path in folders.items() if path.is_dir()}


def _altered(path: Path, checkpoint: Path | None, problem: str) -> ValueError:
    assert checkpoint is not None
    return ValueError(
        f"{path} is {problem}, and {checkpoint.name} cannot be continued without it. Nothing was overwritten. Put the file back "
        f"from a copy, or move {checkpoint.parents[1]} away to start afresh."
    )


class Recording(MultiRoleCallback):
    """Records iterations and evaluations. Pass it after the callbacks whose results it reads.

    `recorder` is None on all but the first of several processes.
    """

    def __init__(self, recorder: Recorder | None, diagnostics: RoleDiagnostics, alarms: Alarms) -> None:
        self.recorder, self.diagnostics, self.alarms = recorder, diagnostics, alarms
        self.grading_seconds, self.cpu = 0.0, time.process_time()

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        self.grading_seconds = sandbox.take_stats().seconds

    def on_iteration_end(self, trainer: MultiRoleGRPOTrainer, iteration: Iteration) -> None:
        """Add its summary, roles, optimizer steps, cosines between roles, and new alarms."""
        if self.recorder is None:
            return
        episodes, number, seconds = iteration.episodes, iteration.number, iteration.seconds
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        groups: dict[tuple[str, int], set[float]] = {}
        for episode, reward in zip(episodes, rewards, strict=True):
            groups.setdefault(episode.group(trainer.args.num_generations), set()).add(reward.value)
        tables, turns = self.recorder.tables, [turn for episode in episodes for turn in episode.turns]
        tables["metrics"].append(
            {
                "iteration": number,
                "reward": sum(reward.value for reward in rewards) / len(rewards),
                "accuracy": sum(bool(reward.is_correct) for reward in rewards) / len(rewards),
                "episodes": len(episodes),
                "turns": len(turns),
                "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
                "completion_tokens": sum(len(turn.completion_ids) for turn in turns),
                "zero_variance_groups": sum(len(values) == 1 for values in groups.values()) / len(groups),
                "optimizer_steps": len(self.diagnostics.ledger),
                "rollout_seconds": seconds["rollout"],
                "update_seconds": seconds["update"],
                "grading_seconds": self.grading_seconds,
                "cpu_seconds": time.process_time() - self.cpu,
            }
        )
        self.cpu = time.process_time()
        found = {
            "ledger": self.diagnostics.ledger,
            "steps": self.diagnostics.steps(),
            "cosines": self.diagnostics.cosines(),
        }
        for name, rows in found.items():
            tables[name] += [{"iteration": number, **row} for row in rows]
        tables["roles"] += [{"iteration": number, "role": role, **values} for role, values in iteration.roles.items()]
        tables["alarms"] += self.alarms.new

    def on_episodes_evaluated(
        self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        """Add the outcome of every problem, and write the turns of the first `N_INSPECTED` episodes, token by token."""
        rows = [Row(e, turn, trainer.policy[turn.role]) for e in episodes[:N_INSPECTED] for turn in e.turns]
        base_logprobs = trainer.logprobs_of(rows, base=True)  # every process computes a share
        if self.recorder is None:
            return
        step, tables = trainer.state.global_step, self.recorder.tables
        tables["eval"] = [row for row in tables["eval"] if row["step"] != step]
        tables["eval"] += [outcome_row(step, episode) for episode in episodes]
        decode = trainer.processing_class.decode
        turns = [
            turn_row(step, row.episode, row.turn)
            | {
                "tokens": [decode([token], skip_special_tokens=True) for token in row.turn.completion_ids],
                "logprobs": np.array(row.turn.logprobs, dtype=np.float32),
                "base_logprobs": logprobs.numpy(),
            }
            for row, logprobs in zip(rows, base_logprobs, strict=True)
        ]
        write_table(self.recorder.folder / "turns" / f"step_{step:05d}.parquet", turns)
