"""A cell's KL anchor and process reward: at weight zero a run is bit-equal to the default, and both are part of a run's name."""

import pytest
from cells import SMALL_RUN
from trainers import table

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell


def adapters(folder, step: int) -> dict[str, bytes]:
    paths = sorted(folder.glob(f"adapters/step_{step:05d}/*/*.safetensors"))
    return {path.parent.name: path.read_bytes() for path in paths}


@pytest.mark.slow
def test_neutral_values_are_the_default_run_to_the_last_bit(finished, tmp_path):
    neutral = {"role_beta": {"generator": 0.0}, "process_reward": 0.0}
    one, other = finished, run_cell(SMALL_RUN.replace(**neutral), tmp_path)
    assert adapters(one, 4).keys() == {"generator", "aggregator"} and adapters(one, 4) == adapters(other, 4)
    assert table(one, "ledger").equals(table(other, "ledger")) and table(one, "eval").equals(table(other, "eval"))


def test_the_cells_anchor_is_the_librarys(make_trainer):
    trainer = make_trainer(Cell("voting", "sp", role_beta={"aggregator": 20.0}))
    assert trainer.role_betas == {"generator": 0.0, "aggregator": 20.0}


def test_role_maps_are_part_of_the_name_and_not_of_the_single_agent():
    cell = Cell("voting", "sp", role_beta={"aggregator": 0.1}, process_reward=0.5)
    assert cell.changed() == {"role_beta": {"aggregator": 0.1}, "process_reward": 0.5}
    assert cell.id not in (Cell("voting", "sp").id, Cell("voting", "sp", process_reward=0.5).id)
    assert cell.sibling("single", "sp").changed() == {"process_reward": 0.5}
