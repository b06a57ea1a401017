"""Every sampled turn has its own seed: no two turns, iterations or runs with different seeds share one."""

import pytest
from scripted_engine import ScriptedEngine

from multirole.workflows import Voting


@pytest.fixture
def seeds(make_library_trainer):
    """seeds(run's seed, iteration) -> the seeds of a rollout of two problems, two episodes each, as the trainer plays it."""

    def play(seed: int, iteration: int) -> list[int]:
        engine = ScriptedEngine(lambda key, request: ([5], 1), eos_id=5)
        trainer = make_library_trainer(Voting(), engine, policy="ip", seed=seed)
        trainer.play([(problem, index) for problem in trainer.problems[:2] for index in range(2)], iteration)
        return [request.seed for request in engine.requests]

    return play


def test_no_seed_is_used_twice(seeds):
    all_seeds = [seed for run, iteration in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)) for seed in seeds(run, iteration)]
    assert len(all_seeds) == len(set(all_seeds)) == 5 * 2 * 2 * 4
    assert seeds(1, 1) == all_seeds[-16:]
