"""Credit estimators: how the outcome of an episode becomes the advantage of each of its turns.

By default every turn gets its episode's advantage (`CREDITS["outcome"]`). The others are published alternatives, over the same rows:

| name | paper | what is compared |
|---|---|---|
| `outcome` | the paper; Dr. MAMR's first change, see `mean_over_turns` | the n episodes of a problem, one value for all turns |
| `agent` | Dr. MAS, arXiv:2602.08847 | the rows of one role |
| `agent_turn` | AT-GRPO without its tree, arXiv:2510.11062 | the turns of one role, slot and round |
| `joint_return` | MAGRPO, arXiv:2508.04652 | the n episodes, not divided by their standard deviation |
| `mean_over_turns` | ReMA's objective as Dr. MAMR states it, arXiv:2511.02303 | as `outcome`, divided by the number of turns |
| `critic` | MADA-RL, arXiv:2607.18006 | a critic's outcome with the accuracy of what it read |
| `branches` | AT-GRPO with its tree, arXiv:2510.11062 | replies to the same prompt, from forks |
| `leave_one_out` | C3, arXiv:2603.06859 | replies to the same prompt, from forks |
| `shapley` | the Shapley value (1953) over roles | coalitions of trained roles, from forks |
| `permuted` | none: a placebo | as `outcome`, but each episode gets the advantage of a random one of its group |

`credit_callback` returns the callback of a name. The docstring of each function lists the parts of the paper that it omits. SHARP
(arXiv:2602.08335) is not included: its abstract names the parts (a broadcast reward, a marginal credit found by masking one
agent, a reward for tool calls, all normalised by agent), but not their weights or how the Shapley value is approximated.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, get_args

from peft import PeftModel

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.credit.advantages import group_advantages
from multirole.inputs.adapters import check_base_alone
from multirole.rollout.replay import Fork, replays_of, same_turn
from multirole.types import REPLAYING_CREDITS, CreditName, Episode, Structure, structure_of
from multirole.update.processes import gather_objects, own_share
from multirole.update.rows import Row

CREDITS: tuple[str, ...] = get_args(CreditName)

Score = Callable[[list[Episode]], object]
"""Sets `reward` of episodes, as a reward function of the trainer would."""
Judge = Callable[[list[Episode]], object]
"""Sets `is_right` of the turns of scored episodes (`diagnostics.turn_grading.judge`)."""

# ---- estimators over the rows of an iteration. Each returns one advantage per row (N,), and 0 where the episode has no reward.


def agent_wise(rows: Sequence[Row], num_generations: int) -> list[float]:
    """Dr. MAS (arXiv:2602.08847): A = (R - mu_k) / (sigma_k + 1e-6), of the problem's rows of agent k.

    An agent is a role. A role with several turns in an episode enters the statistics once per turn, and a role that took a single
    turn keeps its reward, as in the authors' code.
    """
    keys = [(*row.episode.group(num_generations), row.turn.role) for row in rows]
    return _outcomes_compared(rows, keys, keeps_lone=True)


def agent_and_turn_wise(rows: Sequence[Row], num_generations: int) -> list[float]:
    """AT-GRPO's groups (arXiv:2510.11062) on parallel episodes: (R - mean) / (std + 1e-6) within a problem's turns of one role, slot, round.

    After the first stage the turns of a group have different prompts, which the paper's tree sampling avoids (`branches`). The paper
    adds a local reward of each agent, which an outcome reward does not have. A group of one gets 0.
    """
    keys = [(*row.episode.group(num_generations), row.turn.role, row.turn.slot, row.turn.round) for row in rows]
    return _outcomes_compared(rows, keys)


def joint_return(rows: Sequence[Row], num_generations: int) -> list[float]:
    """MAGRPO (arXiv:2508.04652): A_t = R_t - mean(R_t) over the joint actions of a group, for every agent.

    The return R_t from turn t on is the outcome, the only reward of an episode. So this is `scale_rewards="none"` of TRL.
    """
    episodes = list({id(row.episode): row.episode for row in rows if row.episode.reward is not None}.values())
    rewards = [_reward(episode) for episode in episodes]
    groups = [episode.group(num_generations) for episode in episodes]
    means = {group: _mean([r for r, g in zip(rewards, groups, strict=True) if g == group]) for group in set(groups)}
    advantage_of = {id(e): r - means[g] for e, r, g in zip(episodes, rewards, groups, strict=True)}
    return [advantage_of.get(id(row.episode), 0.0) for row in rows]


def mean_over_turns(rows: Sequence[Row], num_generations: int) -> list[float]:
    """1/G sum_i 1/T_i sum_t A_i l_it, the objective with the 1/T_i that, as Dr. MAMR (arXiv:2511.02303) finds, rewards short episodes.

    The loss is a mean over all N rows, sum_it A_i l_it / N, which has no 1/T_i: the default is Dr. MAMR's objective already. This
    puts the factor back: each advantage times N / (G T_i), with T_i turns of the G episodes. Dr. MAMR's other terms, the causal influence
    of a step and the reward for restarts, are not implemented.
    """
    turns: dict[int, int] = {}
    for row in rows:
        turns[id(row.episode)] = turns.get(id(row.episode), 0) + 1
    mean_turns = len(rows) / len(turns) if turns else 0.0
    return [row.episode.advantage * mean_turns / turns[id(row.episode)] for row in rows]


def permuted(rows: Sequence[Row], num_generations: int, seed: int) -> list[float]:
    """Placebo: the advantages of a problem's episodes in a random order, which `seed` draws for every group.

    Each episode's advantage is that of a uniformly drawn episode of its group with a reward, itself included, so the advantages have the
    size and the mean of `outcome`, but no correlation with the episode that they train. All turns of an episode get the same one.
    """
    groups: dict[Hashable, list[Episode]] = {}
    for episode in {id(row.episode): row.episode for row in rows if row.episode.reward is not None}.values():
        groups.setdefault(episode.group(num_generations), []).append(episode)
    advantage_of: dict[int, Any] = {}
    for group, episodes in groups.items():
        drawn = random.Random(repr((seed, group))).sample(episodes, len(episodes))
        advantage_of |= {id(episode): other.advantage for episode, other in zip(episodes, drawn, strict=True)}
    return [advantage_of.get(id(row.episode), 0.0) for row in rows]


def critic_minus_generators(rows: Sequence[Row], num_generations: int, structure: Structure) -> list[float]:
    """MADA-RL (arXiv:2607.18006): a critic's advantage is its reward minus the accuracy of the generators on the same problem.

    A_C = R_C - acc_G. Critics are the roles that judge, select or merge, R_C is the outcome, and acc_G the share of right turns among
    those that the critic could read in its episode: of its `Duty.of`, up to its round. Generators, the roles that solve, are compared
    by their own correctness within the problem's turns of their role and round. The paper's rewards are twice as large and
    have a term for length, which is not implemented; its generators are trained first. Other roles, and turns that nobody has
    judged (`Turn.is_right`), keep the episode's advantage.
    """
    duties, advantages = structure.duties, [row.episode.advantage for row in rows]
    solvers: list[int] = []
    for i, row in enumerate(rows):
        duty, turn = duties.get(row.turn.role), row.turn
        if duty is None or row.episode.reward is None:
            continue
        if duty.kind == "solves" and turn.is_right is not None:
            solvers.append(i)
        elif duty.kind in ("judges", "selects", "merges"):
            read = [t.is_right for t in row.episode.turns if t.role == duty.of and t.round <= turn.round]
            if read and None not in read:
                advantages[i] = _reward(row.episode) - _mean([float(bool(flag)) for flag in read])
    keys = [(*rows[i].episode.group(num_generations), rows[i].turn.role, rows[i].turn.round) for i in solvers]
    values = compared([float(bool(rows[i].turn.is_right)) for i in solvers], keys)
    for i, value in zip(solvers, values, strict=True):
        advantages[i] = value
    return advantages


def compared(values: Sequence[float], groups: Sequence[Hashable], keeps_lone: bool = False) -> list[float]:
    """(value - mean) / (std + 1e-6) within its group; a value alone in its group gives 0, or itself where a lone one is kept."""
    sizes = Counter(groups)
    return [
        advantage if sizes[group] > 1 or keeps_lone else 0.0
        for advantage, group in zip(group_advantages(values, groups), groups, strict=True)
    ]


def _outcomes_compared(rows: Sequence[Row], keys: Sequence[tuple], keeps_lone: bool = False) -> list[float]:
    """Compare the outcome of each row with those of the rows with the same key; 0 without an outcome."""
    scored = [i for i, row in enumerate(rows) if row.episode.reward is not None]
    values = compared([_reward(rows[i].episode) for i in scored], [keys[i] for i in scored], keeps_lone)
    advantages = [0.0] * len(rows)
    for i, value in zip(scored, values, strict=True):
        advantages[i] = value
    return advantages


def _reward(episode: Episode) -> float:
    return math.nan if episode.reward is None else episode.reward.value


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


# ---- estimators over forks


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others, C3's baseline (arXiv:2603.06859); 0 for a single reward."""
    n, total = len(rewards), sum(rewards)
    return [reward - (total - reward) / (n - 1) if n > 1 else 0.0 for reward in rewards]


