"""The paper's settings that depend on workflow and task (Table 7), and its base models. `cell` has all others."""

from dataclasses import dataclass

TASKS = ("math", "code")
PAPER_SCALES = ("0.6b", "1.7b", "4b")
TINY = "tiny-r"
"""The scale whose models and tasks are part of this package."""
TINY_BASES = {"math": "tiny-r", "code": "tiny-r-code"}
"""Model folders of the tiny scale by kind of task."""
OTHER_BASES = ("tiny-r-vain", "tiny-r-seed1", "tiny-r-seed2")
"""Other embedded bases for math at the tiny scale; `model` takes their names."""
TINY_LENGTHS = {"math": (6 * 272, 272), "code": (6 * 176, 176)}
"""Prompt and response caps of the tiny scale in tokens: a prompt holds six replies, as in Table 7's Eval-Opt."""
SMOLLM2 = "smollm2"
"""The scale of a pretrained language model that runs on a CPU; its tasks are generated."""
SMOLLM2_ARITHMETIC = "gym:basic_arithmetic?operators=('+',)&max_terms=2&min_digits=1&max_digits=2&allow_parentheses=False&allow_negation=False"
"""The math task of scale smollm2, sums of two numbers; its code task is `tasks.functions`."""
SMOLLM2_LENGTHS = {"math": (768, 64), "code": (1024, 96)}
"""Prompt and response caps of scale smollm2 in tokens."""


QWEN = "qwen-0.5b"
"""The scale of a pretrained language model that reasons and writes programs, on a CPU; its tasks are generated, its prompts the paper's."""
QWEN_WORD_PROBLEMS = "gym:gsm_symbolic"
"""The math task of scale qwen-0.5b; its code task is `tasks.programs`."""
QWEN_LENGTHS = {"math": (2816, 384), "code": (1536, 192)}
"""Prompt and response caps of scale qwen-0.5b in tokens: a prompt holds six replies and a question. The response caps follow from the card (`tools/qwen_card.py`)."""


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions, which determine its memory and FLOPs. Qwen3 up to 4B ties its embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = True
    has_qk_norms: bool = True
    has_qkv_biases: bool = False

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """(in, out) of one layer's linear modules, which carry the adapters (Table 7, "all linear modules")."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = [(h, self.intermediate), (h, self.intermediate), (self.intermediate, h)]
        return [(h, q), (h, kv), (h, kv), (q, h), *mlp]

    @property
    def linear(self) -> int:
        """The number of weights in one layer's linear modules."""
        return sum(a * b for a, b in self.linear_sizes)

    @property
    def parameters(self) -> int:
        """The number of weights in the base: embedding, untied head, linear modules, norms, biases.

        Qwen3 has two more norms per layer than Llama, and Qwen2 biases of q, k and v.
        """
        norms = 2 * self.hidden + 2 * self.head_dim * self.has_qk_norms
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim * self.has_qkv_biases
        return (
            (2 - self.is_tied) * self.vocab * self.hidden + self.layers * (self.linear + norms + biases) + self.hidden
        )

    @property
    def kv_elements(self) -> int:
        """The number of KV cache elements per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of weights in one LoRA adapter on every linear module."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear_sizes)


@dataclass(frozen=True)
class PinnedModel:
    """A base model at a pinned revision of the Hub, with its shape, which is needed before any download."""

    repo: str
    revision: str
    shape: Shape
    download_gb: float
    """GB (10^9 bytes) of its files on the Hub, rounded. Those of 0.6B and 1.7B repeat the tied head."""
    layer: str = "Qwen3DecoderLayer"
    """The class name of its decoder layers."""
    gguf: tuple[str, str] | None = None
    """Name and SHA-256 of a GGUF file of this model that may stand in for the Hub's."""


MODELS = {  # paper sec 3; the paper pins no revision, these are the ones a follow-up (ASPECT) recorded
    "0.6b": PinnedModel(
        "Qwen/Qwen3-0.6B", "025f7769d0cc53135b8051d32416c7bb42669467", Shape(28, 1024, 3072, 16, 8, 128, 151936), 1.5
    ),
    "1.7b": PinnedModel(
        "Qwen/Qwen3-1.7B", "0060bc56d46589041c1048efd1a397421b1142b5", Shape(28, 2048, 6144, 16, 8, 128, 151936), 4.1
    ),
    "4b": PinnedModel(
        "Qwen/Qwen3-4B", "531c80e289d6cff3a7cd8c0db8110231d23a6f7a", Shape(36, 2560, 9728, 32, 8, 128, 151936), 8.1
    ),
    # not in the paper; without the Hub, module `smollm2` provides another version of these weights
    SMOLLM2: PinnedModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        Shape(30, 576, 1536, 9, 3, 64, 49152, has_qk_norms=False),
        0.27,
        layer="LlamaDecoderLayer",
    ),
    QWEN: PinnedModel(  # not in the paper
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "ea3f2471cf1b1f0db85067f1ef93848e38e88c25",
        Shape(24, 896, 4864, 14, 2, 64, 151936, has_qk_norms=False, has_qkv_biases=True),
        1.0,
        layer="Qwen2DecoderLayer",
        gguf=(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    ),
}

MICRO_BATCH_TOKENS = {"paper": 40960, "tiny": 1024, "smollm2": 4096, "qwen": 4096}
"""`preset_key` -> padded tokens per forward pass, where a launch sets no others."""
ROUNDS = {"math": 3, "code": 2}
"""Table 7, "Eval-Opt revision rounds": the number of drafts and of verdicts (as in the released code)."""
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
    """Return whether a scale's model is part of this package."""
    return scale == TINY


def is_small(scale: object) -> bool:
    """Return whether a scale is for a CPU, with generated tasks; the paper's scales use its data sets."""
    return scale in (TINY, SMOLLM2, QWEN)


def preset_key(scale: object) -> str:
    """Return the keyword of `settings.option` that holds a scale's defaults."""
    return {TINY: "tiny", SMOLLM2: "smollm2", QWEN: "qwen"}.get(str(scale), "paper")


def scale_lengths(scale: object, workflow: str, kind: str) -> tuple[int, int]:
    """Return the prompt and response caps of a scale, workflow and kind of task ("math" or "code"), in tokens."""
    small = {TINY: TINY_LENGTHS, SMOLLM2: SMOLLM2_LENGTHS, QWEN: QWEN_LENGTHS}
    return small[scale][kind] if isinstance(scale, str) and scale in small else LENGTHS[workflow, kind]
