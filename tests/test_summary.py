"""The README's numbers: seeds are grouped by configuration, and intervals cover what they should."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from multirole.record import sha256
from multirole.summary import MARKERS, bootstrap_interval, find_runs, summarise, to_markdown

ROOT = Path(__file__).parents[1]


def finished(folder, **config):
    folder.mkdir(parents=True)
    base = {"seed": 0, "scale": "tiny-s", "task": "math", "n_validation": 256}
    (folder / "config.json").write_text(json.dumps(base | config))
    (folder / "DONE").write_text(json.dumps({"config.json": sha256(folder / "config.json")}))


def test_runs_that_differ_in_more_than_their_seed_are_not_pooled(tmp_path):
    finished(tmp_path / "tiny-s" / "voting-s1-math-s0", seed=0)
    finished(tmp_path / "tiny-s" / "voting-s1-math-s1", seed=1)
    finished(tmp_path / "tiny-s" / "voting-s1-math-s0-n_validation-512", n_validation=512)
    groups = find_runs(tmp_path)
    assert [len(folders) for folders in groups.values()] == [1, 2] or [len(f) for f in groups.values()] == [2, 1]
    assert all("voting-s1-math" in label for label in groups)


def test_an_unfinished_run_is_left_out(tmp_path):
    finished(tmp_path / "tiny-s" / "voting-sp-math-s0")
    (tmp_path / "tiny-s" / "voting-sp-math-s0" / "DONE").unlink()
    assert not find_runs(tmp_path)


def test_bootstrap_by_hand():
    low, high = bootstrap_interval([np.zeros(10), np.ones(10)])
    assert (low, high) == (0.0, 1.0)  # two seeds that disagree wholly: the interval spans both
    low, high = bootstrap_interval([np.r_[np.ones(128), np.zeros(384)]] * 3)
    assert low < 0.25 < high and high - low == pytest.approx(4 * (0.25 * 0.75 / 512) ** 0.5, rel=0.15)


def test_the_readme_shows_what_the_committed_runs_say():
    table = to_markdown(summarise(ROOT / "results"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table in readme.split(MARKERS[0])[1].split(MARKERS[1])[0]


def test_every_relative_link_of_the_readme_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (ROOT / link).exists()]
