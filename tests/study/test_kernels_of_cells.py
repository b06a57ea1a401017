"""A run records the kernels that it computes with, and its evaluations compute with them on a machine that would choose others."""

import json
from dataclasses import asdict

import pytest

from multirole_cpu.kernels import Kernels, use
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.record import add_kernels
from multirole_study.experiment.run import run_cell, run_evaluation
from multirole_study.experiment.run_folder import recorded_kernels

SMALL = {
    "max_steps": 1,
    "n_problems": 1,
    "num_generations": 2,
    "n_train": 8,
    "n_validation": 2,
    "max_completion_length": 16,
}


@pytest.mark.slow
def test_an_evaluation_computes_with_the_kernels_of_its_run(tmp_path, monkeypatch):
    chosen, later = Kernels(attention="groups", layers="packed"), Kernels(attention="heads")
    monkeypatch.setattr("multirole_cpu.kernels.MIN_PARAMETERS", 0)
    monkeypatch.setattr("multirole_cpu.passes.choose_once", lambda base, is_half: chosen)
    cell = Cell("single", "sp", **SMALL)
    run = run_cell(cell, tmp_path)
    assert json.loads((run / "provenance.json").read_text())["kernels"] == asdict(chosen)
    monkeypatch.setattr("multirole_cpu.passes.choose_once", lambda base, is_half: later)
    used: list[Kernels] = []
    monkeypatch.setattr("multirole_cpu.passes.use", lambda base, kernels: used.append(kernels) or use(base, kernels))
    run_evaluation(Evaluation(cell, "own", "terminal"), tmp_path)
    assert used[-1] == chosen


def test_a_small_model_records_no_kernels(tmp_path):

    (tmp_path / "provenance.json").write_text('{"seed": 0}')
    add_kernels(tmp_path, {})
    assert (tmp_path / "provenance.json").read_text() == '{"seed": 0}' and recorded_kernels(tmp_path) is None
    add_kernels(tmp_path, {"head": "packed"})
    assert recorded_kernels(tmp_path) == {"head": "packed"}
