"""`model=FOLDER` with a Llama or a Gemma runs the paper's path from end to end on a CPU."""

from pathlib import Path

import pytest
from toy_families import LLAMA3, saved
from trainers import table
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from multirole_study.experiment.base_models import shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

ROWS = Path(__file__).parents[1] / "data" / "dapo_rows.jsonl"
SMALL = {
    "max_steps": 2, "n_problems": 2, "num_generations": 2, "n_validation": 2, "eval_steps": 2, "save_steps": 2,
    "warmup_steps": 0, "lora_r": 4, "max_completion_length": 24, "max_prompt_tokens": 3000, "dtype": "float32",
    "temperature": 1.0,
}  # fmt: skip


def cell_of(folder: Path, **fields) -> Cell:
    return Cell("voting", "ip", "math", "0.6b", model=str(folder), data=str(ROWS), **SMALL | fields)


@pytest.mark.parametrize(
    ("model", "config", "fields"),
    [
        pytest.param(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": LLAMA3}, id="llama 3.1"),
        pytest.param(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}, id="tied", marks=pytest.mark.slow),
        pytest.param(GemmaForCausalLM, GemmaConfig, {}, id="gemma, by `generate`", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_model_folder_is_trained_and_sampled_by_one_policy(model, config, fields, tmp_path):
    folder = saved(tmp_path / "toy", model, config, **fields)
    run = run_cell(cell_of(folder), tmp_path / "runs")
    assert is_done(run)
    roles = table(run, "roles")
    assert set(roles["role"]) == {"generator", "aggregator"}
    assert roles[roles["iteration"] == 1]["max_logprob_gap"].max() < 1e-3  # engine against trainer, float32
    assert len(list(run.glob("adapters/step_00002/*/adapter_model.safetensors"))) == 2


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("model", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_shapes_are_read_from_the_folder(model, config, is_tied, tmp_path):
    """Parameters are counted as for a Qwen3, except that a Llama lacks two norms of a head's width per layer."""
    folder = saved(tmp_path / "m", model, config, tie_word_embeddings=is_tied)
    shape, real = shape_of(cell_of(folder)), model.from_pretrained(folder).num_parameters()
    assert shape.is_tied == is_tied and 0 <= shape.parameters - real <= 2 * shape.layers * shape.head_dim


def test_a_gemma_is_refused_by_the_fast_engine(tmp_path):
    folder = saved(tmp_path / "toy-gemma", GemmaForCausalLM, GemmaConfig)
    with pytest.raises(ValueError, match="holds a GemmaForCausalLM.*Use engine='auto'"):
        run_cell(cell_of(folder, engine="transformers"), tmp_path / "runs")
