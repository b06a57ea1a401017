"""Read a study that is one YAML file, with its arms, questions, looks and correction, and answer it from packed results.

study = CompareStudy.from_yaml("studies/sharing.yaml")
study.table(Results("results/tiny-r"))
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import pandas as pd
import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from multirole_study.compare.answers import Answer, Question, judged
from multirole_study.compare.arms import Place, Runs, find_runs, mean_by_seed, of_whole_seeds
from multirole_study.compare.corrections import ALL_CELLS
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES, SKILL_MEASURES
from multirole_study.compare.rules import ALPHA, MARGIN
from multirole_study.compare.verdicts import Rule
from multirole_study.experiment.settings import CHECKED, did_you_mean, refuse_repeats

if TYPE_CHECKING:
    from multirole_study.experiment.cell import Cell
    from multirole_study.paper.grid import Grid
    from multirole_study.paper.results import Results


@dataclass(frozen=True, config=CHECKED)
class DeclaredArm:
    """A change of the grid's cells. An arm without a workflow is one of every workflow of the study."""

    policy: str = "sp"
    workflow: str | None = None
    parameters: dict[str, object] = Field(default_factory=dict)


def check_measure(question: str, name: str, options: Mapping[str, object]) -> None:
    """Raise ValueError if a question's measure is none, or does not work with these options."""
    if name not in MEASURES:
        known = did_you_mean(name, list(MEASURES)) or f" Measures are {', '.join(sorted(MEASURES))}."
        raise ValueError(f"`measure` of the question {question!r} is {name!r}, which is none.{known}")
    if name == "change" and not {"metric", "gain"} & set(options):
        raise ValueError(
            f"The measure {name!r} of the question {question!r} needs `metric` or `gain`, such as `metric: length_mean`."
        )
    if missing := set(MEASURES[name].required) - set(options):
        raise ValueError(
            f"The measure {name!r} of the question {question!r} needs {sorted(missing)}, such as `role: generator`."
        )
    if unknown := set(options) - set(MEASURES[name].options):
        raise ValueError(f"The measure {name!r} of the question {question!r} has no {sorted(unknown)}. Leave it out.")


def check_minus(question: str, arms: list[str], minus: str | list[str] | None) -> None:
    """Raise ValueError unless a question's `minus` is one arm, or has one for each of its arms."""
    if isinstance(minus, list) and len(minus) != len(arms):
        raise ValueError(
            f"`minus` of the question {question!r} must be one arm, or one for each of {arms}, got {minus}."
        )


def check_roles(question: str, options: Mapping[str, object], cells: Iterable["Cell"]) -> None:
    """Raise ValueError if a cell that a question reads lacks a role, or the gain of one, that the options name."""
    gains = SKILL_MEASURES | {"single": ()}
    for cell in cells:
        is_single = len(cell.policy) == 1  # its role is put in place of `role`
        named = {
            str(options[name]) for name in ("role", "flat") if name in options and not (is_single and name == "role")
        }
        if unknown := named - set(cell.policy):
            raise ValueError(
                f"The question {question!r} reads the role {min(unknown)!r}, which {cell.workflow} does not have. Its roles are "
                f"{list(cell.policy)}: name one of them, or only arms and `workflows` that have the role."
            )
        gain = options.get("gain")
        if gain and gain not in (*gains.get(cell.workflow, (gain,)), "workflow"):
            raise ValueError(
                f"The question {question!r} reads the gain {gain!r}, which {cell.workflow} does not have. Its gains are "
                f"{[*gains[cell.workflow], 'workflow']}: name one of them, or only arms and `workflows` that have the gain."
            )


