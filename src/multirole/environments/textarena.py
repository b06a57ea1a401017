"""Turn a game of TextArena into a workflow (`from_textarena`): a role for each seat, and the game's rewards for the roles.

game = from_textarena("KuhnPoker-v0", max_rounds=1)
trainer = MultiRoleGRPOTrainer(model, game, game.rewards, args, game.rows(200), peft_config=lora)
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import textarena
from datasets import Dataset

from multirole.types import Answer, Call, Episode, Message, Problem, Structure, user

UNFINISHED = "unfinished"
"""`Answer.reason` of a game that was not over after `max_moves` moves."""
ILLEGAL = "unparsed"
"""`Turn.outcome` of a move that the game did not accept; it counts in the role's `unparsed_rate`."""


class GlobalRandomness:
    """The state of Python's and NumPy's global generators that one game sees.

    TextArena seeds and draws from these generators. Without a state for each game, the moves of one would decide the cards of another, and a
    game would decide what the rest of the process draws.
    """

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager: the generators have this game's state, and afterwards that of before."""
        before = random.getstate(), np.random.get_state()
        self._install(self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            self._install(before)

    @staticmethod
    def _install(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Game:
    """One game that is being played. `env` is TextArena's environment."""

    def __init__(self, env_id: str, n_seats: int, seed: int, options: dict[str, Any]) -> None:
        self._randomness = GlobalRandomness(seed)
        with self._randomness.installed():
            self.env = textarena.make(env_id, **options)
            self.env.reset(num_players=n_seats, seed=seed)

    def observe(self) -> tuple[int, Any]:
        """Return the seat whose move it is, and what it sees."""
        with self._randomness.installed():
            return self.env.get_observation()

    def move(self, seat: int, action: str) -> tuple[bool, bool]:
        """Make a move; return whether the game is over, and whether the move was accepted."""
        with self._randomness.installed():
            is_over, _ = self.env.step(action)
        state = self.env.state
        return is_over, not (state.game_info[seat]["invalid_move"] or not is_over and state.error_count)

    def rewards(self) -> dict[int, float]:
        """Return seat -> the game's reward, of a game that is over."""
        with self._randomness.installed():
            rewards, _ = self.env.close()
        return {seat: float(reward) for seat, reward in rewards.items()}


class TextArenaWorkflow:
    """A workflow whose episodes are games; created by [`from_textarena`]. `rewards` is its reward function, and `rows` makes its datasets."""

    def __init__(
        self, env_id: str, roles: Sequence[str], name: str, max_moves: int, unfinished: float, observe: Callable[..., Any] | None,
        act: Callable[..., str] | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.name, self.roles, self.structure = name, dict.fromkeys(roles, 1), Structure(chats=(("user",),))
        self.env_id, self.max_moves, self.unfinished, self.options = env_id, max_moves, unfinished, options
        self.observe, self.act = observe, act

    async def run(self, problem: Problem, call: Call) -> Answer:
        """Play one game. The answer is JSON: the rewards of the roles, and why the game ended."""
        game, seats = Game(self.env_id, len(self.roles), seed_of(problem), self.options), list(self.roles)
        for number in range(self.max_moves):
            seat, seen = game.observe()
            shown = seen if self.observe is None else self.observe(seen, seat, game.env)
            turn = await call(seats[seat], [*problem.history, *_messages(shown, self.env_id)], round=number)
            action = turn.text if self.act is None else self.act(turn.text, seat, game.env)
            if not isinstance(action, str):
                raise TypeError(
                    f"`act` must return the move as text, got {action!r}. Return '' for a reply without a move."
                )
            is_over, is_legal = game.move(seat, action)
            turn.outcome = "answered" if is_legal else ILLEGAL
            if is_over:
                rewards = game.rewards()
                reason = str(game.env.state.game_info[seat].get("reason", ""))
                return Answer(
                    json.dumps({"rewards": {role: rewards[i] for i, role in enumerate(seats)}, "reason": reason})
                )
        return Answer(json.dumps({"rewards": dict.fromkeys(seats, self.unfinished), "reason": UNFINISHED}), UNFINISHED)

    def rewards(self, episodes: list[Episode], **columns: Any) -> list[dict[str, float]]:
        """Return, for each episode, role -> the game's reward; `unfinished` where a prompt was too long, so that the game has no end.

        It is a reward function of the trainer ([roles.md](roles.md#a-reward-for-each-role)).
        """
        return [
            json.loads(episode.answer.text)["rewards"]
            if episode.answer is not None and episode.answer.text
            else dict.fromkeys(self.roles, self.unfinished)
            for episode in episodes
        ]

    def rows(self, n: int, start: int = 0) -> Dataset:
        """Return a dataset of `n` games whose seeds are `start`, `start + 1` and so on. All episodes of a row have the same cards."""
        return Dataset.from_list([{"prompt": self.env_id, "seed": start + i} for i in range(n)])


def seed_of(problem: Problem) -> int:
    """Return the seed of a problem's games: its column `seed`, or a number made from its id."""
    reference = problem.reference if isinstance(problem.reference, dict) else {}
    seed = reference.get("seed")
    if seed is None:
        return int.from_bytes(hashlib.blake2b(problem.id.encode(), digest_size=4).digest(), "big")
    return int(seed)


def _messages(shown: Any, env_id: str) -> list[Message]:
    """Return what a seat sees as messages. TypeError for an observation of another form, which `observe` must bring into one."""
    if isinstance(shown, str):
        return [user(shown)]
    if isinstance(shown, list) and shown and all(isinstance(message, dict) for message in shown):
        return shown
    raise TypeError(
        f"{env_id!r} shows a seat {shown!r:.200}, which is neither text nor messages. Pass `observe=`, a function of (observation, seat, env) that "
        "returns one of them, or use the name without '-raw'."
    )


def from_textarena(
    env_id: str, roles: Sequence[str] = ("player_0", "player_1"), *, name: str | None = None, max_moves: int = 64, unfinished: float = 0.0,
    observe: Callable[[Any, int, Any], str | list[Message]] | None = None, act: Callable[[str, int, Any], str] | None = None,
    **options: Any,
) -> TextArenaWorkflow:  # fmt: skip
    """Turn a game of TextArena into a workflow with a role for each seat. Its method `rewards` is the reward function, and `rows(n)` makes a dataset.

    Every move is a turn, whose round is its number in the game. The game decides what an illegal move costs: most ask once more, and then the
    player loses. Such a move has the outcome "unparsed". All episodes of a row have the same seed, so that a group compares what roles made of the
    same cards.

    Args:
        env_id: name of the game, such as "KuhnPoker-v0" or "TicTacToe-v0-train".
        roles: the role of each seat, from seat 0 on. A policy map may give several of them one adapter.
        name: the workflow's name; by default made from `env_id`.
        max_moves: the most moves of a game, illegal ones included. At most the trainer's `max_turns` (256).
        unfinished: reward of every role for a game that is not over by then.
        observe: returns what a seat is shown, as text or messages, from (observation, seat, env); by default TextArena's observation.
        act: returns the move that is made from (reply, seat, env); by default the reply. Opponents may see what it returns.
        options: arguments of the game, such as `max_rounds=1`.

    Raises:
        ValueError: for an unknown game, wrong options, or another number of roles than the game has seats.
    """
    if isinstance(roles, str) or len(set(roles)) < len(roles) or not roles:
        raise ValueError(
            f"`roles` must name a different role for each seat, such as ['white', 'black'], got {roles!r}."
        )
    if type(max_moves) is not int or max_moves < 1:
        raise ValueError(f"`max_moves` must be an integer of 1 or more, got {max_moves!r}.")
    try:
        Game(env_id, len(roles), 0, options)
    except (
        ValueError,
        TypeError,
        AssertionError,
        ImportError,
        LookupError,
        SyntaxError,
    ) as error:  # word lists of nltk; Python 3.12
        raise ValueError(
            f"TextArena's game {env_id!r} does not start with {len(roles)} players ({', '.join(roles)}) and the options {options}: {error} "
            "Names of games are in `textarena.envs.registration.ENV_REGISTRY`; `roles` has a name for each seat."
        ) from error
    word = "".join(letter if letter.isalnum() else "_" for letter in env_id).strip("_")
    return TextArenaWorkflow(env_id, tuple(roles), name or word, max_moves, unfinished, observe, act, options)
