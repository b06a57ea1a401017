"""A game of TextArena is a workflow with a role per seat: its moves are turns, its rewards the roles', and its cards depend on its seed alone.

TextArena is in no lock, so these tests are skipped where it is not installed (docs/environments.md says how to install it).
"""

import json
import random

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Episode, Problem

pytest.importorskip("textarena")
from multirole import from_textarena
from multirole.environments.textarena import Game, seed_of

CARDS = "JQK"


def cards_of(game):
    cards = game.env.state.game_state["player_cards"]
    return [CARDS[cards[seat]] for seat in (0, 1)]


def play(tokenizer, game, moves, problem):
    """The episode in which the replies are these moves, and the engine that played it."""
    texts = iter(moves)
    engine = ScriptedEngine(
        lambda *_: ([*tokenizer.encode(next(texts)), tokenizer.eos_token_id], 1), tokenizer.eos_token_id
    )
    rollout = Rollout(game, engine, tokenizer, dict.fromkeys(game.roles), bool, 0, 9000)
    (episode,) = rollout.run([(problem, 0)], 0, Sampling(99, 1.0))
    return episode, engine


def problem(seed):
    return Problem("0", "", "KuhnPoker-v0", {"seed": seed})


def test_every_move_is_a_turn_of_the_seat_whose_move_it_is(tokenizer):
    """Player 1 opens the first round. It bets, and player 0 folds."""
    game = from_textarena("KuhnPoker-v0", ["zero", "one"], max_rounds=1)
    episode, _ = play(tokenizer, game, ["[bet]", "fold"], problem(3))  # TextArena adds the brackets
    assert [(turn.role, turn.round, turn.outcome) for turn in episode.turns] == [
        ("one", 0, "answered"),
        ("zero", 1, "answered"),
    ]
    answer = json.loads(episode.answer.text)
    assert answer["rewards"] == {"zero": -1, "one": 1} and "Player 1 won" in answer["reason"]
    assert game.rewards([episode]) == [{"zero": -1, "one": 1}]
    opening, reply = (tokenizer.decode(turn.prompt_ids) for turn in episode.turns)
    card = cards_of(Game("KuhnPoker-v0", 2, 3, {"max_rounds": 1}))
    assert f"Your card is: '{card[1]}'" in opening and "submitted move" not in opening
    assert f"Your card is: '{card[0]}'" in reply and "Player 1, submitted move: '[bet]'" in reply


def test_an_illegal_move_is_unparsed_and_costs_what_the_game_says(tokenizer):
    """TextArena asks once more, and then the player has lost."""
    game = from_textarena("KuhnPoker-v0", max_rounds=1)
    episode, _ = play(tokenizer, game, ["[call]", "[bet]", "[raise]", "[check]"], problem(3))
    assert [(turn.role, turn.outcome) for turn in episode.turns] == [
        ("player_1", "unparsed"), ("player_1", "answered"), ("player_0", "unparsed"), ("player_0", "unparsed"),
    ]  # fmt: skip
    assert game.rewards([episode]) == [{"player_0": -1, "player_1": 1}]


def test_the_cards_depend_on_the_seed_alone():
    """TextArena draws from Python's global generator, which the games of a rollout would share."""
    options = {"max_rounds": 3}
    moves = ["[check]", "[check]", "[bet]", "[call]", "[check]", "[check]"]

    def dealt(seed, between):
        game, seen = Game("KuhnPoker-v0", 2, seed, options), []
        for move in moves:
            seen.append(cards_of(game))
            between()
            game.move(game.observe()[0], move)
        return seen

    other = Game("KuhnPoker-v0", 2, 7, options)
    for state in ("python", "numpy"):
        before = random.getstate(), np.random.get_state()[1].tolist()
        alone = [dealt(seed, lambda: None) for seed in range(6)]
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before, state
        assert [dealt(seed, lambda: (random.random(), np.random.rand(), other.observe())) for seed in range(6)] == alone
    assert len({tuple(seen[0]) for seen in alone}) > 2 and len({str(seen) for seen in alone}) == 6


def test_what_seats_see_and_what_replies_mean_can_be_replaced(tokenizer):
    seen_by = []

    def observe(seen, seat, env):
        seen_by.append(seat)
        return f"{CARDS[env.state.game_state['player_cards'][seat]]}{seat}"

    def act(reply, seat, env):
        return {"0": "[check]", "1": "[bet]"}.get(reply, "")

    game = from_textarena("KuhnPoker-v0", max_rounds=1, observe=observe, act=act)
    episode, engine = play(tokenizer, game, ["0", "0"], problem(4))
    cards = cards_of(Game("KuhnPoker-v0", 2, 4, {"max_rounds": 1}))
    assert seen_by == [1, 0] and [f"{cards[seat]}{seat}" in tokenizer.decode(r.prompt_ids) for seat, r in zip((1, 0), engine.requests, strict=True)] == [True, True]  # fmt: skip
    winner = max((0, 1), key=lambda seat: CARDS.index(cards[seat]))
    assert game.rewards([episode]) == [{f"player_{winner}": 1, f"player_{1 - winner}": -1}]


def test_a_game_without_an_end_has_the_reward_of_unfinished(tokenizer):
    game = from_textarena("Nim-v0", max_moves=2, unfinished=-0.5)
    episode, _ = play(tokenizer, game, ["[0 1]", "[1 1]", "[2 1]"], problem(0))
    assert episode.answer.reason == "unfinished" and len(episode.turns) == 2
    overflow = Episode(problem(0), 0, answer=Answer("", reason="prompt_overflow"))
    assert game.rewards([episode, overflow]) == [{"player_0": -0.5, "player_1": -0.5}] * 2


def test_rows_and_seeds():
    game = from_textarena("KuhnPoker-v0")
    rows = game.rows(3, start=5)
    assert rows["seed"] == [5, 6, 7] and game.name == "KuhnPoker_v0"
    first, second = Problem("a", "", "", {}), Problem("b", "", "", None)
    assert seed_of(problem(9)) == 9 and seed_of(first) == seed_of(first) != seed_of(second)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("Kuhn",), {}, "Kuhn not found"),
        (("KuhnPoker-v0", ["alone"]), {}, "does not start with 1 players .* has to be 2"),
        (("KuhnPoker-v0",), {"rounds": 2}, "unexpected keyword argument 'rounds'"),
        (("KuhnPoker-v0", ["a", "a"]), {}, "a different role for each seat"),
        (("KuhnPoker-v0",), {"max_moves": 0}, "`max_moves` must be an integer of 1 or more"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_model_is_loaded(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        from_textarena(*arguments, **options)
