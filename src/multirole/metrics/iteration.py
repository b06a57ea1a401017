"""The metrics of one iteration in TRL's log: of the loss, of each role, and of the episodes."""

import itertools
from collections import defaultdict
from collections.abc import Collection

from multirole.callbacks import Iteration
from multirole.metrics.episodes import (
    accuracy,
    aggregate_metric,
    billed_tokens,
    n_failed,
    overflow_rate,
    text_metrics,
    turn_metrics,
)
from multirole.types import Episode
from multirole.update.importance import WeightSums, total_by_role
from multirole.update.passes.model_passes import MicroBatch
from multirole.update.processes import gather_objects
from multirole.update.rows import Row

OF_RATIOS = ("clip_ratio/", "cispo_clip_ratio")
"""Prefixes of TRL's metrics of the ratio, which has one value per row with `importance_sampling_level="sequence"`."""
OF_ROWS = ("vespo/phi_seq_mean",)
"""TRL's metrics that always have one value per row."""
Log = dict[str, list[float]]
"""TRL's `_metrics["train"]`: the values of each metric since the last time that it was logged."""


class LossMetrics:
    """Aggregate what TRL's loss logs per micro-batch into one number per metric and iteration.

    Args:
        means_over_rows: prefixes of the metrics that are means over the rows of a micro-batch; others are means over its tokens.
    """

    def __init__(self, means_over_rows: tuple[str, ...] = ()) -> None:
        self.means_over_rows = means_over_rows
        self.values: list[tuple[str, int, float]] = []  # name, weight, value

    def add(self, rows: list[Row], logged: Log) -> None:
        """Add what the loss of one micro-batch has logged; without `rows`, its values get no weight."""
        n_tokens = sum(len(row.turn.completion_ids) for row in rows)
        for name, values in logged.items():  # several, if a subclass logs more often than TRL
            weight = len(rows) if name.startswith(self.means_over_rows) else n_tokens
            self.values += [(name, weight, value) for value in values]

    def write_to(self, log: Log) -> None:
        """Log the iteration's numbers, over all processes, and forget them."""
        by_name: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for name, weight, value in itertools.chain.from_iterable(gather_objects(self.values)):
            by_name[name].append((weight, value))
        for name, values in by_name.items():
            log[name].append(aggregate_metric(name, values))
        self.values.clear()


class UpdateMetrics:
    """What the micro-batches of one update add up to: the metrics of TRL's loss, and the importance weights by role.

    Args:
        is_per_row: the ratio has one value per row (`importance_sampling_level="sequence"`).
    """

    def __init__(self, is_per_row: bool) -> None:
        self.loss = LossMetrics(OF_ROWS + OF_RATIOS * is_per_row)
        self.weights = WeightSums()
        # role -> sum over tokens, number of tokens
        self.teacher_kl: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, micro: MicroBatch) -> None:
        """Add a micro-batch whose pass has ended."""
        self.loss.add(micro.rows if micro.weight else [], micro.logged)
        if micro.weight and micro.importance is not None:
            self.weights.add(micro.rows, *micro.importance, micro.batch["completion_mask"])
        if micro.teacher_kl is not None:
            for row, kl in zip(micro.rows, micro.teacher_kl.double().sum(1).tolist(), strict=True):
                sums = self.teacher_kl[row.turn.role]
                sums[0], sums[1] = sums[0] + kl, sums[1] + len(row.turn.completion_ids)

    def mean_teacher_kl(self, taught: Collection[str]) -> dict[str, float]:
        """Collective: return the mean over tokens of the KL from its teacher for the roles in `taught` that had tokens; forget the sums."""
        totals = total_by_role(gather_objects(dict(self.teacher_kl)) if taught else [])
        self.teacher_kl.clear()
        return {role: kl / n for role, (kl, n) in totals.items() if role in taught}

    def clear(self) -> None:
        """Forget what an interrupted update has added."""
        self.loss.values.clear()
        self.weights.sums.clear()
        self.teacher_kl.clear()


def role_metrics(rows: list[Row], roles: list[str]) -> dict[str, dict[str, float]]:
    """Return role -> text metrics, for the roles that have rows."""
    rows_by_role = {role: [row for row in rows if row.turn.role == role] for role in roles}
    return {role: text_metrics(role_rows) for role, role_rows in rows_by_role.items() if role_rows}


def partner_metrics(episodes: list[Episode], roles: list[str]) -> dict[str, dict[str, float]]:
    """Return role -> metrics of the turns of roles that are not trained, for those that have any; with the tokens that an endpoint counted."""
    turns = [(episode, turn) for episode in episodes for turn in episode.turns]
    turns_by_role = {role: [(e, turn) for e, turn in turns if turn.role == role] for role in roles}
    return {role: turn_metrics(of_role) | billed_tokens(of_role) for role, of_role in turns_by_role.items() if of_role}


def log_iteration(log: Log, iteration: Iteration, counts_failures: bool) -> None:
    """Log each role's metrics and those of the iteration's episodes."""
    for name in [name for name in log if name.startswith("completions/")]:
        del log[name]  # TRL's lengths are of each episode's last turn: ours are per role
    for role, values in iteration.roles.items():
        for name, value in values.items():
            if value is not None:
                log[f"{role}/{name}"].append(float(value))
    if (fraction := accuracy(iteration.episodes)) is not None:
        log["accuracy"].append(fraction)
    for name, n in iteration.repeated_passes.items():
        log[name].append(n)
    log["prompt_overflow_rate"].append(overflow_rate(iteration.episodes))
    if counts_failures:
        log["failed_episodes"].append(n_failed(iteration.episodes))
