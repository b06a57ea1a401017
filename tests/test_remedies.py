"""Each remedy against a short reference written here; at weight zero, the default run to the last bit."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_gradient_decomposition import Parts
from test_gradients import gradient
from test_matching_switches import plain_logprobs
from trainers import SMALL_RUN, episodes_of, make_episodes, rows_of, table
from transformers import TrainerCallback

from multirole.core.rows import Row
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.judging import judge
from multirole.diagnostics.remedies import CoherencePenalty, ProcessReward, ScaledRoles, process_advantages
from multirole.experiment.cell import Cell
from multirole.experiment.folders import is_done
from multirole.experiment.launch import Launch
from multirole.experiment.record import TABLES
from multirole.experiment.run import run_cell
from multirole.workflows import EvalOpt, Voting

SMALL = {"workflow": "voting", "policy": "sp", "iterations": 5, "n_problems": 2, "n_episodes": 4, "n_validation": 4, "n_train": 16,
         "warmup_iterations": 0, "learning_rate": 5e-3, "eval_every": 2, "save_every": 2}  # fmt: skip


def adapters(folder, step: int) -> dict[str, bytes]:
    found = sorted(folder.glob(f"adapters/step_{step:05d}/*/*.safetensors"))
    return {path.parent.name: path.read_bytes() for path in found}


def test_neutral_values_are_the_default_run_to_the_last_bit(finished, tmp_path):
    neutral = {
        "kl_anchor": {"generator": 0.0}, "coherence_penalty": 0.0, "balance_roles": 0.0, "slot_scaling": 0.0,
        "process_reward": 0.0, "on_alarm": "rollback",
    }  # fmt: skip
    one, other = finished, run_cell(SMALL_RUN.replace(**neutral), tmp_path)
    assert adapters(one, 4).keys() == {"generator", "aggregator"} and adapters(one, 4) == adapters(other, 4)
    assert table(one, "ledger").equals(table(other, "ledger")) and table(one, "eval").equals(table(other, "eval"))


# ---- KL to the base


def applied(make_library_trainer, **options) -> tuple[torch.Tensor, list[Row], object]:
    """The gradient of one step on all rows, clipping off, after whatever `prepare_rows` does."""
    trainer = make_library_trainer(Voting(), **options)
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    return gradient(trainer, trainer.adapters[0], rows), rows, trainer


def k3_gradient(trainer, rows: list[Row], weights: dict[str, float]) -> torch.Tensor:
    """Of the weighted mean over rows of token means of exp(q - p) - (q - p) - 1, q being the base's log-probs."""
    total = 0.0
    for row in rows:
        with torch.no_grad(), trainer.model.disable_adapter():
            base = plain_logprobs(trainer.model, row, trainer.args.temperature)
        trainer.model.set_requires_grad(trainer.adapters, True)
        gap = base - plain_logprobs(trainer.model, row, trainer.args.temperature)  # (C,)
        total = total + weights[row.turn.role] * (gap.exp() - gap - 1).mean() / len(rows)
    named = [p for _, p in sorted(trainer.model.named_parameters()) if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, named)])


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({"beta": 20.0}, {"generator": 20.0, "aggregator": 20.0}),
        ({"role_beta": {"aggregator": 20.0}}, {"generator": 0.0, "aggregator": 20.0}),
        ({"beta": 20.0, "role_beta": {"aggregator": 0.0}}, {"generator": 20.0, "aggregator": 0.0}),
    ],
)
def test_the_anchor_adds_the_gradient_of_k3_by_role(make_library_trainer, given, weights):
    plain, rows, trainer = applied(make_library_trainer)
    anchored, _, same = applied(make_library_trainer, **given)
    expected = k3_gradient(trainer, rows, weights)
    assert expected.norm() > 1e-2 and same.beta == 0.0
    torch.testing.assert_close(anchored - plain, expected, atol=1e-5, rtol=1e-4)


def test_the_cells_anchor_is_the_librarys(make_trainer):
    trainer = make_trainer(Cell("voting", "sp", kl_anchor={"aggregator": 20.0}))
    assert trainer.betas == {"generator": 0.0, "aggregator": 20.0}


# ---- coherence_penalty


class Short(CoherencePenalty):
    FLOOR, WINDOW = 0.3, 4


def test_the_penalty_follows_its_definition_and_survives_a_resume(tmp_path):
    """Cosine with the running mean before the mean moves towards the scaled gradient; first cosine 1; fp32."""
    gradients = [torch.randn(50, generator=torch.Generator().manual_seed(i)) + 1.0 for i in range(6)]
    gradients[3] = -gradients[3]  # against the mean: left as it is
    penalty, mean, trainer = Short(0.8), gradients[0], SimpleNamespace(is_sharded=False)
    for i, g in enumerate(gradients):
        cosine = (g @ mean / (g.norm() * mean.norm())).item()
        factor = max(0.3, 1 - 0.8 * min(max(cosine, 0.0), 1.0))
        assert (factor == 1.0) == (i == 3) and (i > 0 or factor == pytest.approx(0.3))
        torch.testing.assert_close(penalty.on_gradient(trainer, "a", g), g * factor, atol=1e-5, rtol=1e-5)
        mean = 0.75 * mean + 0.25 * g * factor
        torch.testing.assert_close(penalty.averages["a"], mean, atol=1e-5, rtol=1e-5)
        penalty.save_state(tmp_path)
        resumed = Short(0.8)
        resumed.load_state(tmp_path)
        assert resumed.averages["a"].equal(penalty.averages["a"])
        penalty = resumed


