"""Every value of the paper's Table 7 (A.5), typed from its text, against `Cell`, its translation to TRL, and the model.

Not in a cell: "validation batch size 2048", a chunk size of the authors' evaluation loop; here every validation problem is
attempted once, however many run at a time.
"""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from multirole.core.policy import adapter_names
from multirole.core.rows import mini_batches
from multirole.core.schedule import lr_factor
from multirole.experiment.cell import Cell
from multirole.experiment.presets import LENGTHS, MODELS
from multirole.experiment.run import load_model

WORKFLOWS, TASKS, SCALES, POLICIES = (
    ("eval_opt", "voting", "orch_workers"), ("math", "code"), ("0.6b", "1.7b", "4b"), ("sp", "ip")
)  # fmt: skip
CELLS = [Cell(w, p, t, s) for w in WORKFLOWS for p in POLICIES for t in TASKS for s in SCALES]
PROMPT_AND_RESPONSE = {
    ("eval_opt", "math"): (30720, 5120),
    ("eval_opt", "code"): (10240, 2048),
    ("voting", "math"): (20480, 5120),
    ("voting", "code"): (10240, 2048),
    ("orch_workers", "math"): (20480, 5120),
    ("orch_workers", "code"): (10240, 2048),
}
ROLES = {
    "eval_opt": ["generator", "evaluator"],
    "voting": ["generator", "aggregator"],
    "orch_workers": ["orchestrator", "worker", "synthesizer"],
}
PUBLISHED = {  # config.json of Qwen/Qwen3-0.6B, -1.7B and -4B
    "0.6b": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7b": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "4b": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
}
SAME = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}


@pytest.fixture(params=CELLS, ids=lambda cell: f"{cell.id}-{cell.scale}")
def cell(request) -> Cell:
    return request.param


def test_optimization(cell, tmp_path):
    """AdamW, 2e-5, cosine warm-up style with 15 steps, gradient clipping 1.0, PPO clip ratio (high) 0.28."""
    args = cell.grpo_config(str(tmp_path))
    assert args.optim in ("adamw_torch", "adamw_torch_fused") and args.learning_rate == cell.learning_rate == 2e-5
    assert (cell.lr_schedule, cell.warmup_iterations) == ("cosine", 15)
    assert args.max_grad_norm == cell.max_grad_norm == 1.0
    assert args.epsilon_high == cell.clip_high == 0.28


def test_the_learning_rate_warms_up_over_15_steps_and_falls_as_a_cosine():
    factors = [lr_factor(Cell("voting", "ip", scale="1.7b"), step, 0, 2) for step in range(501)]
    steps = torch.tensor(factors[:16]).diff()
    assert torch.allclose(steps, steps[0].expand(15)) and max(factors) == factors[15] == pytest.approx(1.0)
    middle = 15 + (500 - 15) / 2
    assert factors[int(middle)] == pytest.approx(0.5, abs=0.01) and factors[500] == pytest.approx(0.0, abs=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(factors[15:]))


def test_grpo(cell, tmp_path):
    """GRPO without explicit KL, group size 8, group-relative advantages, sequence-mean of token-means."""
    args = cell.grpo_config(str(tmp_path))
    assert (args.beta, args.num_generations, args.scale_rewards, args.loss_type) == (0.0, 8, "group", "grpo")
    assert args.importance_sampling_level == "token" and cell.advantage_group == "episode"


def test_batching(cell, tmp_path):
    """64 problems a step, mini-batches of 64 problems, one epoch an update, temperature 0.7."""
    args = cell.grpo_config(str(tmp_path))
    assert args.per_device_train_batch_size == cell.n_problems * cell.n_episodes == 64 * 8
    assert args.num_iterations == args.gradient_accumulation_steps == args.steps_per_generation == 1
    assert args.temperature == cell.sampling().temperature == cell.temperature == 0.7


def test_a_mini_batch_is_the_rows_of_64_problems():
    """PPO mini-batch size 64, in problems of 8 episodes: 512 rows are one optimizer step, three slots are three."""
    one, three = (mini_batches(list(range(n)), 64 * 8, "even") for n in (512, 3 * 512))
    assert [(len(rows), divisor) for rows, divisor in one] == [(512, 512)]
    assert [(len(rows), divisor) for rows, divisor in three] == [(512, 512)] * 3


def test_sequence_lengths(cell, tmp_path):
    lengths = PROMPT_AND_RESPONSE[cell.workflow, cell.task]
    assert (cell.max_prompt_tokens, cell.max_response_tokens) == lengths == LENGTHS[cell.workflow, cell.task]
    assert cell.grpo_config(str(tmp_path)).max_completion_length == cell.sampling().max_tokens == lengths[1]
    assert cell.sampling(is_evaluation=True).max_tokens == lengths[1]


def test_workflow_caps(cell):
    """Eval-Opt 3 rounds on math and 2 on code; 3 candidate generations; 3 worker proposals."""
    workflow = cell.make_workflow()
    if cell.workflow == "eval_opt":
        assert workflow.rounds == {"math": 3, "code": 2}[cell.task]
    role = {"voting": "generator", "orch_workers": "worker"}.get(cell.workflow)
    assert workflow.roles == {name: 3 if name == role else 1 for name in ROLES[cell.workflow]}


def test_training_schedule(cell, tmp_path):
    """500 steps, validation every 10, checkpoint every 5."""
    args = cell.grpo_config(str(tmp_path))
    assert (args.max_steps, args.eval_steps, args.save_steps) == (500, 10, 5)
    assert (args.eval_strategy, args.save_strategy) == ("steps", "steps")


def test_policy_routing(cell):
    """Isolated: one adapter per role type. Shared: one across all roles."""
    n = len(ROLES[cell.workflow]) if cell.policy_name == "ip" else 1
    assert len(adapter_names(cell.policy)) == n and list(cell.policy) == ROLES[cell.workflow]


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_of_rank_64_and_alpha_32_on_all_linear_modules(tokenizer, tmp_path, policy):
    """Dropout 0.0. What `load_model` puts on a small Qwen3 in the place of the paper's."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    cell = Cell("voting", policy, scale="1.7b", model=str(tmp_path))
    model, _ = load_model(cell)
    assert list(model.peft_config) == adapter_names(cell.policy)
    for lora in model.peft_config.values():
        assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.bias) == (64, 32, 0.0, "none")
        assert not (lora.use_dora or lora.use_rslora)
    linear = {
        name for name, module in model.get_base_model().named_modules()
        if name.endswith("_proj") and "lora" not in name
    }  # fmt: skip
    adapted = {name.split(".lora_A")[0] for name, _ in model.get_base_model().named_parameters() if ".lora_A" in name}
    assert adapted == linear and len(linear) == 2 * 7  # q, k, v, o, gate, up, down; the head is no module of its own
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)


@pytest.mark.parametrize("scale", SCALES)
def test_shapes_count_the_weights_of_the_published_models(scale):
    """On the meta device: no weight exists. The adapters' count is PEFT's, too."""
    shape = MODELS[scale].shape
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**PUBLISHED[scale], **SAME))
        assert model.num_parameters() == shape.parameters
        lora = LoraConfig(r=64, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora)
    trainable, _ = adapted.get_nb_trainable_parameters()
    assert trainable == shape.adapter_parameters(64)
