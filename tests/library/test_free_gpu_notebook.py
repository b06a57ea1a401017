"""`notebooks/free_gpu.ipynb` trains two roles with the library alone: its cells are run here with a tiny model, and plan a real one."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from toy_qwen3 import toy_base
from transformers import Qwen3Config

CELLS = [
    cell
    for cell in json.loads((Path(__file__).parents[2] / "notebooks" / "free_gpu.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]


def run(cells: list[dict], **parameters: object) -> tuple[dict, str]:
    """Run the parameters' cell and some others; return the names that they define, and what they print."""
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in [CELLS[0], *cells]:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102
            names |= parameters if cell is CELLS[0] else {}
    return names, printed.getvalue()


def test_the_cells_train_two_adapters_and_show_what_was_learned(tmp_path):
    names, _ = run(
        CELLS[1:], model=toy_base(), output_dir=str(tmp_path), max_steps=2, n_problems=2, num_generations=2, n_validation=2, max_completion_length=8,
    )  # fmt: skip
    assert {"adapter_solver", "adapter_checker"} <= {path.name for path in tmp_path.iterdir()}
    log = names["log"]
    assert (
        set(names["shown"]) <= set(log) and log["eval_reward"].notna().sum() == 3 and log["reward"].notna().sum() == 2
    )
    assert names["right"]([], [r"\boxed{3} or \boxed{41}", "41"], ["41", "41"]) == [1.0, 0.0]
    row = names["rows"](1, seed=0)[0]
    assert eval(row["prompt"].removeprefix("Compute ").rstrip(".")) == int(row["answer"])


def test_the_memory_of_a_model_is_planned_before_it_is_loaded(tmp_path):
    """Qwen3-0.6B has 596,049,920 parameters, of which 440,401,920 are in layers with adapters."""
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    names, printed = run(CELLS[1:2], model=str(tmp_path))
    assert names["always"]["model"] == 596_049_920 and names["update"]["merged layers"] == 440_401_920
    assert names["sampling"]["cache"] == 32 * 768 * 2 * 28 * 8 * 128
    assert names["needed"] < 13.5 and "GiB of 15" in printed
    with pytest.raises(ValueError, match="a tenth of 15 must stay free. Lower n_problems or the lengths"):
        run(CELLS[1:2], model=str(tmp_path), n_problems=16)
