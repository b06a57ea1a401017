"""Import TRL's `GRPOTrainer` without importing vLLM.

TRL's GRPO module imports its own vLLM engine at the top, and with it all of vLLM where that is installed (seconds and some
200 MB in every process). That engine is not used here: `multirole.engines.vllm` imports vLLM on demand. So while TRL's
GRPO module is imported, one function stands for TRL's module of that engine and imports the real one when it is called. Stock
TRL with `use_vllm=True` works later in the same process, and nothing depends on whether or how vLLM is installed.
"""

import sys
from types import ModuleType
from typing import Any

ENGINE_OF_TRL = "trl.generation.vllm_generation"


def vllm_generation(*args: Any, **kwargs: Any) -> Any:
    """Import TRL's vLLM engine and return a new one."""
    from trl.generation.vllm_generation import VLLMGeneration

    return VLLMGeneration(*args, **kwargs)


if ENGINE_OF_TRL in sys.modules:
    from trl import GRPOTrainer
else:
    sys.modules[ENGINE_OF_TRL] = module = ModuleType(ENGINE_OF_TRL)
    module.__dict__["VLLMGeneration"] = vllm_generation
    try:
        from trl import GRPOTrainer
    finally:
        del sys.modules[ENGINE_OF_TRL]

__all__ = ["GRPOTrainer"]
