"""Signal and noise of gradients: planted means and covariances, and batches that are drawn as training draws them."""

import copy
import math

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine

from multirole.types import Answer, Episode, user
from multirole.workflows import Voting
from multirole_study.experiment.cell import Cell
from multirole_study.measurements import gradient_signal as measured
from multirole_study.measurements.gradient_signal import BatchProducts, jackknife, measure_gradients, role_statistics

PARTS = [("voter", 0), ("voter", 1), ("judge", 0)]
VOTERS, JUDGE, ALL = [0, 1], [2], [0, 1, 2]


def planted(n_batches: int, seed: int = 0, n: int = 40, scale: float = 1.0) -> torch.Tensor:
    """Gradients (B, 3, n). Both voters have the mean (1, 0, ...), the judge (0, 2, 0, ...).

    The noise of an element has variance 0.04, of which a quarter is common to both voters of a batch.
    """
    rng = np.random.default_rng(seed)
    noise = 0.2 * rng.normal(size=(n_batches, 3, n))
    common = 0.1 * rng.normal(size=(n_batches, 1, n))
    noise[:, VOTERS] = math.sqrt(0.75) * noise[:, VOTERS] + common
    mean = np.zeros((3, n))
    mean[VOTERS, 0], mean[2, 1] = 1.0, 2.0
    return torch.tensor(mean + scale * noise)


def products(*args, **kwargs) -> BatchProducts:
    return BatchProducts.from_gradients(PARTS, planted(*args, **kwargs))


def test_products_by_hand():
    """Two batches of two parts in two dimensions."""
    gradients = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 1.0], [1.0, 0.0]]])
    two = BatchProducts.from_gradients([("a", 0), ("b", 0)], gradients)
    assert two.within([0], [0]) == (1 + 10) / 2 and two.between([0], [0]) == 3.0
    assert two.within([0, 1], [0, 1]) == (5 + 17) / 2 and two.between([0, 1], [0, 1]) == 4 + 2
    assert two.between([0], [1]) == (1 + 2) / 2  # a1 . b2 and a2 . b1
    assert measured.noise(two, [0]) == 5.5 - 3 and measured.signal_share(two, [0]) == 3 / 5.5
    assert measured.noise_scale(3 / 5.5) == pytest.approx(2.5 / 3)
    assert two.between([1], [1]) == 0.0 and math.isnan(measured.cosine(two, "a", "b"))  # b has no signal


def test_without_noise_everything_is_the_mean_gradient():
    exact = products(4, scale=0.0)
    assert measured.signal(exact, VOTERS) == pytest.approx(4.0) and measured.noise(exact, VOTERS) == pytest.approx(0.0)
    assert (
        measured.role_share(exact, "voter", True) == pytest.approx(4 / 8) == measured.role_share(exact, "judge", False)
    )
    assert measured.cosine(exact, "voter", "judge") == pytest.approx(0.0)
    assert measured.coherence(exact, "voter", False) == pytest.approx(1.0)
    assert math.isnan(measured.coherence(exact, "judge", False))


def test_signal_and_noise_are_unbiased():
    """Means over 300 draws of 6 batches; the trace of a voter's covariance is 40 * 0.04."""
    draws = [products(6, seed) for seed in range(300)]

    def mean(statistic):
        values = [statistic(draw) for draw in draws]
        return pytest.approx(np.mean(values), abs=4 * np.std(values) / math.sqrt(len(values)))

    assert mean(lambda d: measured.signal(d, VOTERS)) == 4.0
    assert mean(lambda d: measured.signal(d, JUDGE)) == 4.0
    assert mean(lambda d: measured.noise(d, [0])) == 40 * 0.04
    assert mean(lambda d: measured.noise(d, VOTERS)) == 40 * (2 * 0.04 + 2 * 0.01)
    assert mean(lambda d: d.between(VOTERS, JUDGE)) == 0.0
    assert mean(lambda d: d.within([0], [1])) == 1 + 40 * 0.01  # the mean's part and the common noise
    silent = [
        BatchProducts.from_gradients(PARTS, planted(6, seed) - planted(2, 0, scale=0.0)[:1]) for seed in range(300)
    ]
    values = [measured.signal(draw, VOTERS) for draw in silent]
    assert abs(np.mean(values)) < 4 * np.std(values) / math.sqrt(300) and min(values) < 0  # nothing is clipped


