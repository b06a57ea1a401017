"""Every completion token belongs to exactly one role; no prompt or pad token belongs to any."""

import pytest
import torch
from trainers import episodes_of

from multirole.policy import parse_policy
from multirole.update.processes import shard
from multirole.update.rows import Row, collate, micro_batches, mini_batches, padded
from multirole.workflows import OrchWorkers, Voting


def make_rows(workflow, policy="sp", n_problems=2):
    adapter_of = parse_policy(policy, list(workflow.roles))
    episodes = episodes_of(workflow.roles, n_problems=n_problems)
    return [Row(episode, turn, adapter_of[turn.role]) for episode in episodes for turn in episode.turns]


def test_completion_masks_partition_the_trained_tokens_by_role():
    rows = make_rows(OrchWorkers(), "ip", n_problems=3)
    sampled, trained = {}, {}
    for row in rows:
        sampled[row.turn.role] = sampled.get(row.turn.role, 0) + len(row.turn.completion_ids)
    for adapter in {row.adapter for row in rows}:
        for batch, _ in mini_batches([r for r in rows if r.adapter == adapter], 16):
            for micro in micro_batches(batch, 300):
                tensors = collate(micro, 0, torch.device("cpu"))
                for i, row in enumerate(micro):
                    mask = tensors["completion_mask"][i].bool()
                    assert tensors["completion_ids"][i][mask].tolist() == row.turn.completion_ids
                    prompt = tensors["prompt_ids"][i][tensors["prompt_mask"][i].bool()]
                    assert prompt.tolist() == row.turn.prompt_ids  # in a different tensor from the trained tokens
                    trained[row.turn.role] = trained.get(row.turn.role, 0) + int(mask.sum())
    assert trained == sampled


def test_batching_neither_drops_nor_repeats_a_row():
    rows = make_rows(Voting(), n_problems=5)
    batches = [micro for batch, _ in mini_batches(rows, 48) for micro in micro_batches(batch, 200)]
    assert sorted(id(row) for batch in batches for row in batch) == sorted(id(row) for row in rows)


def test_micro_batches_keep_their_token_budget():
    for micro in micro_batches(make_rows(Voting(), n_problems=5), 200):
        assert len(micro) == 1 or len(micro) * max(row.length for row in micro) <= 200


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 200])
def test_processes_share_all_rows_evenly_within_the_budget(n, is_sharded):
    rows = make_rows(Voting(), n_problems=5)
    shares = [shard(rows, 200, rank, [0.0] * n, is_sharded) for rank in range(n)]
    micros = [micro for share in shares for micro, weight in share if weight]
    assert sorted(id(row) for micro in micros for row in micro) == sorted(id(row) for row in rows)
    assert all(len(micro) == 1 or padded(micro) <= 200 for micro in micros)
    if is_sharded:
        assert len({len(share) for share in shares}) == 1, "every process must run equally many passes"
    elif n <= 8:
        loads = [sum(map(padded, (micro for micro, _ in share))) for share in shares]
        assert max(loads) - min(loads) <= max(map(padded, micros))


def test_mini_batch_sizes_by_hand():
    rows = list(range(20))  # any objects
    assert [(len(b), d) for b, d in mini_batches(rows, 8)] == [(6, 6), (7, 7), (7, 7)]
    assert [(len(b), d) for b, d in mini_batches(rows[:16], 8)] == [(8, 8), (8, 8)]
    assert mini_batches([], 8) == []