def test_the_floor_removes_the_freeze(make_library_trainer):
    class NoFloor(CoherencePenalty):
        FLOOR = 0.0

    frozen, _, _ = applied(make_library_trainer, callbacks=[NoFloor(1.0)])
    moving, _, _ = applied(make_library_trainer, callbacks=[CoherencePenalty(1.0)])
    plain, _, _ = applied(make_library_trainer)
    assert frozen.norm() < 1e-4 * plain.norm()
    torch.testing.assert_close(moving, plain / 2, atol=1e-7, rtol=1e-5)


# ---- balance_roles and slot_scaling


def parts(make_library_trainer, *remedies) -> tuple[dict[tuple[str, int], torch.Tensor], torch.Tensor, float]:
    """The parts that the diagnostics see, the gradient that is applied, and its norm as the step has it."""
    before = Parts()
    trainer = make_library_trainer(Voting(), callbacks=[before, *remedies])
    rows, seen = rows_of(trainer, episodes_of(trainer.workflow.roles)), []
    trainer.optimizer.step = lambda: seen.append(
        torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    )
    step, _ = trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 0.0)
    return dict(zip(before.parts, before.matrix, strict=True)), seen[0], step.grad_norm


@pytest.mark.parametrize(("balance", "scaling"), [(1.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.25, 0.5)])
def test_roles_are_balanced_and_slots_scaled_as_defined(make_library_trainer, balance, scaling):
    unscaled, plain, _ = parts(make_library_trainer)
    seen, whole, grad_norm = parts(make_library_trainer, ScaledRoles(balance, scaling))
    assert all(seen[name].equal(part) for name, part in unscaled.items())  # diagnostics describe what the rows ask for
    roles = {"generator": sum(seen["generator", slot] for slot in range(3)), "aggregator": seen["aggregator", 0]}
    mean = (roles["generator"].norm() + roles["aggregator"].norm()) / 2
    scaled = {role: part * (mean / part.norm()) ** balance for role, part in roles.items()}
    expected = scaled["generator"] * 3**-scaling + scaled["aggregator"]
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=1e-4)
    assert (whole - plain).norm() > 1e-2 * plain.norm()
    assert grad_norm == pytest.approx(whole.norm().item(), rel=1e-4)


def test_a_role_without_gradient_is_not_divided_by(make_library_trainer):
    trainer = make_library_trainer(Voting(), callbacks=[ScaledRoles(balance=1.0)])
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    for row in rows:
        row.advantage *= row.turn.role != "aggregator"
    trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 1e-3)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_remedies_do_not_need_the_diagnostics(make_trainer):
    found = []
    for is_on in (True, False):
        cell = Cell("voting", "sp", balance_roles=0.5, slot_scaling=1.0, coherence_penalty=0.2, warmup_iterations=0,
                    diagnostics=is_on)  # fmt: skip
        trainer = make_trainer(cell)
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        trainer.update(trainer.model, trainer.prepare_rows(make_episodes(cell)))
        found.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert found[0].equal(found[1]) and not found[0].equal(before)


# ---- process_reward


def judged(workflow: str, answers: dict[tuple[str, int, int], str], outcomes: dict[int, str], right: bool) -> dict:
    """(role, slot, round) -> is_right of one episode on a problem of tiny_math."""
    cell = Cell(workflow, "ip")
    (problem,) = cell.make_task().problems("train", 1)
    episode = make_episodes(cell, n_problems=1, rounds=2 if workflow == "eval_opt" else 1)[0]
    episode.problem = problem
    object.__setattr__(episode.reward, "is_correct", right)
    for turn in episode.turns:
        text = answers.get((turn.role, turn.slot, turn.round), "nothing")
        turn.text = (
            f"\\boxed{{{problem.reference}}}" if text == "right" else "\\boxed{-99999}" if text == "wrong" else text
        )
        if turn.role == "evaluator":
            turn.outcome = outcomes[turn.round]
    judge([episode], cell.make_task())
    return {(turn.role, turn.slot, turn.round): turn.is_right for turn in episode.turns}


def test_every_kind_of_turn_is_judged_by_its_own_work():
    drafts = {("generator", 0, 0): "wrong", ("generator", 0, 1): "right"}
    found = judged("eval_opt", drafts, {0: "incorrect", 1: "unparsed"}, True)
    assert found == {
        ("generator", 0, 0): False,
        ("evaluator", 0, 0): True,
        ("generator", 0, 1): True,
        ("evaluator", 0, 1): False,
    }
    found = judged("eval_opt", drafts, {0: "correct", 1: "correct"}, True)
    assert (found["evaluator", 0, 0], found["evaluator", 0, 1]) == (False, True)
    found = judged("voting", {("generator", 1, 0): "right"}, {}, False)
    assert [found["generator", slot, 0] for slot in range(3)] == [False, True, False]
    assert found["aggregator", 0, 0] is False
    found = judged("orch_workers", {("worker", 2, 0): "right", ("synthesizer", 0, 0): "right"}, {}, True)
    assert found["orchestrator", 0, 0] is None and found["synthesizer", 0, 0] is True
    assert [found["worker", slot, 0] for slot in range(3)] == [False, False, True]


