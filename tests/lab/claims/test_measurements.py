"""Measurements of the claims against their definitions."""

from types import SimpleNamespace

import pytest
import torch

from weightnorm import parts, weight_norm
from weightnorm.lab.claims import covariance, identities, noise, norm_growth, q_learning
from weightnorm.lab.claims.claim import Context
from weightnorm.lab.claims.problem import WRAPS, Problem, downsampled
from weightnorm.lab.errors import RunError
from weightnorm.lab.replay_buffer import Transitions

CONTEXT, PROBLEM = Context(), Problem("digits")


@pytest.mark.parametrize("how", WRAPS)
def test_networks_of_one_seed_are_the_same_function(how):
    images = PROBLEM.init_images(1)
    with torch.no_grad():
        out, reference = (PROBLEM.network(name, 1)(images) for name in (how, "standard"))
    torch.testing.assert_close(out, reference, atol=1e-4, rtol=1e-4)


def test_training_learns_and_is_deterministic():
    runs = []
    for _ in range(2):
        model = PROBLEM.network("weight-norm", 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(PROBLEM.train(model, optimizer, steps=40, batch=64, seed=3))
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] / 2


def test_divergence_ends_training_and_is_an_error_unless_expected():
    model = PROBLEM.network("standard", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    settings = {"steps": 50, "batch": 16, "seed": 1}
    assert len(PROBLEM.train(model, optimizer, **settings, may_diverge=True)) < 50
    with pytest.raises(RunError, match="diverged at step"):
        PROBLEM.train(model, optimizer, **settings)


def test_downsampling_averages_pixels():
    image = torch.tensor([[0, 2, 10, 20], [4, 6, 30, 41]], dtype=torch.uint8).expand(3, 3, 2, 4)
    small = downsampled(image)
    assert small.dtype == torch.uint8
    assert small[0, 0].tolist() == [[3, 25]]


def test_growth_formula_is_exact_only_with_gradient_descent():
    plain, off = norm_growth.lengths_in_training(CONTEXT, "gradient descent", 5, 1)
    _, off_with_adam = norm_growth.lengths_in_training(CONTEXT, "Adam", 5, 1)
    assert plain.shape[0] == 6
    assert off < 1e-12 < 1e-6 < off_with_adam


def test_covariance_of_v_against_autograd():
    torch.manual_seed(0)
    layer = weight_norm(torch.nn.Linear(4, 2, bias=False).double())
    v, g = parts(layer)
    x, target = torch.randn(2, 30, 4, dtype=torch.float64).unbind()
    of_v, of_w = [], []
    for one, goal in zip(x, target, strict=True):
        w = layer.weight.detach().requires_grad_()
        (grad_w,) = torch.autograd.grad((w @ one).sin() @ goal[:2], w)
        (grad_v,) = torch.autograd.grad((layer.weight @ one).sin() @ goal[:2], v)
        of_w.append(grad_w)
        of_v.append(grad_v)
    for unit in range(2):
        c = torch.cov(torch.stack(of_w)[:, unit].T, correction=0)
        d = torch.cov(torch.stack(of_v)[:, unit].T, correction=0)
        scale = (g / v.norm(dim=1, keepdim=True)).detach()[unit : unit + 1]
        found = covariance.scaled_and_projected(c[None], v.detach()[unit : unit + 1], scale)
        torch.testing.assert_close(found[0], d)


def generator():
    return torch.Generator().manual_seed(2)


def test_alignment_with_a_planted_direction():
    torch.manual_seed(1)
    w = torch.randn(5, 20, dtype=torch.float64)
    planted = w[:, :, None] * w[:, None, :] + 0.01 * torch.eye(20)
    row = covariance.layer_row(planted, w, generator(), spectra=True)
    for key in ("cosine_dominant", "near", "rayleigh"):
        assert row[key] == pytest.approx(1, abs=1e-6)
    assert row["cosine_dominant_random"] < 0.8
    assert row["closer"] == pytest.approx(1)  # what is left is a multiple of the identity
    assert row["closer_random"] < 0.2
    even = covariance.layer_row(
        torch.eye(20).double().expand(5, 20, 20), w, generator(), spectra=False
    )
    assert even["rayleigh"] == pytest.approx(even["rayleigh_random"])


def test_near_means_one_of_the_top_eigenvectors():
    c = torch.diag(torch.arange(20.0, 0.0, -1.0)).double()[None]
    for eigenvector, near in ((0, 1.0), (4, 1.0), (5, 0.0)):
        w = torch.eye(20).double()[eigenvector][None]
        assert covariance.alignment(c, w)["near"] == near


def test_distance_from_the_identity_against_its_definition():
    torch.manual_seed(1)
    a = torch.randn(6, 6, dtype=torch.float64)
    c = a @ a.T
    expected = (c / (c.trace() / 6) - torch.eye(6)).norm() / 6**0.5
    found = covariance.distance(covariance.spectrum(c[None]))
    torch.testing.assert_close(found[0], expected)


def test_a_histogram_is_a_density():
    torch.manual_seed(1)
    found = torch.tensor(noise.histogram(torch.randn(4000, 5)))
    assert found.sum() * 0.25 == pytest.approx(1, abs=0.01)
    assert found[24] == pytest.approx(0.4, abs=0.03)


def test_bytes_saved_for_the_backward_pass():
    saved = [identities.saved_bytes(PROBLEM, PROBLEM.network("standard", 1), n) for n in (50, 100)]
    per_example = (saved[1] - saved[0]) / 50
    # input, three hidden layers before and after the ReLU, log-softmax, at 4 bytes
    assert per_example == pytest.approx(4 * (64 + 6 * 48 + 10), rel=0.2)


def test_random_play_fills_the_replay_buffer(tmp_path):
    torch.manual_seed(1)
    replay = q_learning.random_play(tmp_path / "replay", 30)
    assert replay.steps == 30
    assert replay.sample(8).states.shape == (8, 4, 84, 84)
    assert set(replay.rewards.tolist()) <= {0.0, 1.0}


def test_unexplained_variance():
    """0 if the values equal the targets; large if they are far from them."""
    states, rewards = torch.zeros(3, 4, 84, 84, dtype=torch.uint8), torch.tensor([1.0, 0.0, 0.0])
    unseen = Transitions(states, torch.tensor([0, 1, 0]), rewards, torch.ones(3), states)
    config = SimpleNamespace(discount=1)
    agent = SimpleNamespace(target=lambda x: torch.ones(len(x), 2), config=config)
    right = torch.tensor([[1.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    assert q_learning.unexplained(agent, unseen, right) == 0
    assert q_learning.unexplained(agent, unseen, right + 10) == pytest.approx(100 / (2 / 9))
