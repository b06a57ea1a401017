"""A base with missing weights and a disk that is too small are refused. `bad_inputs` has the files that are refused earlier."""

from types import SimpleNamespace

import pytest
from bad_inputs import PAPER, TINY

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.preflight import check_loaded
from multirole_study.plan import check_disk, disk_need


def test_disk_counts_what_is_saved_already(tmp_path, monkeypatch):
    cell = Cell("voting", "sp", "math", **PAPER, eval_steps=1)
    adapter_bytes = (
        4 * 64 * 4 * (96 + 96 + 2 * (96 + 32) + 96 + 96 + 3 * (96 + 256))
    )  # rank 64 on 4 layers of tiny-r, float32
    assert (
        disk_need(cell) == 3 * 3 * adapter_bytes + 2 * adapter_bytes // 2
    )  # adapters are kept in bfloat16, checkpoints are exact
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=9 * adapter_bytes))
    with pytest.raises(ValueError, match="on a larger disk"):
        check_disk(cell, tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "saved").write_bytes(bytes(adapter_bytes))
    check_disk(cell, tmp_path)


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        (
            {"missing_keys": {"model.layers.1.mlp.up_proj.weight"}},
            "missing, the first is model.layers.1.mlp.up_proj.weight",
        ),
        ({"mismatched_keys": {("lm_head.weight", (2, 3), (3, 3))}}, "of another shape, the first is .*lm_head.weight"),
        ({"unexpected_keys": {"model.layers.3.mlp.up_proj.weight", "x"}}, "not in its config.json, .* model.layers.3"),
    ],
)
def test_a_base_with_other_weights_than_its_config_is_refused(loading, words):
    whole = {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": {"rotary_emb.inv_freq"}}
    check_loaded(TINY, whole)
    with pytest.raises(ValueError, match=words):
        check_loaded(TINY, whole | loading)