@dataclass(frozen=True, config=CHECKED)
class DeclaredQuestion:
    """A question about one arm or several, each alone or minus another arm of the same seed. Raises ValueError for values that cannot work.

    Args:
        measure: a name of `measures.MEASURES`; `role`, `metric`, `flat`, `gain` and `last` are its options.
        arm, minus: names of arms, or lists of them; one `minus` serves all arms.
        pooled: "places" makes one line of each arm's workflows and tasks, "arms" one of all its arms as well. Seeds without all of these runs are
            not read. A seed's number is the mean over its runs.
        estimate: "mean" of a difference (default), "shares" of two arms by Fisher's test, "paired_shares" of two arms by McNemar's exact test
            of the pairs of runs, or the "share" of one arm.
        sign: -1 where the question asks whether the number is smaller.
        at: the bound, by default 0; of a share without `minus`, one half.
        enough: the bound that is enough for a yes, such as -0.03 for "matches or exceeds".
        within: asks instead whether the number lies within ± this.
        tested: False shows the numbers with their intervals, without p and verdict.
    """

    name: str
    question: str
    measure: str
    arm: str | list[str]
    minus: str | list[str] | None = None
    pooled: Literal["places", "arms"] | None = None
    estimate: Literal["mean", "shares", "paired_shares", "share"] | None = None
    sign: Literal[1, -1] = 1
    at: float | None = None
    enough: float | None = None
    within: float | None = None
    tested: bool = True
    role: str | None = None
    metric: str | None = None
    flat: str | None = None
    gain: str | None = None
    last: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_measure(self.name, self.measure, self.options)
        check_minus(self.name, self.arms, self.minus)
        measure, compares_shares = MEASURES[self.measure], self.kind in ("shares", "paired_shares")
        if compares_shares and self.minus is None:
            raise ValueError(f"The question {self.name!r} compares shares. Write the other arm as `minus`.")
        if measure.is_paired and self.minus is None:
            raise ValueError(
                f"The measure {self.measure!r} of the question {self.name!r} compares a run with one of another arm. Write that arm as `minus`."
            )
        if measure.is_paired and compares_shares:
            raise ValueError(
                f"The measure {self.measure!r} of the question {self.name!r} has one number for a pair of runs, so that there are no two shares to "
                "compare. Write `estimate: share`."
            )
        if self.kind == "share" and self.minus is not None and not measure.is_paired:
            raise ValueError(
                f"The question {self.name!r} asks for the share of one arm, which `minus` has no part in. Leave `minus` out, or write `estimate: shares`."
            )
        if self.kind != "mean" and not measure.is_pattern:
            raise ValueError(
                f"The measure {self.measure!r} of the question {self.name!r} is a number and no pattern that a run shows or not, so that it has no "
                "share of runs. Leave `estimate` out."
            )
        bounds = {name for name in ("at", "enough", "within") if getattr(self, name) is not None}
        if bounds and not self.tested:
            raise ValueError(
                f"The question {self.name!r} is not tested, so that no bound applies. Leave `{min(bounds)}` or `tested` out."
            )

    @property
    def arms(self) -> list[str]:
        """List the names of its arms."""
        return [self.arm] if isinstance(self.arm, str) else self.arm

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """List (arm, the arm that is subtracted)."""
        others = self.minus if isinstance(self.minus, list) else [self.minus] * len(self.arms)
        return list(zip(self.arms, others, strict=True))

    @property
    def kind(self) -> str:
        """Return the kind of its estimate."""
        return self.estimate or "mean"

    @property
    def options(self) -> dict[str, object]:
        """Return the options of its measure."""
        chosen = {name: getattr(self, name) for name in ("role", "metric", "flat", "gain", "last")}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True, config=CHECKED)
