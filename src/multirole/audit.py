"""Which policy map carries which risk for a workflow, from one look at the base model (paper A.6.1).

    multirole audit -p workflow voting -p policy ip -p task math --problems 16

A few groups of episodes are sampled from the base model as training's first iteration samples them, and one gradient is
accumulated over all their turns on one fresh adapter. Nothing is stepped and no file is written. The gradient's parts (role,
slot) serve every policy map: before the first step every adapter is the base, so that a map only says which parts are added up.

A base-model gradient is a first look, not a forecast: gradients turn as training goes on, a fresh LoRA adapter has a gradient
in its second factor alone, and a few groups are a small sample.
"""

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice

import pandas as pd

from multirole.advantages import group_advantages, group_of
from multirole.alarm_rules import THRESHOLDS
from multirole.batching import Row
from multirole.cells import Cell
from multirole.diagnostics import IterationDiagnostics
from multirole.episodes import Episode
from multirole.gradients import GradientParts
from multirole.launch import ONE_PROCESS, Launch, add_parameters, read_parameters
from multirole.policies import SHARED, adapter_names, parse_policy
from multirole.run import load_model, load_problems, make_engine, preflight
from multirole.trainer import MultiRoleGRPOTrainer

FIRST_LOOK = (
    "A base-model gradient is a first look, not a forecast: it says which parts push the same way before the first step, "
    "not what training makes of it. The words above follow the alarms' thresholds (alarm_rules), some of them first guesses."
)


