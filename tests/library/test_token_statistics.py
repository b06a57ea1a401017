"""Statistics of trained tokens equal numbers computed by hand."""

import math

import pytest
import torch
from trainers import episodes_of

from multirole.roles.diagnostics import RoleDiagnostics, TokenStats
from multirole.update.rows import episode_rows, trained_tokens

HALF, QUARTER = math.log(0.5), math.log(0.25)
ROLES = {"generator": 3, "aggregator": 1}


def statistics(advantages: tuple[float, float]) -> dict[str, float]:
    """Two rows, of two tokens and of one; the rest is padding. `lp` gives the first token twice the probability of `lr`, the last one half that of `old`."""
    stats = TokenStats()
    stats.add(
        lp=torch.tensor([[HALF, QUARTER, 0.0], [HALF, 9.0, 9.0]]),
        lr=torch.tensor([[QUARTER, QUARTER, 0.0], [HALF, 0.0, 0.0]]),
        old=torch.tensor([[HALF, QUARTER, 0.0], [0.0, 0.0, 0.0]]),
        entropy=torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]),
        mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
        advantages=torch.tensor(advantages),
        clip_low=0.2,
        clip_high=0.28,
    )
    return stats.summary()


def test_gaps_between_trainer_and_engine():
    """One of three tokens has the ratio 2, the others 1."""
    metrics = statistics((1.0, 1.0))
    assert metrics["kl"] == pytest.approx(-math.log(2) / 3)
    assert metrics["k3_kl"] == pytest.approx((1 - math.log(2)) / 3)
    assert metrics["chi2"] == metrics["chi2_raw"] == pytest.approx((4 + 1 + 1) / 3 - 1)
    assert metrics["max_logprob_gap"] == pytest.approx(math.log(2))


def test_a_token_that_the_engine_could_not_score_is_not_compared():
    """One of two tokens has the ratio 2; the third has no log-prob of the engine, and counts for entropy and perplexity only."""
    stats, nan = TokenStats(), math.nan
    logps, mask = torch.tensor([[HALF, QUARTER, HALF]]), torch.ones(1, 3)
    lr = torch.tensor([[QUARTER, QUARTER, nan]])
    stats.add(logps, lr, logps, torch.tensor([[1.0, 2.0, 6.0]]), mask, torch.tensor([1.0]), 0.2, 0.28)
    metrics = stats.summary()
    assert metrics["kl"] == pytest.approx(-math.log(2) / 2) and metrics["k3_kl"] == pytest.approx((1 - math.log(2)) / 2)
    assert metrics["chi2"] == metrics["chi2_raw"] == pytest.approx((4 + 1) / 2 - 1)
    assert metrics["max_logprob_gap"] == pytest.approx(math.log(2)) and metrics["entropy"] == 3.0
    (row, *_) = episode_rows(episodes_of(ROLES), dict.fromkeys(ROLES, "shared"), False)
    row.turn.logprobs = lr[0].tolist()
    diagnostics = RoleDiagnostics()
    diagnostics.add_after([row], list(logps))
    assert diagnostics.chi2_after == {row.turn.role: pytest.approx((4 + 1) / 2 - 1)}


def test_perplexity_is_a_mean_over_rows_and_entropy_over_tokens():
    metrics = statistics((1.0, 1.0))
    assert metrics["perplexity"] == pytest.approx((math.sqrt(8) + 2) / 2)
    assert metrics["entropy"] == pytest.approx(2.0)


@pytest.mark.parametrize(("advantages", "clipped"), [((-1.0, -1.0), 1 / 3), ((1.0, 1.0), 0.0), ((-1.0, 0.0), 0.0)])
def test_a_token_is_clipped_where_its_advantage_has_already_been_followed(advantages, clipped):
    """The loss's ratio is 1/2 in the last token and 1 in the others, whatever the engine's log-probs are."""
    assert statistics(advantages)["clip_fraction"] == pytest.approx(clipped)


def test_the_token_mass_is_a_share_of_the_adapters_tokens():
    episodes = episodes_of(ROLES)
    apart = RoleDiagnostics().per_role(episode_rows(episodes, {role: role for role in ROLES}, False))
    assert [apart[role]["token_mass"] for role in ROLES] == [1.0, 1.0]
    rows = episode_rows(episodes, dict.fromkeys(ROLES, "shared"), False)
    shared = RoleDiagnostics().per_role(rows)
    tokens = [trained_tokens([row for row in rows if row.turn.role == role]) for role in ROLES]
    assert [shared[role]["token_mass"] for role in ROLES] == [pytest.approx(n / sum(tokens)) for n in tokens]
