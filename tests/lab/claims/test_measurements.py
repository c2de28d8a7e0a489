"""The measurements behind the verdicts, against what they are defined as; and the command."""

import pytest
import torch

from commands import weightnorm
from weightnorm import parts, weight_norm
from weightnorm.lab.claims import cost, covariance, growth, noise
from weightnorm.lab.claims.measure import CLAIMS, newest
from weightnorm.lab.claims.workbench import WRAPS, Workbench
from weightnorm.lab.records import load_record

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
    assert len(BENCH.train(model, optimizer, steps=50, batch=16, seed=1)) < 50


def test_lengths_follow_pythagoras_only_under_gradient_descent():
    plain, off = growth.lengths_in_training(BENCH, growth.OPTIMIZERS["gradient descent"], 5, 1)
    _, off_with_adam = growth.lengths_in_training(BENCH, growth.OPTIMIZERS["Adam"], 5, 1)
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


def test_alignment_sees_a_planted_direction():
    w = torch.randn(5, 20, dtype=torch.float64)
    planted = w[:, :, None] * w[:, None, :] + 0.01 * torch.eye(20)
    found = covariance.alignment(planted, w, seed=1)
    assert found["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["rayleigh"] == pytest.approx(1, abs=1e-6)
    assert found["random"] < 0.6
    even = covariance.alignment(torch.eye(20).double().expand(5, 20, 20), w, seed=1)
    assert even["rayleigh"] == pytest.approx(even["rayleigh_random"])


def test_evenness_of_known_spectra():
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 5.0]])
    assert covariance.evenness(values, 4) == pytest.approx([1.0, 0.25])


def test_bytes_kept_for_the_backward_pass():
    kept = [cost.saved_bytes(BENCH, BENCH.network("standard", 1), n) for n in (50, 100)]
    per_example = (kept[1] - kept[0]) / 50
    # input, three hidden layers before and after the ReLU, log-softmax, at 4 bytes
    assert per_example == pytest.approx(4 * (64 + 6 * 48 + 10), rel=0.2)


def test_activations_are_those_of_every_layer():
    model = BENCH.network("weight-norm", 1)
    found = noise.activations(model, BENCH.data.train[:7])
    assert [tuple(t.shape) for t in found] == [(7, 48)] * 3 + [(7, 10)]


def test_the_command_measures_resumes_and_draws(tmp_path):
    exact = [1, 2, 3, 7, 10, 11, 12, 13, 14, 17]
    code, out, err = weightnorm("claims", "--quick", "--runs", tmp_path, "--only", *exact[:3])
    assert code == 0, err
    assert "claim 2 (2 of 3)" in err
    code, out, err = weightnorm(
        "claims", "--quick", "--runs", tmp_path, "--only", *exact, 4, 5, 8, 9, 15, 18, 20
    )
    assert code == 0, err
    assert "claim 2 " not in err  # measured before
    folder = tmp_path / "claims" / "quick"
    rows = newest(folder)
    assert {rows[n]["verdict"] for n in exact} == {"holds"}
    assert rows[4]["verdict"] == "holds"
    assert rows[18]["verdict"] == "not measured"
    assert set(CLAIMS) - set(rows) == {6, 16, 19}
    assert not load_record(folder).finished
    assert "the paper says" in out
    code, out, err = weightnorm("report", tmp_path, "--out", tmp_path / "report")
    assert code == 0, err
    page = (tmp_path / "report" / "index.html").read_text()
    assert "s claims</h2>" in page
    assert page.count("<figure>") == 5  # claims 4, 5, 8, 9 and 15


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--only", 99), "there is no claim 99"), (("--only", 1, "--seeds", 5), "other settings")],
)
def test_what_cannot_be_measured_is_refused(tmp_path, words, says):
    assert weightnorm("claims", "--quick", "--runs", tmp_path, "--only", 1)[0] == 0
    code, _, err = weightnorm("claims", "--quick", "--runs", tmp_path, *words)
    assert code == 2
    assert says in err
