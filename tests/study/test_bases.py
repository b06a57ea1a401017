"""Any base: a folder, a GGUF file or a name on the Hub; its settings are those of the scale whose own base is nearest in size."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import random_model, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from multirole.bases import gguf_folder
from multirole_study.experiment import base_config, base_models
from multirole_study.experiment.base_config import hub_name, recorded_name, scale_of, shape_of_config
from multirole_study.experiment.base_models import convert_pinned, describe, locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, QWEN
from multirole_study.experiment.storage import sha256
from multirole_study.tasks.gym import PROMPTS


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A GGUF file of a Qwen2 that stores its head apart, converted below the test's folder."""
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda digest: tmp_path / digest[:16])
    model, tokenizer = random_model("qwen2", tie_word_embeddings=True)
    return write_gguf(tmp_path / "mine.gguf", model, tokenizer, "qwen2", stores_head=True)


def test_a_file_is_planned_by_its_header_and_recorded_by_its_hash(file):
    cell = Cell("voting", "ip", model=str(file))
    shape = shape_of(cell)
    assert not list(file.parent.glob("*/")), "nothing is converted for a plan"
    folder = locate(cell)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    about = describe(cell)
    assert about["name"] == "mine.gguf, ALL_F32 weights in float32" and about["revision"] == sha256(file)
    assert about["sha256"] == {"model.safetensors": sha256(folder / "model.safetensors")}
    assert cell.to_dict()["model"] == "mine.gguf"


def test_the_settings_are_those_of_the_scale_of_its_size(file):
    cell, usual = Cell("voting", "ip", model=str(file)), Cell("voting", "ip", scale="tiny-r")
    assert cell.replace(model=None) == usual and "model" in cell.changed()
    (remark,) = [text for text in cell.remarks() if "nearest in size" in text]
    assert "mine.gguf" in remark and "'tiny-r'" in remark and f"learning_rate={usual.learning_rate}" in remark
    chosen = Cell("voting", "ip", scale="smollm2", model=str(file))
    assert chosen.learning_rate == Cell("voting", "ip", scale="smollm2").learning_rate
    assert not [text for text in chosen.remarks() if "nearest" in text]
    assert Cell(**cell.parameters()).remarks() == cell.remarks()  # by another process


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        ((2, 64, 96, 4, 512), "tiny-r"),
        ((30, 576, 1536, 9, 49152), "smollm2"),
        ((24, 896, 4864, 14, 151936), "qwen-0.5b"),
        ((28, 1024, 3072, 32, 151936), "0.6b"),
        ((16, 2048, 8192, 32, 128256), "1.7b"),
        ((32, 4096, 14336, 32, 128256), "4b"),
    ],
)
def test_the_nearest_scale(sizes, scale, monkeypatch):
    tiny = base_config.config_of(base_config.embedded_model())
    config = dict(zip(base_config.SIZES, sizes, strict=True)) | {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    monkeypatch.setattr(base_config, "config_of", lambda model: config if model == "this" else tiny)
    assert scale_of("this") == scale


@pytest.mark.parametrize("scale", ["smollm2", "qwen-0.5b"])
def test_pinned_shapes_count_every_weight(scale):
    """Of Llama and Qwen2, with the configuration that the Hub has."""
    shape = MODELS[scale].shape
    family, rest = ("qwen2", {}) if shape.has_qkv_biases else ("llama", {"head_dim": shape.head_dim})
    config = AutoConfig.for_model(
        family, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=True, **rest,
    )  # fmt: skip
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert replace(shape, layers=1).parameters == sum(p.numel() for p in model.parameters())
    assert shape_of_config(config.to_dict(), "") == replace(shape, layers=1)


def test_names_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert hub_name("a/b@v1.0") == ("a/b", "v1.0")
    assert not any(map(hub_name, ("tiny", "./a/b", "/a/b", "a/b/c", "a/b.gguf", "~/b")))
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub_name("a/b") is None and recorded_name("a/b") == "b" and recorded_name("c/d@1") == "c/d@1"
    asked = []
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    ).save_pretrained(tmp_path)

    def download(repo, name, revision=None, local_files_only=False):
        asked.append((repo, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    cell = Cell("single", "sp", model="me/mine@v2")
    assert (
        {*asked} == {("me/mine", "config.json", "v2")}
        and cell.scale == "tiny-r"
        and cell.to_dict()["model"] == "me/mine@v2"
    )
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: str(snapshot))
    assert locate(cell) == snapshot and describe(cell)["revision"] == "abc123" and describe(cell)["name"] == "me/mine"
    with pytest.raises(ValueError, match=r"existing folder or GGUF file, or `owner/name`"):
        Cell("single", "sp", model="nowhere.gguf")


def test_a_broken_file_is_refused_when_a_cell_is_made(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ValueError, match="damaged or truncated"):
        Cell("single", "sp", model=str(broken))


def test_a_file_stands_in_for_the_model_of_qwen_by_its_hash(file, monkeypatch):
    monkeypatch.setattr(base_models, "_snapshot", lambda pinned, is_local: OSError("offline"))
    cell = Cell("single", "sp", scale=QWEN)
    with pytest.raises(ValueError, match=r"multirole fetch qwen-0\.5b --gguf FILE.*SHA-256 1d9614638d18"):
        locate(cell)
    with pytest.raises(ValueError, match=r"mine\.gguf is another file than.*-p model FILE"):
        convert_pinned(QWEN, file)
    pinned = replace(MODELS[QWEN], gguf=("mine.gguf", sha256(file)))
    monkeypatch.setitem(MODELS, QWEN, pinned)
    folder = convert_pinned(QWEN, file)
    assert locate(cell) == folder and describe(cell)["revision"] == sha256(file)
    with pytest.raises(ValueError, match="has no GGUF file"):
        convert_pinned("0.6b", file)


@pytest.mark.parametrize(("scale", "prompts"), [("smollm2", PROMPTS), ("qwen-0.5b", "math"), ("0.6b", "math")])
def test_the_papers_prompts_are_for_models_that_reason(scale, prompts):
    task = Cell("voting", "sp", "gym:gsm_symbolic", scale).make_task()
    assert task.problems("train", 1)[0].task == prompts
