"""The README's blocks are what the committed results say, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import pytest

from multirole.paper.claims import claims
from multirole.paper.readme import blocks, replace_block
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.study_tables import study_tables
from multirole.paper.tables import tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_block_is_what_the_committed_results_say():
    results = Results(ROOT / "results" / "tiny-s")
    made = {
        table.name: table
        for table in [
            *tables(results),
            claims(results),
            *study_tables(results, Study.read(results.grid, results.folder)),
        ]
    }
    for name, block in blocks(results, made).items():
        assert replace_block(README, name, block) == README, f"{name}: run `make paper`"


def test_a_block_is_replaced_between_its_marks_and_nowhere_else():
    text = "a\n<!-- x -->\nold\n<!-- end of x -->\nb"
    assert replace_block(text, "x", "new") == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb"
    with pytest.raises(ValueError, match="has not exactly one block"):
        replace_block(text, "y", "new")


def test_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_every_make_target_that_it_names_exists():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets
