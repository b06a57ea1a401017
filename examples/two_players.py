"""Train two players of Kuhn Poker against each other, and let them play against the untrained model. It takes a few minutes on a CPU.

    pip install '.[cpu,study,textarena]'
    python examples/two_players.py          # five seeds
    python examples/two_players.py 2        # two of them

The embedded model has never seen a card, but it ends its replies with a number in a box. So `observe` shows a seat its card and the moves so far
in a few letters, and `act` reads an even number as the passive move (check or fold) and an odd one as the other (bet or call). Both seats
share an adapter, and the game pays the winner 1 and the loser -1. Then the adapter plays each seat against the model as it was, which by itself
would win half of these games.

In TextArena 0.7.4 a bet adds nothing to the pot, although its rules say so. Folding therefore never pays, and this is what the players learn.
"""

import re
import statistics
import sys

from scipy.stats import t

from multirole import Problem, from_textarena

ROUNDS = 3
ITERATIONS = 16
GAMES = 200


def observe(seen, seat, env):
    """The prompt of a seat: its card, and the moves of this round by their first letters."""
    cards = env.state.game_state["player_cards"]
    last_round = seen.rpartition("### Starting round")[2]
    moves = re.findall(r"submitted move: '\[(\w)", last_round)
    return f"Compute left to right: {'JQK'[cards[seat]]}{''.join(moves)}"


def act(reply, seat, env):
    """The move of a reply: the first legal one for an even number in the last box, the second for an odd one."""
    numbers = re.findall(r"\\boxed\{(\d+)\}", reply)
    legal = sorted(env.state.game_state["current_legal_action_tree"], key=["check", "fold", "bet", "call"].index)
    return f"[{legal[int(numbers[-1]) % 2]}]" if numbers else ""


game = from_textarena("KuhnPoker-v0", max_rounds=ROUNDS, observe=observe, act=act)


def win_rate(trainer):
    """Play each seat against the untrained model. Returns the share of games that the adapter won, a draw as half."""
    results = []
    for seat in game.roles:
        policy = {role: trainer.policy[role] if role == seat else None for role in game.roles}  # None: without an adapter
        deals = [(Problem(f"test {i}", "", "", {"seed": 10_000 + i}), 0) for i in range(GAMES)]
        results += [rewards[seat] for rewards in game.rewards(trainer.play(deals, -1, policy))]
    return statistics.mean((1 + result) / 2 for result in results)


def train(seed):
    """Train with one seed; returns the win rate against the start, and the share of illegal moves in the first and the last iteration."""
    from peft import LoraConfig

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
    from multirole_study import embedded_model

    args = MultiRoleGRPOConfig(
        f"out/two_players/{seed}", policy="sp", generation_batch_size=64, num_generations=16, max_steps=ITERATIONS, max_completion_length=24,
        learning_rate=4e-3, seed=seed, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        embedded_model(), game, game.rewards, args, game.rows(200, start=1000 * seed),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    illegal = [line["player_0/unparsed_rate"] for line in trainer.state.log_history if "player_0/unparsed_rate" in line]
    return win_rate(trainer), illegal[0], illegal[-1]


def interval(values):
    """The mean and the half width of its 95 % t interval."""
    return statistics.mean(values), t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    runs = [train(seed) for seed in seeds]
    for seed, (rate, first, last) in zip(seeds, runs, strict=True):
        print(f"seed {seed}: won {rate:.3f} of its games against the frozen start; illegal moves of player_0: {first:.3f}, in the end {last:.3f}")
    if len(runs) > 1:
        mean, half = interval([rate for rate, _, _ in runs])
        print(f"win rate against the frozen start: {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}], 95 % t interval over {len(runs)} seeds")
