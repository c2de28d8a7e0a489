"""Experiment 2 through the real command line: killed, spread over ranks, reported."""

import random
import time

import pytest
import torch

from commands import outcome, run_folder, same, spread, started, wait_for, weightnorm
from ranks import on_ranks
from weightnorm.lab.experiments import vae
from weightnorm.lab.models.vae import Terms
from weightnorm.lab.runs.ranks import Ranks
from weightnorm.lab.runs.records import load_record

TINY = ("run", "vae", "--preset", "demo", "--width", 0.2, "--latents", 6, "--epochs", 3)
TINY = (*TINY, "--limit", 300, "--batch-size", 20, "--importance-samples", 8)


def tiny(runs, *more):
    return (*TINY, "--runs", runs, *more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run, never disturbed."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*tiny(runs))
    assert code == 0, err
    assert "test negative elbo" in out
    return runs


def test_a_run_leaves_its_record(reference):
    folder = run_folder(reference)
    assert folder.relative_to(reference).parts[2:4] == ("digits", "weight-norm")
    record = load_record(folder)
    bound = record.column("test_negative_elbo")
    assert bound == sorted(bound, reverse=True)
    assert record.result["test_negative_elbo"] == bound[-1]
    estimate = record.result["importance_negative_log_likelihood"]
    assert estimate < record.result["importance_negative_elbo"]
    assert (folder / "pictures.npz").stat().st_size < 300_000


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, reference):
    """Parameters, their average, the optimizer, every random draw, and the pictures."""
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
        if process.returncode == 0:  # it was quicker
            break
        kills += 1
    assert kills
    assert weightnorm(*command)[0] == 0
    ends = outcome(tmp_path)
    assert {"model", "average", "optimizer"} == set(ends[2])
    assert same(ends, outcome(reference))


def test_it_is_reported(reference, tmp_path):
    code, _, err = weightnorm("report", reference, "--out", tmp_path)
    assert code == 0, err
    page = (tmp_path / "index.html").read_text()
    assert "figure 2" in page
    assert "Samples: weight norm, seed 1" in page
    for shown in ("samples", "reconstructions"):
        (file,) = (tmp_path / "figures").glob(f"*{shown}-weight-norm*")
        assert file.suffix == ".png"


def test_two_ranks_learn_as_one_process_does(tmp_path, reference):
    """Their noise is their own, so the numbers are near, not equal."""
    spread(2, *tiny(tmp_path))
    together = load_record(run_folder(tmp_path))
    assert together.environment["ranks"] == 2
    alone = load_record(run_folder(reference)).column("test_negative_elbo")
    assert together.column("test_negative_elbo") == pytest.approx(alone, rel=0.05)


KL = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.0, 0.0], [0.2, 0.4]]).unsqueeze(1)
"""Means 0.2 and 0.45; over the first half 0.3 and 0.7, over the second 0.1 and 0.2."""


def half_of_the_gradient(rank):
    class Here:
        batch, ranks = 4, Ranks(rank, 2)

    kl = KL.chunk(2)[rank].clone().requires_grad_()
    vae.objective(Terms(torch.zeros(2, requires_grad=True), kl), 0.25, Here).backward()
    return kl.grad


def test_free_bits_are_of_the_batch_of_all_ranks():
    gradient = torch.cat(on_ranks(2, half_of_the_gradient))
    whole = KL.clone().requires_grad_()
    whole.mean(0).clamp_min(0.25).sum().backward()
    assert torch.equal(gradient, whole.grad)
