"""Print the configuration that vLLM derives from our arguments on an H100, without a GPU: python vllm_on_fake_cuda.py MODEL -> a JSON line.

The platform is vLLM's own for CUDA, except that the few queries to a driver are answered here. Its kernels are empty modules, because
no kernel is called for a configuration. vLLM's registry imports the real kernels to inspect a model, so a separate process without
the fakes inspects it first; vLLM keeps the result in its cache.
"""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import torch

INSPECT = "from vllm import ModelRegistry; ModelRegistry.models['Qwen3ForCausalLM'].inspect_model_cls()"
subprocess.run([sys.executable, "-c", INSPECT], check=True, stdout=subprocess.DEVNULL)

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132
)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda *_: H100
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.mem_get_info = lambda *_: (79 * 2**30, 80 * 2**30)
for kernels in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C", "vllm._moe_C_stable_libtorch"):
    sys.modules[kernels] = ModuleType(kernels)

from vllm import platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class FakeCuda(CudaPlatformBase):
    """vLLM's CUDA platform with one simulated H100."""

    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: H100.name)
    get_device_total_memory = classmethod(lambda cls, device_id=0: H100.total_memory)
    is_fully_connected = classmethod(lambda cls, ids: True)
    device_count = classmethod(lambda cls: 1)
    log_warnings = classmethod(lambda cls: None)
    is_cumem_allocator_available = lambda self: True


platforms._current_platform = FakeCuda()

from vllm.config import vllm as settings

settings.HAS_TRITON = True  # Triton sees no driver here and calls itself absent

from vllm.engine.arg_utils import EngineArgs

from multirole.engines.vllm_colocate import llm_options
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.plan import vllm_batch

sizes = vllm_batch(Cell("voting", "ip", scale="1.7b"), Launch(), H100.total_memory).values()
options = llm_options(2, 64, 25600, torch.bfloat16, 0.6, *sizes)
config = EngineArgs(model=sys.argv[1], **options | {"max_model_len": 512}).create_engine_config()
settled = {
    "second runner": config.use_v2_model_runner,
    "async scheduling": config.scheduler_config.async_scheduling,
    "chunked prefill": config.scheduler_config.enable_chunked_prefill,
    "tokens of a step": config.scheduler_config.max_num_batched_tokens,
    "sequences": config.scheduler_config.max_num_seqs,
    "graphs": config.compilation_config.cudagraph_mode.name,
    "largest graph": max(config.compilation_config.cudagraph_capture_sizes),
    "LoRA dtype": str(config.lora_config.lora_dtype),
    "LoRA slots": config.lora_config.max_loras,
    "sleep mode": config.model_config.enable_sleep_mode,
    "autotune": config.kernel_config.enable_flashinfer_autotune,
}
sys.stdout.write(json.dumps(settled) + "\n")
