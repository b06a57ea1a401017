"""The paper's qualitative claims held against a grid's runs: holds, fails or undecided, by one set of rules.

Rules, the same for every claim of a kind:

- *Most cells*: each matched cell counts for or against where the 95 % interval of the difference lies on one side of zero, and
  is open otherwise. The claim holds with more than half of the cells for it, fails with more than half against it or with
  none for it and fewer than half open, and is undecided otherwise.
- *Every seed*: a pattern of single runs is looked for in each seed. It holds if every seed shows it, fails if none does.
- Fewer than `OUTER` seeds decide nothing.

A *fall* is a final validation accuracy at least `FALL` below the run's best checkpoint.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from multirole.experiment.presets import TASKS
from multirole.paper.grid import WORKFLOWS
from multirole.paper.measures import amplitudes
from multirole.paper.results import Key, Results
from multirole.paper.statistics import OUTER, Interval, difference
from multirole.paper.write import Table, points

FALL = 0.05
FIRST = 5  # iterations whose median is the "first logged value" of a noisy metric
CLIMBS, FLAT = 3.0, 1.5  # times its first value
LONGER = 1.5  # times its length on the base model
VERDICTS = ("holds", "fails", "undecided")


@dataclass(frozen=True)
class Claim:
    """One claim: what the paper says and where, how it is tested here, the verdict, the evidence and where to see it."""

    claim: str
    section: str
    test: str
    verdict: str
    evidence: str
    see: str


def most(cells: list[Interval], is_open_for: bool = False) -> str:
    """The verdict over matched cells. With `is_open_for` ("matches or exceeds") an open cell counts for the claim."""
    if not cells or min(cell.seeds for cell in cells) < OUTER:
        return "undecided"
    n, against = len(cells), sum(cell.high < 0 for cell in cells)
    agrees = n - against if is_open_for else sum(cell.low > 0 for cell in cells)
    if agrees > n / 2:
        return "holds"
    return "fails" if against > n / 2 or (agrees == 0 and 2 * (n - against) < n) else "undecided"


def every(seeds: list[bool]) -> str:
    """The verdict over single runs."""
    if len(seeds) < OUTER:
        return "undecided"
    return "holds" if all(seeds) else "undecided" if any(seeds) else "fails"


def _counts(cells: list[Interval]) -> str:
    return (
        f"{sum(c.low > 0 for c in cells)} of {len(cells)} cells above zero, {sum(c.high < 0 for c in cells)} below, "
        f"{sum(c.low <= 0 <= c.high for c in cells)} open"
    )


def _of(seeds: list[bool]) -> str:
    return f"{sum(seeds)} of {len(seeds)} seeds"


def _matched(results: Results, tasks: tuple[str, ...] = TASKS) -> Iterator[tuple[str, str]]:
    """(workflow, task) with a finished run of both policies."""
    for task in tasks:
        for workflow in WORKFLOWS:
            if results.seeds(workflow, "ip", task) and results.seeds(workflow, "sp", task):
                yield workflow, task


def _gaps(results: Results, at: str, tasks: tuple[str, ...] = TASKS) -> list[Interval]:
    """IP minus SP of each matched cell."""
    return [
        difference(results.outcomes(w, "ip", t, at), results.outcomes(w, "sp", t, at))
        for w, t in _matched(results, tasks)
    ]


def _trained(results: Results) -> Iterator[tuple[str, str, str]]:
    for workflow in WORKFLOWS:
        for task in TASKS:
            for policy in ("ip", "sp"):
                if results.seeds(workflow, policy, task):
                    yield workflow, policy, task


def _keys(results: Results, workflow: str, policy: str, task: str) -> list[Key]:
    return [Key(workflow, policy, task, seed) for seed in results.seeds(workflow, policy, task)]


def _series(results: Results, key: Key, role: str, metric: str) -> pd.Series:
    """iteration -> value of one role of a run."""
    roles = results.table("roles")
    mine = roles[(roles[list(Key._fields)] == list(key)).all(axis=1) & (roles["role"] == role)]
    return mine.set_index("iteration")[metric]


def climb(series: pd.Series) -> float:
    """The largest 3-iteration mean over the first value; sizes, since an estimate of chi2 can be slightly negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST].median(), 1e-6))


def falls(results: Results, key: Key) -> bool:
    """Whether the run ends at least `FALL` below its best checkpoint."""
    accuracy = results.correct(key).mean()
    return bool(accuracy[accuracy.index > 0].max() - accuracy.iloc[-1] >= FALL)


