"""Styles of the lines in a claim's figures."""

from weightnorm.lab.reports.claims import line_styles
from weightnorm.lab.reports.style import STYLES


def test_a_parameterization_has_its_usual_style():
    names = ["standard", "weight-norm", "weight-norm-log", "batch-norm"]
    styles = dict(zip(names, line_styles(names), strict=True))
    for name in ("standard", "weight-norm", "batch-norm"):
        assert styles[name] == STYLES[name]
    assert styles["weight-norm-log"].name == "weight-norm-log"
    assert len({style.color for style in styles.values()}) == 4


def test_text_after_a_comma_changes_only_the_name():
    small, large = line_styles(["batch-norm, batch 64", "batch-norm, batch 256"])
    assert (small.name, small.color) == ("batch norm, batch 64", STYLES["batch-norm"].color)
    assert large.name == "batch norm, batch 256"
    assert large.color != small.color


def test_there_may_be_more_lines_than_styles():
    assert len(line_styles([*STYLES, "one more"])) == len(STYLES) + 1
