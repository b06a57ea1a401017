"""What a run leaves on disk: Parquet tables, turns, provenance, and DONE, written last.

    config.json  provenance.json        the cell and where it ran; "outcome" where the run diverged
    metrics.parquet                     one row per iteration
    roles.parquet                       iteration x role
    episodes.parquet                    one row per training episode
    ledger.parquet                      one row per optimizer step
    steps.parquet                       optimizer step x role
    cosines.parquet                     iteration x adapter x pair of roles that share it
    eval.parquet                        evaluation step x problem
    skills.parquet                      evaluation step x role x measure
    turns/step_*.parquet                every turn of the first `N_INSPECTED` validation episodes
    adapters/step_*/<adapter>/          PEFT adapters of every evaluation
    checkpoints/                        what a resume needs (`checkpoints`); the newest two
    LOCK                                which process is writing all this (`folders.claim`); gone when it ends
    DONE                                sha256 of every file above but checkpoints: the run is complete

Files are whole or absent (`storage`). The tables travel inside each checkpoint, and a resumed run puts back those of the one
that it continues from: the record never disagrees with the weights.
"""

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from multirole import sandbox
from multirole.core.hooks import Iteration, MultiRoleCallback, Trainer
from multirole.core.measures import accuracy, mean_reward
from multirole.core.rows import Row
from multirole.core.types import Episode, Turn
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.diagnostics.skills import SkillWatch
from multirole.experiment.checkpoints import RECORD, prune, publish, staging, step_of
from multirole.experiment.folders import outcome_of, write_done
from multirole.experiment.storage import remove, write_table, write_text, writing

N_INSPECTED = 32
TABLES = ("metrics", "roles", "episodes", "ledger", "steps", "cosines", "eval", "skills")


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

    def save(self, step: int) -> None:
        """Publish the staged checkpoint of `step`, with the tables in it."""
        self._restore(publish(self.folder, step, self.tables))

    def _restore(self, checkpoint: Path | None) -> None:
        """Make the run's tables and turns those of a checkpoint; None takes all away."""
        kept: dict[Path, Path] = {}
        if checkpoint is not None:
            record = checkpoint / RECORD
            kept = {path.relative_to(record): path for path in sorted(record.rglob("*.parquet"))}
        for path in [*self.folder.glob("*.parquet"), *self.folder.glob("turns/*.parquet")]:
            if path.relative_to(self.folder) not in kept:
                remove(path)
        for name, path in kept.items():
            with writing(self.folder / name) as aside:
                shutil.copyfile(path, aside)

    def rewind(self, checkpoint: Path | None) -> None:
        """Put the tables back as they were at a checkpoint, and drop what came after it and what a kill left behind."""
        staged, step = staging(self.folder), step_of(checkpoint) if checkpoint else 0
        (self.folder / "turns").mkdir(exist_ok=True)
        if checkpoint is not None:
            for path in (checkpoint / RECORD).glob("*.parquet"):
                self.tables[path.stem] = pq.read_table(path).to_pylist()
        elif (self.folder / "metrics.parquet").exists() and not outcome_of(self.folder):
            # tables are put there when a checkpoint has its name, or at the end of a run that diverged before it had one
            raise ValueError(
                f"{self.folder} holds tables and no checkpoints, so the run cannot continue, and starting it afresh would "
                "overwrite them. Put its checkpoints folder back, or move that folder away."
            )
        self._restore(checkpoint)
        later = [*self.folder.glob("adapters/step_*"), *self.folder.glob("checkpoints/checkpoint-*")]
        for path in [*[path for path in later if step_of(path) > step], *self.folder.rglob("*.tmp"), staged]:
            remove(path)

    def finish(self, outcome: dict[str, object] | None = None) -> None:
        """Write the tables and how the run ended, if not as planned; then DONE, with the checksum of every file."""
        if outcome:
            path = self.folder / "provenance.json"
            write_text(path, json.dumps(json.loads(path.read_text()) | {"outcome": outcome}, indent=2))
        for name, rows in self.tables.items():
            if rows:
                write_table(self.folder / f"{name}.parquet", rows)
        remove(staging(self.folder))
        prune(self.folder)
        write_done(self.folder)


class Recording(MultiRoleCallback):
    """Records iterations and evaluations. Pass it after the callbacks whose results it reads.

    `recorder` is None on all but the first of several processes.
    """

    def __init__(self, recorder: Recorder | None, diagnostics: RoleDiagnostics, skills: SkillWatch) -> None:
        self.recorder, self.diagnostics, self.skills = recorder, diagnostics, skills
        self.grading_seconds, self.cpu = 0.0, time.process_time()

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        self.grading_seconds = sandbox.take_seconds()

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """Add its summary, roles, optimizer steps, and cosines between roles."""
        if self.recorder is None:
            return
        episodes, number, seconds = iteration.episodes, iteration.number, iteration.seconds
        groups: dict[tuple[str, int], set[float]] = defaultdict(set)
        for episode in episodes:
            assert episode.reward is not None
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
                "zero_variance_groups": sum(len(values) == 1 for values in groups.values()) / len(groups),
                "optimizer_steps": len(self.diagnostics.ledger),
                "rollout_seconds": seconds["rollout"],
                "update_seconds": seconds["update"],
                "grading_seconds": self.grading_seconds,
                "cpu_seconds": time.process_time() - self.cpu,
            }
        )
        self.cpu = time.process_time()
        watched = self.diagnostics
        for name, rows in (("ledger", watched.ledger), ("steps", watched.steps()), ("cosines", watched.cosines())):
            tables[name] += [{"iteration": number, **row} for row in rows]
        tables["roles"] += [{"iteration": number, "role": role, **values} for role, values in iteration.roles.items()]
        tables["episodes"] += [
            {
                "iteration": number, "problem": e.problem.id, "episode": e.index, "reward": e.reward and e.reward.value,
                "advantage": e.advantage, "correct": e.reward and e.reward.is_correct,
            }
            for e in episodes
        ]  # fmt: skip

    def on_episodes_evaluated(self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float]) -> None:
        """Add the outcome of every problem, and write the turns of the first `N_INSPECTED` episodes, token by token."""
        rows = [Row(e, turn, trainer.policy[turn.role]) for e in episodes[:N_INSPECTED] for turn in e.turns]
        base_logprobs = trainer.logprobs_of(rows, base=True)  # every process computes a share
        if step := trainer.state.global_step:
            trainer.save_adapters()  # every process is asked for its shard
        if self.recorder is None:
            return
        tables, skills = self.recorder.tables, [{"step": step} | row for row in self.skills.rows]
        for name, new in (("eval", [outcome_row(step, e) for e in episodes]), ("skills", skills)):
            tables[name] = [row for row in tables[name] if row["step"] != step] + new
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
