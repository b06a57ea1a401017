"""The configuration that vLLM derives on an H100 from the arguments of a cell at scale 1.7b, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.plan import vllm_batch

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_the_arguments_resolve_to_the_path_that_the_documentation_names():
    """docs/gpu_reference.md names this path; a pin that changes it must change the page."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "vllm_on_fake_cuda.py"), str(locate(Cell("single", "sp")))],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    settled = json.loads(done.stdout.splitlines()[-1])
    chosen = vllm_batch(Cell("voting", "ip", scale="1.7b"), Launch(), 80 * 2**30)
    assert settled == {
        "second runner": True, "async scheduling": True, "chunked prefill": True,
        "tokens of a step": chosen["vllm_max_num_batched_tokens"], "sequences": chosen["vllm_max_num_seqs"], "graphs": "FULL_AND_PIECEWISE", "largest graph": 512, "LoRA dtype": "torch.bfloat16",
        "LoRA slots": 3, "sleep mode": True, "autotune": False,
    }  # fmt: skip
