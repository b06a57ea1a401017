"""The inspector's page: it needs nothing but itself, holds the run's numbers, and shows hostile text as text."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from conftest import make_episodes

from multirole.experiment.cell import Cell
from multirole.experiment.record import sha256
from multirole.experiment.storage import write_table
from multirole.inspector import findings, inspect_run, main, turns
from multirole.inspector.report import validation
from multirole.inspector.tables import PANELS

ROOT = Path(__file__).parents[1]
COLLAPSED = "voting-ip-code-s{}-iterations-40-learning_rate-0.01-n_validation-512-lr_schedule-constant"
HOSTILE = 'a</script><img src=x onerror="alert(1)"><!-- <script>alert(2)</script> @@data@@ \u2028 "quoted" \\boxed{1}'
TURN = {"question": "2+2", "correct": True, "reason": "correct", "outcome": "answered", "finish_reason": "stop",
        "prompt_tokens": 9, "completion_tokens": 3, "slot": 0, "round": 0}  # fmt: skip


def make_run(
    folder, steps=(0, 10), accuracy=None, texts=("4",), n_problems=2, role_rows=(), turn_columns=None, **config
):
    """A run's folder by hand: `texts` are the turns of each of two episodes, `accuracy` the share right per step."""
    (folder / "turns").mkdir(parents=True)
    policy = {"policy": {"generator": "shared"}}
    cell = {"workflow": "single", "task": "math", "scale": "tiny-s", "seed": 3, "iterations": 20} | policy | config
    (folder / "config.json").write_text(json.dumps(cell))
    rows = [
        {"step": step, "problem": f"p{i}", "correct": i < share * n_problems, "reward": 0.0, "reason": "wrong", "turns": 1,
         "answer": "4"}
        for step, share in zip(steps, accuracy or [1.0] * len(steps), strict=True) for i in range(n_problems)
    ]  # fmt: skip
    if rows:
        pd.DataFrame(rows).to_parquet(folder / "eval.parquet")
    for step in steps:
        table = [
            TURN | {"step": step, "problem": f"p{i}", "role": list(cell["policy"])[t % len(cell["policy"])], "text": text,
                    "slot": t // len(cell["policy"])} | (turn_columns or {})
            for i in range(2) for t, text in enumerate(texts)
        ]  # fmt: skip
        pd.DataFrame(table).to_parquet(folder / "turns" / f"step_{step:05d}.parquet")
    if role_rows:
        pd.DataFrame(role_rows).to_parquet(folder / "roles.parquet")
    return folder


def role_row(iteration, role="generator", **values):
    base = {"chi2": 0.0, "perplexity": 1.0, "entropy": 0.1, "grad_norm": 0.1, "length_mean": 5.0, "length_p95": 9.0,
            "unparsed_rate": 0.0, "optimizer_steps": 3}  # fmt: skip
    return {"iteration": iteration, "role": role} | base | values


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of the data element, as a browser would cut the page up."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.is_data = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.is_data = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag):
        self.is_data = False

    def handle_data(self, data):
        self.data += data if self.is_data else ""


def read(page):
    """The elements of a page and its data."""
    parsed = Elements(page.read_text(encoding="utf-8"))
    return parsed, json.loads(parsed.data)


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    """The page of a committed run that collapsed, with its folder."""
    folder = ROOT / "results" / "tiny-s" / COLLAPSED.format(0)
    return folder, inspect_run(folder, tmp_path_factory.mktemp("pages") / "page.html")


def test_the_page_needs_nothing_from_elsewhere(collapsed):
    text = collapsed[1].read_text(encoding="utf-8")
    style = text.split("<style>")[1].split("</style>")[0]
    assert not re.search(r"@import|url\(", style)
    for tag, attributes in read(collapsed[1])[0].tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_the_page_stays_below_5_mb_per_100_episodes(collapsed, tmp_path):
    folder, page = collapsed
    episodes = sum(pd.read_parquet(path)["problem"].nunique() for path in folder.glob("turns/*.parquet"))
    assert page.stat().st_size < 5e6 * episodes / 100
    long = "x<y " * 30_000  # four turns of 120 kB where 50 kB are allowed, and `<` takes six bytes
    steps = tuple(range(0, 120, 10))
    page = inspect_run(make_run(tmp_path / "run", steps, texts=[long] * 4, policy={"generator": "a"}))
    assert page.stat().st_size < 5e6 * 2 * len(steps) / 100
    turn = read(page)[1]["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    at, left_out = turn["gap"]
    assert len(turn["text"]) + left_out == len(long) and long.startswith(turn["text"][:at]) and at > 1000


def test_model_text_cannot_become_markup(tmp_path):
    page = inspect_run(make_run(tmp_path / "run", texts=(HOSTILE,), turn_columns={"question": HOSTILE}))
    parsed, data = read(page)
    tags = [tag for tag, _ in parsed.tags]
    assert "img" not in tags and tags.count("script") == 2
    problem = data["episodes"]["problems"][0]
    assert problem["question"] == problem["steps"]["0"]["turns"][0]["text"] == HOSTILE
    scripts = page.read_text(encoding="utf-8").rsplit("<script>", 1)[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|DOMParser", scripts)


def test_names_of_a_run_are_escaped_in_the_head(tmp_path):
    page = inspect_run(make_run(tmp_path / "run", workflow="</title><img src=x>", policy={"<b>": "shared"}))
    assert "img" not in [tag for tag, _ in read(page)[0].tags]


def test_the_page_holds_the_numbers_of_the_tables(collapsed):
    folder, page = collapsed
    data = read(page)[1]
    roles, metrics = pd.read_parquet(folder / "roles.parquet"), pd.read_parquet(folder / "metrics.parquet")
    panels = {panel["column"]: panel["series"] for panel in data["curves"]["panels"]}
    assert data["curves"]["iterations"] == list(range(1, 41))
    for column in ("chi2", "perplexity", "entropy", "grad_norm", "length_mean", "length_p95", "unparsed_rate"):
        for role in ("generator", "aggregator"):
            assert panels[column][role] == pytest.approx(list(roles.loc[roles["role"] == role, column]), rel=1e-6)
    assert data["curves"]["training"]["reward"] == pytest.approx(list(metrics["reward"]), rel=1e-6)
    outcomes = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"].mean()
    assert data["validation"]["accuracy"] == pytest.approx(list(outcomes), rel=1e-6) and len(outcomes) == 5
    if (folder / "alarms.parquet").exists():
        assert [alarm["message"] for alarm in data["alarms"]] == list(
            pd.read_parquet(folder / "alarms.parquet")["message"]
        )
    assert data["validation"]["low"] == pytest.approx(list(validation(folder)["low"]), rel=1e-6)
    held = pd.read_parquet(folder / "turns" / "step_00040.parquet")
    shown = data["episodes"]["problems"]
    assert len(shown) == 32 and data["episodes"]["n_validation"] == 512
    texts = [turn["text"] for problem in shown for turn in problem["steps"]["40"]["turns"]]
    assert texts == list(held["text"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_role_to_move_is_the_generator_in_every_collapse(seed):
    folder = ROOT / "results" / "tiny-s" / COLLAPSED.format(seed)
    points, roles = validation(folder).to_dict("list"), pd.read_parquet(folder / "roles.parquet")
    first, *others = findings.moves(roles, findings.best_step(points))
    assert (first.role, first.metric) == ("generator", "chi2") and first.value > first.before
    assert all(move.iteration >= first.iteration for move in others)
    found = [finding for finding in findings.role_sentences(points, roles) if finding["is_first"]]
    assert [finding["role"] for finding in found] == ["generator"]
    assert found[0]["text"].startswith(f"The generator moved first: at iteration {first.iteration} its chi2")


def test_a_healthy_run_names_no_role():
    folder = ROOT / "results" / "tiny-s" / "voting-ip-code-s0-n_validation-512"
    found = findings.role_sentences(validation(folder).to_dict("list"), pd.read_parquet(folder / "roles.parquet"))
    assert found[0]["text"] == "Validation never fell 5 points below its best."
    assert not any(finding["is_first"] for finding in found)


def test_early_best_and_last_by_hand():
    assert turns.named_steps([0, 10, 20, 30, 40, 50], 40) == {
        "start": 0, "early": 20, "best": 40, "last": 50
    }  # fmt: skip
    assert turns.named_steps([0, 10, 20, 30, 40], 30)["early"] == 10  # 15 lies between 10 and 20: the earlier
    assert turns.named_steps([0, 10, 20, 30], 10) == {"start": 0, "best": 10, "after best": 20, "last": 30}
    assert turns.columns(turns.named_steps([0, 10, 20, 30, 40, 50], 40)) == [20, 40, 50]
    assert turns.columns(turns.named_steps([0, 10, 20, 30], 10)) == [0, 10, 30]
    assert turns.columns(turns.named_steps([0, 10, 20, 30], 30)) == [0, 10, 30]  # the best is the last
    assert turns.columns(turns.named_steps([0, 10, 20], 0)) == [0, 10, 20]  # the untrained workflow was best
    assert turns.columns(turns.named_steps([0], 0)) == [0]
    assert turns.columns(turns.named_steps([0, 10], None)) == [0, 10]


def test_the_best_checkpoint_and_the_fall_by_hand():
    points = {"step": [0, 10, 20, 30, 40], "accuracy": [0.5, 0.8, 0.8, 0.76, 0.74], "n": [50] * 5}
    assert findings.best_step(points) == 10  # the earlier of equals
    assert findings.fall(points) == (30, 40)
    assert findings.fall(points | {"accuracy": [0.5, 0.8, 0.8, 0.76, 0.76]}) is None
    assert "80.0 % at its best (iteration 10), 74.0 % at the last" in findings.result_sentence(points)


def test_a_move_is_an_excess_over_the_range_until_the_best():
    rows = [role_row(i, perplexity=1.2 if i <= 10 else 1.79) for i in range(1, 15)]
    rows += [role_row(i, "judge", chi2={5: 0.2, 12: 0.29, 13: -0.31}.get(i, 0.0)) for i in range(1, 15)]
    (move,) = findings.moves(pd.DataFrame(rows), best=10)  # 1.79 < 1.5 x 1.2; 0.29 < 1.5 x 0.2 < 0.31
    assert (move.role, move.metric, move.iteration, move.value, move.before) == ("judge", "chi2", 13, 0.31, 0.2)


def test_token_ratios_are_differences_and_absent_without_their_columns(tmp_path):
    columns = {"tokens": ["4", "2"], "logprobs": [-0.5, -1.25], "base_logprobs": [-2.5, None]}
    data = read(inspect_run(make_run(tmp_path / "with", texts=("42",), turn_columns=columns)))[1]
    turn = data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    assert data["episodes"]["has_ratios"] and turn["ratios"] == [2.0, None] and turn["lengths"] == [1, 1]
    data = read(inspect_run(make_run(tmp_path / "other", texts=("4",), turn_columns=columns)))[1]
    assert data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]["pieces"] == ["4", "2"]
    data = read(inspect_run(make_run(tmp_path / "without", texts=("42",))))[1]
    assert not data["episodes"]["has_ratios"]


def test_shortened_tokens_stay_aligned_with_their_text(tmp_path):
    tokens = [f"t{i:05d} " for i in range(20_000)]
    columns = {"tokens": tokens, "logprobs": [-1.0] * 20_000, "base_logprobs": [-1.5] * 20_000}
    data = read(inspect_run(make_run(tmp_path / "run", texts=("".join(tokens),), turn_columns=columns)))[1]
    turn = data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    assert sum(turn["lengths"]) == len(turn["text"]) and len(turn["lengths"]) == len(turn["ratios"]) < 20_000
    assert turn["text"].startswith("t00000 t00001") and turn["text"].endswith("t19999 ") and turn["gap"][0] % 7 == 0


def test_alarms_and_known_columns_are_shown_where_they_are(tmp_path):
    rows = [role_row(i, grad_share=1.0, coherence=0.5, not_known=1.0) for i in range(1, 4)]
    folder = make_run(tmp_path / "run", role_rows=rows)
    alarm = {"iteration": 2, "alarm": "length", "role": "generator", "adapter": "shared", "value": float("nan"), "threshold": 2.0,
             "message": "<b>long</b>"}  # fmt: skip
    pd.DataFrame([alarm]).to_parquet(folder / "alarms.parquet")
    data = read(inspect_run(folder))[1]
    assert data["alarms"] == [alarm | {"value": None}]
    columns = [panel["column"] for panel in data["curves"]["panels"]]
    assert {"grad_share", "coherence"} <= set(columns) and "not_known" not in columns


def test_a_run_that_was_cut_short_is_shown_as_far_as_it_went(tmp_path):
    bare = make_run(tmp_path / "bare", steps=())
    data = read(inspect_run(bare))[1]
    assert data["episodes"] is None and data["result"] == "No evaluation was recorded."
    rows = [role_row(1, chi2=float("nan"), perplexity=float("inf")), role_row(2)]
    one = make_run(tmp_path / "one", steps=(0,), role_rows=rows)
    write_table(one / "turns" / "step_00010.parquet", [])  # every prompt was too long
    data = read(inspect_run(one))[1]
    assert data["result"].startswith("One evaluation: validation accuracy 100.0 % at iteration 0")
    assert data["status"] == "not finished: recorded up to iteration 2 of 20"
    panels = {panel["column"]: panel["series"]["generator"] for panel in data["curves"]["panels"]}
    assert panels["chi2"] == [None, 0.0] and panels["perplexity"] == [None, 1.0]
    unevaluated = make_run(tmp_path / "turns", steps=(0,))
    (unevaluated / "eval.parquet").unlink()  # turns are written at once, the table with the next checkpoint
    data = read(inspect_run(unevaluated))[1]
    assert data["episodes"]["columns"] == [0] and data["episodes"]["problems"][0]["steps"]["0"]["correct"]


def test_a_workflow_of_your_own_has_its_roles_in_the_order_of_their_turns(tmp_path):
    policy = {"judge": "x", "writer": "x", "editor": "y"}
    folder = make_run(tmp_path / "run", texts="abc", workflow="newsroom", policy=policy)
    table = pd.read_parquet(folder / "turns" / "step_00000.parquet")
    table["role"] = table["role"].replace({"judge": "writer", "writer": "judge"})
    table.to_parquet(folder / "turns" / "step_00000.parquet")
    data = read(inspect_run(folder))[1]
    assert data["graph"]["columns"] == ["writer", "judge", "editor"] and data["graph"]["is_order_only"]
    assert data["graph"]["adapters"] == ["x", "y"]
    assert len({role["colour"] for role in data["roles"]}) == 3


def test_the_command_writes_a_page_per_finished_run_and_an_index(tmp_path, capsys):
    results = tmp_path / "results" / "tiny-s"
    for name in ("a&b", "unfinished"):
        make_run(results / name, accuracy=(0.5, 1.0))
    done = {"config.json": sha256(results / "a&b" / "config.json")}
    (results / "a&b" / "DONE").write_text(json.dumps(done))
    assert main([str(tmp_path / "results")]) == 0
    assert (results / "a&b" / "inspector.html").exists() and not (results / "unfinished" / "inspector.html").exists()
    index = Elements((tmp_path / "results" / "inspector.html").read_text(encoding="utf-8"))
    assert [dict(a)["href"] for tag, a in index.tags if tag == "a"] == ["tiny-s/a%26b/inspector.html"]
    assert main([str(results / "unfinished"), "--out", str(tmp_path / "one.html")]) == 0
    assert str(tmp_path / "one.html") in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "empty", "out"])
def test_a_folder_without_runs_is_refused_in_plain_words(tmp_path, what, capsys):
    (tmp_path / "empty").mkdir()
    arguments = {"missing": ["missing"], "empty": ["empty"], "out": ["empty", "--out", "x.html"]}[what]
    assert main([str(tmp_path / arguments[0]), *arguments[1:]]) == 2
    assert re.search("Write the folder|Leave --out away", capsys.readouterr().err)


def test_pages_leave_a_finished_run_finished(tmp_path):
    folder = shutil.copytree(
        ROOT / "results" / "tiny-s" / "voting-sp-math-s0-n_validation-512", tmp_path / "run",
        ignore=shutil.ignore_patterns("checkpoints", "adapters", "*.ipynb"),
    )  # fmt: skip
    inspect_run(folder)
    assert read(inspect_run(folder))[1]["status"] == "finished, 60 iterations"


def test_every_panel_is_a_column_that_a_run_records(make_trainer):
    """A renamed metric would leave an empty panel, and nobody would miss it."""
    trainer = make_trainer(Cell("voting", "sp"))
    rows = trainer._rows(make_episodes(trainer.cell, n_problems=4))
    diagnostics, _ = trainer.update(trainer.model, rows)
    recorded = set().union(*diagnostics.per_role().values())
    assert {panel.column for panel in PANELS} <= recorded
