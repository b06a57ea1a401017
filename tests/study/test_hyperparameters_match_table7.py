"""Every value of the paper's Table 7 (A.5), typed from its text, against `Cell`, its translation to TRL, and the model.

Not in a cell: "validation batch size 2048", a chunk size of the authors' evaluation loop; here every validation problem is
attempted once, however many run at a time.
"""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM, get_scheduler

from multirole.inputs.arguments import kl_weights
from multirole.policy import adapter_names
from multirole.update.rows import mini_batches
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import load_model, training_args, update_rules
from multirole_study.experiment.presets import LENGTHS, MODELS

SCALES, POLICIES = ("0.6b", "1.7b", "4b"), ("sp", "ip")
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


TABLE_7 = {  # ours (see each field of `Cell`) -> what the table says
    "learning_rate": 2e-5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 15,
    "max_grad_norm": 1.0,
    "epsilon_high": 0.28,
    "loss_type": "grpo",  # sequence-mean of token-means
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "beta": 0.0,  # no explicit KL
    "num_generations": 8,
    "generation_batch_size": 64 * 8,
    "num_iterations": 1,
    "temperature": 0.7,
    "max_steps": 500,
    "eval_steps": 10,
    "save_steps": 5,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "updates": "per_batch",
    "top_p": 1.0,
    "top_k": 0,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("workflow", "task"), PROMPT_AND_RESPONSE)
def test_the_trainer_gets_the_values_of_table_7(workflow, task, scale, tmp_path):
    prompt, response = PROMPT_AND_RESPONSE[workflow, task]
    for policy in POLICIES:
        cell = Cell(workflow, policy, task, scale)
        args = training_args(cell, str(tmp_path))
        assert {name: getattr(args, name) for name in TABLE_7} == TABLE_7
        assert update_rules(cell) == []  # advantages by episode, one clock, shuffled rows: the library's rules
        assert args.optim in ("adamw_torch", "adamw_torch_fused") and not any(kl_weights(args, cell.policy).values())
        assert (args.max_prompt_tokens, args.max_completion_length) == (prompt, response) == LENGTHS[workflow, task]
        assert (cell.max_completion_length, cell.temperature) == (response, 0.7)
        assert (cell.n_train, cell.n_validation) == (None, 256)  # all training rows
        assert Cell(workflow, policy, task, scale, data=__file__).n_validation is None  # all of a file's
        n = len(ROLES[workflow]) if policy == "ip" else 1  # one adapter per role type, or one across all roles
        assert len(adapter_names(cell.policy)) == n and list(cell.policy) == ROLES[workflow] == list(args.policy)
        played = cell.make_workflow()  # 3 candidates; 3 proposals; 3 rounds on math and 2 on code
        many = {"voting": "generator", "orch_workers": "worker"}.get(workflow)
        assert played.roles == {name: 3 if name == many else 1 for name in ROLES[workflow]}
        assert workflow != "eval_opt" or played.rounds == {"math": 3, "code": 2}[task]


def test_the_translation_to_trl_loses_nothing(tmp_path):
    settings = {"max_steps": 7, "learning_rate": 3e-3, "epsilon": 0.1, "epsilon_high": 0.3, "temperature": 0.9, "delta": 3.0,
                "num_generations": 3, "role_beta": {"aggregator": 0.1}, "lr_schedule": "constant", "seed": 5}  # fmt: skip
    args = training_args(Cell("voting", "ip", "code", **settings), str(tmp_path))
    assert (args.epsilon, args.epsilon_high, args.delta) == (0.1, 0.3, 3.0)
    assert kl_weights(args, {"generator": "generator", "aggregator": "aggregator"}) == {
        "generator": 0.0,
        "aggregator": 0.1,
    }
    assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (3e-3, "constant_with_warmup", 0.01)
    assert (args.max_steps, args.generation_batch_size, args.num_generations) == (7, 8 * 3, 3)
    assert (args.temperature, args.max_completion_length, args.seed, args.use_cpu) == (
        0.9,
        176,
        5,
        not torch.cuda.is_available(),
    )


def test_the_learning_rate_warms_up_over_15_steps_and_falls_as_a_cosine(tmp_path):
    args = training_args(Cell("voting", "ip", scale="1.7b"), str(tmp_path))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
    factors = [schedule.lr_lambdas[0](step) for step in range(501)]
    steps = torch.tensor(factors[:16]).diff()
    assert torch.allclose(steps, steps[0].expand(15)) and max(factors) == factors[15] == pytest.approx(1.0)
    assert factors[15 + 485 // 2] == pytest.approx(0.5, abs=0.01) and factors[500] == pytest.approx(0.0, abs=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(factors[15:]))


def test_a_mini_batch_is_the_rows_of_64_problems():
    """PPO mini-batch size 64, in problems of 8 episodes: 512 rows are one optimizer step, three slots are three."""
    one, three = (mini_batches(list(range(n)), 64 * 8) for n in (512, 3 * 512))
    assert [(len(rows), divisor) for rows, divisor in one] == [(512, 512)]
    assert [(len(rows), divisor) for rows, divisor in three] == [(512, 512)] * 3


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