class CompareStudy:
    """Arms, the seeds that they share, and questions about them. Raises ValueError for values that cannot work.

    Args:
        arms: name -> cell of the grid with changed fields.
        workflows, tasks: where arms are compared; a question has a line for each arm and place.
        seeds: pairs of runs have the same seed; their order is that of the looks.
        looks: numbers of seeds at which lines are read, or such a number -> its alpha; by default one look, at all seeds.
        alpha: the level of both sides together.
        margin: of equivalence, as a difference of accuracies.
        correction: "holm", over the lines of a question, or "none". It corrects the p-values of tests of zero, and the verdicts that follow from
            them; a verdict by an interval (`enough`, `at`, `within`, or of a share) is not corrected, and the p beside it tests zero.
        packed_in: further results folders, such as "results/tiny-r", whose packed runs serve as runs of its arms and are not trained again.
    """

    arms: dict[str, DeclaredArm]
    tasks: list[str]
    questions: list[DeclaredQuestion]
    seeds: list[int] = Field(min_length=1)
    workflows: list[str] = Field(default_factory=lambda: ["voting", "eval_opt", "orch_workers"])
    looks: list[int] | dict[int, float] = Field(default_factory=list)
    alpha: float = ALPHA
    margin: float = MARGIN
    correction: Literal["holm", "none"] = "holm"
    packed_in: list[str] = Field(default_factory=list)

    def __post_init__(self) -> None:
        refuse_repeats("`seeds`", self.seeds)
        refuse_repeats("The names of `questions`", [question.name for question in self.questions])
        named = {arm for question in self.questions for pair in question.pairs for arm in pair if arm is not None}
        if unknown := named - set(self.arms):
            raise ValueError(
                f"Questions name the arms {sorted(unknown)}, which `arms` does not have: {list(self.arms)}."
            )
        if wrong := [look for look in self.looks if not 1 < look <= len(self.seeds)]:
            raise ValueError(f"`looks` must be numbers of seeds, from 2 to {len(self.seeds)}, got {wrong}.")
        for question in self.questions:
            sizes = {len(self.places(*pair)) for pair in question.pairs}
            if question.pooled == "places" and question.kind != "mean" and len(sizes) > 1:
                raise ValueError(
                    f"The question {question.name!r} pools runs of {sorted(sizes)} places in its lines, and looks are at equal numbers of runs. Ask two "
                    "questions, or name arms that are compared at the same places."
                )
        levels = {self.alpha, *(self.looks.values() if isinstance(self.looks, dict) else ())}
        for question in self.questions:
            if levels != {ALPHA} and not (question.kind != "share" and self.rule(question).is_test_against_zero):
                raise ValueError(
                    f"The question {question.name!r} is decided by its 95 % interval, so that its level is {ALPHA}, got {sorted(levels)}. "
                    "Leave out `alpha` and the alphas of `looks`, or ask about zero, as with `estimate: mean`."
                )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a study. Raises ValueError for values that cannot work."""
        return cls(**yaml.safe_load(Path(path).read_text(encoding="utf-8")))

    def rule(self, declared: DeclaredQuestion) -> Rule:
        """Return the rule of a question."""
        at = (0.5 if declared.kind == "share" else 0.0) if declared.at is None else declared.at
        has_margin = declared.kind == "mean" and MEASURES[declared.measure].has_margin
        return Rule(at, declared.enough, None, declared.within, declared.sign, self.alpha, has_margin)

    def question(self, declared: DeclaredQuestion) -> Question:
        """Return a declared question with the rules of the study."""
        at = tuple(sorted(self.looks)) or (len(self.seeds),)
        alphas = tuple(self.looks[look] for look in at) if isinstance(self.looks, dict) else ()
        estimated_by = {"margin": self.margin} if declared.kind == "mean" else {}
        return Question(
            MEASURES[declared.measure], declared.options, estimate=declared.kind, estimated_by=estimated_by,
            rule=self.rule(declared), looks=Looks(at, alphas=alphas), correction=self.correction, is_tested=declared.tested,
        )  # fmt: skip

    def cells_of(self, grid: "Grid", arm: str, place: Place) -> list["Cell"]:
        """Return the cells of an arm at a place, one for each seed."""
        about, (workflow, task) = self.arms[arm], place
        return [
            grid.cell(about.workflow or workflow, about.policy, task, seed, **about.parameters) for seed in self.seeds
        ]

    def lines(self, declared: DeclaredQuestion) -> Iterator[tuple[Place, str, str | None]]:
        """Yield (place, arm, the arm that is subtracted) for each line of a question; a line that pools has the names of what it pools."""
        if declared.pooled is None:
            for pair in declared.pairs:
                yield from ((place, *pair) for place in self.places(*pair))
            return
        everywhere = (ALL_CELLS, ", ".join(self.tasks))
        if declared.pooled == "places":
            yield from ((everywhere, *pair) for pair in declared.pairs)
        else:
            others = dict.fromkeys(minus for _, minus in declared.pairs if minus is not None)
            yield everywhere, ", ".join(declared.arms), ", ".join(others) or None

    def places(self, arm: str, minus: str | None) -> list[Place]:
        """Return the places of an arm, or of a pair of arms."""
        is_everywhere = None in {self.arms[name].workflow for name in (arm, minus) if name is not None}
        workflows = self.workflows if is_everywhere else [str(self.arms[arm].workflow)]
        return [(workflow, task) for task, workflow in product(self.tasks, workflows)]

    def answers(self, results: "Results", declared: DeclaredQuestion) -> list[Answer]:
        """Answer a question for each of its lines."""

        question = self.question(declared)

        def numbers(place: Place, arm: str, minus: str | None) -> pd.DataFrame:
            return question.numbers(runs(arm, place), None if minus is None else runs(minus, place))

        def runs(arm: str, place: Place) -> Runs:
            return {place: find_runs(results, self.cells_of(results.grid, arm, place))}

        if declared.pooled is None:
            return judged(question, [numbers(*line) for line in self.lines(declared)])
        of_pairs = [[numbers(place, *pair) for place in self.places(*pair)] for pair in declared.pairs]
        pools = of_pairs if declared.pooled == "places" else [list(chain.from_iterable(of_pairs))]
        counts_missing = question.measure.is_partial and declared.kind != "mean"
        read = [of_whole_seeds(parts, self.seeds, counts_missing) for parts in pools]
        if declared.kind == "mean":
            return judged(question, [mean_by_seed(numbers) for numbers in read])
        at = tuple(seeds * len(pools[0]) for seeds in question.looks.at)  # in runs, or pairs of them
        return judged(replace(question, looks=replace(question.looks, at=at)), read)

    def table(self, results: "Results") -> pd.DataFrame:
        """Return a row per question and line: question, workflow, task, arm, minus, seeds, value, low, high, p (after correction), and verdict."""
        rows = []
        for declared in self.questions:
            for (place, arm, minus), answer in zip(self.lines(declared), self.answers(results, declared), strict=True):
                keys = {
                    "question": declared.name,
                    "workflow": place[0],
                    "task": place[1],
                    "arm": arm,
                    "minus": minus or "",
                }
                mean, low, high, *_ = answer.interval
                numbers = {"seeds": answer.pairs, "value": mean, "low": low, "high": high, "p": answer.p}
                rows.append(keys | numbers | {"verdict": answer.verdict})
        return pd.DataFrame(rows)
