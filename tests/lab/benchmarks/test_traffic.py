"""Bytes between ranks: what is counted, what is predicted, and what the document says."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks
from weightnorm.lab.benchmarks.cases.synced_batch_norm import SyncedBatchNorm
from weightnorm.lab.benchmarks.cases.traffic import (
    PARAMETERIZATIONS,
    FeedForward,
    handed_over,
    measure,
)
from weightnorm.lab.benchmarks.messages import Link, Row, estimated_table, measured_table
from weightnorm.lab.runs.ranks import Ranks

pytestmark = pytest.mark.xdist_group("traffic")  # which share their processes

DOCS = Path(__file__).parents[3] / "docs"
CHANNELS = [96] * 3 + [192] * 6 + [10]
WEIGHTS, BIASES = 1_405_344, 1_450


def _on_rank(rank):
    rows = [vars(measure("ConvPool-CNN-C", how, Ranks(rank, 2))) for how in PARAMETERIZATIONS]
    torch.manual_seed(0)
    x, counts = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    norm = SyncedBatchNorm(3, 1e-6).double()
    mine = x.tensor_split([4])[rank].clone().requires_grad_()
    out = norm(mine)
    (out * counts.tensor_split([4])[rank]).sum().backward()
    grads = [p.grad for p in norm.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return {"rows": rows, "out": out.detach(), "x": mine.grad, "parameters": grads}


@pytest.fixture(scope="module")
def on_two():
    return on_ranks(2, _on_rank)


@pytest.fixture(scope="module")
def rows(on_two):
    return {row["parameterization"]: Row(**row) for row in on_two[0]["rows"]}


def test_every_byte_is_accounted_for(rows):
    assert rows["standard"].gradients == 4 * (WEIGHTS + BIASES)
    assert rows["weight-norm"].gradients == 4 * (WEIGHTS + 2 * BIASES)
    assert rows["weight-norm-mean-only"].gradients == 4 * (WEIGHTS + 2 * BIASES)
    assert rows["batch-norm"].gradients == 4 * (WEIGHTS + 2 * BIASES)
    for name in ("standard", "weight-norm"):
        assert rows[name].sums == rows[name].gathers == 0
    mean_only, batch_norm = rows["weight-norm-mean-only"], rows["batch-norm"]
    assert mean_only.summed == 4 * 2 * sum(c + 1 for c in CHANNELS)  # there and back
    assert (mean_only.sums, mean_only.gathers) == (2 * len(CHANNELS), 0)
    assert batch_norm.gathered == 4 * sum(2 * c + 1 for c in CHANNELS)
    assert batch_norm.summed == 4 * sum(2 * c for c in CHANNELS)
    assert batch_norm.sums == batch_norm.gathers == len(CHANNELS)


def test_the_operating_system_saw_what_a_ring_sends(rows):
    for row in rows.values():
        assert row.expected < row.sent < 1.005 * row.expected


def test_the_stand_in_is_batch_norm_of_all_ranks_together(on_two):
    torch.manual_seed(0)
    x, counts = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    x.requires_grad_()
    norm = nn.BatchNorm1d(3, eps=1e-6).double()
    out = norm(x)
    (out * counts).sum().backward()
    torch.testing.assert_close(torch.cat([r["out"] for r in on_two]), out.detach())
    torch.testing.assert_close(torch.cat([r["x"] for r in on_two]), x.grad)
    for rank in on_two:
        torch.testing.assert_close(rank["parameters"], [p.grad for p in norm.parameters()])


def test_alone_nothing_is_sent():
    row = measure("ConvPool-CNN-C", PARAMETERIZATIONS[2], Ranks())
    assert (row.gradients, row.summed, row.sent, row.expected) == (0, 0, 0, 0)
    with handed_over() as count:
        FeedForward(nn.Identity(), 4, 8, 1)(torch.randn(2, 4))
    assert not count


def test_the_model_of_a_link():
    link = Link("by hand", latency=1.0, bandwidth=100.0)
    assert link.sum(4000, 4) == pytest.approx(6 * 1 + 1.5 * 40)  # a ring
    assert link.sum(1, 1024) == pytest.approx(20 * 1.01)  # a tree
    assert link.gather(50, 4) == pytest.approx(2 * 1 + 3 * 0.5)
    row = Row("", "", 2, gradients=4000, summed=10, sums=5, gathered=6, gathers=3, sent=0)
    statistics = 5 * link.sum(2, 4) + 3 * link.gather(2, 4)
    assert link.step(row, 4) == pytest.approx((link.sum(4000, 4), statistics))


def test_the_document_has_the_measured_numbers():
    record = json.loads((DOCS / "results" / "scaling" / "traffic.json").read_text())
    found = [Row(**row) for row in record["rows"]]
    text = (DOCS / "scaling.md").read_text()
    assert measured_table(found) in text
    assert estimated_table(found) in text
