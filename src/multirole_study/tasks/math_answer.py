"""Old module of 0.3, whose grading is the package `math_answers`; until 1.0."""

import warnings

from math_answers import grade as grade_answers

__all__ = ["grade_answers"]

warnings.warn("`multirole_study.tasks.math_answer` is the package `math_answers`.", DeprecationWarning, stacklevel=2)