def test_process_advantages_are_added_by_role_and_round(make_library_trainer):
    """Four drafts of round 0, one of them right: +-; a second round that one episode alone has teaches nothing."""
    remedy = ProcessReward(0.5, lambda episodes: None)
    trainer = make_library_trainer(EvalOpt(), policy="ip", num_generations=4, callbacks=[remedy])
    episodes = episodes_of(trainer.workflow.roles, 4, n_problems=1, rounds=2)
    for i, episode in enumerate(episodes):
        episode.turns = episode.turns if i == 0 else episode.turns[:2]
        for turn in episode.turns:
            turn.is_right = i == 0 if turn.role == "generator" else None
    plain = rows_of(trainer, episodes)
    own = dict(zip([id(row.turn) for row in plain], process_advantages(plain, 4), strict=True))
    first = [own[id(row.turn)] for row in plain if row.turn.role == "generator" and row.turn.round == 0]
    assert first == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # mean 1/4, std 1/2
    rows = trainer.prepare_rows(episodes)
    assert len(rows) == len(plain)
    for row in rows:
        assert row.advantage == pytest.approx(row.episode.advantage + 0.5 * own[id(row.turn)], abs=1e-12)
        if row.turn.round == 1 or row.turn.role == "evaluator":
            assert own[id(row.turn)] == 0.0


# ---- on_alarm="rollback"


class Watch(TrainerCallback):
    """Notes the adapter and the moments after every iteration; ends the process's run where it is told to."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.weights, self.moments = stop_at, {}, {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == self.stop_at:
            raise KeyboardInterrupt
        named = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
        self.weights[state.global_step], self.moments[state.global_step] = named, len(optimizer.state)


def test_an_alarm_takes_the_run_back_to_its_best_step_also_across_a_kill(tmp_path, monkeypatch):
    """Alarms at iterations 1 (nothing to return to), 3 and 4; evaluated and saved at 2. With every other remedy at once."""

    def holding(alarms, measured):
        about = {"role": "generator", "adapter": "shared", "value": 1.0, "threshold": 0.0, "message": ""}
        return [{"alarm": f"at_{alarms.last}"} | about] if alarms.last in (1, 3, 4) else []

    monkeypatch.setattr(Alarms, "_holding", holding)
    cell = Cell(
        **SMALL, lr_schedule="constant", on_alarm="rollback",
        rollback_rate=0.25, kl_anchor={"generator": 0.1}, coherence_penalty=0.5, balance_roles=0.5, slot_scaling=0.5,
        process_reward=0.5, updates="tokens", step_tokens=400,
    )  # fmt: skip
    watch = Watch()
    folder = run_cell(cell, tmp_path / "whole", [watch])
    best = {name.removeprefix("base_model.model."): value for name, value in load_file(
        next(folder.glob("adapters/step_00002/shared/*.safetensors"))).items()}  # fmt: skip
    for step in (3, 4):
        own = {
            name.removeprefix("base_model.model.").replace(".shared", ""): w for name, w in watch.weights[step].items()
        }
        assert own.keys() == best.keys() and all(own[name].equal(best[name]) for name in best)
    assert watch.moments[1] > 0 and watch.moments[2] > 0 and watch.moments[3] == watch.moments[4] == 0
    rates = table(folder, "ledger").groupby("iteration")["lr"].unique().map(list)
    assert [rates[i] for i in range(1, 6)] == [[5e-3]] * 3 + [[5e-3 / 4], [5e-3 / 16]]
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path / "broken", [Watch(stop_at=4)])
    again = run_cell(cell, tmp_path / "broken")
    assert is_done(again) and adapters(again, 5) == adapters(folder, 5)
    for name in TABLES:
        one, other = (table(run, name) for run in (folder, again))
        clocks = [column for column in one if column.endswith("seconds")]
        assert one.drop(columns=clocks).equals(other.drop(columns=clocks)), name


def test_sharded_weights_are_not_rolled_back(make_trainer):
    with pytest.raises(ValueError, match="on_alarm='rollback'.*sharding='fsdp2'"):
        make_trainer(Cell("voting", "sp", on_alarm="rollback"), launch=Launch(sharding="fsdp2", n_processes=2))


def test_role_maps_are_part_of_the_name_and_not_of_the_single_agent():
    cell = Cell("voting", "sp", kl_anchor={"aggregator": 0.1}, balance_roles=0.5)
    assert cell.changed() == {"kl_anchor": {"aggregator": 0.1}, "balance_roles": 0.5}
    assert cell.id not in (Cell("voting", "sp").id, Cell("voting", "sp", balance_roles=0.5).id)
    assert cell.sibling("single", "sp").changed() == {"balance_roles": 0.5}
