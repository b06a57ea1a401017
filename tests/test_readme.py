"""The README's links lead somewhere, and its commands exist."""

import re
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_every_make_target_that_it_names_exists():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets


def finding(pattern: str) -> list[float]:
    """The numbers of one sentence of the README."""
    match = re.search(pattern, re.sub(r"\s+", " ", README))
    assert match, pattern
    return [float(number) for number in match.groups()]


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "results" / "tiny-s" / "tables" / f"{name}.csv")


def test_the_findings_are_the_numbers_of_the_tables():
    claims = table("claims")
    by_policy = {policy: claims[claims["number"] == f"{policy} falls"]["value"] for policy in ("ip", "sp")}
    ip, n_ip, sp, n_sp = (int(count) for runs in by_policy.values() for count in (runs.sum(), len(runs)))
    ends = finding(r"(\d+) of (\d+) multi-agent runs end .*?: (\d+) of (\d+) with isolated and (\d+) of (\d+) with shared")
    assert ends == [ip + sp, n_ip + n_sp, ip, n_ip, sp, n_sp]

    updates = table("matched_updates")
    falls, grid = (updates[updates["number"] == name]["value"].sum() for name in ("falls", "falls, grid"))
    n_runs = updates[updates["number"] == "peak"]["seeds"].sum()
    assert finding(r"(\d+) of (\d+) runs fall at some point; with the paper's setup, (\d+) of (\d+)") == [
        falls, n_runs, grid, n_runs
    ]  # fmt: skip

    peaks = table("table_1")
    single = peaks[(peaks["task"] == "math") & (peaks["number"] == "SA-RL")]["value"].unique()
    assert finding(r"\((\d+\.\d) % on arithmetic\)") == [round(100 * single.item(), 1)]
