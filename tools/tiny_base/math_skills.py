"""Measure the base for tiny_chain, or a trained adapter in every role, on validation problems (`skills`)."""

from multirole_study.experiment.presets import TINY_LENGTHS
from multirole_study.tasks.tiny_chain import TinyChain
from tiny_base import skills
from tiny_base.math_dialogues import MathCritic


class Examiner(skills.Examiner):
    """Asks a base for tiny_chain."""

    task = TinyChain()
    cap = TINY_LENGTHS["math"][1]
    critic = MathCritic
    useful, heads = "\n", ("=", ">")
