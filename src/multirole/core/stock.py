"""TRL's `GRPOTrainer`, imported without vLLM.

TRL imports all of vLLM wherever it is installed (6 CPU-seconds and 200 MB in every process), for an engine that is not used
here: `multirole.engines.vllm_engine` imports it when it is asked for. To use TRL's own vLLM in the same process, import
`trl.GRPOTrainer` before `multirole`.
"""

from trl import import_utils

_is_vllm_available = import_utils.is_vllm_available
import_utils.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOTrainer
finally:
    import_utils.is_vllm_available = _is_vllm_available

__all__ = ["GRPOTrainer"]
