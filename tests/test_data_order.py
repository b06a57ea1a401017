"""Problems of an iteration come in groups of n; every pass is a fresh permutation; a resume sees the same order."""

from multirole.core.trainer import ProblemSampler


def test_groups_and_passes():
    order = list(ProblemSampler(n_rows=5, n_problems=2, n_episodes=3, iterations=4, seed=0))
    assert len(order) == 24
    groups = [order[i : i + 3] for i in range(0, 24, 3)]
    assert all(len(set(group)) == 1 for group in groups)
    firsts = [group[0] for group in groups]
    assert sorted(firsts[:5]) == [0, 1, 2, 3, 4]  # the first pass sees every problem once
    assert order == list(ProblemSampler(5, 2, 3, 4, 0)) != list(ProblemSampler(5, 2, 3, 4, 1))


def test_passes_differ():
    order = list(ProblemSampler(n_rows=50, n_problems=10, n_episodes=1, iterations=10, seed=0))
    assert order[:50] != order[50:] and sorted(order[:50]) == sorted(order[50:])
