"""Report section of experiment 3, DRAW: figure 3, bounds, ‖w‖, samples and drawings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import final, finite_or_nan, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Picture, Plot, Section, Table, slug
from weightnorm.lab.reports.pictures import image_grid, load_arrays
from weightnorm.lab.reports.provenance import config_values, deviations, settings
from weightnorm.lab.reports.run_grid import (
    RunGrid,
    by_setting,
    finished,
    label,
    parameterization,
)
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.reports.tables import (
    difference_table,
    epochs_sentence,
    epochs_table,
    final_values,
    times,
    unfinished,
)

METRIC = "test_negative_elbo"
PUBLISHED = ("DRAW with attention (published)", "—", "—", "−80.97", "—", "—", "—", "—")
CITED = (
    "The paper shows its bounds in a figure only. −80.97 is DRAW's own published bound, cited from "
    "memory of that paper and not verified."
)
USUAL = {"steps": "64", "hidden": "256", "epochs": "100", "limit": "none", "attention": "True"}
ZOOM = 4
"""Enlargement of drawings, so that a box of one pixel width is thin."""
COLUMNS, FRAMES = 10, 32
"""Columns of still images; frames of an animation."""
LAST = 10
"""How many times longer the last frame of an animation is shown."""
SQUARE = np.array([213, 94, 0], np.uint8)

Pixels = NDArray[np.uint8]


G_STYLES = {
    "standard": STYLES["standard"],
    "weight-norm": replace(STYLES["weight-norm"], name="weight norm, g = ‖v‖"),
    "weight-norm g=one-except-windows": Style(
        "weight norm, g = 1 except windows", STYLES["weight-norm-mean-only"].color, "v"
    ),
    "weight-norm g=one": Style("weight norm, g = 1", STYLES["batch-norm"].color, "s"),
}
"""Weight norm has one curve for each initial g."""


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 3, one part for each preset."""
    grids = [
        RunGrid(name, runs, "train_negative_elbo", kind=kind, styles=G_STYLES)
        for name, runs in by_setting(records, ("initial_g",), label_without_g).items()
    ]
    return Section(
        "Generative modelling: DRAW",
        "DRAW on binarized MNIST, standard and with every weight vector normalized (section 5.3 of "
        "the paper). The bound is the ELBO, a lower bound on the log-likelihood, in nats: higher "
        "is better. g is the initial length of the weight vectors.",
        tuple(map(part, grids)),
    )


def kind(record: RunRecord) -> str:
    """Return the parameterization, with the initial g of weight norm unless it is ‖v‖."""
    name, g = parameterization(record), record.config.get("initial_g", "norm")
    return name if g == "norm" or name != "weight-norm" else f"{name} g={g}"


def label_without_g(record: RunRecord) -> str:
    """Return the label without the initial g, which is a curve of its own.

    >>> from pathlib import Path
    >>> folder = Path("runs/draw/cpu+epochs=3,initial-g=one/weight-norm/lr-0.001/seed-1")
    >>> label_without_g(RunRecord(folder, "draw", "cpu", {}))
    'cpu+epochs=3'
    """
    preset, _, changes = label(record).partition("+")
    others = [change for change in changes.split(",") if not change.startswith("initial-g=")]
    return f"{preset}+{','.join(others)}" if any(others) else preset


def part(runs: RunGrid) -> Section:
    """Describe the runs of one preset."""

    def curves(metric: str, title: str, y: str = "bound, nats", scale: float = -1) -> Plot:
        drawn = best_lines(runs, metric, scale)
        name = slug(f"draw {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", y, drawn)

    content: list[Plot | Picture | Table] = [
        curves(METRIC, "Bound on the test set (the paper's figure 3)"),
        curves("train_negative_elbo", "Bound on the training set"),
        bounds(runs),
        *epochs_table(runs, METRIC, "test bound", -1),
        *difference_table(runs, METRIC, "test bound", -1, digits=1),
        curves("w_norm", "Length of the weight vectors", "‖w‖, mean over units", 1),
        curves("v_norm", "Length of v", "‖v‖, mean over units", 1),
        *unfinished(runs),
        *pictures(runs),
        *learning_rates(runs),
        times(runs),
        settings(runs.records),
    ]
    visible = (item for item in content if not isinstance(item, Plot) or item.lines)
    title = f"draw: {runs.label}"
    return Section(title, f"{_data(runs)}. {runs.progress}", tuple(visible), findings(runs))


def findings(runs: RunGrid) -> tuple[str, ...]:
    """Summarize the final bounds in a sentence."""
    if not runs.best_finished:
        return ()
    epochs = " or ".join(sorted(config_values(runs.records, "epochs")))
    values = final_values(runs, METRIC, -1, digits=1)
    return (
        f"{_data(runs)} ({runs.label}), {epochs} epochs: test bound in nats: {values}.",
        *epochs_sentence(runs, METRIC, "test bound", -1),
    )


