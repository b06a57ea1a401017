"""Tasks: problems, answer extraction and scoring.

The built-in ones are `math.Math`, `code.Code`, `tiny_chain.TinyChain`, `tiny_pipe.TinyPipe`, `functions.Functions`, `programs.Programs` and
`gym.Gym` (reasoning-gym). A user-supplied task is a `Task`, or any object with the methods of `TaskLike`.
"""

from multirole_study.tasks.code import hidden_tests
from multirole_study.tasks.user_task import RewardError, Task, TaskLike

__all__ = ["RewardError", "Task", "TaskLike", "hidden_tests"]
