"""How the lines of a claim's figure look."""

from weightnorm.lab.reports.claims import drawn_as
from weightnorm.lab.reports.style import LOOKS


def test_a_parameterization_looks_as_everywhere():
    names = ["standard", "weight-norm", "weight-norm-log", "batch-norm"]
    looks = dict(zip(names, drawn_as(names), strict=True))
    for name in ("standard", "weight-norm", "batch-norm"):
        assert looks[name] == LOOKS[name]
    assert looks["weight-norm-log"].name == "weight-norm-log"
    assert len({look.colour for look in looks.values()}) == 4


def test_what_stands_behind_a_comma_changes_the_name_alone():
    small, large = drawn_as(["batch-norm, batch 64", "batch-norm, batch 256"])
    assert (small.name, small.colour) == ("batch norm, batch 64", LOOKS["batch-norm"].colour)
    assert large.name == "batch norm, batch 256"
    assert large.colour != small.colour


def test_there_may_be_more_lines_than_looks():
    assert len(drawn_as([*LOOKS, "one more"])) == len(LOOKS) + 1