def bounds(runs: RunGrid) -> Table:
    """Tabulate final bounds, beside the published one where comparable."""
    rows: list[tuple[str, ...]] = []
    for kind, (rate, records) in runs.best.items():
        done = finished(records)
        test, kl, train = (
            stat(sign * final(record, metric) for record in done)
            for sign, metric in ((-1, METRIC), (1, "test_kl"), (-1, "train_negative_elbo"))
        )
        epochs = " or ".join(sorted(config_values(records, "epochs")))
        words = (test.text(), str(len(done)), "—", train.text(), kl.text(), f"{rate:g}", epochs)
        rows.append((runs.name(kind), *words))
    head = ("parameterization", "test bound", "n", "published", "training bound", "KL, test")
    notes = ["Nats; mean ± standard deviation over n finished runs, at the last epoch."]
    if _mnist(runs):
        rows.append(PUBLISHED)
        notes.append(CITED)
        if other := deviations(runs.records, USUAL):
            usual = "64 steps, 256 units, 100 epochs, all data"
            notes.append(f"The paper's runs: {usual}. These: {other}.")
    return Table("Bounds", (*head, "lr", "epochs"), tuple(rows), tuple(notes))


def learning_rates(runs: RunGrid) -> list[Plot]:
    """Plot the final bound by learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, METRIC, scale=-1)
    name, title = slug(f"draw {runs.label} rate"), "Test bound by learning rate"
    x, y = "learning rate", "final bound, nats"
    return [Plot(name, title, line_caption(drawn), x, y, drawn, log_x=True)]


def _data(runs: RunGrid) -> str:
    return "Binarized MNIST" if _mnist(runs) else "Digits, not MNIST"


def _mnist(runs: RunGrid) -> bool:
    return set(config_values(runs.records, "data")) == {"binarized-mnist"}


class Snapshot(NamedTuple):
    """Samples and drawings that a run saved after an epoch."""

    epoch: int
    samples: Pixels  # (n, height, width)
    drawings: Pixels  # (T, n, height, width)
    boxes: NDArray[np.float32]  # (T, n, 3): centre y, x and side


def pictures(runs: RunGrid) -> list[Picture]:
    """Show samples and drawings of one run of each kind, at half of its epochs and at the end."""
    made = []
    for kind, (_, records) in runs.best.items():
        for record in sorted(records, key=lambda record: not record.finished):
            if kept := snapshots(record):
                of = f"{runs.name(kind)}, seed {record.config.get('seed', '?')}"
                name = slug(f"draw {runs.label} {kind}")
                made += [samples(snapshot, name, of) for snapshot in kept]
                made += drawings(kept[-1], name, of)
                break
    return made


def snapshots(record: RunRecord) -> list[Snapshot]:
    """Load the snapshots of a run that are complete."""
    last = finite_or_nan(record.config.get("epochs"))
    found = []
    for epoch in [] if math.isnan(last) else sorted({int(last) // 2, int(last)}):
        arrays = load_arrays(record, f"epoch-{epoch}")
        if {"samples", "drawings", "boxes"} <= set(arrays):
            images, steps = (arrays[name].astype(np.uint8) for name in ("samples", "drawings"))
            boxes = np.nan_to_num(arrays["boxes"].astype(np.float32))
            fit = images.ndim == 3 and steps.ndim == 4 and boxes.shape == (*steps.shape[:2], 3)
            if fit and images.size and steps.size:
                found.append(Snapshot(epoch, images, steps, boxes))
    return found


def samples(snapshot: Snapshot, name: str, of: str) -> Picture:
    """Show samples: the canvas after the last step."""
    return Picture(
        f"{name}-samples-{snapshot.epoch}",
        f"Samples after {snapshot.epoch} epochs: {of}",
        "Probabilities of the pixels; the same noise for every parameterization and epoch.",
        image_grid(snapshot.samples, COLUMNS, background=64)[None],
    )


def drawings(snapshot: Snapshot, name: str, of: str) -> list[Picture]:
    """Show the canvas after each step with the box that the step writes to, still and animated."""
    steps = np.stack(
        [
            np.stack([with_box(canvas, box) for canvas, box in zip(canvases, boxes, strict=True)])
            for canvases, boxes in zip(snapshot.drawings, snapshot.boxes, strict=True)
        ]
    )  # (T, n, height, width, 3)
    chosen = _spread(len(steps), COLUMNS)
    still = image_grid(steps[chosen].swapaxes(0, 1).reshape(-1, *steps.shape[2:]), len(chosen))
    frames = [image_grid(step, -(-len(step) // 2)) for step in steps[_spread(len(steps), FRAMES)]]
    moving = np.stack(frames + frames[-1:] * LAST)
    at = ", ".join(str(step + 1) for step in chosen)
    square = "The box is the window that the step writes to."
    return [
        Picture(
            f"{name}-drawing",
            f"Drawings, step by step: {of}",
            f"Steps {at} from left to right. {square}",
            still[None],
        ),
        Picture(f"{name}-moving", f"Drawings, animated: {of}", square, moving, seconds=0.12),
    ]


def with_box(canvas: Pixels, box: NDArray[np.float32]) -> Pixels:
    """Enlarge a canvas and draw the part of `box` that lies within it."""
    image = np.repeat(canvas.repeat(ZOOM, 0).repeat(ZOOM, 1)[..., None], 3, 2)
    y, x, side = box.tolist()
    edges = [
        [round((centre + sign * side / 2 + 0.5) * ZOOM) for sign in (-1, 1)] for centre in (y, x)
    ]
    (top, bottom), (left, right) = (
        [min(max(edge, 0), size - 1) for edge in pair]
        for pair, size in zip(edges, image.shape, strict=False)
    )
    image[[top, bottom], left : right + 1] = SQUARE
    image[top : bottom + 1, [left, right]] = SQUARE
    return image


def _spread(count: int, most: int) -> NDArray[np.int_]:
    """Choose at most `most` steps, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))
