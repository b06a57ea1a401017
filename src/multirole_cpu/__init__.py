"""An engine and faster passes for small models on CPUs, which `multirole` finds by their entry points."""

SERVED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that the engine "transformers" implements. `qwen3.unsupported` says what else a model may not have."""
