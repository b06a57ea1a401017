"""Derive the sampling seed of every turn from what the turn is, so that no schedule changes a reply."""

import hashlib


def turn_seed(seed: int, iteration: int, problem: str, episode: int, role: str, slot: int, round: int) -> int:
    """Return the 63-bit sampling seed of one turn. No part of it depends on scheduling."""
    return _seed_of(seed, iteration, problem, episode, role, slot, round)


def prompt_seed(seed: int, iteration: int, problem: str, episode: int, role: str, prompt: list[int], nth: int) -> int:
    """Return the 63-bit sampling seed of the `nth` turn of a role with this prompt in an episode, in whatever order the calls arrive."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
    return _seed_of(seed, iteration, problem, episode, role, digest, nth)


def _seed_of(*key: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1