def _every_pair(results: Results, measure: str) -> tuple[int, int, int]:
    """Matched cells, and in how many of them the amplitude is larger under IP in every seed, and under SP in every seed."""
    wide = amplitudes(results).pivot(index=["workflow", "task", "seed"], columns="policy", values=measure)
    larger = (wide["ip"] > wide["sp"]).groupby(["workflow", "task"])
    return larger.ngroups, int(larger.all().sum()), int((~larger.any()).sum())


def _signature(results: Results, key: Key, role: str, metric: str) -> tuple[float, float]:
    """(at the start, at the end) of a signature of the training texts: means over the first and the last iterations."""
    series = _series(results, key, role, metric)
    return float(series.iloc[:FIRST].mean()), float(series.iloc[-FIRST:].mean())


# ---- the claims


def improves_over_base(results: Results) -> Claim:
    gains = [difference(results.outcomes(*c, "best"), results.outcomes(*c, "base")) for c in _trained(results)]
    return Claim("Multi-agent RL usually improves over the base model", "4.1", "peak minus base, most cells", most(gains),
                 _counts(gains), "Table 1, Figure 2")  # fmt: skip


def matches_single_agent(results: Results) -> Claim:
    residuals = []
    for workflow, policy, task in _trained(results):
        single = results.outcomes("single", "sp", task, "best")
        if single is not None:
            residuals.append(difference(results.outcomes(workflow, policy, task, "best"), single))
    return Claim("On most cells it matches or exceeds single-agent RL", "4.1", "peak minus SA-RL peak, most cells, an open cell "
                 "matches", most(residuals, is_open_for=True), _counts(residuals), "Table 1")  # fmt: skip


def ip_has_the_higher_ceiling(results: Results) -> Claim:
    gaps = _gaps(results, "best")
    return Claim("IP peaks above SP on most matched cells", "4.2", "IP minus SP at the peak, most cells", most(gaps),
                 _counts(gaps), "Table 1, Figure 3")  # fmt: skip


def ip_rises_faster(results: Results) -> Claim:
    gaps = []
    for workflow, task in _matched(results, ("math",)):
        first = {
            policy: np.stack(
                [(c := results.correct(key))[c.columns[1]] for key in _keys(results, workflow, policy, task)]
            )
            for policy in ("ip", "sp")
        }
        gaps.append(difference(first["ip"], first["sp"]))
    return Claim("Math: IP rises faster early in all three workflows", "4.2", "IP minus SP at the first checkpoint, every workflow",
                 _all_workflows(gaps), "; ".join(map(points, gaps)), "Figure 4")  # fmt: skip


def _all_workflows(gaps: list[Interval]) -> str:
    if len(gaps) < len(WORKFLOWS) or min(gap.seeds for gap in gaps) < OUTER:
        return "undecided"
    return (
        "holds" if all(gap.low > 0 for gap in gaps) else "fails" if any(gap.high < 0 for gap in gaps) else "undecided"
    )


def ip_falls_back(results: Results) -> Claim:
    gaps = []
    for workflow, task in _matched(results, ("math",)):
        ip, sp = ([results.outcomes(workflow, p, task, at) for at in ("best", "terminal")] for p in ("ip", "sp"))
        gaps.append(difference(ip[0] - ip[1], sp[0] - sp[1]))
    return Claim("Math: IP then falls back towards or below SP in all three workflows", "4.2", "fall from peak to end under IP minus "
                 "the same under SP, every workflow", _all_workflows(gaps), "; ".join(map(points, gaps)), "Figure 4")  # fmt: skip


def ip_falls_more_often(results: Results) -> Claim:
    counts = {
        p: [falls(results, k) for w, t in _matched(results) for k in _keys(results, w, p, t)] for p in ("ip", "sp")
    }
    ip, sp = sum(counts["ip"]), sum(counts["sp"])
    enough = len(counts["ip"]) >= OUTER * len(WORKFLOWS)
    p = _sign_test(counts) if enough else 1.0
    verdict = "undecided" if p > 0.05 else "holds" if ip > sp else "fails"
    return Claim("IP more often falls off a terminal cliff", "abstract, 4.2", "runs that end 5 points or more below their peak, IP "
                 "against SP, exact sign test over matched runs", verdict,
                 f"{ip} of {len(counts['ip'])} IP runs and {sp} of {len(counts['sp'])} SP runs, p={p:.2g}", "Table 1 checks")  # fmt: skip


