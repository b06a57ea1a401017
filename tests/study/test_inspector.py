"""The inspector's page is self-contained, holds the run's numbers, and shows hostile text as text."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from multirole_study.__main__ import inspect
from multirole_study.experiment.record import Recorder
from multirole_study.experiment.settings import UserError
from multirole_study.experiment.storage import write_table
from multirole_study.inspector import inspect_run
from multirole_study.inspector.episodes import name_steps, questions_of, training_groups
from multirole_study.inspector.live_page import LivePage
from multirole_study.inspector.run_figures import plot_learning, plot_roles
from multirole_study.inspector.run_reader import PANELS, facts, role_changes, state, validation
from multirole_study.inspector.side_by_side import inspect_pair, shown_text
from multirole_study.paper import pack
from multirole_study.paper.grid import Grid
from multirole_study.workflow_record import observed_edges

ROOT = Path(__file__).parents[2]
HOSTILE = 'a</script><img src=x onerror="alert(1)"><!-- <script>alert(2)</script> @@data@@ \u2028 "quoted" \\boxed{1}'
TURN = {"question": "2+2", "correct": True, "reason": "correct", "outcome": "answered", "finish_reason": "stop",
        "prompt_tokens": 9, "completion_tokens": 3, "slot": 0, "round": 0}  # fmt: skip


def make_run(
    folder, steps=(0, 10), accuracy=None, texts=("4",), n_problems=2, role_rows=(), turn_columns=None, **config
):
    """Write a run's folder by hand: `texts` are the turns of each of two episodes, `accuracy` is the accuracy per step."""
    (folder / "turns").mkdir(parents=True)
    policy = {"policy": {"generator": "shared"}}
    cell = {"workflow": "single", "task": "math", "scale": "tiny-r", "seed": 3, "max_steps": 20} | policy | config
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
    """Parses a page as a browser does: every start tag with its attributes, and the text of the data element."""

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


