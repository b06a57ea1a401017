"""Read the rules that every study shares, such as the level of its tests and the margin of equivalence, from `claims.yaml`."""

from pathlib import Path

import yaml

DECLARED = yaml.safe_load((Path(__file__).parents[1] / "paper/claims.yaml").read_text(encoding="utf-8"))
RULES = DECLARED["rules"]
ALPHA, MARGIN = RULES["alpha"], RULES["margin"]
WINDOW = DECLARED["phenomena"]["window"]
"""Iterations at the start and at the end of training whose means a change compares."""