def _sign_test(counts: dict[str, list[bool]]) -> float:
    pairs = list(zip(counts["ip"], counts["sp"], strict=False))
    only_ip, only_sp = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return float(binomtest(only_ip, only_ip + only_sp).pvalue) if only_ip + only_sp else 1.0


def sp_fails_too(results: Results) -> Claim:
    runs = [falls(results, key) for w, t in _matched(results) for key in _keys(results, w, "sp", t)]
    verdict = "undecided" if len(runs) < OUTER else "holds" if any(runs) else "fails"
    return Claim("SP does not eliminate failure", "4.4", "some SP run ends 5 points or more below its peak", verdict,
                 f"{sum(runs)} of {len(runs)} SP runs", "Figure 4")  # fmt: skip


def grad_norm_is_larger_under_ip(results: Results) -> Claim:
    return _amplitude_claim(results, "The largest gradient norm is larger under IP, systematically", "grad_norm")


def chi2_is_larger_under_ip(results: Results) -> Claim:
    return _amplitude_claim(results, "The largest chi2 is larger under IP on most cells", "chi2")


def _amplitude_claim(results: Results, claim: str, measure: str) -> Claim:
    if not list(_matched(results)):
        return Claim(claim, "4.2", "maximum over the run", "undecided", "no matched cell", "Figure 5")
    n, ip, sp = _every_pair(results, measure)
    enough = min(len(results.seeds(w, p, t)) for w, t in _matched(results) for p in ("ip", "sp")) >= OUTER
    verdict = "undecided" if not enough else "holds" if ip > n / 2 else "fails" if sp > n / 2 else "undecided"
    return Claim(claim, "4.2", "maximum over the run; a cell counts where every seed agrees", verdict,
                 f"larger under IP in {ip} of {n} matched cells, under SP in {sp}, seeds differ in {n - ip - sp}", "Figure 5")  # fmt: skip


def ranking_changes_with_the_task(results: Results) -> Claim:
    best: dict[str, list[str]] = {}
    for task in TASKS:
        for seed in results.grid.seeds:
            gains = {}
            for workflow, policy, _ in (cell for cell in _trained(results) if cell[2] == task):
                if seed in results.seeds(workflow, policy, task):
                    accuracy = results.correct(Key(workflow, policy, task, seed)).mean()
                    gains[workflow, policy] = accuracy.iloc[1:].max() - accuracy.iloc[0]
            if len(gains) == 2 * len(WORKFLOWS):
                best.setdefault(task, []).append(" > ".join(sorted(WORKFLOWS, key=lambda w: -gains[w, "ip"])))
    complete = len(best) == len(TASKS) and min(map(len, best.values())) >= OUTER
    constant = {task: set(orders) for task, orders in best.items()}
    differ = complete and not set.intersection(*constant.values())
    same = complete and len(set.union(*constant.values())) == 1
    said = "; ".join(f"{task}: {', '.join(dict.fromkeys(orders))}" for task, orders in best.items())
    return Claim("The ranking of workflows by gain changes with the task", "4.3", "order of the IP gains over base, per seed: holds if "
                 "no order occurs in both tasks", "holds" if differ else "fails" if same else "undecided", said, "Figure 2")  # fmt: skip


def voting_ip_generator_climbs(results: Results) -> Claim:
    seen, said = [], []
    for key in _keys(results, "voting", "ip", "math"):
        generator, aggregator = (climb(_series(results, key, r, "chi2_after")) for r in ("generator", "aggregator"))
        seen.append(generator >= CLIMBS and aggregator < generator / FLAT and falls(results, key))
        said.append(f"x{generator:.0f} against x{aggregator:.0f}{', falls' if falls(results, key) else ''}")
    return Claim("Voting-IP math: the generator's chi2 climbs, the aggregator's stays flat, validation falls", "5.1",
                 f"chi2 after the update: the generator's climbs {CLIMBS:g}-fold and {FLAT:g} times as far as the aggregator's, and "
                 "the run falls; every seed", every(seen), f"{_of(seen)}: {'; '.join(said)}", "Figure 6a, Table 2")  # fmt: skip


def orch_ip_descends_sp_plateaus(results: Results) -> Claim:
    pairs = zip(
        _keys(results, "orch_workers", "ip", "math"), _keys(results, "orch_workers", "sp", "math"), strict=False
    )
    seen = [falls(results, ip) and not falls(results, sp) for ip, sp in pairs]
    return Claim("Orch-Workers math: IP rises and descends, SP rises and plateaus", "5.1", "the IP run falls and the SP run does not; "
                 "every seed", every(seen), _of(seen), "Figure 6c")  # fmt: skip


