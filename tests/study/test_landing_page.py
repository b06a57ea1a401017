"""The committed pages of results and inspectors: their links lead somewhere, and they show the committed results."""

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
import yaml
from markupsafe import escape
from test_inspector import make_run, read

from multirole_study.inspector.landing_page import figure, findings, landing_page, study, table
from multirole_study.paper.pages import publish

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SCALE, PAGE = RESULTS / "tiny-r", RESULTS / "index.html"
SHOWN = yaml.safe_load((SCALE / "page.yaml").read_text(encoding="utf-8"))
RUNS = [RESULTS / "inspector" / f"{name}.html" for name in SHOWN["runs"]]


def links(page: Path) -> list[Path]:
    """The files that a page refers to."""
    targets = re.findall(r'(?:href|src)="([^"#]+)"', page.read_text(encoding="utf-8"))
    return [(page.parent / unquote(link)).resolve() for link in targets]


def test_every_inspector_is_on_the_page():
    assert sorted(RUNS) == sorted(RESULTS.glob("inspector/*.html"))


def test_every_link_stays_below_results_and_leads_somewhere():
    assert [link for link in links(PAGE) if not link.is_file() or RESULTS not in link.parents] == []
    assert set(RUNS) <= set(links(PAGE))
    assert {read(run)[1]["index"] for run in RUNS} == {f"../{PAGE.name}"}


def test_every_linked_file_is_committed():
    """A file that git ignores exists where it was made, and is missing from a clone."""
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    committed = {ROOT / name for name in listed.stdout.splitlines()}
    assert [link for link in links(PAGE) if link not in committed] == []


def test_the_pages_are_small():
    assert PAGE.stat().st_size < 700_000 and max(run.stat().st_size for run in RUNS) < 400_000


def test_the_findings_the_tables_and_the_captions_are_up_to_date():
    """If this fails, `multirole paper results/tiny-r --page` writes the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    parts = [findings(ROOT / "README.md"), *(table(path, RESULTS)["body"] for path in SCALE.glob("tables/*.md"))]
    parts += [escape(figure(SCALE / "figures" / f"{name}.md", "", RESULTS)["rest"]) for name in SHOWN["figures"]]
    for declared in SHOWN["studies"]:
        section = study(declared, RESULTS)
        parts += [one["body"] for one in section["tables"]] + [escape(one["rest"]) for one in section["figures"]]
    assert [part[:200] for part in parts if part not in text] == []


@pytest.mark.slow
def test_the_pages_show_the_committed_results(tmp_path):
    """If this fails, `multirole paper results/tiny-r --page` writes them anew."""
    (tmp_path / "results").mkdir()
    for folder in RESULTS.iterdir():
        if folder.is_dir() and folder.name != "inspector":  # which the page's runs are written into
            (tmp_path / "results" / folder.name).symlink_to(folder)
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    made = publish(tmp_path / "results" / SCALE.name)
    for page in (PAGE, *RUNS):
        assert (made.parent / page.relative_to(RESULTS)).read_text() == page.read_text(), page.name


def test_a_page_from_its_parts_by_hand(tmp_path):
    scale = tmp_path / "results" / "tiny-r"
    for folder in ("figures", "tables"):
        (scale / folder).mkdir(parents=True)
    (scale / "page.yaml").write_text(yaml.safe_dump({
        "title": "What <i>they</i> show", "about": "Two runs.", "runs": {"one": "It falls."}, "figures": {"f": "make grid"},
        "notebooks": {"tiny-r/tables": "all"},
        "studies": [{"id": "other", "title": "Another", "about": "Of *words*.", "figures": {"other/f": "make study"},
                     "tables": {"other/q": "Questions", "tiny-r/tables/t": None}, "pages": {"other/run.html": {"title": "A run", "shows": "it rises"}}}],
    }))  # fmt: skip
    (scale.parent / "other").mkdir()
    (scale.parent / "other" / "f.md").write_text("Of others. The rest.\n")
    (scale.parent / "other" / "q.md").write_text("Asked: **why?**\n")
    (scale.parent / "other" / "q.csv").touch()
    (scale / "figures" / "f.md").write_text(
        "Figure 1.5. Accuracy of 0.3M parameters. More of it. And more.\n\nComputed in `f`.\n"
    )
    (scale / "tables" / "t.md").write_text(
        "# Table 1: <b>\n\n| a | b |\n|---|---|\n| 1 | <img src=x> |\n\nA caption.\n"
    )
    readme = tmp_path / "README.md"
    readme.write_text(
        "# x\n\n<!-- findings: tested -->\n- One [is](x.md) **found**.\n- Two.\n\n<!-- end of findings -->\n\nNot this.\n"
    )
    run = make_run(tmp_path / "one", accuracy=(0.5, 1.0))
    page = landing_page(scale, lambda name: tmp_path / name, readme)
    text = page.read_text()
    assert "<li>One is <strong>found</strong>.</li>\n<li>Two.</li>" in text and "Not this" not in text
    assert "What &lt;i&gt;they&lt;/i&gt; show" in text and "<img src=x>" not in text and "<th>a</th>" in text
    assert ">Figure 1.5. Accuracy of 0.3M parameters. <code>make grid</code>" in text
    assert (
        'href="inspector/one.html">Single agent, math · seed 3</a>' in text
        and "It falls. one: tiny-r, max_steps 20" in text
    )
    assert read(page.parent / "inspector" / "one.html")[1]["episodes"]["problems"]
    other = text[text.index('<section id="other">') : text.index('<section id="notebooks">')]
    assert '<a href="tiny-r/tables.html">tables.html</a>: all' in text
    assert "Of <em>words</em>." in other and 'src="other/f.png"' in other and "<code>make study</code>" in other
    assert '<a href="other/run.html">A run</a>: it rises' in other and "Asked: <strong>why?</strong>" in other
    assert (
        '<a href="other/q.csv">' in other and "LaTeX" not in other and "<summary>Table 1: &lt;b&gt;</summary>" in other
    )
    readme.write_text("# x\n")
    with pytest.raises(ValueError, match="has no findings between"):
        landing_page(scale, lambda name: run, readme)
    shutil.rmtree(scale / "figures")


def test_only_the_first_problems_are_on_a_committed_page():
    data = read(min(RUNS))[1]
    assert len(data["episodes"]["problems"]) == 12 and data["episodes"]["n_validation"] == 512
    outcomes = pd.read_parquet(
        RESULTS / "tiny-r" / "eval.parquet", filters=[("run", "==", data["name"]), ("step", "==", 0)]
    )
    (curve,) = data["validation"]
    assert curve["accuracy"][0] == pytest.approx(outcomes["correct"].mean())
