"""The pages in a real browser, wide and on a phone: no error on the console, nothing scrolls sideways, every control works."""

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
from browser import browser, needs_browser
from test_docs import site  # noqa: F401
from test_inspector import committed  # noqa: F401

from multirole_study.inspector import inspect_run
from multirole_study.inspector.side_by_side import inspect_pair

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
pytestmark = [pytest.mark.slow, needs_browser]

USE_ALL = """
const used = new Set();
for (const query of ["", "zzz", ""])
  for (let i = 0, nodes; (nodes = document.querySelectorAll("button, summary, select, input")), i < nodes.length; i++) {
    const node = nodes[i];
    if (node.tagName === "SELECT") { node.selectedIndex = node.options.length - 1; node.dispatchEvent(new Event("change")); }
    else if (node.type === "range") { node.value = 3; node.dispatchEvent(new Event("input")); }
    else if (node.type === "search") { node.value = query; node.dispatchEvent(new Event("input")); }
    else node.click();
    used.add(node.tagName + (node.id || node.type || ""));
  }
document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
for (const plot of document.querySelectorAll(".plot svg")) plot.dispatchEvent(new PointerEvent("pointermove", { clientX: 200 }));
return [...used];
"""
PAGE_WIDTH = "return document.documentElement.scrollWidth"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_control_of_the_inspector_works(committed, tmp_path, width):  # noqa: F811
    folder = shutil.copytree(committed[0], tmp_path / "run")
    rows = [{"iteration": i, "problem": "p", "episode": j, "reward": 0.5 * j, "advantage": j - 1.0, "correct": j == 2}
            for i in (1, 2) for j in range(3)]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "episodes.parquet")
    skills = [
        {"step": s, "role": "aggregator", "measure": "selects", "skill": 0.5, "trivial": 0.4, "cases": 3}
        for s in (0, 10)
    ]
    pd.DataFrame(skills).to_parquet(folder / "skills.parquet")
    with browser(width) as window:
        window.open(inspect_run(folder))
        assert {"BUTTONtheme", "INPUTrange", "INPUTsearch", "INPUTshade"} <= set(window.run(USE_ALL))
        assert window.errors() == [] and window.run(PAGE_WIDTH) <= width
        assert window.run("return document.querySelectorAll('.cell').length") == 3
        assert "aggregator selects" in window.run("return document.querySelector('#panels').textContent")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_control_of_two_runs_works(committed, tmp_path, width):  # noqa: F811
    """A click on a bar of the lanes leads to the turn's text."""
    second = shutil.copytree(committed[0], tmp_path / "other")
    with browser(width) as window:
        window.open(inspect_pair(committed[0], second, tmp_path / "pair.html"))
        assert "INPUTsearch" in window.run(USE_ALL)
        assert window.errors() == [] and window.run(PAGE_WIDTH) <= width
        window.run("document.querySelector('#filters button').click()")  # all problems
        assert window.run("return document.querySelectorAll('.lanes').length") == 2
        opened = """
const bar = document.querySelectorAll(".track button")[3];
bar.click();
return [bar.title.split(":")[0], document.activeElement.className, document.activeElement.querySelector("b").textContent];
"""
        assert window.run(opened) == ["aggregator, slot 1, round 1", "turn", "aggregator"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_landing_page_and_its_runs_open(width):
    with browser(width) as window:
        window.open(ROOT / "results" / "index.html")
        window.run("for (const one of document.querySelectorAll('summary, #theme')) one.click()")
        assert window.errors() == [] and window.run(PAGE_WIDTH) <= width
        assert window.run("return [...document.images].filter((image) => !image.naturalWidth).length") == 0
        window.run("document.querySelector('.index a').click()")
        assert window.run("return document.querySelectorAll('.panel').length") > 10
        window.run("document.querySelector('#back a').click()")
        assert window.run("return document.title") == window.run("return document.querySelector('h1').textContent")
        assert window.errors() == [] and window.run("return document.querySelectorAll('.plate').length") > 5


@pytest.mark.parametrize("width", WIDTHS)
def test_the_documentation_opens(site, width):  # noqa: F811
    """It is served on this machine, because its search starts a worker, which a page opened as a file may not."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser(width) as window:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in ("index", "api", "metrics"):
            window.send("POST", "/url", url=f"http://127.0.0.1:{server.server_port}/{page}.html")
            assert window.errors() == [] and window.run(PAGE_WIDTH) <= width, page
        server.shutdown()