def normalised(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / (std + 1e-6), AT-GRPO's advantage within the branches of a turn (arXiv:2510.11062); 0 for a single reward."""
    return compared(rewards, [0] * len(rewards))


def shapley_values(worth: Mapping[frozenset[str], float], players: Sequence[str]) -> dict[str, float]:
    """Return the Shapley value of each player (Shapley 1953): its marginal worth, averaged over the orders of joining.

    phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! (v(S + i) - v(S)), with `worth` v of every subset of the n players.
    """
    n, values = len(players), dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for members in map(frozenset, itertools.combinations(others, size)):
                values[player] += weight * (worth[members | {player}] - worth[members])
    return values


# ---- callbacks


def credit_callback(
    name: str, judge: Judge | None = None, score: Score | None = None, n_branches: int = 4
) -> MultiRoleCallback | None:
    """Return the callback of an estimator in `CREDITS`; None for "outcome", the trainer's default.

    Pass it to `MultiRoleGRPOTrainer(callbacks=[...])` before callbacks that change advantages or read them.

    Args:
        judge: for "critic", sets `is_right` of turns.
        score: for estimators that fork, sets `reward` of replayed episodes.
        n_branches: for "branches" and "leave_one_out", replies to each prompt, the episode's own included.

    Raises:
        ValueError: for an unknown name, and for a name whose arguments are missing.
    """
    if name not in CREDITS:
        raise ValueError(f"`credit` must be one of {list(CREDITS)}, got {name!r}.")
    if name == "critic" and judge is None:
        raise ValueError(
            "`credit='critic'` compares critics with the generators that they read. Pass `judge`, which sets `is_right`."
        )
    if name in REPLAYING_CREDITS and score is None:
        raise ValueError(
            f"`credit={name!r}` replays episodes. Pass `score`, which sets the `reward` of a list of episodes."
        )
    if name in ("branches", "leave_one_out"):
        return BranchCredit(name, score, n_branches)  # type: ignore[arg-type]
    if name == "shapley":
        return ShapleyCredit(score)  # type: ignore[arg-type]
    return None if name == "outcome" else RowCredit(name, judge if name == "critic" else None)


def judge_episodes(judge: Judge, episodes: list[Episode]) -> None:
    """Set `is_right` of all turns. Each process judges a share and gets all results."""
    share = list(own_share(episodes))
    judge(share)
    judged = gather_objects([[turn.is_right for turn in episode.turns] for episode in share])
    for episode, flags in zip(episodes, itertools.chain.from_iterable(judged), strict=True):
        for turn, flag in zip(episode.turns, flags, strict=True):
            turn.is_right = flag


class RowCredit(MultiRoleCallback):
    """Callback that sets the advantages of an iteration's rows by an estimator without forks."""

    def __init__(self, name: str, judge: Judge | None = None) -> None:
        self.name, self.judge = name, judge

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        if self.judge is not None:
            judge_episodes(self.judge, episodes)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        n = trainer.args.num_generations
        if self.name == "critic":
            advantages = critic_minus_generators(rows, n, structure_of(trainer.workflow))
        elif self.name == "permuted":
            advantages = permuted(rows, n, trainer.state.global_step)
        else:
            advantages = ROW_ESTIMATORS[self.name](rows, n)
        return set_all(rows, advantages)


ROW_ESTIMATORS: dict[str, Callable[[Sequence[Row], int], list[float]]] = {
    "agent": agent_wise,
    "agent_turn": agent_and_turn_wise,
    "joint_return": joint_return,
    "mean_over_turns": mean_over_turns,
}


class BranchCredit(MultiRoleCallback):
    """Callback that compares replies to the same prompt: it forks every turn, and also trains on the other replies.

    The rest of the episode is replayed with its seeds, so that the rewards of a group differ by one turn and what follows from it.
    C3 replays under fixed continuations as well; its estimate without a critic model is this one with `leave_one_out`. AT-GRPO's tree
    goes on from the best branch; here the episode goes on as it was sampled, so that its turns stay samples of the policy.
    An iteration has `n_branches` times the rows, and one more replay for each row that is added.
    """

    def __init__(self, name: str, score: Score, n_branches: int) -> None:
        if n_branches < 2:
            raise ValueError(f"`n_branches` must be at least 2, to compare replies with each other, got {n_branches}.")
        self.compare = leave_one_out if name == "leave_one_out" else normalised
        self.score, self.n_branches = score, n_branches
        self.branches: dict[int, list[Episode]] = {}

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        forks = [
            Fork(episode, turn, "resample", draw)
            for episode in episodes
            if episode.reward is not None
            for turn in episode.turns
            for draw in range(1, self.n_branches)
        ]
        played = play_scored(trainer, forks, trainer.state.global_step, self.score)
        self.branches = {}
        for fork, branch in zip(forks, played, strict=True):
            self.branches.setdefault(id(fork.at), []).append(branch)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        grown: list[Row] = []
        for row in rows:
            group = [row]
            scored_branches = [b for b in self.branches.get(id(row.turn), []) if b.reward is not None]
            for branch in scored_branches:
                turn = same_turn(row.episode, row.turn, branch)
                if turn is None:  # a prompt beside it was too long
                    continue
                is_masked = trainer.args.mask_truncated_completions and turn.finish_reason == "length"
                group.append(Row(branch, turn, row.adapter, is_masked=is_masked))
            scored = [member for member in group if member.episode.reward is not None]
            advantages = self.compare([_reward(member.episode) for member in scored])
            for member, advantage in zip(scored, advantages, strict=True):
                member.advantage = advantage
            grown += scored or group
        self.branches = {}
        return grown


class ShapleyCredit(MultiRoleCallback):
    """Callback that gives each role its Shapley value over coalitions of trained roles, while the base plays the other roles.

    Every turn of a role gets the role's value, compared among the n episodes of the problem as (phi - mean) / (std + 1e-6). An episode of
    r roles is replayed 2^r - 1 times; where one of the replays has no reward, the episode's rows get 0. The base's replies have their own
    seeds: with the roles' seeds, a new adapter, which equals the base, would be worth exactly 0 in every episode and would never be trained.
    """

    def __init__(self, score: Score) -> None:
        self.score = score
        self.values: dict[int, dict[str, float]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: PeftModel, **_: Any) -> None:
        """Raise ValueError before training if the base alone is not the untrained model."""
        check_base_alone(model, "Use another `credit`, or another `init_lora_weights`.")

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        roles = list(trainer.policy)
        coalitions = [frozenset(c) for size in range(len(roles)) for c in itertools.combinations(roles, size)]
        scored = [episode for episode in episodes if episode.reward is not None]
        forks = [
            Fork(episode, tuple(role for role in roles if role not in coalition), "base", 1)
            for episode in scored
            for coalition in coalitions
        ]
        played = play_scored(trainer, forks, trainer.state.global_step, self.score)
        self.values = {}
        for i, episode in enumerate(scored):
            replays = played[i * len(coalitions) : (i + 1) * len(coalitions)]
            if any(replay.reward is None for replay in replays):
                continue  # it failed, or its reward function left it out: there is no value
            rewards = [_reward(replay) for replay in replays]
            worth = dict(zip(coalitions, rewards, strict=True)) | {frozenset(roles): _reward(episode)}
            self.values[id(episode)] = shapley_values(worth, roles)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        n = trainer.args.num_generations
        advantage_of: dict[tuple[int, str], float] = {}
        episodes = {id(row.episode): row.episode for row in rows if id(row.episode) in self.values}
        groups = [episode.group(n) for episode in episodes.values()]
        for role in trainer.policy:
            values = compared([self.values[key][role] for key in episodes], groups)
            advantage_of |= {(key, role): value for key, value in zip(episodes, values, strict=True)}
        self.values = {}
        return set_all(rows, [advantage_of.get((id(row.episode), row.turn.role), 0.0) for row in rows])


def set_all(rows: list[Row], advantages: Sequence[float]) -> list[Row]:
    """Set the advantage of every row; returns the rows."""
    for row, advantage in zip(rows, advantages, strict=True):
        row.advantage = advantage
    return rows


def play_scored(trainer: Any, forks: Sequence[Fork], iteration: int, score: Score) -> list[Episode]:
    """Replay forks under the trainer's current weights and score them, as `forks.play_forks` does on one process.

    Each process replays and scores a share and gets all results. Replays that failed are not scored: their reward is None. Raises ValueError
    for episodes that older weights played, and for forks with "base" if an adapter took over a part of the base.
    """
    if any(fork.how == "base" for fork in forks):
        check_base_alone(trainer.peft_model, "Fork with how='resample' or 'twin'.")
    present = trainer.state.global_step
    if any(turn.version not in (None, present) for fork in forks for turn in fork.episode.turns):
        raise ValueError(
            f"With `max_staleness={trainer.args.max_staleness}` episodes were played under older weights, so they cannot be replayed. "
            "Set it to 0, or use a credit without replays, such as 'outcome'."
        )
    attempts, replays = replays_of(trainer.workflow, forks)
    episodes = trainer.play(attempts, iteration, replays=replays)
    share = own_share(episodes)
    if finished := [episode for episode in share if episode.failure is None]:
        score(finished)
    rewards = itertools.chain.from_iterable(gather_objects([episode.reward for episode in share]))
    for episode, reward in zip(episodes, rewards, strict=True):
        episode.reward = reward
    return episodes
