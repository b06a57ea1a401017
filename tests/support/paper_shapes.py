"""Configurations of Qwen3 at the shapes of the paper's scales."""

from transformers import Qwen3Config

from multirole_study.experiment.presets import Shape


def config_of(s: Shape) -> Qwen3Config:
    """Return the configuration of a Qwen3 of this shape."""
    return Qwen3Config(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, tie_word_embeddings=True,
        max_position_embeddings=40960,
    )  # fmt: skip
