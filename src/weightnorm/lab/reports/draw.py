"""The section of experiment 3, DRAW: the paper's figure, how many epochs weight norm saves, and
drawings to look at."""

from __future__ import annotations

import math
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.reports.aggregate import final, finite_or_nan, series, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Picture, Plot, Section, Table, slug
from weightnorm.lab.reports.pictures import image_grid, load_arrays
from weightnorm.lab.reports.provenance import config_values, deviations, settings
from weightnorm.lab.reports.run_grid import RunGrid, finished, run_grids
from weightnorm.lab.reports.style import style_of
from weightnorm.lab.reports.tables import times, unfinished
from weightnorm.lab.runs.records import RunRecord

METRIC = "test_negative_elbo"
PUBLISHED = ("DRAW with attention (published)", "—", "—", "−80.97", "—", "—", "—", "—")
CITED = (
    "The paper shows its bounds in a figure only. −80.97 is DRAW's own published bound, cited from "
    "memory of that paper and not verified."
)
USUAL = {"steps": "64", "hidden": "256", "epochs": "100", "limit": "none", "attention": "True"}
ZOOM = 4
"""Pixels of a picture for each pixel of a drawing, so that a thin square fits around some."""
COLUMNS, FRAMES = 10, 32
"""Of samples, and steps of a drawing that are shown side by side; and of one that moves."""
LAST = 10
"""How many times longer the end of a moving drawing is shown."""
SQUARE = np.array([213, 94, 0], np.uint8)

Pixels = NDArray[np.uint8]


def section(records: list[RunRecord]) -> Section:
    """Experiment 3, a part for each preset."""
    return Section(
        "Generative modelling: DRAW",
        "DRAW on binarized MNIST, standard and with every weight vector normalized (section 5.3 of "
        "the paper). The bound is the ELBO, a lower bound on the log-likelihood, in nats: higher "
        "is better.",
        tuple(map(part, run_grids(records, metric="train_negative_elbo"))),
    )


def part(runs: RunGrid) -> Section:
    """Everything about the runs of one preset."""

    def curves(metric: str, title: str) -> Plot:
        drawn = best_lines(runs, metric, scale=-1)
        name = slug(f"draw {runs.label} {metric}")
        return Plot(name, title, line_caption(drawn), "epoch", "bound, nats", drawn)

    content: list[Plot | Picture | Table] = [
        curves(METRIC, "Bound on the test set (the paper's figure 3)"),
        curves("train_negative_elbo", "Bound on the training set"),
        bounds(runs),
        *epochs_to_same_bound(runs),
        *unfinished(runs),
        *pictures(runs),
        *learning_rates(runs),
        times(runs),
        settings(runs.records),
    ]
    shown = (item for item in content if not isinstance(item, Plot) or item.lines)
    data = "Binarized MNIST" if _mnist(runs) else "Digits, not MNIST"
    intro = f"{data}. {len(finished(runs.records))} of {len(runs.records)} runs are finished."
    return Section(f"draw: {runs.label}", intro, tuple(shown))


# — numbers —


def bounds(runs: RunGrid) -> Table:
    """Bounds at the end, beside the published one where it is comparable."""
    rows: list[tuple[str, ...]] = []
    for kind, (rate, records) in runs.best.items():
        done = finished(records)
        test, kl, train = (
            stat(sign * final(record, metric) for record in done)
            for sign, metric in ((-1, METRIC), (1, "test_kl"), (-1, "train_negative_elbo"))
        )
        epochs = " or ".join(sorted(config_values(records, "epochs")))
        words = (test.text(), str(len(done)), "—", train.text(), kl.text(), f"{rate:g}", epochs)
        rows.append((style_of(kind).name, *words))
    head = ("parameterization", "test bound", "n", "published", "training bound", "KL, test")
    notes = ["Nats; mean ± standard deviation over n finished runs, at the last epoch."]
    if _mnist(runs):
        rows.append(PUBLISHED)
        notes.append(CITED)
        if other := deviations(runs.records, USUAL):
            notes.append(f"Usual: 64 steps, 256 units, 100 epochs, all data. These: {other}.")
    return Table("Bounds", (*head, "lr", "epochs"), tuple(rows), tuple(notes))


