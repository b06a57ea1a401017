"""The learning-rate schedule, on either clock.

The paper prints "warmup style cosine, 15 steps". The released code ticks one schedule once per *update call*, that is
once per adapter and iteration, so that Isolated-Policy warms up two to three times faster than Shared-Policy: a
confound of the comparison. `lr_clock` switches it off.
"""

import math

from multirole.experiment.cell import Cell


def lr_factor(cell: Cell, iteration: int, call: int, n_calls: int) -> float:
    """Fraction of the peak learning rate, in [0, 1].

    Args:
        iteration: 0-based iteration.
        call: 0-based index of the update call (the adapter) within the iteration; `n_calls` of them.
    """
    tick = iteration if cell.lr_clock == "iteration" else iteration * n_calls + call
    if tick < cell.warmup_iterations:
        return tick / cell.warmup_iterations
    if cell.lr_schedule == "constant":
        return 1.0
    progress = (tick - cell.warmup_iterations) / max(1, cell.iterations - cell.warmup_iterations)
    if cell.lr_schedule == "cosine":
        progress = min(progress, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
