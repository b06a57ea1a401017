"""A GGUF file as a base: the converted model and tokenizer are those that it was made from, and what cannot be converted is refused first."""

import json
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from gguf import GGMLQuantizationType
from gguf_files import FAMILIES, random_model, write_gguf
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole.bases import gguf_folder
from multirole.bases.gguf_folder import LLAMA3_ROPES, local_base, origin_of
from multirole.bases.gguf_header import read_header

SPLIT = b"\x0b" + bytes(7) + b"split.count\x02\0\0\0\x02\0"
"""A field of a header, of type uint16."""

TEXT = "It cost 1,234.50 then.\n\n  def f(x):\n\treturn x  # don't 你好"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "12?"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda digest: folder / digest[:16])
    return folder


def logits(model, n_tokens: int = 300) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.randint(5, 900, (1, n_tokens), generator=torch.Generator().manual_seed(2))).logits


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_converted_model_and_tokenizer_are_the_original_ones(architecture, is_tied, tmp_path):
    """Also where the file calls the end of text the end of a turn, or pads with the end of a turn."""
    model, tokenizer = random_model(architecture, tie_word_embeddings=is_tied)
    wrong = {"eos": tokenizer.convert_tokens_to_ids("<|end_of_text|>" if architecture == "llama" else "<|endoftext|>")}
    path = write_gguf(tmp_path / "m.gguf", model, tokenizer, architecture, pad=tokenizer.eos_token_id, **wrong)
    folder = local_base(str(path))
    read, made = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(read) is type(model) and read.config.tie_word_embeddings is is_tied
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=1e-5)
    assert made.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT, add_special_tokens=False)
    assert made.decode(made.encode(TEXT, add_special_tokens=False)) == TEXT
    assert made.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT)
    assert made.eos_token == tokenizer.eos_token and made.pad_token_id == wrong["eos"]
    assert read.generation_config.eos_token_id == [tokenizer.eos_token_id, wrong["eos"]]


def test_transformers_reads_the_same_weights(tmp_path):
    model, tokenizer = random_model("qwen2")
    path = write_gguf(tmp_path / "m.gguf", model, tokenizer, "qwen2", matrices=GGMLQuantizationType.Q8_0)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(local_base(str(path)))
    torch.testing.assert_close(logits(read), logits(peer), atol=1e-5, rtol=1e-5)
    assert origin_of(Path(local_base(str(path))))["quantisation"] == "Q8_0"
    assert (logits(read) - logits(model)).abs().max() > 1e-3, "the file is rounded"


def test_a_head_that_is_stored_beside_its_embedding_is_one_matrix(tmp_path):
    """In other precision, too; a model whose two matrices differ keeps both."""
    model, tokenizer = random_model("qwen2", tie_word_embeddings=False)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    head.data = embedding.data * (1 + 0.05 * torch.randn_like(embedding))
    read = AutoModelForCausalLM.from_pretrained(
        local_base(str(write_gguf(tmp_path / "m.gguf", model, tokenizer, "qwen2")))
    )
    assert read.config.tie_word_embeddings and read.lm_head.weight is read.model.embed_tokens.weight


@pytest.mark.parametrize("rope", LLAMA3_ROPES)
def test_the_factors_of_llama_3_are_recognised(rope, tmp_path):
    plain, tokenizer = random_model("llama")
    model, _ = random_model("llama", rope_parameters=plain.config.rope_parameters | rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    dims = torch.arange(0, 16, 2) / 16
    extra = {"rope_freqs.weight": (5e5**-dims / frequencies).numpy()}
    read = AutoModelForCausalLM.from_pretrained(
        local_base(str(write_gguf(tmp_path / "m.gguf", model, tokenizer, "llama", extra=extra)))
    )
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=1e-5)
    assert read.config.rope_parameters["factor"] == rope["factor"]


