"""The measurements behind the verdicts, against what they are defined as."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from weightnorm import parts, weight_norm
from weightnorm.lab.claims import cost, covariance, noise, norm_growth, reinforcement
from weightnorm.lab.claims.context import WRAPS, Workbench, shrunk
from weightnorm.lab.claims.runner import measure, newest
from weightnorm.lab.errors import RunError
from weightnorm.lab.rl.replay_buffer import Batch

BENCH = Workbench(quick=True, seeds=(1,))


@pytest.mark.parametrize("way", WRAPS)
def test_all_networks_of_one_seed_start_alike(way):
    images = BENCH.init_images(1)
    with torch.no_grad():
        out, reference = (BENCH.network(name, 1)(images) for name in (way, "standard"))
    torch.testing.assert_close(out, reference, atol=1e-4, rtol=1e-4)


def test_the_loop_learns_and_repeats():
    runs = []
    for _ in range(2):
        model = BENCH.network("weight-norm", 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(BENCH.train(model, optimizer, steps=40, batch=64, seed=3))
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] / 2


def test_a_run_that_breaks_stops():
    model = BENCH.network("standard", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    losses = BENCH.train(model, optimizer, steps=50, batch=16, seed=1, may_break=True)
    assert len(losses) < 50


def test_a_network_that_must_not_break_says_so():
    model = BENCH.network("standard", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    with pytest.raises(RunError, match="broke at step"):
        BENCH.train(model, optimizer, steps=50, batch=16, seed=1)


def test_a_claim_that_breaks_does_not_stop_the_others(monkeypatch, tmp_path):
    monkeypatch.setitem(norm_growth.QUICK_RATES, "gradient descent", 1e30)
    bench = Workbench(quick=True, seeds=(1, 2), runs=tmp_path)
    with pytest.raises(RunError, match=r"claim 5: .* broke at step .* The others are in"):
        measure(bench, only=(2, 5, 10), console=Console(quiet=True))
    assert list(newest(tmp_path / "claims" / "quick")) == [2, 10]


def test_images_are_shrunk_to_means():
    image = torch.tensor([[0, 2, 10, 20], [4, 6, 30, 41]], dtype=torch.uint8).expand(3, 3, 2, 4)
    small = shrunk(image, 2)
    assert small.dtype == torch.uint8
    assert small[0, 0].tolist() == [[3, 25]]
    assert shrunk(image, 1) is image


def test_lengths_follow_pythagoras_only_under_gradient_descent():
    plain, off = norm_growth.lengths_in_training(BENCH, "gradient descent", 5, 1)
    _, off_with_adam = norm_growth.lengths_in_training(BENCH, "Adam", 5, 1)
    assert plain.shape[0] == 6
    assert off < 1e-12 < 1e-6 < off_with_adam


def test_the_covariance_of_v_in_brute_force():
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


def chance():
    return torch.Generator().manual_seed(2)


def test_alignment_sees_a_planted_direction():
    torch.manual_seed(1)
    w = torch.randn(5, 20, dtype=torch.float64)
    planted = w[:, :, None] * w[:, None, :] + 0.01 * torch.eye(20)
    row = covariance.layer_row(planted, w, chance(), spectra=True)
    for key in ("cosine", "cosine_dominant", "near", "rayleigh"):
        assert row[key] == pytest.approx(1, abs=1e-6)
    assert row["cosine_random"] < 0.6
    assert row["closer"] == pytest.approx(1)  # what is left is a multiple of the identity
    assert row["closer_random"] < 0.2
    even = covariance.layer_row(
        torch.eye(20).double().expand(5, 20, 20), w, chance(), spectra=False
    )
    assert even["rayleigh"] == pytest.approx(even["rayleigh_random"])


def test_near_is_one_of_the_dominant_eigenvectors():
    c = torch.diag(torch.arange(20.0, 0.0, -1.0)).double()[None]
    for eigenvector, near in ((0, 1.0), (4, 1.0), (5, 0.0)):
        w = torch.eye(20).double()[eigenvector][None]
        assert covariance.alignment(c, w)["near"] == near


def test_a_dead_unit_has_no_say():
    w = torch.randn(2, 4, dtype=torch.float64)
    c = torch.stack([torch.eye(4).double(), torch.zeros(4, 4).double()])
    assert covariance.layer_row(c, w, chance(), False) == covariance.layer_row(
        c[:1], w[:1], chance(), False
    )


def test_the_distance_from_the_identity_in_brute_force():
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


def test_bytes_kept_for_the_backward_pass():
    kept = [cost.saved_bytes(BENCH, BENCH.network("standard", 1), n) for n in (50, 100)]
    per_example = (kept[1] - kept[0]) / 50
    # input, three hidden layers before and after the ReLU, log-softmax, at 4 bytes
    assert per_example == pytest.approx(4 * (64 + 6 * 48 + 10), rel=0.2)


def test_activations_are_those_of_every_layer():
    model = BENCH.network("weight-norm", 1)
    found = noise.activations(model, BENCH.data.train[:7])
    assert [tuple(t.shape) for t in found] == [(7, 48)] * 3 + [(7, 10)]


def test_random_play_is_remembered_as_it_was(tmp_path):
    torch.manual_seed(1)
    replay = reinforcement.random_play(tmp_path / "replay", 30)
    assert replay.steps == 30
    assert replay.sample(8).states.shape == (8, 4, 84, 84)
    assert set(replay.rewards.tolist()) <= {0.0, 1.0}


def test_what_the_values_leave_unexplained():
    """An agent whose values are the targets explains all; one that is far off, nothing."""
    states, rewards = torch.zeros(3, 4, 84, 84, dtype=torch.uint8), torch.tensor([1.0, 0.0, 0.0])
    unseen = Batch(states, torch.tensor([0, 1, 0]), rewards, torch.ones(3), states)
    config = SimpleNamespace(discount=1)
    agent = SimpleNamespace(target=lambda x: torch.ones(len(x), 2), config=config)
    right = torch.tensor([[1.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    assert reinforcement.unexplained(agent, unseen, right) == 0
    assert reinforcement.unexplained(agent, unseen, right + 10) == pytest.approx(100 / (2 / 9))
