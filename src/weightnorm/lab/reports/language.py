"""Report section of experiment 5, the language model: bits per byte, ‖v‖, angle of a step."""

from __future__ import annotations

import math
from dataclasses import replace

from weightnorm.lab.records import RunRecord, by_seed
from weightnorm.lab.reports.aggregate import curve, final, finite_or_nan, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Line, Plot, PlotPanels, Section, Table, slug
from weightnorm.lab.reports.provenance import settings
from weightnorm.lab.reports.run_grid import (
    RunGrid,
    by_setting,
    finished,
    label,
    parameterization,
)
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.reports.tables import final_values, signed, unfinished
from weightnorm.lab.statistics import Interval, mean_interval, paired_differences

BLUE, GREEN, PURPLE = (
    STYLES[kind].color for kind in ("weight-norm", "weight-norm-mean-only", "mean-only-batch-norm")
)
METHODS = {
    "adamw standard": Style("AdamW", STYLES["standard"].color, "o"),
    "adamw weight-norm": Style("AdamW, weight norm", BLUE, "^"),
    "muon standard": Style("Muon", STYLES["batch-norm"].color, "s"),
    "muon weight-norm": Style("Muon, weight norm (Muown)", GREEN, "v"),
    "hyperball weight-norm": Style("Adam, fixed norm (Hyperball)", PURPLE, "D"),
}
PLAIN = {
    "adamw weight-norm": "adamw standard",
    "muon weight-norm": "muon standard",
    "hyperball weight-norm": "adamw standard",
}
"""Method → the one that it is compared with: the same optimizer without weight norm."""
METHOD_FIELDS = ("optimizer", "retract", "length_learning_rate", "weight_decay")
"""Fields that belong to a method; by default the last two depend on it."""
RETRACTED = "+retract=True"
RETRACTED_COLORS = {"adamw weight-norm": "#a6611a", "muon weight-norm": "#7f7f7f"}
METRICS = ("train_bits_per_byte", "test_bits_per_byte")
RESULT, TRIGRAM = "trigram_bits_per_byte", "trigram model"


def method(record: RunRecord) -> str:
    """Return optimizer and parameterization, with a mark if ‖v‖ is restored after every step."""
    name = f"{record.config.get('optimizer', 'unknown')} {parameterization(record)}"
    return name + RETRACTED * bool(record.config.get("retract"))


