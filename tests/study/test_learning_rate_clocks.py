"""Learning rates under each reading of the released code's schedule, against numbers worked out by hand and a closed form."""

import math

import pytest

from multirole.schedule import ScheduleClock, schedule_callbacks
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import training_args, update_rules

RATE = 8e-3
C = [math.cos(math.pi * eighths / 16) ** 2 for eighths in range(9)]
"""(1 + cos(pi x)) / 2 = cos(pi x / 2) ** 2 after so many eighths of a cosine: 1, .962, .854, .691, .5, .309, .146, .038, 0."""


def rates(trainer, iteration: int) -> list[float]:
    """Return the rates of an iteration's update calls, as fractions of the cell's rate. Call it for iterations in order."""
    while trainer.lr_scheduler.last_epoch < iteration:
        trainer.optimizer._opt_called = True  # otherwise the scheduler warns that it was stepped first
        trainer.lr_scheduler.step()  # as HF's loop does after every iteration
    trainer.state.global_step = iteration
    for callback in trainer.multirole_callbacks:
        if isinstance(callback, ScheduleClock):
            callback.on_update_begin(trainer, [], {})
    return [trainer.adapter_learning_rate(adapter) / RATE for adapter in trainer.adapters]


def cell(workflow: str, policy: str, clock: str, schedule: str, ticks: int | None = None) -> Cell:
    """12 iterations: 4 ticks of warm-up, then 8 of the schedule."""
    settings = {"lr_clock": clock, "lr_schedule": schedule, "lr_clock_ticks": ticks}
    return Cell(workflow, policy, max_steps=12, warmup_steps=4, learning_rate=RATE, **settings)


SP = {0: [0], 2: [0.5], 4: [1], 6: [C[2]], 8: [0.5], 11: [C[7]]}
"""One adapter makes one update call per iteration, so that the clocks agree."""
CASES = {  # workflow, policy, lr_clock, lr_schedule: iteration (from 0) -> the rates of its update calls
    ("voting", "sp", "iteration", "cosine"): SP,
    ("voting", "sp", "update_call", "cosine"): SP,
    ("voting", "sp", "update_call_wrapped", "cosine"): SP,
    ("voting", "sp", "update_call", "constant"): {0: [0], 1: [0.25], 4: [1], 11: [1]},
    ("voting", "ip", "iteration", "cosine"): {0: [0, 0], 2: [0.5, 0.5], 4: [1, 1], 8: [0.5, 0.5], 11: [C[7], C[7]]},
    ("voting", "ip", "iteration", "constant"): {0: [0, 0], 1: [0.25, 0.25], 4: [1, 1], 11: [1, 1]},
    # two adapters: ticks 2i and 2i + 1; the cosine ends at tick 12, in iteration 6, and is whole again at tick 20
    ("voting", "ip", "update_call", "cosine"): {
        0: [0, 0.25], 1: [0.5, 0.75], 2: [1, C[1]], 3: [C[2], C[3]], 5: [C[6], C[7]], 6: [0, 0], 8: [0, 0], 11: [0, 0],
    },
    ("voting", "ip", "update_call_wrapped", "cosine"): {
        0: [0, 0.25], 1: [0.5, 0.75], 2: [1, C[1]], 3: [C[2], C[3]], 5: [C[6], C[7]],
        6: [0, C[7]], 8: [0.5, C[3]], 10: [1, C[1]], 11: [C[2], C[3]],
    },
    ("voting", "ip", "update_call", "constant"): {0: [0, 0.25], 1: [0.5, 0.75], 2: [1, 1], 6: [1, 1], 11: [1, 1]},
    # three adapters: ticks 3i to 3i + 2; the cosine ends in iteration 4
    ("orch_workers", "ip", "update_call", "cosine"): {1: [0.75, 1, C[1]], 3: [C[5], C[6], C[7]], 4: [0, 0, 0], 11: [0, 0, 0]},
    ("orch_workers", "ip", "update_call_wrapped", "cosine"): {
        1: [0.75, 1, C[1]], 3: [C[5], C[6], C[7]], 4: [0, C[7], C[6]], 6: [C[2], C[1], 1], 11: [C[3], C[2], C[1]],
    },
}  # fmt: skip


@pytest.mark.parametrize(("workflow", "policy", "clock", "schedule"), CASES)
def test_rates_by_hand(make_trainer, workflow, policy, clock, schedule):
    trainer = make_trainer(cell(workflow, policy, clock, schedule))
    for iteration, expected in CASES[workflow, policy, clock, schedule].items():
        assert rates(trainer, iteration) == pytest.approx(expected, abs=1e-12), iteration


def closed_form(schedule: str, tick: int, warmup: int, horizon: int, is_wrapped: bool) -> float:
    """The schedules in half-angle form. Where the cosine is wrapped, its angle goes on beyond the horizon."""
    if tick < warmup:
        return tick / warmup
    x = (tick - warmup) / (horizon - warmup)
    return 1.0 if schedule == "constant" else math.cos(math.pi * (x if is_wrapped else min(x, 1.0)) / 2) ** 2


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("clock", ["iteration", "update_call", "update_call_wrapped"])
def test_five_hundred_iterations_follow_the_closed_form(make_trainer, clock, schedule):
    """The paper's horizon and warm-up on its workflow with the most adapters."""
    settings = {"max_steps": 500, "warmup_steps": 15, "learning_rate": RATE}
    trainer = make_trainer(Cell("orch_workers", "ip", lr_schedule=schedule, lr_clock=clock, **settings))
    for iteration in range(500):
        ticks = [iteration] * 3 if clock == "iteration" else [3 * iteration + call for call in range(3)]
        expected = [closed_form(schedule, tick, 15, 500, clock == "update_call_wrapped") for tick in ticks]
        assert rates(trainer, iteration) == pytest.approx(expected, abs=1e-9)