def orch_sp_escalates(results: Results) -> Claim:
    seen, said = [], []
    for key in _keys(results, "orch_workers", "sp", "math"):
        worker = climb(_series(results, key, "worker", "chi2"))
        seen.append(worker >= CLIMBS and falls(results, key))
        said.append(f"x{worker:.0f}{', falls' if falls(results, key) else ''}")
    return Claim("Orch-Workers-SP math: diagnostics escalate ahead of a terminal cliff", "5.2", f"the worker's chi2 climbs {CLIMBS:g}-fold "
                 "and the run falls; every seed", every(seen), f"{_of(seen)}: {'; '.join(said)}", "Figure 6b")  # fmt: skip


def _grows(results: Results, cell: tuple[str, str, str], role: str, other: str) -> tuple[list[bool], str]:
    """Whether `role` grows longer while `other` does not, per seed, and the lengths."""
    seen, said = [], []
    for key in _keys(results, *cell):
        (a, b), (c, d) = (_signature(results, key, r, "length_mean") for r in (role, other))
        seen.append(b >= LONGER * a and d < LONGER * c)
        said.append(f"{a:.0f} to {b:.0f} tokens, {other} {c:.0f} to {d:.0f}")
    return seen, f"{_of(seen)}: {'; '.join(said)}"


def voting_sp_aggregator_grows(results: Results) -> Claim:
    seen, said = _grows(results, ("voting", "sp", "math"), "aggregator", "generator")
    return Claim("Voting-SP math: the aggregator grows verbose while the voters stay flat", "5.2", f"mean length in the last {FIRST} "
                 f"iterations over the first {FIRST}: at least {LONGER:g} against less; every seed", every(seen), said, "Table 5 A3")  # fmt: skip


def eval_opt_sp_evaluator_resolves(results: Results) -> Claim:
    seen, said = _grows(results, ("eval_opt", "sp", "math"), "evaluator", "generator")
    return Claim("Eval-Opt-SP math: the evaluator re-solves at length", "5.2", f"the same of the evaluator, {LONGER:g}-fold; every seed",
                 every(seen), said, "Table 5 A2")  # fmt: skip


def eval_opt_sp_evaluator_writes_code(results: Results) -> Claim:
    seen, said = [], []
    for key in _keys(results, "eval_opt", "sp", "code"):
        before, after = _signature(results, key, "evaluator", "code_fence_rate")
        seen.append(after - before >= 0.25)
        said.append(f"{before:.0%} to {after:.0%}")
    return Claim("Eval-Opt-SP code: the evaluator writes code", "5.2", "share of its turns with a Python fence rises by a quarter; every "
                 "seed", every(seen), f"{_of(seen)}: {'; '.join(said)}", "Table 5 A1")  # fmt: skip


CLAIMS: tuple[Callable[[Results], Claim], ...] = (
    improves_over_base, matches_single_agent, ip_has_the_higher_ceiling, ip_rises_faster, ip_falls_back, ip_falls_more_often,
    sp_fails_too, grad_norm_is_larger_under_ip, chi2_is_larger_under_ip, ranking_changes_with_the_task,
    voting_ip_generator_climbs, orch_ip_descends_sp_plateaus, orch_sp_escalates, voting_sp_aggregator_grows,
    eval_opt_sp_evaluator_resolves, eval_opt_sp_evaluator_writes_code,
)  # fmt: skip


def claims(results: Results) -> Table:
    """Every claim with its verdict (facts: the claims that the paper's text makes)."""
    found = [claim(results) for claim in CLAIMS]
    shown = pd.DataFrame(
        [(c.claim, c.section, c.test, f"**{c.verdict}**", c.evidence, c.see) for c in found],
        columns=["the paper's claim", "sec", "tested by", "here", "evidence", "see"],
    )
    n = {verdict: sum(c.verdict == verdict for c in found) for verdict in VERDICTS}
    caption = (
        f"Scale {results.grid.scale}, {len(results.grid.seeds)} seeds, {len(results.missing())} runs or evaluations missing. "
        f"{n['holds']} claims hold, {n['fails']} fail, {n['undecided']} are undecided here. Differences of accuracies are in "
        "percentage points with 95 % bootstrap intervals. The paper made them of one seed per cell at 0.6B to 4B; a claim that fails "
        "at another scale and on another task is not thereby refuted."
    )
    return Table(
        "claims", "The paper's claims against these runs", caption, shown, pd.DataFrame([vars(c) for c in found])
    )