def test_coherence_is_that_of_the_mean_and_that_of_what_slots_share():
    """A voter's mean square is 1 + 1.6; voters share 1 by their means and 0.4 by common noise."""
    many = products(400)
    assert measured.coherence(many, "voter", False) == pytest.approx(1.4 / 2.6, abs=0.03)
    assert measured.coherence(many, "voter", True) == pytest.approx(1 / 2.6, abs=0.03)
    assert role_statistics(products(20))["voter"]["shared_coherence"].value == pytest.approx(0.4 / 2.6, abs=0.05)


def test_shares_sum_to_one():
    statistics = role_statistics(products(8))
    for name in ("mean_share", "batch_share"):
        assert sum(roles[name].value for roles in statistics.values()) == pytest.approx(1.0)


def test_the_order_of_batches_changes_nothing():
    gradients = planted(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    first, second = (BatchProducts.from_gradients(PARTS, part) for part in (gradients, gradients[order]))
    for role, statistics in role_statistics(first).items():
        for name, estimate in statistics.items():
            assert role_statistics(second)[role][name] == pytest.approx(estimate, nan_ok=True), (role, name)


def test_split_halves_and_their_cross_products_partition_all_pairs():
    """The mean over all pairs is that of pairs within both halves and of pairs across them."""
    gradients = planted(8)
    whole = BatchProducts.from_gradients(PARTS, gradients)
    halves = [BatchProducts.from_gradients(PARTS, part) for part in (gradients[:4], gradients[4:])]
    across = gradients[:4, VOTERS].sum(1).mean(0) @ gradients[4:, VOTERS].sum(1).mean(0)
    within = sum(12 * measured.signal(half, VOTERS) for half in halves)
    assert measured.signal(whole, VOTERS) == pytest.approx((within + 32 * across.item()) / 56)


def test_left_out_batches_are_those_of_the_jackknife():
    gradients = planted(5)
    whole = BatchProducts.from_gradients(PARTS, gradients)
    rest = BatchProducts.from_gradients(PARTS, gradients[[0, 1, 3, 4]])
    assert np.allclose(whole.without(2).products, rest.products)


def test_errors_cover_the_truth():
    """The jackknife error of a mean product is about its spread over draws; it is not too small."""
    draws = [jackknife(products(10, seed), lambda p: measured.signal(p, VOTERS)) for seed in range(120)]
    spread = np.std([draw.value for draw in draws])
    assert 0.85 * spread < np.mean([draw.error for draw in draws]) < 1.4 * spread
    assert math.isnan(jackknife(products(2), lambda p: measured.signal(p, VOTERS)).error)


def test_bad_products_are_refused():
    with pytest.raises(ValueError, match="two batches"):
        products(1)
    with pytest.raises(ValueError, match="shape"):
        BatchProducts(PARTS, np.zeros((2, 2, 2, 2)))


@pytest.mark.parametrize("policy", [pytest.param("sp", marks=pytest.mark.slow), "ip"])
def test_a_batch_is_drawn_as_training_draws_it(make_trainer, policy):
    """Batches are independent and at fixed weights. Each has new problems, whole groups, and the gradient of one optimizer step on all rows."""
    cell = Cell("voting", policy, n_problems=2, num_generations=4, max_completion_length=32)
    trainer = make_trainer(cell)
    played: list[list[Episode]] = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: played.append(generate(inputs)) or played[-1]
    before = [p.clone() for p in trainer.peft_model.parameters()]
    callbacks = list(trainer.callback_handler.callbacks)
    gradients = measure_gradients(trainer, 3)
    assert all(
        torch.equal(p, q) and p.grad is None for p, q in zip(trainer.peft_model.parameters(), before, strict=True)
    )
    assert trainer.state.global_step == 0 and trainer.callback_handler.callbacks == callbacks
    batches = [{episode.problem.id for episode in episodes} for episodes in played]
    assert [len(batch) for batch in batches] == [2, 2, 2] and not batches[0] & batches[1]
    slots = [("aggregator", 0), *(("generator", slot) for slot in range(3))]
    assert [part for measure in gradients.values() for part in measure.parts] == (
        slots if policy == "sp" else slots[1:] + slots[:1]
    )
    for measure in gradients.values():
        assert measure.values.shape[:2] == (3, len(measure.parts))
        assert set(measure.rows.values()) == {3 * 8}
        assert all(measure.tokens[part] > measure.rows[part] for part in measure.parts)
    again = measure_gradients(trainer, 3)
    assert all(torch.equal(again[name].values, measure.values) for name, measure in gradients.items())
    other = measure_gradients(trainer, 3, seed=1)
    assert not any(torch.equal(other[name].values, measure.values) for name, measure in gradients.items())


def test_every_turn_of_every_batch_has_its_own_seed(make_library_trainer, tokenizer):
    """Three batches of two problems, the same in each, with two episodes of four turns."""
    engine = ScriptedEngine(lambda key, request: ([5, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    sizes = {"n_prompts": 2, "generation_batch_size": 4, "num_generations": 2}
    measure_gradients(make_library_trainer(Voting(), engine, **sizes), 3)
    assert len(engine.requests) == len({request.seed for request in engine.requests}) == 3 * 2 * 2 * 4


def test_an_adapter_whose_role_is_never_called_is_left_out(make_library_trainer, tokenizer):
    class Half:
        name, roles = "half", {"solver": 1, "fixer": 1}

        async def run(self, problem, call):
            return Answer((await call("solver", [user(problem.question)])).text)

    engine = ScriptedEngine(lambda key, request: ([5, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    sizes = {"n_prompts": 2, "generation_batch_size": 4, "num_generations": 2}
    trainer = make_library_trainer(Half(), engine, policy="ip", **sizes)
    assert list(measure_gradients(trainer, 2)) == [trainer.policy["solver"]]


def test_a_measurement_leaves_training_as_it_was(make_trainer):
    """The measurement is not logged or counted, and the entropy coefficient adapts to training only."""
    trainer = make_trainer(
        Cell("voting", "sp", n_problems=2, num_generations=4, max_completion_length=32, old_logprobs="recomputed")
    )
    trainer.args.use_adaptive_entropy = trainer.use_adaptive_entropy = trainer.has_entropy_bonus = True
    trainer._metrics["train"]["reward"].append(0.5)
    names = ("_metrics", "_logs", "entropy_coef", "_last_world_entropy")
    before = {name: copy.deepcopy(getattr(trainer, name)) for name in names}
    n_tokens = trainer.state.num_input_tokens_seen
    loss_metrics = list(trainer.update_metrics.loss.values)
    measure_gradients(trainer, 2)
    assert trainer.correction is not None and not trainer.update_metrics.weights.sums
    assert {name: getattr(trainer, name) for name in before} == before
    assert trainer.update_metrics.loss.values == loss_metrics and trainer.state.num_input_tokens_seen == n_tokens


def test_one_batch_is_no_measurement(make_trainer):
    with pytest.raises(ValueError, match="`n_batches` must be 2 or more, got 1"):
        measure_gradients(
            make_trainer(Cell("voting", "sp", n_problems=2, num_generations=4, max_completion_length=32)), 1
        )


def test_a_run_that_plays_ahead_can_be_measured(make_trainer):
    """A measurement plays its own episodes at the present weights."""
    cell = Cell("voting", "sp", n_problems=2, num_generations=4, max_completion_length=32, engine="transformers")
    trainer, ahead = make_trainer(cell), make_trainer(cell.model_copy(update={"max_staleness": 1}))
    kept = ahead.player.ahead
    expected, measured = measure_gradients(trainer, 2), measure_gradients(ahead, 2)
    assert torch.allclose(measured["shared"].values, expected["shared"].values) and ahead.player.ahead is kept


def test_roles_that_train_in_turn_are_measured_together(make_trainer):
    """Rows of the role that is not in turn need their reference log-probs as well."""
    cell = Cell("voting", "ip", n_problems=2, num_generations=4, max_completion_length=32, role_order="generator,aggregator",
                beta=0.01)  # fmt: skip
    trainer = make_trainer(cell)
    order = trainer.args.role_order
    assert set(measure_gradients(trainer, 2)) == {"generator", "aggregator"}
    assert order and trainer.args.role_order == order
