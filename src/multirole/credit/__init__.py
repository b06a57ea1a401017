"""Credit: how the outcome of an episode becomes the advantages of its turns.

Every module of `multirole.credit.estimators` defines one estimator, a subclass of [`CreditEstimator`]; its name in
`MultiRoleGRPOConfig.credit` is the module's. "module:Class" names an estimator of any other module.

SHARP (arXiv:2602.08335) is not included: its abstract names the parts (a broadcast reward, a marginal credit found by masking one
agent, a reward for tool calls, all normalised by agent), but not their weights or how the Shapley value is approximated.
"""

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multirole.credit import estimators
from multirole.extras import import_named

if TYPE_CHECKING:
    from multirole.credit.estimator import CreditEstimator
    from multirole.options import MultiRoleGRPOConfig

ESTIMATORS = tuple(sorted(module.name for module in pkgutil.iter_modules(estimators.__path__)))
"""Names of the package's estimators."""


def load_estimator(name: str) -> "type[CreditEstimator]":
    """Import the class that `MultiRoleGRPOConfig.credit` names: one of `ESTIMATORS`, or "module:Class".

    Raises ValueError if there is none, and TypeError for another class.
    """
    from multirole.credit.estimator import CreditEstimator  # it imports torch, which the names do not need

    is_of_package = not str(name).partition(":")[2]
    if is_of_package and name not in ESTIMATORS:
        raise ValueError(f"`credit` must be one of {list(ESTIMATORS)} or 'module:Class', got {name!r}.")
    if is_of_package:
        module = import_module(f"{estimators.__name__}.{name}")
        (estimator,) = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, CreditEstimator) and value.__module__ == module.__name__
        ]
        return estimator
    estimator = import_named("credit", name, name)
    if not (isinstance(estimator, type) and issubclass(estimator, CreditEstimator)):
        raise TypeError(f"`credit={name!r}` must name a subclass of `multirole.CreditEstimator`, got {estimator!r}.")
    return estimator


def with_credit(args: "MultiRoleGRPOConfig", callbacks: Iterable[Any], workflow: Any) -> list[Any]:
    """Return the run's callbacks in their order: the estimator that `credit` names, then the user's `callbacks`.

    That of `process_reward` follows the last estimator among them, since some estimators start anew, whatever the advantages were.

    Raises ValueError for a name that cannot be loaded, for branches with a `process_reward`, and for an estimator, also among the user's `callbacks`, that
    replays episodes although `max_staleness` has them played by older weights, or that has no meaning for the workflow.
    """
    from multirole.credit.estimator import CreditEstimator
    from multirole.credit.process_reward import ProcessReward

    ordered: list[Any] = [load_estimator(args.credit).from_args(args), *callbacks]
    places = [i for i, callback in enumerate(ordered) if isinstance(callback, CreditEstimator)]
    for estimator in (ordered[i] for i in places):
        estimator.check(workflow)
        if args.process_reward and estimator.has_branches:
            raise ValueError(
                f"`process_reward={args.process_reward}` grades the turns of sampled episodes, and {type(estimator).__name__} also trains on other replies "
                "to their prompts, which are not graded. Write process_reward=0, or another `credit`, such as 'outcome'."
            )
        if args.max_staleness and estimator.replays_episodes:
            raise ValueError(
                f"{type(estimator).__name__} replays episodes under the weights that played them, and `max_staleness={args.max_staleness}` "
                "trains on older ones. Write max_staleness=0, or another `credit`, such as 'outcome'."
            )
    if args.process_reward:
        ordered.insert(places[-1] + 1, ProcessReward(args.process_reward))
    return ordered
