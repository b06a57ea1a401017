"""The rules of a cell's settings that the library does not have, in the library's form (`multirole.option_rules`). Each is one line of data.

They read settings, the facts of partners (`policy.partner_facts`), and these: `ticks` of the learning-rate schedule, the names that were `changed` from the preset, the `treatment` that
`fixed_launch` holds, `task_label`, whether the estimator `replays_episodes`, why it has no meaning for the workflow (`credit_misfit`), and whether the task is the user's (`has_own_task`) or of reasoning-gym (`has_gym_task`).
"""

from multirole.credit import ESTIMATORS
from multirole.option_rules import Rule
from multirole_study.experiment.base_config import exists, is_base
from multirole_study.experiment.launch import MEMORY_SETTINGS
from multirole_study.experiment.presets import OTHER_BASES, is_small, is_tiny
from multirole_study.experiment.settings import did_you_mean, looked_in


def no_such_path(name: str, path: str) -> str:
    """Return the message for a path that does not exist."""
    return (
        f"`{name}` must be an existing local path, got {path!r}{looked_in(path)}. Leave it out for the pinned download."
    )


RULES = [
    Rule(lambda treatment: treatment.keys() <= {*MEMORY_SETTINGS},
         f"`fixed_launch` must set some of {', '.join(MEMORY_SETTINGS)}, such as 'micro_batch_tokens=512', got {{fixed_launch!r}}."),
    Rule(lambda n_train, n_problems: n_train is None or n_train >= n_problems,
         "`n_train` must be at least `n_problems` ({n_problems}), got {n_train}."),
    Rule(lambda warmup_steps, ticks, changed: warmup_steps <= ticks or "warmup_steps" not in changed,  # the preset's may exceed a trial
         "`warmup_steps` must be at most the {ticks} ticks of `max_steps`, got {warmup_steps}."),
    Rule(lambda lr_clock_ticks, lr_clock: lr_clock_ticks is None or lr_clock != "iteration",
         "`lr_clock_ticks={lr_clock_ticks}` sets the ticks of a clock per update call, and `lr_clock` is {lr_clock!r}. Write lr_clock='update_call_wrapped' or "
         "'update_call' too."),
    Rule(lambda max_sampled_tokens, lr_clock: max_sampled_tokens is None or lr_clock == "iteration",
         "`max_sampled_tokens={max_sampled_tokens}` reads the schedule at the share of the budget that is spent, and `lr_clock={lr_clock!r}` at a count of "
         "update calls. Leave out one of the two."),
    Rule(lambda endpoint_roles: not endpoint_roles,
         "`policy` has an endpoint play {endpoint_roles}, whose replies a resumed cell would ask for again. Play them by 'frozen', 'frozen:FOLDER' or "
         "'past:NAME', or train with the library, which records and replays them."),
    Rule(lambda role_order, row_order, minibatch_split: role_order is None or (row_order, minibatch_split) == ("shuffled", "even"),
         "`role_order={role_order!r}` trains one role per iteration, and the released code's row_order={row_order!r} and "
         "minibatch_split={minibatch_split!r} cut the rows of all roles. Leave out one of the two."),
    Rule(lambda updates, minibatch_split: updates != "tokens" or minibatch_split != "sequential",
         "`updates='tokens'` has no full step to divide a partial one by. Write minibatch_split='even'."),
    Rule(lambda credit: credit in ESTIMATORS,
         lambda credit: f"`credit` must be one of {', '.join(ESTIMATORS)}, got {credit!r}." + did_you_mean(credit, ESTIMATORS)),
    Rule(lambda credit_misfit: not credit_misfit, lambda credit_misfit: credit_misfit),
    Rule(lambda replays_episodes, credit, max_staleness: not (max_staleness and replays_episodes),
         "`credit={credit!r}` replays episodes under the weights that played them, and `max_staleness={max_staleness}` trains on older ones. Write "
         "max_staleness=0."),
    Rule(lambda credit, advantage_group: credit == "outcome" or advantage_group == "episode",
         "`credit={credit!r}` decides what is compared, so `advantage_group` must be 'episode', got {advantage_group!r}."),
    Rule(lambda model, scale, task: model not in OTHER_BASES or (is_tiny(scale) and task != "code"),
         "`model={model!r}` is a base for scale='tiny-r' and task='math', got scale={scale!r} and task={task_label!r}. Leave `model` out."),
    Rule(lambda model: model is None or model in OTHER_BASES or is_base(model),
         lambda model: f"`model` must be an existing folder or GGUF file, or `owner/name` of the Hub, got {model!r}{looked_in(model)}. Leave it out for the "
         "pinned download."),
    Rule(lambda data, has_own_task: data is None or not has_own_task,
         "`data` replaces the rows of task='math' or 'code', but a user-supplied task has its own rows. Leave `data` out."),
    Rule(lambda data, has_own_task, scale, has_gym_task: data is None or has_own_task or not (is_small(scale) or has_gym_task),
         "`data` replaces the rows of task='math' or 'code' at a paper scale and cannot be used here; got {data!r}. Write scale='0.6b'."),
    Rule(lambda data, has_own_task, scale, has_gym_task: (
             data is None or has_own_task or is_small(scale) or has_gym_task or exists(data)),
         lambda data, *_: no_such_path("data", data)),
]  # fmt: skip
"""Every rule of a cell. All that are broken are reported."""
