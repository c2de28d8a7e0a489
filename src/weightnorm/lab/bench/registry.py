"""All benchmarks, in the order in which they are measured."""

from __future__ import annotations

from weightnorm.lab.bench.benchmark import Benchmark
from weightnorm.lab.bench.cases import (
    acting,
    convnet,
    dqn_steps,
    draw_step,
    launches,
    loop,
    low_rank_norm,
    mean_only,
    monitor_step,
    op,
    optimizer_step,
    recurrent,
    scaling,
    vae_step,
    vocoder,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        convnet.STEP,
        vocoder.BENCHMARK,
        recurrent.BENCHMARK,
        acting.BENCHMARK,
        op.BENCHMARK,
        mean_only.BENCHMARK,
        convnet.INIT,
        optimizer_step.BENCHMARK,
        convnet.MEMORY,
        scaling.BENCHMARK,
        loop.BENCHMARK,
        draw_step.BENCHMARK,
        dqn_steps.BENCHMARK,
        vae_step.BENCHMARK,
        monitor_step.BENCHMARK,
        low_rank_norm.BENCHMARK,
        launches.BENCHMARK,
    )
}
