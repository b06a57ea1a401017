"""Score the episodes of an evaluation with the reward functions, and compute the metrics that it logs.

`MultiRoleGRPOTrainer.evaluation_loop` plays the episodes.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from multirole.metrics.episodes import accuracy, billed_tokens, mean_reward, n_failed, overflow_rate, role_rewards
from multirole.options import MultiRoleGRPOConfig
from multirole.types import Episode
from multirole.update.processes import gather_objects

logger = logging.getLogger(__name__)


def score_shares(
    episodes: list[Episode],
    rows: list[dict[str, Any]],
    calculate_rewards: Callable[..., Tensor],
    accelerator: Accelerator,
) -> Tensor:
    """Set `reward` of evaluation episodes; each process scores a share. Returns all rewards (N, F), by function.

    TRL gathers the rewards, which needs shares of equal size: the last episode is scored more than once where they are not.

    Args:
        episodes: of every process, equally many for each of `rows`, in their order.
        calculate_rewards: TRL's `_calculate_rewards`, which returns the rewards of all processes.
    """
    repeats, size = len(episodes) // len(rows), -(-len(episodes) // accelerator.num_processes)
    start = accelerator.process_index * size
    share = [min(i, len(episodes) - 1) for i in range(start, start + size)]
    inputs = [rows[i // repeats] | {"episodes": episodes[i]} for i in share]
    rewards = calculate_rewards(inputs, [row["prompt"] for row in inputs], [], [])
    scored = itertools.chain.from_iterable(gather_objects([(i, episodes[i].reward) for i in share]))
    first_rows: dict[int, int] = {}  # episode -> the first of its rows
    for n, (i, reward) in enumerate(scored):
        episodes[i].reward = reward
        first_rows.setdefault(i, n)
    return rewards[list(first_rows.values())]


def gathered_columns(
    logged: Mapping[str, list[Any]], n_episodes: int, accelerator: Accelerator
) -> dict[str, list[Any]]:
    """Return the columns that reward functions have logged for an evaluation's episodes, from the shares of all processes (`score_shares`).

    A column without one value per episode of every share is left out.
    """
    size = -(-n_episodes // accelerator.num_processes)
    shares = gather_objects({name: values for name, values in logged.items() if len(values) == size})
    names = [name for name in shares[0] if all(name in share for share in shares)]
    return {name: [value for share in shares for value in share[name]][:n_episodes] for name in names}


def warn_of_loss_as_metric(args: MultiRoleGRPOConfig) -> None:
    """Warn of checkpoints that are compared by their loss, which is transformers' default with `load_best_model_at_end`."""
    if args.metric_for_best_model in ("loss", "eval_loss"):
        logger.warning(
            "`metric_for_best_model=%r`: the loss of an evaluation is about 0 for every policy, as in TRL, so it does not say which is "
            "best. Write metric_for_best_model='reward'.", args.metric_for_best_model,
        )  # fmt: skip


def mean_by_name(names: list[str], scores: Tensor) -> dict[str, float]:
    """The mean score by reward function, of scores (N, F); over all functions of a name, as in TRL's training log."""
    means: dict[str, list[float]] = defaultdict(list)
    for name, mean in zip(names, scores.nanmean(0).tolist(), strict=True):
        means[name].append(mean)
    return {name: sum(values) / len(values) for name, values in means.items()}


def evaluation_metrics(
    prefix: str, episodes: list[Episode], means: Mapping[str, float], counts_failures: bool
) -> dict[str, float]:
    """Mean reward, mean by reward function (`means`) and by role where functions reward roles, accuracy if it is known, and rates; each name begins with `prefix`."""
    metrics = {f"{prefix}_reward": mean_reward(episodes)}
    metrics |= {f"{prefix}_rewards/{name}/mean": value for name, value in means.items()}
    metrics |= {f"{prefix}_{role}/reward": value for role, value in role_rewards(episodes).items()}
    turns = [(episode, turn) for episode in episodes for turn in episode.turns]
    metrics |= {f"{prefix}_{name}": value for name, value in billed_tokens(turns).items()}
    if (fraction := accuracy(episodes)) is not None:
        metrics[f"{prefix}_accuracy"] = fraction
    metrics[f"{prefix}_prompt_overflow_rate"] = overflow_rate(episodes)
    if counts_failures:
        metrics[f"{prefix}_failed_episodes"] = n_failed(episodes)
    return metrics


def mean_of_logged(prefix: str, pending: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the means, over all processes, of what reward functions have logged during an evaluation (TRL's `log_metric`)."""
    logged: dict[str, list[float]] = defaultdict(list)
    for metrics in gather_objects(dict(pending)):
        for name, values in metrics.items():
            logged[f"{prefix}_{name}"] += values
    return {name: sum(values) / len(values) for name, values in logged.items()}