def verl_cosine(step: int, warmup: int, total: int, least: float = 0.0, cycles: float = 0.5) -> float:
    """verl's formula with its defaults for `min_lr_ratio` and `num_cycles`: bounded from below, and not at the end."""
    if step < warmup:
        return step / max(1, warmup)
    angle = 2 * math.pi * cycles * (step - warmup) / max(1, total - warmup)
    return max(least, (1 - least) / 2 * math.cos(angle) + (1 + least) / 2)


@pytest.mark.parametrize(
    ("workflow", "policy", "adapters"), [("voting", "ip", 2), ("orch_workers", "ip", 3), ("voting", "sp", 1)]
)
def test_the_wrapped_clock_is_verl_s_scheduler_stepped_after_every_update_call(
    make_trainer, workflow, policy, adapters
):
    """verl's worker has one scheduler for all adapters and steps it after each call, past the end of the cosine."""
    settings = {"max_steps": 60, "warmup_steps": 5, "learning_rate": RATE, "lr_clock": "update_call_wrapped"}
    trainer = make_trainer(Cell(workflow, policy, lr_schedule="cosine", **settings))
    steps = 0
    for iteration in range(60):
        expected = []
        for _ in range(adapters):
            expected.append(verl_cosine(steps, 5, 60))
            steps += 1
        assert rates(trainer, iteration) == pytest.approx(expected, abs=1e-12), iteration
    assert steps == 60 * adapters


@pytest.mark.parametrize(
    ("workflow", "clock", "zeros", "full"),
    [
        ("voting", "update_call", (250, 499), ()),
        ("voting", "update_call_wrapped", (250,), (492,)),
        ("orch_workers", "update_call", (167, 328, 490), ()),
        ("orch_workers", "update_call_wrapped", (167, 490), (328,)),
    ],
)
def test_when_a_cosine_of_500_ticks_ends_and_returns(make_trainer, workflow, clock, zeros, full):
    """15 ticks of warm-up and cosines of 485: 0 at ticks 500 and 1470, and 1 at tick 985, two or three ticks per iteration."""
    settings = {"max_steps": 500, "warmup_steps": 15, "learning_rate": RATE, "lr_schedule": "cosine"}
    trainer = make_trainer(Cell(workflow, "ip", lr_clock=clock, **settings))
    for iteration in sorted((*zeros, *full)):
        expected = 1 if iteration in full else 0
        assert rates(trainer, iteration) == pytest.approx([expected] * len(trainer.adapters), abs=1e-3)


def test_the_preset_of_the_released_code_is_constant_per_update_call():
    released = Cell("voting", "ip", scale="0.6b", preset="released_code")
    args = training_args(released, "unused")
    assert (str(args.lr_scheduler_type.value), args.warmup_steps) == ("constant_with_warmup", 15)
    assert schedule_callbacks(args) == [ScheduleClock(2)]
    assert schedule_callbacks(training_args(Cell("voting", "ip"), "unused")) == update_rules(Cell("voting", "ip")) == []


TICKS = {  # policy, lr_clock, lr_clock_ticks: iteration (from 0) -> the rates of its update calls
    # SP on the curve of IP with two adapters: ticks 2i; the cosine ends in iteration 6 and is whole again in iteration 10
    ("sp", "update_call_wrapped", 2): {0: [0], 1: [0.5], 2: [1], 3: [C[2]], 5: [C[6]], 6: [0], 8: [0.5], 10: [1], 11: [C[2]]},
    ("sp", "update_call", 2): {1: [0.5], 3: [C[2]], 6: [0], 11: [0]},
    ("sp", "update_call_wrapped", 3): {1: [0.75], 3: [C[5]], 4: [0], 6: [C[2]], 11: [C[3]]},
    # four ticks for two adapters are two for each, and one tick is that of the iteration
    ("ip", "update_call_wrapped", 4): {0: [0, 0.5], 1: [1, C[2]], 2: [C[4], C[6]], 3: [0, C[6]]},
    ("ip", "update_call", 1): {1: [0.25, 0.25], 6: [C[2], C[2]], 11: [C[7], C[7]]},
}  # fmt: skip


@pytest.mark.parametrize(("policy", "clock", "ticks"), TICKS)
def test_a_clock_of_other_ticks_by_hand(make_trainer, policy, clock, ticks):
    trainer = make_trainer(cell("voting", policy, clock, "cosine", ticks))
    for iteration, expected in TICKS[policy, clock, ticks].items():
        assert rates(trainer, iteration) == pytest.approx(expected, abs=1e-12), iteration


def test_sp_on_the_clock_of_ip_has_the_rates_of_its_first_adapter(make_trainer):
    settings = {"max_steps": 60, "warmup_steps": 5, "learning_rate": RATE, "lr_clock": "update_call_wrapped"}
    isolated = make_trainer(Cell("eval_opt", "ip", **settings))
    shared = make_trainer(Cell("eval_opt", "sp", lr_clock_ticks=2, **settings))
    for iteration in range(60):
        assert rates(shared, iteration) == rates(isolated, iteration)[:1]
    assert rates(shared, 59) == pytest.approx([1], abs=0.03)  # nearly whole again at the end


def test_a_schedule_without_a_formula_is_refused(make_trainer):
    trainer = make_trainer(cell("voting", "ip", "update_call", "cosine"))
    trainer.lr_scheduler = object()
    with pytest.raises(TypeError, match="a function of the step, got a object. Use `lr_scheduler_type='cosine'`"):
        ScheduleClock(2).on_learning_rate(trainer, "generator", RATE)
