"""The step's benchmark: it measures the same function four times."""

import pytest
import torch

from weightnorm import normalized_weights
from weightnorm.lab.benchmarks.draw_step import NETWORKS, main, networks
from weightnorm.lab.benchmarks.side_by_side import interleaved


def test_the_four_compute_the_same():
    x, noise = torch.rand(3, 784).round(), torch.randn(4, 3, 100)
    made = networks(hidden=8)
    bounds = [model(x, noise).negative_elbo for model in made.values()]
    for bound in bounds[1:]:
        torch.testing.assert_close(bound, bounds[0])
    assert [len(normalized_weights(model)) for model in made.values()] == [0, 9, 0, 9]


def test_it_prints_every_network(capsys):
    sizes = {"--steps": "2", "--hidden": "4", "--batch-size": "2", "--rounds": "1"}
    small = [word for pair in sizes.items() for word in pair]
    seconds = main(small)
    assert list(seconds) == list(NETWORKS)
    assert all(value > 0 for value in seconds.values())
    out = capsys.readouterr().out
    assert all(name in out for name in NETWORKS)


def test_turns_are_taken_and_the_first_round_is_not_counted(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def step(name, durations):
        def run():
            order.append(name)
            now[0] += durations.pop(0)

        return run

    steps = {"a": step("a", [100.0, 1.0, 2.0, 9.0]), "b": step("b", [100.0, 5.0, 5.0, 5.0])}
    assert interleaved(steps, rounds=3) == pytest.approx({"a": 2.0, "b": 5.0})
    assert order == ["a", "b"] * 4
