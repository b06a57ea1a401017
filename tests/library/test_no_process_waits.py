"""Several processes get nearly equal shares of an update, so that n devices are almost n times as fast as one."""

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest

from multirole.policy import adapter_names, parse_policy
from multirole.types import Turn
from multirole.update.processes import shard
from multirole.update.rows import Row, optimizer_steps, padded
from multirole.workflows import WORKFLOWS

REPLY = 0.25  # mean length, as a part of its cap
N_EPISODES, REPLY_CAP, ROUNDS, PASS_TOKENS = 64 * 8, 5120, 3, 40960
PROMPT_CAP = {"single": 15360, "voting": 20480, "eval_opt": 30720, "orch_workers": 20480}
"""The paper's sizes for mathematics (Table 7)."""


def idle(name: str, n: int, is_sharded: bool) -> float:
    """Return the fraction of an update in which one of `n` processes waits, from dealing made-up rows as the trainer deals real ones.

    Replies have log-normal lengths, later prompts quote what was written before, and every other episode has an advantage.
    Scoring a row takes a third of training it.
    """
    rng, work = random.Random(0), [0.0, 0.0]  # of the slowest process, and the mean
    workflow, mean, rows = WORKFLOWS[name](), REPLY * REPLY_CAP, []
    policy = parse_policy("sp", list(workflow.roles))
    for episode in range(N_EPISODES):
        written = 0
        for i, (role, slots) in enumerate(list(workflow.roles.items()) * (ROUNDS if name == "eval_opt" else 1)):
            prompt = min(160 + int(written * mean), PROMPT_CAP[name])
            written += slots
            for slot in range(slots):
                reply = min(REPLY_CAP, max(1, round(mean * rng.lognormvariate(-0.32, 0.8))))
                turn = Turn(role, slot, i, range(prompt), range(reply), [], "", "stop")
                rows.append(Row(None, turn, policy[role], float(episode % 2)))
    rng.shuffle(rows)
    args = SimpleNamespace(updates="per_batch", generation_batch_size=N_EPISODES, step_rows=None, step_tokens=None)
    for adapter in adapter_names(policy):
        for step, _ in optimizer_steps([row for row in rows if row.adapter == adapter], args):
            parts, loads = defaultdict(list), [0.0] * n
            for row in step:
                part = (row.turn.role, row.turn.slot)  # in bfloat16 each part of a gradient is a pass
                parts[bool(row.advantage), part].append(row)
            passes = [[] for _ in range(n)]
            for (is_trained, _), part_rows in parts.items():
                cost = 3.0 if is_trained else 1.0
                for rank in range(n):
                    now = loads if rank == n - 1 else list(loads)
                    micro_batches = shard(part_rows, PASS_TOKENS, rank, now, is_sharded, cost)
                    passes[rank] += [cost * padded(micro) for micro, _ in micro_batches]
            # FSDP2's processes wait for each other in every pass, others at the end of a step
            work[0] += sum(map(max, zip(*passes, strict=True))) if is_sharded else max(map(sum, passes))
            work[1] += sum(cost for micro_batches in passes for cost in micro_batches) / n
    return 1 - work[1] / work[0]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("workflow", ["single", "voting", "eval_opt", "orch_workers"])
def test_no_process_waits_for_a_tenth_of_an_update(workflow, is_sharded):
    for n_processes in (2, 8):
        assert 0 <= idle(workflow, n_processes, is_sharded) < 0.1