@dataclass(frozen=True)
class Audit:
    """What the base model's first episodes show of each role; made by `audit`.

    Args:
        roles: by role that spoke: rows, tokens (of completions), mean and p95 of a completion, silent (the fraction of groups
            whose rewards are all equal).
        gradient: the parts (role, slot) of one gradient over all rows.
    """

    cell: Cell
    n_episodes: int
    roles: pd.DataFrame
    gradient: GradientParts

    @property
    def slots(self) -> dict[str, int]:
        """Multiplicity of each role that spoke."""
        return {role: n for role, n in self.cell.make_workflow().roles.items() if role in self.roles.index}

    @property
    def maps(self) -> dict[str, dict[str, str]]:
        """The policy maps that are judged: ip, sp, and the cell's own where it is neither."""
        names, every = ["ip", "sp"], list(self.cell.policy)
        found = {name: parse_policy(name, every) for name in names}
        return found | ({} if self.cell.policy_name in names else {self.cell.policy_name: self.cell.policy})

    def steps(self, policy: dict[str, str]) -> dict[str, int]:
        """adapter -> optimizer steps of one training iteration."""
        counts = self.roles[["rows", "tokens"]].groupby(policy).sum()
        return {adapter: self._n_steps(*counts.loc[adapter]) for adapter in counts.index}

    def _n_steps(self, rows: float, tokens: float) -> int:
        """Optimizer steps of an adapter with so much in the sample, at the cell's own size of an iteration."""
        scale = self.cell.n_problems * self.cell.n_episodes / self.n_episodes
        return self.cell.n_steps(round(rows * scale), round(tokens * scale))

    def among(self, roles: list[str]) -> GradientParts:
        """The parts of these roles alone, as on an adapter that they share."""
        some = GradientParts()
        some.products, some.parts = self.gradient.products, [part for part in self.gradient.parts if part[0] in roles]
        return some

    def table(self) -> pd.DataFrame:
        """One row per role. Masses and the gradient share are of the whole workflow: what a shared adapter would see."""
        whole, shared = self.roles, self.among(list(self.slots))
        parts = pd.DataFrame({role: shared.of_role(role) for role in self.slots}).T
        columns = {
            "slots": pd.Series(self.slots),
            "turns per episode": whole["rows"] / self.n_episodes,
            "completion tokens, mean": whole["mean"],
            "completion tokens, p95": whole["p95"],
            "token mass": whole["tokens"] / whole["tokens"].sum(),
            "row mass": whole["rows"] / whole["rows"].sum(),
            "gradient share": parts["grad_share"],
            "coherence": parts["coherence"],
            "amplification": parts["amplification"],
            "zero-variance groups": whole["silent"],
        }
        for name, policy in self.maps.items():
            counts = self.steps(policy)
            columns[f"optimizer steps, {name}"] = pd.Series({role: counts[policy[role]] for role in self.slots})
        return pd.DataFrame(columns).rename_axis("role")

    def verdict(self) -> str:
        """In words, which risk each policy map carries for this workflow, and how far to trust it."""
        cell = self.cell
        sample = f"{self.n_episodes} episodes of {cell.workflow_name} on {cell.task_name}"
        lines = [f"{sample} from the base model {cell.scale}, seed {cell.seed}."]
        if missing := [role for role in cell.policy if role not in self.slots]:
            lines.append(f"Not judged, since it never spoke: {', '.join(missing)}.")
        if self.roles["silent"].min() == 1.0:
            lines.append("No group's rewards differ: there is no gradient to take apart. Write a larger --problems.")
        for name, policy in self.maps.items():
            lines.append(f"\n{name}:")
            for adapter in adapter_names(policy):
                mine = [role for role in self.slots if policy[role] == adapter]
                if len(mine) == 1:
                    lines.append(self._alone(mine[0], policy))
                elif mine:
                    lines += self._together(adapter, mine, policy)
        return "\n".join([*lines, "", FIRST_LOOK])

    def _alone(self, role: str, policy: dict[str, str]) -> str:
        """The risk of a role on an adapter of its own (paper sec 5.1)."""
        n_slots, n_steps = self.slots[role], self.steps(policy)[policy[role]]
        if n_slots == 1:
            return (
                f"- The {role} has one slot on an adapter of its own ({_steps(n_steps)} per iteration): no same-role slots, "
                "nothing to amplify."
            )
        found, least = self.among([role]).of_role(role), THRESHOLDS["coherence"].value
        measured = "On the base its slots' gradients cannot be compared: they are zero, or one slot alone spoke."
        if math.isfinite(found["coherence"]):
            agree = "they agree" if found["coherence"] >= least else "they hardly agree yet"
            measured = (
                f"On the base its slots' gradients have a mean cosine of {found['coherence']:.2f}: {agree} (from {least:g} on). "
                f"Its amplification is {found['amplification']:.2f}, of {n_slots} for slots that say the same."
            )
        alone = self._n_steps(*(self.roles.loc[role, ["rows", "tokens"]] / n_slots))
        return (
            f"- The {role} fills {n_slots} slots on an adapter of its own: the shape of gradient_amplification. The adapter "
            f"takes {_steps(n_steps)} per iteration; with one slot it would take {alone}. {measured} If the {role} is also the "
            "role most prone to collapse, let it share an adapter or give it fewer slots."
        )

    def _together(self, adapter: str, roles: list[str], policy: dict[str, str]) -> list[str]:
        """Who owns a shared adapter, and the two surfaces of its capture (paper sec 5.2)."""
        mine, parts = self.roles.loc[roles], self.among(roles)
        tokens, rows = mine["tokens"] / mine["tokens"].sum(), mine["rows"] / mine["rows"].sum()
        shares = pd.Series({role: parts.of_role(role)["grad_share"] for role in roles})
        owners = (
            f"- Adapter {adapter!r} serves {', '.join(roles)} with {_steps(self.steps(policy)[adapter])} per iteration. The "
            f"largest part of its tokens is from {_owner(tokens)}, of its rows from {_owner(rows)}, of its gradient from "
            f"{_owner(shares)}."
        )
        return [owners, self._token_surface(tokens), self._frequency_surface(rows, shares)]

    def _token_surface(self, tokens: pd.Series) -> str:
        """Whether a role could take on the form of the one that owns most tokens."""
        dominant, lengths = tokens.idxmax(), self.roles.loc[tokens.index, "mean"]
        least, ratio, gap = (THRESHOLDS[name].value for name in ("tokens", "asymmetry", "length_rise"))
        terse = [
            role
            for role in tokens.index
            if lengths[dominant] >= ratio * lengths[role] and lengths[dominant] - lengths[role] >= gap
        ]
        rule = f"from {least:.0%} of the tokens, against a role that is {ratio:g} times and {gap:g} tokens shorter"
        if tokens[dominant] < least or not terse:
            return f"- Token-distribution surface of sp_role_capture: not on the base ({rule})."
        shorter = " and ".join(f"the {role} ({lengths[role]:.0f} tokens)" for role in terse)
        return (
            f"- Token-distribution surface of sp_role_capture: open ({rule}). Terse beside the {dominant} "
            f"({lengths[dominant]:.0f} tokens on average) and to be captured by it: {shorter}. Watch their lengths and texts."
        )

    def _frequency_surface(self, rows: pd.Series, shares: pd.Series) -> str:
        """Whether a role owns an adapter by its number of slots."""
        role, least = rows.idxmax(), THRESHOLDS["frequency"].value
        rule = f"from 2 slots and {least:.0%} of the rows"
        if self.slots[role] < 2 or rows[role] < least:
            return f"- Per-episode frequency surface of sp_role_capture: not on the base ({rule})."
        cosine = self.among([role]).of_role(role)["coherence"]
        agreement = f"; the mean cosine of its slots' gradients is {cosine:.2f}" if math.isfinite(cosine) else ""
        return (
            f"- Per-episode frequency surface of sp_role_capture: open ({rule}). The {role} has {self.slots[role]} slots, "
            f"{rows[role]:.0%} of the rows and {_percent(shares[role])} of the gradient{agreement}. Watch the other roles' texts."
        )


