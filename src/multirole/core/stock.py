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
    from trl.trainer import utils
    from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_callable_name, is_async_callable
finally:
    import_utils.is_vllm_available = _is_vllm_available

# TRL's fused head scores completion tokens alone where it can use Triton; let it do so on a CPU, too. This also changes a stock
# `GRPOTrainer` in this process, in speed alone.
utils._use_triton = lambda device: True

__all__ = ["GRPOTrainer", "add_fused_lm_head", "create_model_from_path", "get_callable_name", "is_async_callable"]
