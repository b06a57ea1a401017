"""Every number of the paper's setup (Table 7), and what the embedded scales and the released code put in its place.

The only copy: `cells.Cell` fills its fields from here, the README's table is printed from here, and
`tests/test_hyperparameters_match_table7.py` holds it against the paper.
"""

from dataclasses import dataclass

TASKS = ("math", "code")
TINY_SCALES = ("tiny-s", "tiny-m", "tiny-l")
PRESETS = ("paper", "released_code")


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
        return [
            (h, q),
            (h, kv),
            (h, kv),
            (q, h),
            (h, self.intermediate),
            (h, self.intermediate),
            (self.intermediate, h),
        ]

    @property
    def parameters(self) -> int:
        """Weights of the base: embedding, head where it is apart, linear modules, norms (Qwen3's, q and k norms included)."""
        norms = 2 * self.hidden + 2 * self.head_dim
        linear = sum(a * b for a, b in self.linear_sizes)
        return (2 - self.is_tied) * self.vocab * self.hidden + self.layers * (linear + norms) + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of one adapter on every linear module: LoRA of a rank, or at rank 0 a whole copy."""
        return self.layers * sum(rank * (a + b) if rank else a * b for a, b in self.linear_sizes)


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
SCALES = (*TINY_SCALES, *MODELS)

PAPER = {  # Table 7, and where it is silent what the released code does
    "learning_rate": 2e-5,
    "warmup_iterations": 15,
    "max_grad_norm": 1.0,
    "clip_low": 0.2,  # Table 7 prints the high ratio only; 0.2 is verl's default
    "clip_high": 0.28,
    "weight_decay": 0.01,  # not in Table 7
    "lora_rank": 64,
    "lora_alpha": 32,
    "n_problems": 64,
    "n_episodes": 8,
    "temperature": 0.7,
    "iterations": 500,
    "eval_every": 10,
    "save_every": 5,
    "n_voters": 3,
    "n_workers": 3,
    "old_logprobs": "recomputed",
    "dtype": "bfloat16",
    "micro_batch_tokens": 40960,  # ours: one row of the longest cell is 35,840 tokens
}
TINY = PAPER | {  # the embedded scales: smaller batches, larger steps, shorter runs
    "learning_rate": 2e-3,
    "warmup_iterations": 5,
    "lora_rank": 16,
    "lora_alpha": 16,
    "n_problems": 16,
    "temperature": 1.0,
    "iterations": 60,
    "save_every": 10,
    "old_logprobs": "sampled",  # the two agree to float32 rounding here
    "dtype": "float32",
    "micro_batch_tokens": 1024,
    "n_train": 4096,
    "n_validation": 256,
    "max_prompt_tokens": 512,
    "max_response_tokens": 96,
}
ROUNDS = {"math": 3, "code": 2}  # Table 7, "Eval-Opt revision rounds"; drafts and verdicts, as the released code counts
LENGTHS = {  # (workflow, task) -> tokens of prompt and response (Table 7; "single" is the released code's)
    ("single", "math"): (15360, 5120),
    ("eval_opt", "math"): (30720, 5120),
    ("voting", "math"): (20480, 5120),
    ("orch_workers", "math"): (20480, 5120),
    ("single", "code"): (4096, 2048),
    ("eval_opt", "code"): (10240, 2048),
    ("voting", "code"): (10240, 2048),
    ("orch_workers", "code"): (10240, 2048),
}
TEXT_OPTIONS = {  # preset="paper": what the paper's text says
    "code_reward": "fraction",
    "malformed_reward": -0.1,
    "advantage_group": "episode",
    "lr_clock": "iteration",
    "lr_schedule": "cosine",
    "updates": "per_batch",
    "minibatch_split": "even",
    "row_order": "shuffled",
    "aggregator_fallback": "candidate_1",
    "renderer": "chat_template",
    "code_rows": "deepcoder",
}
CODE_OPTIONS = {  # preset="released_code": what the authors' code does
    "code_reward": "all_pass",
    "malformed_reward": 0.0,
    "advantage_group": "role",  # "slot" for Voting on math, see `defaults`
    "lr_clock": "update_call",
    "lr_schedule": "constant",
    "updates": "per_batch",
    "minibatch_split": "sequential",
    "row_order": "mountain",
    "aggregator_fallback": "first_digit",
    "renderer": "released_code",
    "code_rows": "reconstruction",
    "dual_clip": 3.0,
}
CHOICES = {
    "task": TASKS,
    "scale": SCALES,
    "preset": PRESETS,
    "engine": ("auto", "transformers", "vllm"),
    "dtype": ("float32", "bfloat16"),
    "old_logprobs": ("sampled", "recomputed"),
    "code_reward": ("fraction", "all_pass"),
    "advantage_group": ("episode", "role", "slot", "role_round"),
    "advantage_norm": ("group", "agent", "none", "leave_one_out"),
    "loss_aggregation": ("grpo", "token", "dr_grpo"),
    "lr_clock": ("iteration", "update_call"),
    "lr_schedule": ("cosine", "constant", "cosine_wrap"),
    "updates": ("per_batch", "one", "tokens"),
    "minibatch_split": ("even", "sequential"),
    "row_order": ("shuffled", "mountain"),
    "aggregator_fallback": ("candidate_1", "first_digit"),
    "renderer": ("chat_template", "released_code"),
    "code_rows": ("deepcoder", "reconstruction"),
    "eval_sampling": ("training", "qwen3"),
    "on_alarm": ("log", "checkpoint", "stop", "rollback"),
}
LEAST = {
    "seed": 0, "warmup_iterations": 0, "lora_rank": 0, "n_episodes": 2, "temperature": 0.01, "malformed_reward": -1.0,
    "max_grad_norm": 1e-6, "dual_clip": 1.0,
}  # fmt: skip
MOST = {
    "seed": 2**32 - 1,  # NumPy's
    "coherence_penalty": 1.0, "coherence_floor": 1.0, "balance_roles": 1.0, "slot_scaling": 1.0,
    "rollback_rate": 1.0,
}  # fmt: skip


def is_tiny(scale: str) -> bool:
    """Whether a scale is embedded in this package."""
    return scale in TINY_SCALES


def defaults(workflow: str, task: str, scale: str, preset: str) -> dict[str, object]:
    """What the fields of a cell are that were left open. A workflow of your own takes Voting's lengths."""
    prompt, response = LENGTHS.get((workflow, task), LENGTHS["voting", task])
    sizes = TINY if is_tiny(scale) else PAPER | {"max_prompt_tokens": prompt, "max_response_tokens": response}
    options = TEXT_OPTIONS if preset == "paper" else CODE_OPTIONS
    if preset == "released_code" and (workflow, task) == ("voting", "math"):
        options = options | {"advantage_group": "slot"}
    if is_tiny(scale):
        options = options | {"renderer": "chat_template"}  # the embedded bases know no other
    return sizes | {"rounds": ROUNDS[task]} | options
