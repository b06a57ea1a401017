"""Models, rows, machines and saved files that cannot serve a run are refused before a model is loaded or a file written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from paper_rows import DAPO, many, write
from test_checkpoints import CONFIG, iterate

from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import newest_whole
from multirole.experiment.folders import folder_of, open_folder
from multirole.experiment.launch import Launch
from multirole.experiment.model_checks import check_loaded
from multirole.experiment.models import locate
from multirole.experiment.record import Recorder
from multirole.experiment.run import preflight, run_cell
from multirole.experiment.storage import write_text
from multirole.plan import check, check_disk, disk_need

TINY = locate(Cell("voting", "sp"))
SMALL = {"n_problems": 2, "n_validation": 2, "max_prompt_tokens": 3000, "max_response_tokens": 24, "iterations": 2}


def edit(name: str, **values: object) -> Callable[[Path], object]:
    """Changes entries of a JSON file; None takes one out."""

    def change(folder: Path) -> None:
        held = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in held.items() if value is not None}))

    return change


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def absent(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


MODELS = {  # name -> change of the folder, fields of the cell, words of the refusal
    "no chat template": (absent("chat_template.jinja"), {}, "chat template that cannot write"),
    "template that refuses users": (text("chat_template.jinja", "{{ raise_exception('no users') }}"), {}, "no users"),
    "template that drops the user": (text("chat_template.jinja", "Hello."), {}, "leaves out message 1 of a conversation of 3"),
    "no end of sequence": (edit("tokenizer_config.json", eos_token=None), {}, "without an end-of-sequence token"),
    "tokenizer of another model": (edit("config.json", vocab_size=100), {}, "ids up to 509, but .* ids up to 99"),
    "turn marks unknown": (lambda folder: None, {"renderer": "released_code"}, "renderer='released_code' writes"),
    "encoder and decoder": (
        edit("config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]), {}, "'t5' model .* not a causal"
    ),
    "masked language model": (
        edit("config.json", model_type="bert", architectures=["BertForMaskedLM"]), {}, "BertForMaskedLM.* not a causal"
    ),
    "unknown architecture": (edit("config.json", model_type="qwen9", architectures=None), {}, "incomplete or damaged .*qwen9"),
    "not served on a CPU": (
        edit("config.json", model_type="gemma", architectures=["GemmaForCausalLM"]), {}, "GemmaForCausalLM, .* engine='vllm'"
    ),
    "no dense decoder": (edit("config.json", intermediate_size=None), {}, r"no \['intermediate_size'\]"),
    "weights cut off": (cut("model.safetensors"), {}, "incomplete or damaged"),
    "weights emptied": (text("model.safetensors", ""), {}, "incomplete or damaged"),
    "no weights": (absent("model.safetensors"), {}, "save_pretrained"),
    "config cut off": (cut("config.json"), {}, "config.json.* is not a valid JSON"),
    "tokenizer cut off": (cut("tokenizer.json"), {}, "incomplete or damaged"),
    "no tokenizer": (absent("tokenizer_config.json"), {}, r"no \['tokenizer_config.json'\]"),
}  # fmt: skip
ROWS = {  # name -> file, its rows or its text, words of the refusal
    "missing columns": ("a.jsonl", [{"question": "1+1?"}], "a.jsonl.*write the columns"),
    "empty": ("a.jsonl", "", "a.jsonl"),
    "duplicate ids": ("a.jsonl", many(1) * 20, "19"),
    "broken rows": ("a.jsonl", many(20, solution={3: ""}), "row 3.*At most 1%"),
    "cut off": ("a.jsonl", '{"prompt": "1+1?", "sol', "a.jsonl"),
    "cut off parquet": ("a.parquet", "PAR1 and no more", "a.parquet cannot be read"),
    "unknown kind": ("a.txt", "prompt,solution", "a.txt"),
    "fewer than validation needs": ("a.jsonl", many(10), "got count=2. Write 1 <= count <= 1"),
}
RUNS = {  # name -> fields of the cell, words of the refusal; refused by the rows' lengths and numbers
    "over-long prompts": ({"max_prompt_tokens": 5}, r"`max_prompt_tokens` \(5\) leaves 0 of 21"),
    "fewer rows than n_problems": ({"n_problems": 22}, "`n_problems` must be at most the 21 training problems"),
    "fewer rows than n_train": ({"n_train": 500}, "holds 21 problems, got count=500"),
}
MACHINES = {  # name -> what is patched, fields of the cell, words of the refusal
    "no GPU": ({}, {"model": None}, "scale='0.6b' needs one. Use scale='tiny-s'"),
    "model not here": ({}, {"model": None}, "needs Qwen/Qwen3-0.6B .* not in this machine's cache.* pass model=FOLDER"),
    "vLLM too old": ({"multirole.experiment.machine.version": lambda name: "0.11.0"}, {"engine": "vllm"}, "0.11.0"),
    "vLLM too new": ({"multirole.experiment.machine.version": lambda name: "1.0.0+cu130"}, {"engine": "vllm"}, "1.0.0"),
    "no vLLM": ({"multirole.experiment.machine.installed": lambda *names: {}}, {"engine": "vllm"}, "0.22 to 0.31 here, found none. Install it"),
    "too little memory": ({"multirole.plan.this_device": lambda: ("CPU", 2**28)}, {}, "does not fit.* 0.25 GiB"),
    "too little disk": ({"shutil.disk_usage": lambda folder: SimpleNamespace(free=2**20)}, {}, "1 MiB free.* larger disk"),
}  # fmt: skip
RECORDS = {  # name -> change of a run's folder, words of the refusal
    "checkpoint changed": (text("checkpoints/checkpoint-1/optimizer.pt", "other"), "optimizer.pt is not as it was"),
    "results of another cell": (edit("config.json", seed=7), "another configuration, with seed=0"),
    "of an older version": (text("checkpoints/checkpoint-1/manifest.json", "{}"), "manifest.json cannot be read"),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def on_a_cpu_without_a_model(monkeypatch, tmp_path):
    """No GPU, no network, an empty cache; loading a model fails the test."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)


