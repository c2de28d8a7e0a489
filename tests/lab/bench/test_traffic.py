"""Bytes between ranks: counted, predicted, and in the document."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks
from weightnorm.lab.bench.cases.synced_batch_norm import SyncedBatchNorm
from weightnorm.lab.bench.cases.traffic import (
    PARAMETERIZATIONS,
    FeedForward,
    count_collectives,
    measure,
    traffic,
)
from weightnorm.lab.bench.messages import Link, StepTraffic, estimated_table, measured_table
from weightnorm.lab.runs.ranks import Ranks

pytestmark = pytest.mark.xdist_group("traffic")  # share their processes

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
    return {row["parameterization"]: StepTraffic(**row) for row in on_two[0]["rows"]}


def test_bytes_of_every_collective(rows):
    assert rows["standard"].gradient_bytes == 4 * (WEIGHTS + BIASES)
    assert rows["weight-norm"].gradient_bytes == 4 * (WEIGHTS + 2 * BIASES)
    assert rows["weight-norm-mean-only"].gradient_bytes == 4 * (WEIGHTS + 2 * BIASES)
    assert rows["batch-norm"].gradient_bytes == 4 * (WEIGHTS + 2 * BIASES)
    for name in ("standard", "weight-norm"):
        assert rows[name].all_reduce_calls == rows[name].all_gather_calls == 0
    mean_only, batch_norm = rows["weight-norm-mean-only"], rows["batch-norm"]
    assert mean_only.all_reduce_bytes == 4 * 2 * sum(c + 1 for c in CHANNELS)  # twice
    assert (mean_only.all_reduce_calls, mean_only.all_gather_calls) == (2 * len(CHANNELS), 0)
    assert batch_norm.all_gather_bytes == 4 * sum(2 * c + 1 for c in CHANNELS)
    assert batch_norm.all_reduce_bytes == 4 * sum(2 * c for c in CHANNELS)
    assert batch_norm.all_reduce_calls == batch_norm.all_gather_calls == len(CHANNELS)


def test_bytes_on_sockets_are_those_of_a_ring(rows):
    for row in rows.values():
        assert row.ring_bytes < row.sent_bytes < 1.005 * row.ring_bytes


def test_synced_batch_norm_against_batch_norm_of_the_whole_batch(on_two):
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


def test_one_rank_sends_nothing():
    row = measure("ConvPool-CNN-C", PARAMETERIZATIONS[2], Ranks())
    assert (row.gradient_bytes, row.all_reduce_bytes, row.sent_bytes, row.ring_bytes) == (
        0,
        0,
        0,
        0,
    )
    with count_collectives() as count:
        FeedForward(nn.Identity(), 4, 8, 1)(torch.randn(2, 4))
    assert not count


def test_alpha_beta_model():
    link = Link("by hand", latency=1.0, bandwidth=100.0)
    assert link.all_reduce(4000, 4) == pytest.approx(6 * 1 + 1.5 * 40)  # a ring
    assert link.all_reduce(1, 1024) == pytest.approx(20 * 1.01)  # a tree
    assert link.all_gather(50, 4) == pytest.approx(2 * 1 + 3 * 0.5)
    row = StepTraffic("", "", 2, 4000, 10, 5, 6, 3, 0)
    statistics = 5 * link.all_reduce(2, 4) + 3 * link.all_gather(2, 4)
    assert link.step(row, 4) == pytest.approx((link.all_reduce(4000, 4), statistics))


def test_document_agrees_with_the_record():
    record = json.loads((DOCS / "results" / "scaling" / "traffic.json").read_text())
    found = [StepTraffic(**row) for row in record["rows"]]
    text = (DOCS / "scaling.md").read_text()
    assert measured_table(found) in text
    assert estimated_table(found) in text


def test_measured_on_worker_processes():
    rows = traffic([2], ["feed-forward"])
    assert [row.parameterization for row in rows] == [str(how) for how in PARAMETERIZATIONS]
    assert all(row.ranks == 2 and row.sent_bytes > row.gradient_bytes for row in rows)
