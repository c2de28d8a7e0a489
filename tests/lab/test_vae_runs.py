"""The VAE experiment through the command line: kill and resume, several ranks, report."""

import random
import time

import pytest
import torch

from commands import outcome, run_folder, same, spread, started, wait_for, weightnorm
from ranks import on_ranks
from weightnorm.lab import vae
from weightnorm.lab.environment import Ranks
from weightnorm.lab.records import load_record
from weightnorm.lab.vae import ElboTerms

TINY = ("run", "vae", "--preset", "demo", "--width", 0.2, "--latents", 6, "--epochs", 3)
TINY = (*TINY, "--limit", 300, "--batch-size", 20, "--importance-samples", 8)


def tiny(runs, *more):
    return (*TINY, "--out", runs, *more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run, uninterrupted."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*tiny(runs))
    assert code == 0, err
    assert "test negative elbo" in out
    return runs


def test_run_writes_its_record(reference):
    folder = run_folder(reference)
    assert folder.relative_to(reference).parts[2:4] == ("digits", "weight-norm")
    record = load_record(folder)
    bound = record.column("test_negative_elbo")
    assert bound == sorted(bound, reverse=True)
    assert record.result["test_negative_elbo"] == bound[-1]
    estimate = record.result["importance_negative_log_likelihood"]
    assert estimate < record.result["importance_negative_elbo"]
    assert (folder / "pictures.npz").stat().st_size < 300_000


def test_resume_after_kill_is_bit_exact(tmp_path, reference):
    """Parameters, their average, the optimizer, the metrics and the stored images."""
    chance = random.Random(1)
    command = tiny(tmp_path, "--checkpoint-seconds", 0)
    kills = 0
    while kills < 2:
        process = started(*command)
        try:
            wait_for(lambda p=process: p.poll() is not None or [*tmp_path.rglob("checkpoint.pt")])
            time.sleep(chance.uniform(0, 0.5))
            process.kill()
        finally:
            process.communicate()
        if process.returncode == 0:  # it finished first
            break
        kills += 1
    assert kills
    assert weightnorm(*command)[0] == 0
    final = outcome(tmp_path)
    assert {"model", "average", "optimizer"} == set(final[2])
    assert same(final, outcome(reference))


def test_report_shows_curves_and_images(reference, tmp_path):
    code, _, err = weightnorm("report", reference, "--out", tmp_path)
    assert code == 0, err
    page = (tmp_path / "index.html").read_text()
    assert "figure 2" in page
    assert "Samples: weight norm, seed 1" in page
    for shown in ("samples", "reconstructions"):
        (file,) = (tmp_path / "figures").glob(f"*weight-norm-{shown}*")
        assert file.suffix == ".png"


def test_two_ranks_train_like_one_process(tmp_path, reference):
    """Ranks draw their own noise, so the metrics are close, not equal."""
    spread(2, *tiny(tmp_path))
    two_ranks = load_record(run_folder(tmp_path))
    assert two_ranks.environment["ranks"] == 2
    one_process = load_record(run_folder(reference)).column("test_negative_elbo")
    assert two_ranks.column("test_negative_elbo") == pytest.approx(one_process, rel=0.05)


KL = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.0, 0.0], [0.2, 0.4]]).unsqueeze(1)
"""Means 0.2 and 0.45; over the first half 0.3 and 0.7, over the second 0.1 and 0.2."""


def gradient_of_half(rank):
    class Context:
        batch, ranks = 4, Ranks(rank, 2)

    kl = KL.chunk(2)[rank].clone().requires_grad_()
    vae.objective(ElboTerms(torch.zeros(2, requires_grad=True), kl), 0.25, Context).backward()
    return kl.grad


def test_free_bits_apply_to_the_mean_over_all_ranks():
    gradient = torch.cat(on_ranks(2, gradient_of_half))
    whole = KL.clone().requires_grad_()
    whole.mean(0).clamp_min(0.25).sum().backward()
    assert torch.equal(gradient, whole.grad)