def text_of(turn):
    return turn.get("text", "".join(turn["pieces"]))


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The page of a committed run, with its folder."""
    results = ROOT / "results" / "tiny-r"
    name = Grid.read(results).cell("voting", "sp", "math", 0).id
    run = pack.unpack(results, name, tmp_path_factory.mktemp("runs"))
    return run, inspect_run(
        run, tmp_path_factory.mktemp("pages") / "page.html", index=tmp_path_factory.getbasetemp() / "index.html"
    )


def test_the_page_is_self_contained(committed):
    text = committed[1].read_text(encoding="utf-8")
    style = text.split("<style>")[1].split("</style>")[0]
    assert not re.search(r"@import|url\(", style)
    for tag, attributes in read(committed[1])[0].tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_the_page_stays_below_5_mb_per_100_episodes(committed, tmp_path):
    folder, page = committed
    episodes = sum(pd.read_parquet(path)["problem"].nunique() for path in folder.glob("turns/*.parquet"))
    assert page.stat().st_size < 5e6 * episodes / 100
    long = "x<y " * 30_000  # four turns of 120 kB where 50 kB are allowed, and `<` takes six bytes
    steps = tuple(range(0, 120, 10))
    page = inspect_run(make_run(tmp_path / "run", steps, texts=[long] * 4, policy={"generator": "a"}))
    assert page.stat().st_size < 5e6 * 2 * len(steps) / 100
    turn = read(page)[1]["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    at, left_out = turn["gap"]
    beginning = "".join(turn["pieces"][:at])
    assert len(text_of(turn)) + left_out == len(long) and long.startswith(beginning) and len(beginning) > 1000


def test_model_text_cannot_become_markup(tmp_path):
    page = inspect_run(make_run(tmp_path / "run", texts=(HOSTILE,), turn_columns={"question": HOSTILE}))
    parsed, data = read(page)
    tags = [tag for tag, _ in parsed.tags]
    assert "img" not in tags and tags.count("script") == 2
    problem = data["episodes"]["problems"][0]
    assert problem["question"] == text_of(problem["steps"]["0"]["turns"][0]) == HOSTILE
    scripts = page.read_text(encoding="utf-8").rsplit("<script>", 1)[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|DOMParser", scripts)


def test_names_of_a_run_are_escaped_in_the_head(tmp_path):
    page = inspect_run(make_run(tmp_path / "run", workflow="</title><img src=x>", policy={"<b>": "shared"}))
    assert "img" not in [tag for tag, _ in read(page)[0].tags]


def test_the_page_holds_the_numbers_of_the_tables(committed):
    folder, page = committed
    data = read(page)[1]
    roles, metrics = pd.read_parquet(folder / "roles.parquet"), pd.read_parquet(folder / "metrics.parquet")
    panels = {(panel["table"], panel["column"]): panel["series"] for panel in data["panels"]}
    assert data["iterations"] == list(range(1, 61))
    for column in ("chi2", "perplexity", "entropy", "grad_norm", "length_mean", "length_p95", "unparsed_rate"):
        for role in ("generator", "aggregator"):
            recorded = list(roles.loc[roles["role"] == role, column])
            assert panels["roles", column][role] == pytest.approx(recorded, rel=1e-6)
    for column in ("reward", "accuracy"):
        assert panels["metrics", column][""] == pytest.approx(list(metrics[column]), rel=1e-6)
    outcomes = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"].mean()
    assert data["validation"][0]["accuracy"] == pytest.approx(list(outcomes), rel=1e-6) and len(outcomes) == 13
    assert data["validation"][0]["low"] == pytest.approx(list(validation(folder)["low"]), rel=1e-6)
    held = pd.read_parquet(folder / "turns" / "step_00060.parquet")
    shown = data["episodes"]["problems"]
    assert len(shown) == 32 and data["episodes"]["n_validation"] == 512
    assert [text_of(turn) for problem in shown for turn in problem["steps"]["60"]["turns"]] == list(held["text"])
    rewards = pd.read_parquet(folder / "eval.parquet").set_index(["step", "problem"])["reward"]
    assert [p["steps"]["60"]["reward"] for p in shown] == [rewards[60, p["problem"]] for p in shown]


def test_a_turn_that_was_graded_by_itself_says_so(tmp_path):
    graded = read(inspect_run(make_run(tmp_path / "graded", turn_columns={"turn_correct": True})))[1]
    plain = read(inspect_run(make_run(tmp_path / "plain", turn_columns={"turn_correct": None})))[1]
    turns = [data["episodes"]["problems"][0]["steps"]["0"]["turns"][0] for data in (graded, plain)]
    assert turns[0]["right"] is True and "right" not in turns[1]


def test_two_runs_share_a_page(tmp_path):
    """Problems that both have stand next to each other; every series has the name of its run."""
    roles = {"generator": "a", "judge": "b"}
    rows = {length: [role_row(i, role, length_mean=length) for i in (1, 2) for role in roles] for length in (5.0, 9.0)}
    first = make_run(tmp_path / "x", accuracy=(0.5, 1.0), role_rows=rows[5.0], policy=roles, texts=("4", "5"))
    second = make_run(tmp_path / "y", (0, 20), (0.5, 0.5), role_rows=rows[9.0], policy={"generator": "a"}, seed=4)
    parsed, data = read(inspect_pair(first, second))
    assert (first / "against_y.html").exists() and not {"img", "link"} & {tag for tag, _ in parsed.tags}
    (lengths,) = [panel["series"] for panel in data["panels"] if panel["column"] == "length_mean"]
    assert lengths == {
        "generator, A": [5.0] * 2,
        "judge, A": [5.0] * 2,
        "generator, B": [9.0] * 2,
        "judge, B": [9.0] * 2,
    }
    assert {name: [*part["accuracy"]] for part in data["validation"] for name in [part["name"]]} == {"A": [0.5, 1.0], "B": [0.5, 0.5]}  # fmt: skip
    assert data["lines"]["judge, A"]["colour"] == data["lines"]["judge, B"]["colour"]
    assert data["lines"]["judge, A"]["dash"] != data["lines"]["judge, B"]["dash"]
    episodes = data["episodes"]
    assert [info["step"] for info in episodes["steps"]] == ["A 0", "A 10", "B 0", "B 20"]
    assert episodes["columns"] == ["A 10", "B 20"] and [p["problem"] for p in episodes["problems"]] == ["p0", "p1"]
    assert [len(episodes["problems"][0]["steps"][step]["turns"]) for step in episodes["columns"]] == [2, 1]
    assert [(each["right"], each["wrong"]) for each in episodes["contrasts"]] == [("A 10", "B 20"), ("B 20", "A 10")]
    assert ["seed", 3, 4] in data["differing"] and "scale" not in [name for name, *_ in data["differing"]]
    with pytest.raises(ValueError, match="given twice"):
        inspect_pair(first, first)


def test_the_page_of_two_runs_has_texts_without_tokens_and_stays_below_1_mb(tmp_path):
    turn = {"pieces": ["ab", "cd", "ef", "gh"], "ratios": [0.0] * 4, "tokens": 6}
    assert shown_text(turn, 8) == {"pieces": ["abcd", "efgh"], "tokens": 6}
    assert shown_text(turn, 4) == {"pieces": ["ab", "gh"], "gap": [1, 4], "tokens": 6}
    assert shown_text(turn | {"gap": [3, 99]}, 6) == {"pieces": ["abc", "gh"], "gap": [1, 102], "tokens": 6}
    assert shown_text(turn | {"text": "xyz"}, 100) == {"pieces": ["x", "yz"], "tokens": 6}
    runs = [make_run(tmp_path / name, texts=["word " * 2000] * 40, policy={"generator": "a"}) for name in "xy"]
    assert 500_000 < inspect_pair(*runs).stat().st_size < 1_000_000


def test_the_page_of_a_run_that_trains_loads_itself_again(tmp_path, caplog):
    """It has the tables so far, which the folder has not; writing it costs at most its share of the time."""
    folder = make_run(tmp_path / "run", steps=(0,), texts=("4",))
    (folder / "provenance.json").write_text("{}")
    (folder / "eval.parquet").unlink()
    recorder = Recorder(folder)
    outcome = {
        "step": 0,
        "problem": "p0",
        "correct": True,
        "reward": 1.0,
        "reason": "correct",
        "turns": 1,
        "answer": "4",
    }
    recorder.tables["eval"] = [outcome]
    trainer = SimpleNamespace(recorder=recorder)
    live = LivePage()
    live.on_episodes_evaluated(trainer, [], {}, "eval")
    page = folder / "inspector.html"
    parsed, data = read(page)
    assert ("meta", {"http-equiv": "refresh", "content": "30"}) in parsed.tags
    assert (data["name"], data["state"], data["validation"][0]["accuracy"]) == ("run", "not finished", [1.0])
    assert len(data["episodes"]["problems"]) == 2 and not (folder / "eval.parquet").exists()
    assert live.spent > 0
    page.unlink()
    live.on_episodes_evaluated(trainer, [], {}, "eval")
    assert not page.exists(), "the first page took more than its share of the time since"
    live.started -= 1000 * live.spent
    live.on_episodes_evaluated(trainer, [], {}, "eval")
    assert page.exists() and live.n_pages == 2
    (folder / "provenance.json").write_text("{")
    trainer.state = SimpleNamespace(global_step=10)
    LivePage().on_episodes_evaluated(trainer, [], {}, "eval")
    assert "at iteration 10 is not written: JSONDecodeError" in caplog.text, "training goes on"
    (folder / "provenance.json").write_text("{}")
    LivePage().on_episodes_evaluated(SimpleNamespace(recorder=None), [], {}, "eval")  # of another process
    assert not [attributes for tag, attributes in read(inspect_run(folder))[0].tags if attributes.get("http-equiv") == "refresh"]  # fmt: skip


def test_the_turns_that_decided_and_the_worth_of_roles(tmp_path):
    """Only what `multirole role_value` has measured: two of three redraws of one turn change the outcome of p1 at iteration 10."""
    run = make_run(tmp_path / "run", texts=("4", "5"))
    plain = read(inspect_run(run))[1]
    assert plain["role_values"] == [] and plain["episodes"]["forked"] == []
    assert not any("effects" in turn for p in plain["episodes"]["problems"] for e in p["steps"].values() for turn in e["turns"])  # fmt: skip
    place = {"step": 10, "problem": "p1", "index": 0, "role": "generator", "slot": 1, "round": 0, "before": 1.0}
    effects = [place | {"how": how, "after": 0.0, "changed": changed, "replays": n} for how, changed, n in (("resample", 2, 3), ("base", 1, 1))]  # fmt: skip
    write_table(run / "turn_effects.parquet", effects)
    value = {"step": 10, "role": "generator", "how": "twin", "problems": 4, "replays": 4, "before": 0.5, "after": 0.25,
             "change": -0.25, "change_low": -0.5, "change_high": 0.0, "moved": 0.25, "moved_low": 0.0, "moved_high": 0.5,
             "token_share": 0.75, "grad_share": float("nan")}  # fmt: skip
    write_table(run / "role_value.parquet", [value])
    data = read(inspect_run(run))[1]
    assert data["episodes"]["forked"] == [10]
    by_problem = {p["problem"]: p["steps"]["10"]["turns"] for p in data["episodes"]["problems"]}
    assert by_problem["p1"][1]["effects"] == {"resample": [2, 3], "base": [1, 1]}
    assert not any("effects" in turn for turn in (by_problem["p1"][0], *by_problem["p0"]))
    assert data["role_values"] == [{key: v for key, v in value.items() if key not in ("replays", "after", "grad_share")} | {"grad_share": None}]  # fmt: skip


def test_facts_by_hand(tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 10, 20, 30), accuracy=(0.5, 0.8, 0.8, 0.76), n_problems=50)
    facts_of_run = facts(run)
    assert facts_of_run["iteration"].to_dict() == {
        "start": 0,
        "best": 10,
        "end": 30,
    }  # the earlier of equals; 4 points are no fall
    assert facts_of_run["value"].tolist() == [
        f"{value}\N{NO-BREAK SPACE}%" for value in ("50.0", "80.0", "76.0")
    ] and facts_of_run.loc["best", "detail"].endswith("n=50")
    fallen = make_run(tmp_path / "fallen", steps=(0, 10, 20, 30), accuracy=(0.5, 0.8, 0.74, 0.9), n_problems=50)
    assert facts(fallen)["iteration"].to_dict() == {"start": 0, "best": 30, "end": 30, "first fall": 20}
    assert facts(make_run(tmp_path / "bare", steps=())).empty


def test_start_best_and_last_by_hand():
    assert name_steps([0, 10, 20, 30], 20) == {0: "start", 20: "best", 30: "last"}
    assert name_steps([0, 10, 20, 30], 30) == {0: "start", 20: "", 30: "last, best"}
    assert name_steps([0, 10, 20], 0) == {0: "start, best", 10: "", 20: "last"}  # the untrained workflow was best
    assert name_steps([0, 10], None) == {0: "start", 10: "last"}
    assert list(name_steps([0], 0)) == [0]


def test_training_groups_by_hand(monkeypatch):
    rows = [{"iteration": 3, "problem": "p", "episode": i, "reward": float(i % 2), "advantage": i - 1.5, "correct": i % 2 == 1}
            for i in range(4)]  # fmt: skip
    groups = training_groups(pd.DataFrame(rows), 2)  # one problem, drawn twice
    assert groups == {3: [["p", [[0.0, -1.5, 0], [1.0, -0.5, 1]]], ["p", [[0.0, 0.5, 0], [1.0, 1.5, 1]]]]}
    assert training_groups(pd.DataFrame(), 2) is None
    monkeypatch.setattr("multirole_study.inspector.episodes.MAX_TRAINING", 20)
    many = pd.DataFrame([row | {"iteration": i} for i in range(10) for row in rows])
    assert list(training_groups(many, 2)) == [0, 2, 4, 6, 8]


def test_token_ratios_are_differences_and_absent_without_their_columns(tmp_path):
    columns = {"tokens": ["4", "2"], "logprobs": [-0.5, -1.25], "base_logprobs": [-2.5, None]}
    data = read(inspect_run(make_run(tmp_path / "with", texts=("42",), turn_columns=columns)))[1]
    turn = data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    assert turn["ratios"] == [2.0, None] and turn["pieces"] == ["4", "2"] and "text" not in turn
    data = read(inspect_run(make_run(tmp_path / "other", texts=("4",), turn_columns=columns)))[1]
    turn = data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    assert turn["pieces"] == ["4", "2"] and turn["text"] == "4"
    data = read(inspect_run(make_run(tmp_path / "without", texts=("42",))))[1]
    assert "ratios" not in data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]


def test_shortened_tokens_stay_aligned_with_their_text(tmp_path):
    tokens = [f"t{i:05d} " for i in range(20_000)]
    columns = {"tokens": tokens, "logprobs": [-i / 100 for i in range(20_000)], "base_logprobs": [0.0] * 20_000}
    data = read(inspect_run(make_run(tmp_path / "run", texts=("".join(tokens),), turn_columns=columns)))[1]
    turn = data["episodes"]["problems"][0]["steps"]["0"]["turns"][0]
    assert len(turn["ratios"]) == len(turn["pieces"]) < 20_000
    assert [f"t{round(-100 * ratio):05d} " for ratio in turn["ratios"]] == turn["pieces"]
    assert turn["pieces"][0] == "t00000 " and turn["pieces"][-1] == "t19999 "
    assert 7 * len(turn["pieces"]) + turn["gap"][1] == 7 * 20_000


def test_known_columns_are_shown(tmp_path):
    rows = [role_row(i, grad_share=1.0, coherence=0.5, not_known=1.0) for i in range(1, 13)]
    data = read(inspect_run(make_run(tmp_path / "run", role_rows=rows)))[1]
    columns = [panel["column"] for panel in data["panels"]]
    assert {"grad_share", "coherence"} <= set(columns) and "not_known" not in columns


def test_a_divergence_is_never_drawn_below_zero(tmp_path):
    rows = [role_row(i, chi2=value, chi2_after=-1e-3) for i, value in enumerate((-0.05, 0.2, -1e-7), start=1)]
    folder = make_run(tmp_path / "run", role_rows=rows)
    for group, name in (("main", "chi2, trainer against engine"), ("gradients", "chi2 after the update")):
        (axes,) = [axes for axes in plot_roles(folder, group).axes if axes.get_title().startswith(name)]
        assert axes.get_ylim()[0] == 0 and all(line.get_ydata().min() >= 0 for line in axes.get_lines())
    plt.close("all")
    chi2 = next(panel for panel in read(inspect_run(folder))[1]["panels"] if panel["column"] == "chi2")
    assert chi2["scale"] == "divergence" and chi2["series"]["generator"] == [-0.05, 0.2, -1e-7]


def test_an_interrupted_run_is_shown_as_far_as_it_went(tmp_path):
    bare = make_run(tmp_path / "bare", steps=())
    data = read(inspect_run(bare))[1]
    assert data["episodes"] is None and data["facts"] == [] and data["training_groups"] is None
    rows = [role_row(1, chi2=float("nan"), perplexity=float("inf")), role_row(2)]
    one = make_run(tmp_path / "one", steps=(0,), role_rows=rows)
    write_table(one / "turns" / "step_00010.parquet", [])  # every prompt was too long
    data = read(inspect_run(one))[1]
    assert data["state"] == "not finished" and data["iterations"] == [1, 2]
    panels = {panel["column"]: panel["series"]["generator"] for panel in data["panels"]}
    assert panels["chi2"] == [None, 0.0] and panels["perplexity"] == [None, 1.0]
    unevaluated = make_run(tmp_path / "turns", steps=(0,))
    (unevaluated / "eval.parquet").unlink()  # turns are written at once, the table with the next checkpoint
    data = read(inspect_run(unevaluated))[1]
    assert data["episodes"]["columns"] == [0] and data["episodes"]["problems"][0]["steps"]["0"]["correct"]


def test_a_user_supplied_workflow_has_its_roles_in_the_order_of_their_turns(tmp_path):
    policy = {"judge": "x", "writer": "x", "editor": "y"}
    folder = make_run(tmp_path / "run", texts="abc", workflow="newsroom", policy=policy)
    table = pd.read_parquet(folder / "turns" / "step_00000.parquet")
    table["role"] = table["role"].replace({"judge": "writer", "writer": "judge"})
    table.to_parquet(folder / "turns" / "step_00000.parquet")
    data = read(inspect_run(folder))[1]
    assert [(role["name"], role["adapter"]) for role in data["roles"]] == [
        ("writer", "x"),
        ("judge", "x"),
        ("editor", "y"),
    ]
    assert len({role["colour"] for role in data["roles"]}) == 3


def test_the_command_writes_a_page_per_finished_run_and_an_index(tmp_path, capsys):
    results = tmp_path / "results" / "tiny-r"
    for name in ("a&b", "unfinished"):
        make_run(results / name, accuracy=(0.5, 1.0))
    digest = hashlib.sha256((results / "a&b" / "config.json").read_bytes()).hexdigest()
    (results / "a&b" / "DONE").write_text(json.dumps({"config.json": digest}))
    evaluation = results / "evaluations" / "own" / "a&b"  # has no page of its own
    evaluation.mkdir(parents=True)
    (evaluation / "config.json").write_text(json.dumps({"adapters": "own", "cell": {"policy": {}}}))
    (evaluation / "DONE").write_text("{}")
    assert inspect([str(tmp_path / "results")]) == 0
    page = results / "a&b" / "inspector.html"
    assert read(page)[1]["index"] == "../../inspector.html" and not (results / "unfinished" / "inspector.html").exists()
    index = Elements((tmp_path / "results" / "inspector.html").read_text(encoding="utf-8"))
    assert [dict(a)["href"] for tag, a in index.tags if tag == "a"] == ["tiny-r/a%26b/inspector.html"]
    assert inspect([str(results / "unfinished"), "--out", str(tmp_path / "one.html")]) == 0
    assert str(tmp_path / "one.html") in capsys.readouterr().out


@pytest.mark.parametrize("content", ["missing", "empty", "out"])
def test_a_folder_without_runs_is_refused_in_plain_words(tmp_path, content):
    (tmp_path / "empty").mkdir()
    arguments = {"missing": ["missing"], "empty": ["empty"], "out": ["empty", "--out", "x.html"]}[content]
    with pytest.raises(UserError, match="contains no finished run|is not the folder of a run"):
        inspect([str(tmp_path / arguments[0]), *arguments[1:]])


def test_pages_leave_a_finished_run_finished_and_a_changed_table_does_not(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    inspect_run(folder)
    assert state(folder) == read(inspect_run(folder))[1]["state"] == "finished"
    (folder / "eval.parquet").unlink()
    assert state(folder) == "changed after it finished"


def test_every_panel_is_a_column_that_a_run_records(finished, tmp_path):
    """A renamed metric would leave an empty panel that nobody notices."""
    folder = shutil.copytree(finished, tmp_path / finished.name)
    recorded = {name: set(pd.read_parquet(folder / f"{name}.parquet")) for name in ("roles", "metrics")}
    assert [panel for panel in PANELS if panel.column not in recorded[panel.table]] == []
    data = read(inspect_run(folder))[1]
    rewards = {i: [r for _, group in groups for r, *_ in group] for i, groups in data["training_groups"].items()}
    assert [sum(values) / len(values) for values in rewards.values()] == pytest.approx(
        data["panels"][0]["series"][""], abs=1e-3
    )
    advantages = [sum(a for _, a, _ in group) for groups in data["training_groups"].values() for _, group in groups]
    assert len(advantages) == 8 and advantages == pytest.approx([0.0] * 8, abs=0.01)  # relative to the group's mean
    assert {skill["measure"] for skill in data["skills"]} >= {"workflow"}
    assert list(facts(folder).index)[:3] == ["start", "best", "end"]


def test_a_role_gets_better_or_worse_where_the_interval_of_its_change_leaves_out_zero(tmp_path):
    """Newcombe's interval of 60 of 100 minus 40 of 100 is [0.061, 0.329]; that of 6 of 10 minus 4 of 10 holds 0."""
    rows = [
        ("", "workflow", 0, 0.5, 0.4, 100), ("", "workflow", 5, 0.1, 0.2, 100), ("", "workflow", 10, 0.5, 0.3, 100),
        ("voter", "solves", 0, 0.4, None, 100), ("voter", "solves", 10, 0.6, None, 100),
        ("judge", "selects", 0, 0.6, 0.5, 100), ("judge", "selects", 10, 0.4, 0.5, 100),
        ("clerk", "selects", 0, 0.4, 0.5, 10), ("clerk", "selects", 10, 0.6, 0.5, 10), ("clerk", "selects", 15, None, None, 0),
        ("mute", "other", 0, None, None, 10), ("late", "solves", 10, 0.5, None, 10),
    ]  # fmt: skip
    columns = ["role", "measure", "step", "skill", "trivial", "cases"]
    assert role_changes(tmp_path) == []
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "skills.parquet")
    changes = {row["role"]: row for row in role_changes(tmp_path)}
    assert list(changes) == ["", "voter", "judge", "clerk"]
    assert {role: row["verdict"] for role, row in changes.items()} == {"": "", "voter": "better", "judge": "worse", "clerk": ""}  # fmt: skip
    assert changes[""] == {"role": "", "counted": "right answers", "from": 0, "to": 10, "cases": 100, "before": 0.5, "after": 0.5, "trivial": 0.3, "verdict": ""}  # fmt: skip
    assert (changes["clerk"]["to"], changes["voter"]["trivial"]) == (10, None)


