"""The ledger of optimizer steps that an iteration of 8 episodes must have."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

EPISODES = 8
ROWS = {  # rows per episode when no verdict ever parses: Eval-Opt on math then plays 3 rounds; one strategy, one worker
    "single": {"generator": 1},
    "voting": {"generator": 3, "aggregator": 1},
    "eval_opt": {"generator": 3, "evaluator": 3},
    "orch_workers": {"orchestrator": 1, "worker": 1, "synthesizer": 1},
}


def expected_ledger(
    settings: Any, policy: Mapping[str, str], workflow: str, reply: int, rates: Iterable[float]
) -> list[tuple]:
    """Return (adapter, rows, tokens, lr) of every optimizer step of one iteration whose replies all have `reply` tokens.

    `settings` has `updates` and `step_tokens`; `rates` has each adapter's learning rate.
    """
    ledger = []
    for adapter, rate in zip(dict.fromkeys(policy.values()), rates, strict=False):
        n = EPISODES * sum(k for role, k in ROWS[workflow].items() if policy[role] == adapter)
        steps = {
            "per_batch": math.ceil(n / EPISODES),
            "one": 1,
            "tokens": min(n, math.ceil(n * reply / (settings.step_tokens or 1))),
        }[settings.updates]
        ledger += [(adapter, n // steps, n // steps * reply, pytest.approx(rate, rel=1e-12))] * steps
    return ledger