def epochs_to_same_bound(runs: RunGrid) -> list[Table]:
    """When each parameterization reaches the bound that the other ends with."""
    done = {kind: finished(records) for kind, (_, records) in runs.best.items()}
    rows = []
    for kind, other in permutations([kind for kind in done if done[kind]], 2):
        end = stat(final(record, METRIC) for record in done[other])
        there = stat(reached(record, end.mean) for record in done[kind])
        theirs = stat(finite_or_nan(record.config.get("epochs")) for record in done[other])
        saved = f"{theirs.mean - there.mean:.1f}" if there.complete and theirs.complete else "—"
        bound = stat([-end.mean]).text()
        row = (style_of(kind).name, f"{style_of(other).name}'s last, {bound}", there.text(digits=1))
        rows.append((*row, saved, str(there.runs)))
    head = ("parameterization", "bound to reach", "epochs to reach it", "epochs sooner", "n")
    notes = ("Mean ± standard deviation over n finished runs. —: not by all of them.",)
    return [Table("Epochs to the same bound", head, tuple(rows), notes)] if rows else []


def reached(record: RunRecord, target: float) -> float:
    """The first epoch whose test bound is as good; nan if none is."""
    good = (epoch for epoch, value in series(record, METRIC).items() if value <= target)
    return min(good, default=math.nan)


def learning_rates(runs: RunGrid) -> list[Plot]:
    """What the learning rate does to the end of training, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, METRIC, scale=-1)
    name, title = slug(f"draw {runs.label} rate"), "Test bound by learning rate"
    x, y = "learning rate", "final bound, nats"
    return [Plot(name, title, line_caption(drawn), x, y, drawn, log_x=True)]


def _mnist(runs: RunGrid) -> bool:
    return set(config_values(runs.records, "data")) == {"binarized-mnist"}


# — pictures —


class Snapshot(NamedTuple):
    """What a run kept of an epoch."""

    epoch: int
    samples: Pixels  # (n, height, width)
    drawings: Pixels  # (T, n, height, width)
    boxes: NDArray[np.float32]  # (T, n, 3): centre y, x and side


def pictures(runs: RunGrid) -> list[Picture]:
    """Samples and drawings of one run of each parameterization, at its half and at its end."""
    made = []
    for kind, (_, records) in runs.best.items():
        for record in sorted(records, key=lambda record: not record.finished):
            if kept := snapshots(record):
                of = f"{style_of(kind).name}, seed {record.config.get('seed', '?')}"
                name = slug(f"draw {runs.label} {kind}")
                made += [samples(snapshot, name, of) for snapshot in kept]
                made += drawings(kept[-1], name, of)
                break
    return made


def snapshots(record: RunRecord) -> list[Snapshot]:
    """Those that are there and whole."""
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
    """What the model draws, at its last step."""
    return Picture(
        f"{name}-samples-{snapshot.epoch}",
        f"Samples after {snapshot.epoch} epochs: {of}",
        "Probabilities of the pixels; the same noise for every parameterization and epoch.",
        image_grid(snapshot.samples, COLUMNS, background=64)[None],
    )


def drawings(snapshot: Snapshot, name: str, of: str) -> list[Picture]:
    """The canvas as it grows, and the square that each step writes to: side by side, and moving."""
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
    square = "The square is what the step's filters span."
    return [
        Picture(
            f"{name}-drawing",
            f"Drawings, step by step: {of}",
            f"Steps {at} from left to right. {square}",
            still[None],
        ),
        Picture(f"{name}-moving", f"Drawings, moving: {of}", square, moving, seconds=0.12),
    ]


def with_box(canvas: Pixels, box: NDArray[np.float32]) -> Pixels:
    """A canvas, enlarged and in color, with a thin square: what is of `box` within it."""
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
    """At most that many steps, the first and the last among them, evenly spread."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))
