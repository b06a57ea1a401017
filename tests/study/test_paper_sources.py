"""Rows of the paper's tasks, pinned or user-supplied: located, verified, read and split; which are left out or refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from paper_rows import DAPO, many, rows_of, sha, write

from multirole_study.tasks import code, math, sources
from multirole_study.tasks.code import Code
from multirole_study.tasks.math import Math
from multirole_study.tasks.sources import DataError, Source

REVISION = "a" * 40


# ---- the pinned datasets


@pytest.mark.parametrize(
    ("source", "n_rows", "train", "validation"),
    [
        (math.SOURCE, 14_116, 12_704, 1_412),
        (code.SOURCE, 16_252, 15_252, 1_000),
    ],
)
def test_the_split_has_the_papers_sizes(source, n_rows, train, validation):
    assert (n_rows - source.n_test(n_rows), source.n_test(n_rows)) == (train, validation)
    assert all(len(checksum) == 64 for _, checksum in source.files) and len(source.revision) == 40


@pytest.mark.parametrize("n", [10, 24, 117, 2_345])
def test_the_split_is_that_of_datasets(n, tmp_path):
    path = write(tmp_path / "rows.jsonl", many(n))
    numbered = datasets.Dataset.from_list(many(n))
    pair = numbered.train_test_split(test_size=0.1, seed=42)
    assert [p.question for p in Math(path).problems("validation")] == pair["test"]["prompt"][:]
    assert [p.question for p in Math(path).problems("train")] == pair["train"]["prompt"][:]
    shuffled, n_test = numbered.shuffle(seed=42)["prompt"][:], code.n_test(n)
    tests = json.dumps([{"input": "1", "output": "1"}])
    path = write(tmp_path / "code.jsonl", [{"problem": row["prompt"], "tests": tests} for row in many(n)])
    for split, questions in (("validation", shuffled[:n_test]), ("train", shuffled[n_test:])):
        problems = Code(path).problems(split)
        assert all(q in p.question for q, p in zip(questions, problems, strict=True))


@pytest.fixture
def pin(monkeypatch, tmp_path) -> Source:
    """Our rows as a pinned dataset of two files, taken for math's; an empty Hub cache; no network."""
    rows = rows_of(DAPO)
    parts = [write(tmp_path / "hub" / f"{i}.parquet", part) for i, part in enumerate((rows[:20], rows[20:]))]
    files = tuple((f"en/{path.name}", sha(path)) for path in parts)
    pin = replace(math.SOURCE, repo="someone/rows", revision=REVISION, files=files, note="a note")
    monkeypatch.setattr(Math, "source", pin)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return pin


def fill_cache(tmp_path: Path, names: list[str]) -> Path:
    folder = tmp_path / "cache" / "datasets--someone--rows" / "snapshots" / REVISION
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tmp_path / "hub" / Path(name).name).read_bytes())
    return folder


def test_a_repeated_question_stays_in_a_pinned_dataset_and_not_in_user_supplied_rows(tmp_path, monkeypatch):
    rows = many(20)
    rows[7] = rows[3]
    path = write(tmp_path / "rows.parquet", rows)
    assert Math(path).describe()["skipped"] == {"duplicate": 1}
    files = (("rows.parquet", sha(path)),)
    monkeypatch.setattr(Math, "source", replace(math.SOURCE, repo="someone/rows", revision=REVISION, files=files))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, **where: str(path))
    held = Math().problems("train") + Math().problems("validation")
    assert len(held) == len({problem.id for problem in held}) == 20
    assert len({problem.question for problem in held}) == 19 and Math().describe()["skipped"] == {}


def test_a_filled_cache_needs_no_network(pin, tmp_path):
    fill_cache(tmp_path, [name for name, _ in pin.files])
    train, validation = Math().problems("train"), Math().problems("validation")
    assert (len(train), len(validation)) == (21, 3)
    assert Math().describe() == {
        "repo": "someone/rows", "revision": REVISION, "note": "a note", "is_pinned": True,
        "files": dict(pin.files), "rows": 24, "train": 21, "validation": 3, "skipped": {},
    }  # fmt: skip
    expected = datasets.Dataset.from_list(rows_of(DAPO)).train_test_split(test_size=0.1, seed=42)
    assert [p.question for p in validation] == expected["test"]["prompt"][:]
    assert [p.reference for p in train] == expected["train"]["solution"][:]


def test_an_unreachable_hub_is_named_with_the_command(pin, tmp_path):
    fill_cache(tmp_path, ["en/0.parquet"])
    with pytest.raises(DataError) as caught:
        Math().problems("train")
    message = str(caught.value)
    assert f"revision {REVISION} are not in the cache" in message
    assert f"`hf download someone/rows en/0.parquet en/1.parquet --repo-type dataset --revision {REVISION}`" in message


