"""How the lines of a claim's figure style."""

from weightnorm.lab.reports.claims import drawn_as
from weightnorm.lab.reports.style import STYLES


def test_a_parameterization_looks_as_everywhere():
    names = ["standard", "weight-norm", "weight-norm-log", "batch-norm"]
    styles = dict(zip(names, drawn_as(names), strict=True))
    for name in ("standard", "weight-norm", "batch-norm"):
        assert styles[name] == STYLES[name]
    assert styles["weight-norm-log"].name == "weight-norm-log"
    assert len({style.color for style in styles.values()}) == 4


def test_what_stands_behind_a_comma_changes_the_name_alone():
    small, large = drawn_as(["batch-norm, batch 64", "batch-norm, batch 256"])
    assert (small.name, small.color) == ("batch norm, batch 64", STYLES["batch-norm"].color)
    assert large.name == "batch norm, batch 256"
    assert large.color != small.color


def test_there_may_be_more_lines_than_looks():
    assert len(drawn_as([*STYLES, "one more"])) == len(STYLES) + 1