def test_what_cannot_be_converted_is_refused_by_its_header(tmp_path, cache):
    model, tokenizer = random_model("qwen3")
    whole = write_gguf(tmp_path / "whole.gguf", model, tokenizer, "qwen3")
    content, header = whole.read_bytes(), read_header(whole)
    other = tmp_path / "other.gguf"
    extra = {"blk.0.attn_sinks.weight": header.start * torch.ones(4).numpy()}
    cases = {
        "there is none": (None, "cannot be read"),
        "empty": (b"", "cannot be read"),
        "a page of the Hub": (b"<html>" * 9, "is not a GGUF file"),
        "an old version": (b"GGUF\x01\0\0\0" + content[8:], "has version 1 of GGUF"),
        "within the header": (content[: header.start // 2], "truncated: its header cannot be read"),
        "at its end": (content[: header.start], f"has {header.start} bytes of {len(content)}"),
        "within the tensors": (content[:-500], "is truncated"),
        "one part of a model": (content[:16] + (len(header.fields) + 1).to_bytes(8, "little") + SPLIT + content[24:], "is one of 2 parts of a model"),
        "of a tokenizer of another kind": (content.replace(b"gpt2", b"bert"), "has a tokenizer of kind 'bert'"),
        "of another architecture": (content.replace(b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0qwen3", b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0gemma"),
                                    "architecture 'gemma', and llama, qwen2, qwen3 can be converted"),
    }  # fmt: skip
    for name, (written, words) in cases.items():
        other.unlink(missing_ok=True)
        if written is not None:
            other.write_bytes(written)
        with pytest.raises(ValueError, match=words) as raised:
            local_base(str(other))
        assert str(raised.value).startswith(f"The file {str(other)!r}") and "\n" not in str(raised.value), name
    write_gguf(other, model, tokenizer, "qwen3", extra=extra)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks\.weight, which no Qwen3ForCausalLM has"):
        local_base(str(other))
    assert not list(cache.iterdir()), "nothing was begun"


@pytest.fixture
def written(tmp_path) -> str:
    model, tokenizer = random_model("llama")
    return str(write_gguf(tmp_path / "m.gguf", model, tokenizer, "llama"))


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    usual, folders = gguf_folder.convert, []

    def convert(header, folder):
        folders.append(folder)
        return usual(header, folder)

    monkeypatch.setattr(gguf_folder, "convert", convert)
    return folders


def test_a_file_is_converted_once_also_under_another_name(written, conversions, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        (folder,) = {*threads.map(local_base, [written] * 4)}
    shutil.copy(written, tmp_path / "copy.gguf")
    assert local_base(str(tmp_path / "copy.gguf")) == folder and len(conversions) == 1
    origin = origin_of(Path(folder))
    assert origin["file"] == "m.gguf" and len(origin["sha256"]) == 64 and origin["architecture"] == "llama"


def test_an_interrupted_conversion_leaves_nothing_and_is_repeated(written, conversions, cache, monkeypatch):
    usual = gguf_folder.convert

    def interrupted(header, folder):
        usual(header, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            local_base(written)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    left = conversions[0]  # what SIGKILL leaves
    left.mkdir()
    (left / "half").touch()
    folder = Path(local_base(written))
    assert not left.exists() and not (folder / "half").exists()
    (folder / "model.safetensors").write_bytes(b"")  # damaged since
    assert AutoModelForCausalLM.from_pretrained(local_base(written)).dtype == torch.float32 and len(conversions) == 3


def test_a_full_disk_is_refused_before_and_survived_during_the_conversion(written, cache, monkeypatch):
    usage = namedtuple("Usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: usage(10**6))
        with pytest.raises(ValueError, match="has 1 MB free.*HF_HOME"):
            local_base(written)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(ValueError, match=r"No space left on device.*HF_HOME"):
            local_base(written)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert (Path(local_base(written)) / "config.json").is_file()


def test_the_trainer_takes_a_file(written, tmp_path):
    args = MultiRoleGRPOConfig(
        str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", generation_batch_size=4, num_generations=2, max_steps=2,
        max_completion_length=4,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        written, Single(), lambda completions, **_: [float(len(c)) for c in completions], args, Dataset.from_dict({"prompt": ["one", "two"] * 2}),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2 and type(trainer.player.engine).__name__ == "TransformersEngine"
    assert trainer.processing_class.eos_token == "<|eot_id|>"


def test_the_header_says_all_of_the_configuration(written):
    """So that a plan needs no conversion."""
    header = read_header(Path(written))
    config = json.loads((Path(local_base(written)) / "config.json").read_text())
    for name, value in gguf_folder.config_of(header).items():
        assert config[name] == value, name
