"""All benchmarks, in the order in which they are measured."""

from __future__ import annotations

from importlib.util import find_spec

from weightnorm.lab.bench import convnet, dora, dqn, kernels, launches, layers, optimizer
from weightnorm.lab.bench.benchmark import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        convnet.STEP,
        layers.SMALL_LAYERS,
        layers.RECURRENT,
        layers.OPERATIONS,
        layers.MEAN_ONLY_LAYERS,
        optimizer.BENCHMARK,
        convnet.MEMORY,
        dqn.BENCHMARK,
        launches.BENCHMARK,
        *([dora.BENCHMARK] if find_spec("peft") else []),
        *([kernels.BENCHMARK] if find_spec("triton") else []),
    )
}