def test_a_download_that_breaks_off_is_named_with_the_command(pin, monkeypatch):
    """The errors of the Hub's client are no OSErrors."""

    def download(*_, **__):
        raise huggingface_hub.errors.HTTPError("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DataError, match=r"could not be fetched \(peer closed connection\).*`hf download someone/rows"):
        Math().problems("train")


def test_missing_files_are_downloaded_at_the_pinned_revision(pin, tmp_path, monkeypatch):
    asked = []

    def download(repo, filename, **where):
        asked.append((repo, filename, where))
        return str(tmp_path / "hub" / Path(filename).name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert len(Math().problems("train")) == 21
    where = {"repo_type": "dataset", "revision": REVISION}
    assert asked == [("someone/rows", name, where) for name in ("en/0.parquet", "en/1.parquet")]


def test_a_damaged_download_is_refused(pin, tmp_path):
    folder = fill_cache(tmp_path, [name for name, _ in pin.files])
    write(folder / "en" / "1.parquet", many(4))
    with pytest.raises(DataError, match=r"have the SHA-256 .*Delete the damaged ones from "):
        Math().problems("train")


# ---- your own rows


@pytest.mark.parametrize("suffix", sources.SUFFIXES)
def test_user_supplied_rows_are_read_from_every_kind_of_file(tmp_path, suffix):
    path = write(tmp_path / f"rows{suffix}", rows_of(DAPO))
    assert Math(str(path)).problems("train") == Math(DAPO).problems("train")
    description = Math(path).describe()
    assert description["files"] == {path.name: sha(path)} and not description["is_pinned"]
    assert description["repo"] is None and description["revision"] is None


def test_a_smaller_count_is_a_prefix_and_more_than_there_are_is_refused():
    everything = Math(DAPO).problems("train")
    assert Math(DAPO).problems("train", 5) == everything[:5] and len(everything) == 21
    assert Math(DAPO).problems("train", 21) == everything
    for count in (22, 0):
        with pytest.raises(DataError, match=r"holds 21 problems.*Write 1 <= count <= 21, or None"):
            Math(DAPO).problems("train", count)
    with pytest.raises(ValueError, match="must be 'train' or 'validation'"):
        Math(DAPO).problems("test")


def test_ids_are_stable_and_unique():
    everything = Math(DAPO).problems("train") + Math(DAPO).problems("validation")
    assert len({p.id for p in everything}) == 24
    known = next(p for p in everything if p.question == "How many positive divisors does $720$ have?")
    assert known.id == "math/" + hashlib.sha1(known.question.encode()).hexdigest()[:12]
    assert (known.task, known.reference) == ("math", "30")


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "rows.jsonl", many(20))
    assert len(Math(path).problems("train")) == 18
    write(path, many(30))
    assert len(Math(path).problems("train")) == 27


def test_a_number_is_an_answer_and_a_line_separator_no_end_of_a_row(tmp_path):
    rows = many(20, solution={i: i + 1 for i in range(20)}) + [{"prompt": "a\u2028b", "solution": 2.5}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    problems = Math(path).problems("train") + Math(path).problems("validation")
    assert len(problems) == 21 and {p.reference for p in problems} == {str(i + 1) for i in range(20)} | {"2.5"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": {7: ""}}, "no_question"),
        ({"prompt": {7: None}}, "no_question"),
        ({"solution": {7: "  "}}, "no_answer"),
        ({"solution": {7: None}}, "no_answer"),
        ({"solution": {7: True}}, "no_answer"),
        ({"solution": {7: ["1"]}}, "no_answer"),
    ],
)
def test_a_broken_row_is_left_out_and_counted_until_there_are_too_many(tmp_path, change, reason):
    description = Math(write(tmp_path / "100.jsonl", many(100, **change))).describe()
    assert description["skipped"] == {reason: 1} and description["train"] + description["validation"] == 99
    with pytest.raises(
        DataError, match=rf"'{reason}': 1}} were dropped \(row 7: {reason}\)\. At most 1% of the rows may be broken"
    ):
        Math(write(tmp_path / "99.jsonl", many(99, **change))).problems("train")


def test_a_repeated_question_is_never_in_both_splits(tmp_path):
    rows = many(40)
    order = datasets.Dataset.from_dict({"row": range(40)}).shuffle(seed=42)["row"][:]
    test_rows, train_rows = order[:4], order[4:]
    rows[train_rows[0]] = rows[test_rows[0]]
    rows[train_rows[1]] = rows[train_rows[2]]
    path = write(tmp_path / "rows.jsonl", rows)
    train, validation = Math(path).problems("train"), Math(path).problems("validation")
    assert [p.question for p in validation] == [rows[i]["prompt"] for i in test_rows]
    assert len(train) == 34 and not {p.id for p in train} & {p.id for p in validation}
    assert Math(path).describe()["skipped"] == {"duplicate": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"question": "1+1?", "solution": "2"}', r"row 0: no_question.*write the columns \['prompt', 'solu"),
        ("rows.jsonl", "", "of 0 rows.*each split needs one problem"),
        ("rows.jsonl", '{"prompt": "1+1?", "solution": "2"}\n{"prompt": ', "cannot be read: .* line 2 "),
        ("rows.jsonl", "[1]", "must hold one JSON object per line"),
        ("rows.parquet", "PAR1, or not", "cannot be read"),
        ("rows.jsonl", '{"prompt": "1+1?", "solution": "2"}', "'train': 0, 'validation': 1"),
    ],
)  # fmt: skip
def test_files_that_are_not_datasets_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Math(tmp_path / name).problems("train")


def test_missing_parquet_columns_and_missing_files_are_named(tmp_path):
    write(tmp_path / "rows.parquet", [{"problem": "1+1?", "answer": "2"}])
    with pytest.raises(DataError, match=r"row 0: no_question.*write the columns \['prompt', 'solution'\]"):
        Math(tmp_path / "rows.parquet").problems("train")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.txt").write_text("prompt,solution")
    for name in ("absent.jsonl", "empty", "rows.txt"):
        with pytest.raises(DataError, match=rf"Rows must be a file .*got '.*{name}'"):
            Math(tmp_path / name).problems("train")
