"""Multi-role GRPO: reinforcement learning of multi-agent LLM workflows on stock TRL."""

import logging
import warnings

__version__ = "0.1.0"

# Two messages that every import of trl would print into the first cell of a notebook, about things absent on purpose:
warnings.filterwarnings("ignore", message="IProgress not found")  # ipywidgets: progress is plain text here
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # Triton, on a CPU
