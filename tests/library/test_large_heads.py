"""A large head on a CPU: log-probs, entropies and gradients of every kernel are those of the logits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from multirole_cpu.attention_head import HEADS, HeadKernels, LargeHead
from multirole_cpu.half_model import products_in

OUTPUTS = ("log_probs", "entropy")
TEMPERATURE = 0.7


def inputs(n_words: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (9, 16), rows of a head (V, 16) and targets (9,): words at random, and the three likeliest ones."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 16, generator=generator), torch.randn(n_words, 16, generator=generator)
    targets = torch.randint(n_words, (9,), generator=generator)
    targets[:3] = (hidden @ head.T).argmax(-1)[:3]
    return hidden.requires_grad_(), head, targets


def expected(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logps = (hidden.double() @ head.double().T / TEMPERATURE).log_softmax(-1)  # (9, V)
    return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def computed(
    hidden: Tensor, head: Tensor, targets: Tensor, kernel: str = "attention", softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    return LargeHead(HeadKernels(kernel, kernel)).apply(
        hidden, head, None, targets, TEMPERATURE, 128, softcap, 1.0, OUTPUTS
    )[:2]


@pytest.fixture(params=HEADS)
def kernel(request, monkeypatch) -> str:
    """Every kernel; tiles are of 4 tokens and 128 words, so that there are several, the last of them smaller."""
    for name in ("tiles", "bfloat16"):
        monkeypatch.setitem(HEADS, name, (4, 128))
    return request.param


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_values_and_gradients_in_float32(weights, kernel):
    """The losses contain log-probs, entropies (an entropy bonus), or both."""
    hidden, head, targets = inputs()
    gradients = []
    for scores in (partial(computed, kernel=kernel), expected):
        values = scores(hidden, head, targets)
        loss = sum((w * v * torch.arange(9)).sum() for w, v in zip(weights, values, strict=True) if w)
        gradients.append((*(v.detach().double() for v in values), *torch.autograd.grad(loss, hidden)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_values_and_gradients_in_bfloat16(kernel):
    """Log-probs are those of rounded factors, of which "bfloat16" also rounds distances, and the gradient is near that of float32."""
    hidden, head, targets = inputs()
    with products_in("bf16"):
        logps, entropies = computed(hidden, head, targets, kernel)
        (gradient,) = torch.autograd.grad(logps.sum(), hidden)
    rounded = expected(hidden.bfloat16(), head.bfloat16(), targets)
    tolerances = {"atol": 0.01, "rtol": 2**-8} if kernel == "bfloat16" else {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(logps.double(), rounded[0], **tolerances)
    torch.testing.assert_close(entropies.double(), rounded[1], atol=0.05, rtol=0)
    (other,) = torch.autograd.grad(expected(hidden, head, targets)[0].sum(), hidden)
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), other.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("is_half", [False, True])
def test_scoring_without_a_gradient_gives_the_same_values(kernel, is_half):
    hidden, head, targets = inputs()
    with products_in("bf16" if is_half else "ieee"):
        differentiated = computed(hidden, head, targets, kernel)
        with torch.no_grad():
            scored = computed(hidden.detach(), head, targets, kernel)
    tolerances = (1e-4, 0.1) if is_half else (1e-5, 1e-4)  # an entropy's mean row is rounded to bfloat16
    for one, other, tolerance in zip(scored, differentiated, tolerances, strict=True):
        torch.testing.assert_close(one, other.detach(), atol=tolerance, rtol=0)


def test_a_head_with_a_cap_is_left_to_trl():
    hidden, head, targets = inputs()
    logits = (5.0 * torch.tanh(hidden @ head.T / 5.0) / TEMPERATURE).log_softmax(-1)
    logps, _ = computed(hidden, head, targets, softcap=5.0)
    torch.testing.assert_close(logps, logits.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