def test_reading_a_run_imports_neither_torch_nor_trl():
    code = "import sys, multirole_study.inspector, multirole_study.inspector.run_figures; print({'torch', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_run_that_is_not_packed_whole_has_a_page(tmp_path):
    """Such runs have neither advantages nor numbers by token."""
    results = ROOT / "results" / "tiny-r"
    name = Grid.read(results).cell("single", "sp", "math", 3).id
    data = read(
        inspect_run(pack.unpack(results, name, tmp_path), tmp_path / "page.html", index=tmp_path / "index.html")
    )[1]
    assert "NaN" not in json.dumps(data)


def test_arrows_of_a_workflow_without_a_structure_follow_its_turns():
    """A loop is drawn backwards, and the answer comes from the last speaker of an episode, not from the role that appeared last."""
    spoken = {"a": "solver critic solver critic solver", "b": "solver critic critic solver"}
    turns = pd.DataFrame(
        [{"step": 0, "problem": name, "role": role} for name, roles in spoken.items() for role in roles.split()]
    )
    edges = {(edge.source, edge.target, edge.is_loop) for edge in observed_edges(turns)}
    assert edges == {
        ("question", "solver", False), ("solver", "critic", False), ("critic", "solver", True), ("solver", "answer", False),
    }  # fmt: skip
    assert observed_edges(turns[:0]) == []


