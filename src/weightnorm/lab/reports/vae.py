"""Report section of experiment 2, the convolutional VAE: figure 2, bounds, samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import final, stat
from weightnorm.lab.reports.curves import best_lines, line_caption, rate_lines
from weightnorm.lab.reports.document import Picture, Plot, Section, Table, slug
from weightnorm.lab.reports.pictures import image_grid, load_arrays
from weightnorm.lab.reports.provenance import config_values, deviations, settings
from weightnorm.lab.reports.run_grid import RunGrid, finished, grouped, run_grids
from weightnorm.lab.reports.tables import (
    difference_table,
    epochs_sentence,
    epochs_table,
    final_values,
    times,
    unfinished,
)

DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "Digits"}
UNSURE = "published, from memory"
PUBLISHED = {
    "mnist": [
        (f"diagonal posterior ({UNSURE})", "−84.08"),
        (f"two steps of flow, 320 units ({UNSURE})", "−82.02"),
    ],
    "cifar10": [
        ("the authors' larger runs, in Theano (published)", "3.28"),
        ("the authors' larger runs, in TensorFlow (published)", "3.15"),
    ],
}
"""Bounds in nats; on CIFAR-10, bits per dimension."""
PAPER_SIZE = {"width": "1", "depth": "2", "latents": "32", "limit": "none"}
COLUMNS = 8
"""Columns of image grids."""


def section(records: list[RunRecord]) -> Section:
    """Describe experiment 2, one part for each data set and preset."""
    groups = grouped(records, _data)
    parts = [
        part(data, runs)
        for data, group in sorted(groups.items(), key=lambda item: (item[0] == "cifar10", item[0]))
        for runs in run_grids(group, metric="train_negative_elbo")
    ]
    return Section(
        "Convolutional VAE with inverse autoregressive flow",
        "Standard parameterization and weight normalization from the same initialization "
        "(section 5.2 of the paper), compared by the bound on log p(x) over the test set, with "
        "averaged parameters.",
        tuple(parts),
    )


def part(data: str, runs: RunGrid) -> Section:
    """Describe the runs of one data set and preset."""
    title = f"vae: {DATA.get(data, data)}, {runs.label}"
    name = slug(f"vae {data} {runs.label}")

    def curves(metric: str, title: str, y: str, scale: float = 1) -> Plot:
        drawn = best_lines(runs, metric, scale)
        return Plot(f"{name}-{slug(metric)}", title, line_caption(drawn), "epoch", y, drawn)

    content: list[Plot | Picture | Table] = [
        curves("test_negative_elbo", "Bound (the paper's figure 2)", "bound on log p(x), nats", -1),
        curves("test_bits_per_dim", "Bits per dimension", "bits per dimension"),
        curves("train_negative_elbo", "Bound in training", "bound on log p(x), nats", -1),
        bounds(data, runs),
        *epochs_table(runs, "test_negative_elbo", "test bound", -1),
        *difference_table(runs, "test_negative_elbo", "test bound", -1, digits=1),
        divergences(runs),
        *learning_rates(name, runs),
        *pictures(name, runs),
        *unfinished(runs),
        times(runs),
        settings(runs.records),
    ]
    visible = (item for item in content if not isinstance(item, Plot) or item.lines)
    return Section(title, runs.progress, tuple(visible), findings(data, runs))


def findings(data: str, runs: RunGrid) -> tuple[str, ...]:
    """Summarize the final bounds in a sentence."""
    if not runs.best_finished:
        return ()
    place = f"{DATA.get(data, data)} ({runs.label}), {_either(runs, 'epochs')} epochs"
    if data == "cifar10":
        values = f"test bits/dim: {final_values(runs, 'test_bits_per_dim')}"
    else:
        values = f"test bound in nats: {final_values(runs, 'test_negative_elbo', -1)}"
    epochs = epochs_sentence(runs, "test_negative_elbo", "test bound", -1)
    return (f"{place}: {values}.", *epochs)


def bounds(data: str, runs: RunGrid) -> Table:
    """Tabulate final bounds beside published ones."""
    results = {
        "bound, nats": ("test_negative_elbo", -1),
        "bits/dim": ("test_bits_per_dim", 1),
        "log p(x), nats": ("importance_negative_log_likelihood", -1),
        "its bound, nats": ("importance_negative_elbo", -1),
        "training bound, nats": ("train_negative_elbo", -1),
    }
    if data != "cifar10":
        del results["bits/dim"]
    rows: list[tuple[str, ...]] = []
    for kind, (rate, records) in runs.best.items():
        done = finished(records)
        cells = [stat(sign * final(r, key) for r in done).text() for key, sign in results.values()]
        epochs = " or ".join(sorted(config_values(records, "epochs")))
        rows.append((runs.name(kind), *cells, str(len(done)), f"{rate:g}", epochs))
    place = [*results].index("bits/dim" if data == "cifar10" else "bound, nats")
    for name, value in PUBLISHED.get(data, ()):
        cells = ["—"] * len(results)
        cells[place] = value
        rows.append((name, *cells, "—", "—", "—"))
    notes = [
        "Mean ± standard deviation over n finished runs: the paper found a better bound and less "
        "variance between seeds with weight normalization.",
        f"log p(x) is estimated with {_either(runs, 'importance_samples')} importance samples on "
        f"{_examples(runs)}, and its bound is from the same draws.",
    ]
    if data in PUBLISHED and (other := deviations(runs.records, PAPER_SIZE)):
        notes.append(f"The full size: width 1, depth 2, 32 latents, all data. These: {other}.")
    head = ("parameterization", *results, "n", "lr", "epochs")
    return Table("Bounds", head, tuple(rows), tuple(notes))


def divergences(runs: RunGrid) -> Table:
    """Tabulate the KL divergence of each stochastic layer at the last epoch."""
    keys = sorted(
        {key for r in runs.records for row in r.metrics for key in row if _is_layer(key)},
        key=lambda key: int(key.rpartition("_")[2]),
    )
    rows = []
    for kind, (_, records) in runs.best.items():
        done = finished(records)
        cells = (stat(final(r, key) for r in done).text() for key in keys)
        rows.append((runs.name(kind), *cells, str(len(done))))
    head = ("parameterization", *(f"layer {key.rpartition('_')[2]}" for key in keys), "n")
    notes = ("Nats on the test set, at the last epoch. Layer 1 is the top, drawn first.",)
    return Table("KL of each stochastic layer", head, tuple(rows), notes)


def learning_rates(name: str, runs: RunGrid) -> list[Plot]:
    """Plot the bound against the learning rate, if more than one was tried."""
    if not any(len(rates) > 1 for rates in runs.grid.values()):
        return []
    drawn = rate_lines(runs, "test_negative_elbo", -1)
    title, y = "Bound by learning rate", "final bound, nats"
    return [Plot(f"{name}-rate", title, line_caption(drawn), "learning rate", y, drawn, log_x=True)]


def pictures(name: str, runs: RunGrid) -> list[Picture]:
    """Show samples and reconstructions of the first finished run of each parameterization."""
    drawn = []
    for kind, (_, records) in runs.best.items():
        for record in finished(records)[:1]:
            images = _images(record)
            whose = f"{runs.name(kind)}, seed {record.config.get('seed', '?')}"
            if "samples" in images:
                caption = "The mean of p(x|z) for z drawn from the prior, with averaged parameters."
                sheet = image_grid(images["samples"], COLUMNS)
                file = slug(f"{name} samples {kind}")
                drawn.append(Picture(file, f"Samples: {whose}", caption, sheet[None]))
            if {"originals", "reconstructions"} <= set(images):
                pairs = _alternating(images["originals"], images["reconstructions"])
                caption = "Test images, each with its reconstruction below."
                file = slug(f"{name} reconstructions {kind}")
                sheet = image_grid(pairs, COLUMNS)
                drawn.append(Picture(file, f"Reconstructions: {whose}", caption, sheet[None]))
    return drawn


def _alternating(above: NDArray[np.uint8], below: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Interleave two sets of images row by row."""
    rows = [
        images[start : start + COLUMNS]
        for start in range(0, min(len(above), len(below)) // COLUMNS * COLUMNS, COLUMNS)
        for images in (above, below)
    ]
    return np.concatenate(rows)


def _images(record: RunRecord) -> dict[str, NDArray[np.uint8]]:
    """Load the arrays of a run that are images."""
    return {
        key: x.astype(np.uint8)
        for key, x in load_arrays(record, "pictures").items()
        if x.dtype == np.uint8 and x.ndim >= 3 and x.shape[3:] in ((), (3,)) and len(x) >= COLUMNS
    }


def _is_layer(key: str) -> bool:
    start, _, number = key.rpartition("_")
    return start == "test_kl" and number.isdecimal()


def _data(record: RunRecord) -> str:
    return str(record.config.get("data", "unknown data"))


def _either(runs: RunGrid, field: str) -> str:
    return " or ".join(sorted(config_values(runs.records, field)))


def _examples(runs: RunGrid) -> str:
    count = _either(runs, "importance_examples")
    return "the test set" if count == "none" else f"the first {count} test examples"
