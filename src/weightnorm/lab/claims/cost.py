"""Claims 16 and 22: cost in time, read from the benchmark's record (sections 4 and 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightnorm.lab.bench import convnet
from weightnorm.lab.bench.benchmark import Limit, estimate, extra_at_most, load, ratio_interval
from weightnorm.lab.bench.layers import (
    ALONE,
    BATCH_NORM,
    FIRST_LAYERS,
    LAYOUTS,
    MEAN_ONLY,
    mean_only_case_name,
)
from weightnorm.lab.bench.peers import OURS, PLAIN
from weightnorm.lab.claims.claim import (
    NOT_MEASURED,
    Context,
    Outcome,
    Statement,
    above,
    below,
    claim,
    weakest,
)
from weightnorm.lab.statistics import Interval

NOTICEABLE = 1.05
"""Time relative to standard from which a difference is noticeable."""
RECORD = "the step of ConvPool-CNN-C at the paper's size, from the record of `weightnorm bench`"


def case_of(context: Context, benchmark: str, case: str) -> dict[str, Any] | None:
    """Return a case of the benchmark's record; None if there is none."""
    path = context.records / "bench" / "result.json"
    if not path.exists():
        return None
    for each in load(path)["benchmarks"]:
        for found in each["cases"]:
            if (each["name"], found["case"]) == (benchmark, case):
                return found  # type: ignore[no-any-return]
    return None


@claim(
    16,
    "5.1",
    Statement(
        "A step is slower with batch norm",
        "16 % slower, on a GPU",
        f"{RECORD}: relative to standard above {NOTICEABLE}",
    ),
    Statement(
        "…and not noticeably slower with weight norm",
        "not noticeably",
        f"the same record: below {NOTICEABLE}",
    ),
    records=True,
)
def step_time(context: Context) -> list[Outcome]:
    case = case_of(context, "step", f"batch of {convnet.BATCH}")
    if case is None:
        return [Outcome("no record of the benchmark", NOT_MEASURED, 0)] * 2
    samples, n = case["samples"], case["rounds"]
    batch_norm = ratio_interval(samples, convnet.BATCH_NORM, PLAIN)
    weight_norm = ratio_interval(samples, OURS, PLAIN)
    return [
        Outcome(str(batch_norm), above(batch_norm, NOTICEABLE), n),
        Outcome(str(weight_norm), below(weight_norm, NOTICEABLE), n),
    ]


@claim(
    22,
    "4",
    Statement(
        "Mean-only batch norm costs less than batch norm",
        "lower overhead",
        "a 3×3 convolution of 96 channels and 100 images, forward and backward, from the record of "
        "`weightnorm bench`: its extra time relative to that of batch norm below 1, in both memory "
        "layouts. Whole steps beside it",
    ),
    records=True,
)
def mean_only_cost(context: Context) -> list[Outcome]:
    cases = {
        layout: case_of(context, "mean-only", mean_only_case_name(layout, FIRST_LAYERS))
        for layout in LAYOUTS
    }
    found = {layout: case["samples"] for layout, case in cases.items() if case is not None}
    if len(found) < len(LAYOUTS):
        return [Outcome("no record of the benchmark", NOT_MEASURED, 0)]
    extra = extra_at_most(MEAN_ONLY, 1.0, BATCH_NORM, ALONE)
    values = {layout: value_of(extra, samples) for layout, samples in found.items()}
    text = ", ".join(f"{layout} {x}" for layout, x in values.items())
    step = case_of(context, "step", f"batch of {convnet.BATCH}")
    if step is not None:
        whole = ratio_interval(step["samples"], convnet.MEAN_ONLY, convnet.BATCH_NORM)
        text += f"; a whole step with weight norm, relative to batch norm: {whole}"
    verdict = weakest(*(below(x, 1.0) for x in values.values()))
    return [Outcome(text, verdict, min(len(x[ALONE]) for x in found.values()), values)]


def value_of(limit: Limit, samples: Mapping[str, Any]) -> Interval:
    return estimate(samples, limit.peers, limit.value)
