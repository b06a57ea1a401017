"""The documentation builds as a site without a dead link, and its API page has every public name."""

import asyncio
import json
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import multirole
from multirole.metrics.episode_traces import metadata_of
from multirole.metrics.evaluation import evaluation_metrics
from multirole.types import Answer, Episode, Problem, Reward, Turn
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.record import turn_row

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site. mkdocs is strict, so a dead link or anchor fails here."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_link_of_every_page_leads_somewhere(site):
    """This includes links that mkdocs does not check: out of docs/, to files that the site copies, and in the theme's frame."""
    pages = [page for page in site.glob("*.html") if page.name != "404.html"]
    assert {"index.html", "api.html", "metrics.html"} <= {page.name for page in pages}
    dead = []
    for page in pages:
        for link in re.findall(r'(?:href|src)="((?!\w+:|//|#)[^"#?]+)', page.read_text(encoding="utf-8")):
            if not (page.parent / link).exists():
                dead.append((page.name, link))
    assert dead == []


def test_a_link_to_a_table_leads_to_its_place_among_the_results(site):
    places = set(re.findall(r'id="([^"]+)"', (site / "results/index.html").read_text(encoding="utf-8")))
    linked = {
        place
        for page in site.glob("*.html")
        for place in re.findall(r'href="results/index.html#([^"]+)"', page.read_text(encoding="utf-8"))
    }
    assert "tiny-r-tables-table_1" in linked and linked - places == set()


def test_the_api_page_describes_every_public_name(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in dir(multirole) if f'id="multirole.{name}"' not in text] == []
    assert "[<code>" not in text, "a name in brackets that is not a link"


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|img)[^>]*\ssrc="(?:https?:)?//|<link[^>]*stylesheet[^>]*href="(?:https?:)?//', page.read_text()
        )
        assert loaded == [], page.name


@pytest.mark.parametrize("rows", ["of the page", "of examples/data"])
def test_the_file_of_the_docs_is_a_workflow_and_a_task(tmp_path, rows):
    """Its reward also reads the rows of examples/data, which the page names, and whose answers are numbers."""
    text = (ROOT / "docs" / "own_workflow.md").read_text(encoding="utf-8")
    section = text.partition("## From data to a trained run")[2]
    blocks = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)))  # the first of each language
    data = {name: (ROOT / "examples" / "data" / name).read_text() for name in ("train.jsonl", "validation.jsonl")}
    if rows == "of the page":
        data = dict.fromkeys(data, blocks["json"])
    for name, content in {"pair.py": blocks["python"], **data}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    words = blocks["shell"].replace("pair.py:", f"{tmp_path}/pair.py:").split()
    parameters = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}
    cell = Cell.from_parameters(parameters | {"max_steps": int(parameters["max_steps"])})[0]
    problem = cell.make_task().problems("train")[0]

    async def call(role, messages, slot=0):
        return SimpleNamespace(text=f"{role} {slot}: \\boxed{{{problem.reference['answer']}}}")

    answer = asyncio.run(cell.make_workflow().run(problem, call)).text
    assert answer.startswith("referee") and cell.make_task().score([problem], [answer])[0].is_correct
    assert cell.policy == {"solver": "adapter_a", "referee": "adapter_b"}


def section(page: str, heading: str) -> str:
    """Return a page's text from a heading that begins so to the next one of its level."""
    return re.search(
        rf"^## {re.escape(heading)}.*?(?=^## |\Z)", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )[0]


def test_the_page_of_metrics_has_every_column_of_a_run():
    """Those of the packed runs, and those of the turns as a run writes them."""
    columns = defaultdict(set)
    for path in (ROOT / "results").rglob("*.parquet"):
        columns[path.stem] |= {*pq.read_schema(path).names} - {"run", "iteration", "role", "step", "problem"}
    turn = Turn("a", 0, 0, [1], [2], [0.0], "text", "stop")
    episode = Episode(Problem("p", "", "?", None), 0, [turn], Answer("text"), Reward(1.0))
    columns["turns/"] = {*turn_row(0, episode, turn)}
    for table in ("metrics", "roles", "episodes", "skills", "ledger", "cosines", "eval", "turns/"):
        named = re.findall(r"`([\w/]+)`", section("METRICS.md", f"`{table}"))
        assert columns[table] and columns[table] - {*named} == set(), table


def test_the_page_of_scripts_has_the_rates_and_ranks_of_the_scales():
    table = [
        line.split(" | ")
        for line in section("docs/scripts.md", "A first learning rate").splitlines()
        if line[:2] == "| "
    ][1:]
    cells = [Cell("voting", "sp", scale=scale) for scale in ("tiny-r", "smollm2", "qwen-0.5b", "0.6b")]
    assert [(float(re.match("[0-9e-]+", rate)[0]), int(rank)) for _, rate, rank, _ in table] == [
        (c.learning_rate, c.lora_r) for c in cells
    ]


def test_the_page_of_logs_has_every_metric_of_an_evaluation():
    turn = Turn("a", 0, 0, [1], [2], [0.0], "text", "stop", billed=(3, 4))
    episode = Episode(
        Problem("p", "", "?", None), 0, [turn], Answer("text"), Reward(1.0, is_correct=True, turns=(1.0,)), failure="no"
    )
    metrics = evaluation_metrics("eval", [episode], {"right": 1.0}, counts_failures=True)
    named = re.findall(r"`([\w/<>]+)`", section("docs/trl_runs.md", "Evaluations"))
    generic = {name.replace("right", "<function>").replace("_a/", "_<role>/") for name in metrics}
    assert len(generic) == 8 and generic - {*named} == set()
    assert {*metadata_of(episode, 0)} - {*re.findall(r"`(\w+)`", section("docs/trl_runs.md", "Logs"))} == set()


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("rivals", "speed"),
        ("commits_9153f33", "speed"),
        ("commits_30b0fbaa", "speed"),
        ("processes", "speed"),
        ("engine", "speed"),
        ("commands", "speed"),
        ("update", "speed_update"),
        ("gradient", "speed_update"),
    ],
)
def test_the_tables_of_a_benchmark_are_the_measured_ones(monkeypatch, name, page):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measured = json.loads((ROOT / f"results/bench/{name}.json").read_text(encoding="utf-8"))
    assert import_module(f"bench_{name.partition('_')[0]}").table(measured) in (ROOT / f"docs/{page}.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", ["staleness_server", "staleness_server_smollm2"])
def test_the_tables_of_staleness_are_the_measured_ones(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = import_module("bench_staleness")
    runs = json.loads((ROOT / f"results/bench/{name}.json").read_text(encoding="utf-8"))["runs"]
    table = "\n".join([*benchmark.HEAD, *map(benchmark.row, runs)])
    assert table in (ROOT / "docs/staleness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_finds_what_it_imports(monkeypatch, path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(path), run_name="benchmark")
