"""The committed runs keep their policy maps and their ids."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from multirole.policy import parse_policy
from multirole_study.experiment.cell import Cell, policy_name

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("scale", ["tiny-r", "smollm2"])
def test_a_committed_run_has_the_policy_and_the_id_of_its_settings(scale):
    runs = pq.read_table(RESULTS / scale / "runs.parquet", columns=["run", "kind", "policy", "settings"]).to_pylist()
    cells = [run for run in runs if run["kind"] == "run"]
    assert len(cells) >= 40
    for run in cells:
        settings = json.loads(run["settings"])
        policy = settings["policy"]
        assert parse_policy(policy, list(policy)) == policy
        assert (policy_name(policy) if policy_name(policy) in ("sp", "ip") else "map") == run["policy"]
        assert Cell.from_record(settings).id == run["run"]
