"""What the paper's setup (Table 7) says by workflow and task, and its base models. All other values are in `cell`."""

from dataclasses import dataclass

TASKS = ("math", "code")
TINY = "tiny-r"
"""The scale whose models and tasks are embedded in this package."""
TINY_BASES = {"math": "tiny-r", "code": "tiny-r-code"}
"""Folders of its models by task."""
TINY_LENGTHS = {"math": (6 * 272, 272), "code": (6 * 176, 176)}
"""Its caps of prompt and response in tokens by task: prompts hold six replies, as in Table 7's Eval-Opt."""


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions: all that its memory and its arithmetic depend on. Qwen3 up to 4B ties its embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = True

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """(in, out) of one layer's linear modules, which carry the adapters (Table 7, "all linear modules")."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = [(h, self.intermediate), (h, self.intermediate), (self.intermediate, h)]
        return [(h, q), (h, kv), (h, kv), (q, h), *mlp]

    @property
    def linear(self) -> int:
        """Weights of one layer's linear modules."""
        return sum(a * b for a, b in self.linear_sizes)

    @property
    def parameters(self) -> int:
        """Weights of the base: embedding, head where it is apart, linear modules, norms (Qwen3's, q and k norms included)."""
        norms = 2 * self.hidden + 2 * self.head_dim
        return (2 - self.is_tied) * self.vocab * self.hidden + self.layers * (self.linear + norms) + self.hidden

    @property
    def kv_elements(self) -> int:
        """Numbers that a KV cache holds of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int) -> int:
        """Weights of one LoRA adapter on every linear module."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear_sizes)


@dataclass(frozen=True)
class PinnedModel:
    """A base model on the Hub at one revision, with its shape, which must be known before anything is downloaded."""

    repo: str
    revision: str
    shape: Shape


MODELS = {  # paper sec 3; the paper pins no revision, these are the ones a follow-up (ASPECT) recorded
    "0.6b": PinnedModel(
        "Qwen/Qwen3-0.6B", "025f7769d0cc53135b8051d32416c7bb42669467", Shape(28, 1024, 3072, 16, 8, 128, 151936)
    ),
    "1.7b": PinnedModel(
        "Qwen/Qwen3-1.7B", "0060bc56d46589041c1048efd1a397421b1142b5", Shape(28, 2048, 6144, 16, 8, 128, 151936)
    ),
    "4b": PinnedModel(
        "Qwen/Qwen3-4B", "531c80e289d6cff3a7cd8c0db8110231d23a6f7a", Shape(36, 2560, 9728, 32, 8, 128, 151936)
    ),
}

ROUNDS = {"math": 3, "code": 2}
"""Table 7, "Eval-Opt revision rounds": drafts, and as many verdicts, as the released code counts them."""
LENGTHS = {  # (workflow, task) -> caps of prompt and response in tokens (Table 7; "single" is the released code's)
    ("single", "math"): (15360, 5120),
    ("eval_opt", "math"): (30720, 5120),
    ("voting", "math"): (20480, 5120),
    ("orch_workers", "math"): (20480, 5120),
    ("single", "code"): (4096, 2048),
    ("eval_opt", "code"): (10240, 2048),
    ("voting", "code"): (10240, 2048),
    ("orch_workers", "code"): (10240, 2048),
}


def is_tiny(scale: object) -> bool:
    """Whether a scale is embedded in this package."""
    return scale == TINY