def label_without_retraction(record: RunRecord) -> str:
    """Return the label without `retract`, which is a curve of its own."""
    preset, _, changes = label(record).partition("+")
    kept = [change for change in changes.split(",") if change not in ("", "retract=True")]
    return "+".join([preset, ",".join(kept)]) if kept else preset


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 5: a part for each setting that compares, then the others."""
    styles = METHODS | {
        f"{kind}{RETRACTED}": Style(f"{METHODS[kind].name}, ‖v‖ restored", color, "x")
        for kind, color in RETRACTED_COLORS.items()
    }
    grids = [
        RunGrid(name, runs, "train_bits_per_byte", kind=method, styles=styles)
        for name, runs in by_setting(records, METHOD_FIELDS, label_without_retraction).items()
    ]
    compared = [runs for runs in grids if compares(runs)]
    others = [runs for runs in grids if not compares(runs)]
    return Section(
        "Language model (beyond the paper)",
        "A byte-level transformer on the Python source of torch, with weight norm in the optimizer "
        "of its blocks' matrices. Each method at the learning rate with the lowest mean training "
        "loss at the end. Lower is better.",
        (*map(part, compared or grids), *([other_settings(others)] if compared and others else [])),
    )


def compares(runs: RunGrid) -> bool:
    """Whether plain weights and another method were run at this setting."""
    return len(runs.grid) > 1 and not {*PLAIN.values()}.isdisjoint(runs.grid)


def other_settings(grids: list[RunGrid]) -> Section:
    """Tabulate the finished runs of settings with one method or without plain weights."""
    rows = []
    for runs in grids:
        for kind, rates in runs.grid.items():
            for rate, records in rates.items():
                done = finished(records)
                ends = (stat(final(r, metric) for r in done) for metric in METRICS)
                values = (end.text(digits=3) for end in ends)
                rows.append((runs.label, runs.name(kind), f"{rate:g}", *values, str(len(done))))
    head = ("setting", "method", "lr", "training", "held-out", "n")
    table = Table("Bits per byte", head, tuple(rows))
    intro = "Settings with one method, or without plain weights."
    return Section("language: other settings", intro, (table,))


def part(runs: RunGrid) -> Section:
    """Describe the runs of one preset."""

    def curves(metric: str, title: str, y: str, runs: RunGrid = runs) -> Plot:
        drawn = in_steps(best_lines(runs, metric), runs)
        name = slug(f"language {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "step", y, drawn)

    # Retraction has curves of its own in the figures of lengths and angles only.
    compared = replace(runs, records=[r for r in runs.records if not r.config.get("retract")])
    equal_steps = curves(
        "test_bits_per_byte", "At equal steps", "bits per byte of held-out text", compared
    )
    by_unit = [r for r in runs.records if r.config.get("optimizer") != "hyperball"]  # by matrix
    lengths = curves(
        "v_norm", "Length of v", "‖v‖, mean over units", replace(runs, records=by_unit)
    )
    content: list[Plot | PlotPanels | Table] = [
        steps_and_minutes(compared, equal_steps),
        results(runs),
        *differences(runs),
        *unfinished(runs),
        curves("train_bits_per_byte", "Training text", "bits per byte", compared),
        lengths,
        curves("step_angle", "Angle of a step", "radians, mean over units"),
        *learning_rates(compared),
        settings(runs.records),
    ]
    visible = (item for item in content if not isinstance(item, Plot) or item.lines)
    return Section(f"language: {runs.label}", runs.progress, tuple(visible), findings(runs))


def in_steps(drawn: tuple[Line, ...], runs: RunGrid) -> tuple[Line, ...]:
    """Return lines over training steps, from lines over epochs."""
    steps = finite_or_nan(runs.records[0].config.get("steps")) if drawn else math.nan
    return tuple(replace(line, x=tuple(steps * x for x in line.x)) for line in drawn)


def findings(runs: RunGrid) -> tuple[str, ...]:
    """Summarize the results: final values, and what weight norm changes under each optimizer."""
    if not runs.best_finished:
        return ()
    values = final_values(runs, "test_bits_per_byte", digits=3)
    trigram = "".join(f", {TRIGRAM} {value:.3f}" for value in trigram_values(runs))
    changes = "; ".join(
        f"{runs.name(kind)} {signed(change)}, n = {n}"
        for kind, (change, n) in paired(runs, "test_bits_per_byte").items()
    )
    return (
        f"Language model ({runs.label}): bits per byte of held-out text: {values}{trigram}.",
        *([f"Difference to the same optimizer without weight norm: {changes}."] if changes else []),
    )


def paired(runs: RunGrid, metric: str) -> dict[str, tuple[Interval, int]]:
    """Return how a metric differs from that of the same optimizer without weight norm: the mean
    over common seeds, its 95 % interval, and their number. Seeds share texts and initial weights.
    """
    done = {
        kind: {seed: math.nan if x is None else x for seed, x in by_seed(records, metric).items()}
        for kind, records in runs.best_finished.items()
    }
    found = {}
    for kind, values in done.items():
        plain = done.get(PLAIN.get(kind.removesuffix(RETRACTED), ""), {})
        if changes := paired_differences(values, plain):
            found[kind] = mean_interval(changes), len(changes)
    return found


def differences(runs: RunGrid) -> list[Table]:
    """Tabulate what weight norm changes under each optimizer, seed by seed."""
    training = paired(runs, "train_bits_per_byte")
    rows = tuple(
        (runs.name(kind), runs.name(PLAIN[kind.removesuffix(RETRACTED)]), signed(training[kind][0]),
         signed(held_out), str(n))
        for kind, (held_out, n) in paired(runs, "test_bits_per_byte").items()
    )  # fmt: skip
    head = ("method", "compared with", "training", "held-out", "n")
    note = (
        "Difference of the final bits per byte, mean over the seeds that both have [95 % interval]."
    )
    return [Table("Difference", head, rows, (note,))] if rows else []


def trigram_values(runs: RunGrid) -> list[float]:
    """Return the bits per byte of a trigram model: one value, if all runs have the same text."""
    values = (r.result.get(RESULT) for rs in runs.best_finished.values() for r in rs if r.result)
    return sorted({value for value in values if value is not None})


def steps_and_minutes(runs: RunGrid, equal_steps: Plot) -> PlotPanels:
    """Plot the held-out bits per byte against steps, and of finished runs against minutes."""
    drawn = []
    for kind, records in runs.best_finished.items():
        rate, _ = runs.best[kind]
        done = curve(records, "test_bits_per_byte")
        minutes = tuple(epoch * shortest_epoch(records) / 60 for epoch in done.x)
        name = f"{runs.name(kind)}, lr {rate:g}, n = {done.n}"
        spread = done.std if done.n > 1 else ()
        drawn.append(Line(name, runs.style(kind), minutes, done.mean, spread))
    equal_time = replace(
        equal_steps, title="At equal time", x="minutes of training", lines=tuple(drawn)
    )
    name, title = slug(f"language {runs.label} held-out"), "Held-out text"
    caption = f"{equal_steps.caption} Minutes: at the speed of the method's shortest epoch."
    return PlotPanels(name, title, caption, (equal_steps, equal_time))


def shortest_epoch(records: list[RunRecord]) -> float:
    """Return the seconds of the shortest epoch: the others share the machine with other work."""
    seconds = (finite_or_nan(row.get("seconds")) for record in records for row in record.metrics)
    return min((value for value in seconds if not math.isnan(value)), default=math.nan)


def results(runs: RunGrid) -> Table:
    """Tabulate the final bits per byte of each method at its best learning rate."""
    rows = []
    for kind, (rate, records) in runs.best.items():
        done = finished(records)
        train, test = (stat(final(r, metric) for r in done) for metric in METRICS)
        values = (train.text(digits=3), test.text(digits=3), str(len(done)), f"{rate:g}")
        rows.append((runs.name(kind), *values, f"{shortest_epoch(done):.1f}"))
    if trigram := trigram_values(runs):
        rows.append((TRIGRAM, "—", stat(trigram).text(digits=3), "—", "—", "—"))
    head = ("method", "training", "held-out", "n", "lr", "seconds per epoch")
    notes = (
        "Bits per byte after the last epoch: mean ± standard deviation over n finished runs.",
        "Seconds of the shortest epoch, without its evaluation: the others share the machine with "
        "other work.",
    )
    return Table("Bits per byte", head, tuple(rows), notes)


def learning_rates(runs: RunGrid) -> list[Plot]:
    """Plot the final training loss by learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, "train_bits_per_byte")
    name, title = slug(f"language {runs.label} rate"), "Training text by learning rate"
    y, x = "final bits per byte", "learning rate of the directions"
    return [Plot(name, title, line_caption(drawn), x, y, drawn, log_x=True)]