def refused(tmp_path: Path, fields: dict, words: str) -> None:
    """A paper's cell on a small model is refused before training, and the results folder stays empty."""
    results = tmp_path / "results"
    results.mkdir()
    cell = Cell("voting", "sp", "math", "0.6b", **{"model": str(TINY), "data": str(DAPO)} | SMALL | fields)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        preflight(cell)
        check(cell, Launch(results_dir=str(results)))
    assert files_of(results) == {}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_serve_is_refused(name, tmp_path):
    change, fields, words = MODELS[name]
    shutil.copytree(TINY, tmp_path / "bad")
    change(tmp_path / "bad")
    refused(tmp_path, {"model": str(tmp_path / "bad")} | fields, words)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_dataset_are_refused(name, tmp_path):
    file, rows, words = ROWS[name]
    path = tmp_path / file
    path.write_text(rows) if isinstance(rows, str) else write(path, rows)
    refused(tmp_path, {"data": str(path)}, words)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_cannot_run_it_is_refused(name, tmp_path, monkeypatch):
    patched, fields, words = MACHINES[name]
    for what, value in patched.items():
        monkeypatch.setattr(what, value)
    refused(tmp_path, fields, words)


def test_what_those_cases_spoil_is_accepted_as_it_was(tmp_path):
    cell = Cell("voting", "sp", "math", "0.6b", model=str(TINY), data=str(DAPO), **SMALL)
    preflight(cell)
    check(cell, Launch(results_dir=str(tmp_path)))


def test_disk_counts_what_is_saved_already(tmp_path, monkeypatch):
    cell = Cell("voting", "sp", "math", "0.6b", model=str(TINY), data=str(DAPO), **SMALL)
    one = 4 * 64 * 3 * (96 + 96 + 2 * (96 + 32) + 96 + 96 + 3 * (96 + 256))  # rank 64 on 3 layers of tiny-s, float32
    assert disk_need(cell) == 3 * 3 * one + 2 * one // 2  # adapters are kept in bfloat16, checkpoints are exact
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=9 * one))
    with pytest.raises(ValueError, match="on a larger disk"):
        check_disk(cell, tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "saved").write_bytes(bytes(one))
    check_disk(cell, tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_rows_do_not_suffice_is_refused(name, tmp_path):
    fields, words = RUNS[name]
    cell = Cell("voting", "sp", "math", "0.6b", model=str(TINY), data=str(DAPO), **SMALL | fields)
    with pytest.raises(ValueError, match=words):
        run_cell(cell, tmp_path)
    assert {Path(path).name for path in files_of(folder_of(cell, tmp_path))} <= {"config.json"}


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        (
            {"missing_keys": {"model.layers.1.mlp.up_proj.weight"}},
            "missing, the first is model.layers.1.mlp.up_proj.weight",
        ),
        ({"mismatched_keys": {("lm_head.weight", (2, 3), (3, 3))}}, "of another shape, the first is .*lm_head.weight"),
        ({"unexpected_keys": {"model.layers.3.mlp.up_proj.weight", "x"}}, "not in its config.json, .* model.layers.3"),
    ],
)
def test_a_base_with_other_weights_than_its_config_is_refused(loading, words):
    whole = {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": {"rotary_emb.inv_freq"}}
    check_loaded(TINY, whole)
    with pytest.raises(ValueError, match=words):
        check_loaded(TINY, whole | loading)


@pytest.mark.parametrize("name", RECORDS)
def test_saved_files_that_are_not_this_runs_are_refused(name, tmp_path):
    change, words = RECORDS[name]
    (tmp_path / "turns").mkdir()
    write_text(tmp_path / "config.json", json.dumps(CONFIG))
    iterate(Recorder(tmp_path), 1)
    change(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=words):
        Recorder(tmp_path).rewind(newest_whole(tmp_path))
    assert files_of(tmp_path) == before


def test_a_folder_that_is_a_file_or_another_cells_is_refused_and_stays(tmp_path):
    cell = Cell("voting", "sp")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="`results_dir` must be a folder that can be written to, got .*/file'"):
        run_cell(cell, tmp_path / "file")
    edit("config.json", seed=9)(open_folder(cell, tmp_path))
    before = files_of(tmp_path)
    with pytest.raises(
        ValueError, match=f"{cell.id} holds a run with another configuration. Write another results_dir"
    ):
        open_folder(cell, tmp_path)
    assert files_of(tmp_path) == before
