"""Multi-role GRPO: reinforcement learning of multi-agent LLM workflows on stock TRL."""

__version__ = "0.1.0"
