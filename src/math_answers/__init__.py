r"""Grade mathematical answers: is `\frac{2}{4}` the reference 0.5?

    from math_answers import accuracy_reward, extract, grade, is_equal

    is_equal(r"\frac{2}{4}", "0.5")  # True
    extract(r"So the answer is \boxed{42}.")  # "42"
    grade([("100 cm", "1 m"), ("1/3", "0.33")])  # ["correct", "wrong"]
    GRPOTrainer(..., reward_funcs=accuracy_reward)  # TRL; the dataset has a column `solution` or `answer`

`math_answers.grading` lists the verdicts and the conventions. The names are imported at their first use, so that the sandbox's workers, which
import `math_answers.compare`, load nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:  # the same names again, because type checkers do not read strings
    from math_answers.extraction import extract
    from math_answers.grading import Verdict, accuracy_reward, grade, is_equal

_MODULE_OF = {
    "accuracy_reward": "grading",
    "extract": "extraction",
    "grade": "grading",
    "is_equal": "grading",
    "Verdict": "grading",
}

__all__ = ["Verdict", "accuracy_reward", "extract", "grade", "is_equal"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'math_answers' has no attribute {name!r}")
    return getattr(import_module(f"math_answers.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
