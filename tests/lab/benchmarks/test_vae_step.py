"""The benchmark runs and says what it measured; how long that took is for a quiet machine."""

import re

from weightnorm.lab.benchmarks import vae_step


def test_a_row_for_each_data_set(capsys):
    vae_step.main(["--width", "0.05", "--batch-size", "2", "--rounds", "1", "--threads", "1"])
    rows = re.findall(r"(MNIST|CIFAR-10)\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", capsys.readouterr().out)
    assert [name for name, *_ in rows] == ["MNIST", "CIFAR-10"]
    for _, standard, normed, ratio in rows:
        assert abs(float(normed) / float(standard) - float(ratio)) < 0.05 * float(ratio)
