"""The benchmark runs and says what it measured; how long that took is for a quiet machine."""

import re

from weightnorm.lab.benchmarks import optimizer_step


def test_a_row_for_each_form(capsys):
    optimizer_step.main(["--width", "0.02", "--batch-size", "4", "--rounds", "1", "--threads", "1"])
    out = capsys.readouterr().out
    for form in optimizer_step.FORMS:
        ((passes, step, both, _),) = re.findall(rf"{form}\W+" + r"\W+".join([r"([\d.]+)"] * 4), out)
        assert abs(float(passes) + float(step) - float(both)) < 0.02