def test_training_groups_are_named_by_their_questions():
    episodes = pd.DataFrame({"problem": ["mine/1f", "mine/1f", "mine/2e"], "question": ["2+2", "2+2", "x" * 500]})
    assert questions_of(episodes) == {"mine/1f": "2+2", "mine/2e": "x" * 80}
    episodes["question"] = ["Compute: 2+2", "Compute: 2+2", "Compute: 2+3"]
    assert questions_of(episodes) == {"mine/1f": "2+2", "mine/2e": "2+3"}
    assert questions_of(episodes.drop(columns="question")) == {}


def test_episodes_that_nobody_has_judged_are_neither_right_nor_wrong(tmp_path):
    """A task of the user's may give a reward alone, or judge some answers only."""
    folder = make_run(tmp_path, accuracy=(0.5, 1.0))
    outcomes = pd.read_parquet(folder / "eval.parquet").astype({"correct": object})
    outcomes.loc[::2, "correct"] = None
    write_table(folder / "eval.parquet", outcomes.to_dict("records"))
    points = validation(folder)
    judged = outcomes[outcomes["correct"].notna()]
    assert points["n"].sum() == len(judged) and points["accuracy"].iloc[-1] == 1.0
    assert inspect_run(folder).is_file()


def test_a_run_that_cannot_be_read_stops_no_other_page(tmp_path):
    for name in ("a", "b"):
        folder = make_run(tmp_path / "tiny-r" / name, accuracy=(0.5, 1.0))
        (folder / "DONE").write_text("{}")
    (tmp_path / "tiny-r" / "a" / "roles.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(
        UserError, match="1 pages and the index .* are written. These runs cannot be read: .*tiny-r/a: "
    ):
        inspect([str(tmp_path)])
    assert (tmp_path / "tiny-r" / "b" / "inspector.html").is_file() and (tmp_path / "inspector.html").is_file()


def test_the_folder_of_an_evaluation_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"adapters": "own", "cell": {"policy": {}}}))
    with pytest.raises(UserError, match="is the folder of an evaluation. Give the folder of its run"):
        inspect([str(tmp_path)])
    with pytest.raises(UserError, match="--out .* is a folder. Write the name of a file in it"):
        inspect([str(tmp_path), "--out", str(tmp_path)])


def test_a_role_that_is_not_trained_has_a_player_and_no_adapter(tmp_path):
    policy = {"judge": "frozen", "rival": "past:writer", "writer": "x"}
    folder = make_run(tmp_path / "run", texts="abc", workflow="newsroom", policy=policy)
    roles = {role["name"]: (role["adapter"], role["played_by"]) for role in read(inspect_run(folder))[1]["roles"]}
    assert roles == {"judge": ("", "the base, frozen"), "rival": ("", "past selves of writer"), "writer": ("x", "")}


def test_the_learning_of_a_run_without_iterations_is_an_empty_figure(tmp_path):
    (axes,) = plot_learning(tmp_path).axes
    assert not axes.lines
