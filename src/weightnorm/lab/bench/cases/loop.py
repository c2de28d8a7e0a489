"""The training loop of the CIFAR-10 experiment beside a minimal loop."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from weightnorm import Parameterization
from weightnorm.lab import classify
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.roofline import operations
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

LAB, MINIMAL = "lab", "minimal loop"


def cases(settings: Settings) -> Iterator[Case]:
    config = replace(
        classify.PRESETS["cpu"],
        parameterization=Parameterization.STANDARD,
        epochs=1,
        width=settings.size(0.25, 0.03),
        batch_size=settings.size(100, 4),
        device=str(settings.device),
    )
    count = 6 * config.batch_size
    labels = torch.arange(count) % 10
    x = torch.randn(count, 3, 32, 32)
    data = Labelled(x, labels, x[:4], labels[:4], tuple("0123456789"))

    def lab() -> float:
        with tempfile.TemporaryDirectory() as folder:
            silent = Console(file=io.StringIO())
            record = classify.run(replace(config, runs=Path(folder)), silent, data)
        return float(record.metrics[0]["seconds"])

    def model() -> nn.Module:
        torch.manual_seed(config.seed)
        made: nn.Module = ConvPoolCNN(lambda layer: layer, width=config.width)
        return made.to(settings.device).to(memory_format=torch.channels_last)  # type: ignore

    def minimal() -> float:
        network, images = model(), x.to(settings.device)
        answers = labels.to(settings.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.0003, fused=True)
        wrong = total = 0.0
        began = time.perf_counter()
        for rows in torch.randperm(count).split(config.batch_size):
            batch, y = images[rows].contiguous(memory_format=torch.channels_last), answers[rows]
            logits = network(batch)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
            wrong += (logits.argmax(1) != y).sum().item()
        return time.perf_counter() - began

    def passes() -> None:
        network = model()
        F.cross_entropy(
            network(x[: config.batch_size].to(settings.device)),
            labels[: config.batch_size].to(settings.device),
        ).backward()

    yield Case(
        "6 steps of 100 images, ¼ width",
        {MINIMAL: minimal, LAB: lab},
        base=MINIMAL,
        goals=(AtMost(LAB, 1.02, MINIMAL),),
        work=Work(6 * operations(passes), "convolution", LAB),
        examples=count,
    )


BENCHMARK = Benchmark("loop", "Training loop of the CIFAR-10 experiment, images per second", cases)
