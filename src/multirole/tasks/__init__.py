"""The tasks: modules with `problems`, `extract` and `score_batch`."""

from multirole.tasks import tiny_code, tiny_math

TASKS = {"tiny_math": tiny_math, "tiny_code": tiny_code}
