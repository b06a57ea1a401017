"""A cell takes TRL's names of its settings and is the same cell."""

import pytest

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import training_args
from multirole_study.experiment.settings import UserError
from multirole_study.experiment.trl_names import TRL_NAMES

VALUES = {
    "max_steps": 7, "num_generations": 6, "max_completion_length": 40, "warmup_steps": 2, "epsilon": 0.1,
    "epsilon_high": 0.3, "delta": 4.0, "eval_steps": 3, "save_steps": 2,
}  # fmt: skip


def test_both_names_give_one_cell_with_one_id():
    assert VALUES.keys() == TRL_NAMES.keys()
    one, other = Cell("voting", "ip", **VALUES), Cell("voting", "ip", **{TRL_NAMES[n]: v for n, v in VALUES.items()})
    assert one == other and one.id == other.id
    assert Cell.from_parameters(VALUES | {"policy": "ip", "iterations": None})[0] == one
    assert Cell("voting", "ip").replace(**VALUES) == one
    for name in VALUES:
        assert f"'{name}'" not in repr(one.parameters())


def test_the_trainer_gets_them_under_trls_names(tmp_path):
    args = training_args(Cell("voting", "ip", **VALUES), str(tmp_path))
    assert {name: getattr(args, name) for name in VALUES} == VALUES


def test_a_setting_with_both_names_is_refused():
    with pytest.raises(
        ValueError, match="`max_steps` is TRL's name of the setting `iterations`, and both have a value"
    ):
        Cell("voting", "ip", max_steps=3, iterations=4)
    with pytest.raises(UserError, match="Write one of them"):
        Cell.from_parameters({"iterations": 4, "max_steps": 3})


def test_none_is_no_value():
    assert Cell("voting", "ip", max_steps=None, iterations=4) == Cell("voting", "ip", iterations=4)
    assert Cell("voting", "ip", iterations=4).replace(max_steps=None) == Cell("voting", "ip")