def silent_groups(cell: Cell, episodes: list[Episode], rows: list[Row]) -> dict[str, float]:
    """role -> fraction of the groups its rows are compared in whose rewards are all equal, so that they teach nothing."""
    rewards: dict[tuple, set[float]] = defaultdict(set)
    groups: dict[str, set[tuple]] = defaultdict(set)
    for row in rows:
        key = group_of(row, cell)
        groups[row.turn.role].add(key)
        rewards[key].add(row.episode.reward.value)
    for episode in episodes if cell.advantage_group == "episode" else []:  # one without a turn is compared, too
        rewards[episode.group(cell.n_episodes)].add(episode.reward.value)
    return {role: sum(len(rewards[key]) == 1 for key in keys) / len(keys) for role, keys in groups.items()}


def audit(cell: Cell, n_problems: int = 16, launch: Launch = ONE_PROCESS) -> Audit:
    """Sample `n_problems` groups of `cell.n_episodes` episodes from the base model and take one gradient apart."""
    if launch.n_processes > 1:
        raise ValueError(
            f"n_processes={launch.n_processes} cannot share an audit, which is one gradient in one process. Leave it out."
        )
    look = replace(cell, policy="sp", n_problems=n_problems, train_after=None)
    preflight(look, launch)
    model, tokenizer = load_model(look)
    engine = make_engine(look, tokenizer, launch)
    try:
        with tempfile.TemporaryDirectory() as folder:
            problems, validation, _ = load_problems(look, tokenizer)
            trainer = MultiRoleGRPOTrainer(look, model, tokenizer, engine, problems, validation, folder, launch=launch)
            first = islice(trainer._get_train_sampler(), 0, n_problems * look.n_episodes, look.n_episodes)
            episodes = trainer.play([(problems[i], n) for i in first for n in range(look.n_episodes)], 0)
    finally:
        engine.close()
    groups = [episode.group(look.n_episodes) for episode in episodes]
    advantages = group_advantages([episode.reward.value for episode in episodes], groups, eps=1e-4)  # TRL's
    for episode, advantage in zip(episodes, advantages, strict=True):
        episode.advantage = advantage
    if trainer.args.gradient_checkpointing:  # as `train` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.model.train()
    rows = trainer.prepare(trainer.model, episodes)
    diagnostics = IterationDiagnostics(rows, look.clip_low, look.clip_high, look.temperature)
    trainer.accumulate(trainer.model, SHARED, rows, len(rows), diagnostics)
    lengths = pd.DataFrame([(row.turn.role, len(row.turn.completion_ids)) for row in rows], columns=["role", "tokens"])
    by_role = lengths.groupby("role")["tokens"]
    roles = pd.DataFrame({
        "rows": by_role.size(), "tokens": by_role.sum(), "mean": by_role.mean(), "p95": by_role.quantile(0.95),
        "silent": pd.Series(silent_groups(look, episodes, rows)),
    })  # fmt: skip
    spoke = [role for role in cell.policy if role in roles.index]
    return Audit(cell, len(episodes), roles.loc[spoke], diagnostics.gradients[SHARED])


def _steps(n: int) -> str:
    return "1 optimizer step" if n == 1 else f"{n} optimizer steps"


def _percent(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "nothing"


def _owner(shares: pd.Series) -> str:
    """Who has the largest share, all of them where several have."""
    if shares.isna().any():
        return "nobody, since it is zero"
    largest = shares.index[shares >= shares.max() - 1e-9]
    return f"{' and '.join(f'the {role}' for role in largest)} ({shares.max():.0%}{' each' * (len(largest) > 1)})"


def main(argv: list[str]) -> int:
    """Say which risk each policy map carries for a workflow, from a few episodes of the base model."""
    parser = argparse.ArgumentParser(prog="multirole audit", description=main.__doc__)
    add_parameters(parser)
    parser.add_argument("--problems", type=int, default=16, help="groups of episodes to sample (default: 16)")
    arguments = parser.parse_args(argv)
    try:
        cell, launch = Cell.from_parameters(read_parameters(arguments))
        found = audit(cell, arguments.problems, launch)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    table = found.table().astype(object).T.to_string(float_format="{:.2f}".format)
    sys.stdout.write(f"{table}\n\n{found.verdict()}\n")
    return 0
