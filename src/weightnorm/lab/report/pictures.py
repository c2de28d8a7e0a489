"""Images from the arrays that runs saved: samples, reconstructions, drawings, games."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from weightnorm.lab.records import RunRecord
from weightnorm.lab.results import number

Pixels = NDArray[np.uint8]

WIDTH = 640
"""Pixels; smaller images are enlarged up to this width."""
COLUMNS = {"vae": 8, "draw": 10}
ZOOM = 4
"""Enlargement of drawings, so that a box of one pixel width is thin."""
FRAMES, LAST = 32, 10
"""Frames of an animation, and how many times longer the last one is shown."""
STEP_SECONDS = 4 / 60
"""Duration of an agent's step: four frames of the game."""
BOX = np.array([213, 94, 0], np.uint8)


class Picture(NamedTuple):
    """An image, or an animation if there are several frames."""

    name: str
    title: str
    caption: str
    frames: Pixels  # (frames, height, width), or (frames, height, width, 3) in color
    seconds: float = 0.1

    def file(self) -> tuple[str, bytes]:
        """Encode the picture: ``png`` or ``gif``, and its bytes. Small ones are enlarged."""
        factor = max(1, WIDTH // self.frames.shape[2])
        images = [Image.fromarray(x.repeat(factor, 0).repeat(factor, 1)) for x in self.frames]
        buffer = io.BytesIO()
        if len(images) == 1:
            images[0].save(buffer, "png", optimize=True)
            return "png", buffer.getvalue()
        times = {"loop": 0, "duration": round(1000 * self.seconds)}
        images[0].save(buffer, "gif", save_all=True, append_images=images[1:], **times)
        return "gif", buffer.getvalue()


def load_arrays(record: RunRecord, name: str) -> dict[str, NDArray[np.generic]]:
    """Load the arrays of ``name.npz`` in a run's folder; none if it is missing or damaged."""
    try:
        with (
            (record.folder / f"{name}.npz").open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            return {key: arrays[key] for key in arrays.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return {}


def image_grid(images: Pixels, columns: int, background: int = 128) -> Pixels:
    """Arrange images (n, height, width) or (n, height, width, 3) in rows, as one image.

    >>> image_grid(np.zeros((3, 2, 2), np.uint8), columns=2).shape
    (5, 5)
    """
    n, height, width, *color = images.shape
    rows = -(-n // columns)
    shape = (rows * (height + 1) - 1, columns * (width + 1) - 1, *color)
    sheet = np.full(shape, background, np.uint8)
    for index, image in enumerate(images):
        y, x = (index // columns) * (height + 1), (index % columns) * (width + 1)
        sheet[y : y + height, x : x + width] = image
    return sheet


def seed(record: RunRecord) -> str:
    return f"seed {record.config.get('seed', '?')}"


def vae_pictures(runs: pd.DataFrame, of: str) -> Iterator[Picture]:
    """Show samples and reconstructions of the first run."""
    record, columns = runs["record"].iloc[0], COLUMNS["vae"]
    of, arrays = f"{of}, {seed(record)}", load_arrays(record, "pictures")
    images = {
        key: x.astype(np.uint8)
        for key, x in arrays.items()
        if x.dtype == np.uint8 and x.ndim >= 3 and x.shape[3:] in ((), (3,)) and len(x) >= columns
    }
    if "samples" in images:
        caption = "The mean of p(x|z) for z drawn from the prior, with averaged parameters."
        sheet = image_grid(images["samples"], columns)[None]
        yield Picture("samples", f"Samples: {of}", caption, sheet)
    if {"originals", "reconstructions"} <= set(images):
        above, below = images["originals"], images["reconstructions"]
        rows = [
            each[start : start + columns]
            for start in range(0, min(len(above), len(below)) // columns * columns, columns)
            for each in (above, below)
        ]
        sheet = image_grid(np.concatenate(rows), columns)[None]
        caption = "Test images, each with its reconstruction below."
        yield Picture("reconstructions", f"Reconstructions: {of}", caption, sheet)


class Snapshot(NamedTuple):
    """Samples and drawings that a run saved after an epoch."""

    epoch: int
    samples: Pixels  # (n, height, width)
    drawings: Pixels  # (T, n, height, width)
    boxes: NDArray[np.float32]  # (T, n, 3): centre y, x and side


def draw_pictures(runs: pd.DataFrame, of: str) -> Iterator[Picture]:
    """Show samples and drawings of the first run that saved any, at half of its epochs and at the
    end."""
    records = [record for record in runs["record"] if snapshots(record)]
    for record in records[:1]:
        yield from snapshot_pictures(snapshots(record), f"{of}, {seed(record)}")


def snapshot_pictures(kept: list[Snapshot], of: str) -> Iterator[Picture]:
    for snapshot in kept:
        yield Picture(
            f"samples-{snapshot.epoch}",
            f"Samples after {snapshot.epoch} epochs: {of}",
            "Probabilities of the pixels; the same noise for every parameterization and epoch.",
            image_grid(snapshot.samples, COLUMNS["draw"], background=64)[None],
        )
    yield from drawings(kept[-1], of)


def snapshots(record: RunRecord) -> list[Snapshot]:
    """Load the snapshots of a run that are complete."""
    last = number(record.config.get("epochs"))
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


def drawings(snapshot: Snapshot, of: str) -> Iterator[Picture]:
    """Show the canvas after each step with the box that the step writes to, still and animated."""
    steps = np.stack(
        [
            np.stack([with_box(canvas, box) for canvas, box in zip(canvases, boxes, strict=True)])
            for canvases, boxes in zip(snapshot.drawings, snapshot.boxes, strict=True)
        ]
    )  # (T, n, height, width, 3)
    chosen = _spread(len(steps), COLUMNS["draw"])
    still = image_grid(steps[chosen].swapaxes(0, 1).reshape(-1, *steps.shape[2:]), len(chosen))
    at = ", ".join(str(step + 1) for step in chosen)
    words = "The box is the window that the step writes to."
    caption = f"Steps {at} from left to right. {words}"
    yield Picture("drawing", f"Drawings, step by step: {of}", caption, still[None])
    frames = [image_grid(step, -(-len(step) // 2)) for step in steps[_spread(len(steps), FRAMES)]]
    moving = np.stack(frames + frames[-1:] * LAST)
    yield Picture("moving", f"Drawings, animated: {of}", words, moving, seconds=0.12)


def with_box(canvas: Pixels, box: NDArray[np.float32]) -> Pixels:
    """Enlarge a canvas and draw the part of `box` that lies within it."""
    image = np.repeat(canvas.repeat(ZOOM, 0).repeat(ZOOM, 1)[..., None], 3, 2)
    y, x, side = box.tolist()
    (top, bottom), (left, right) = (
        [min(max(round((centre + sign * side / 2 + 0.5) * ZOOM), 0), size - 1) for sign in (-1, 1)]
        for centre, size in zip((y, x), image.shape, strict=False)
    )
    image[[top, bottom], left : right + 1] = BOX
    image[top : bottom + 1, [left, right]] = BOX
    return image


def _spread(count: int, most: int) -> NDArray[np.int_]:
    """Choose at most `most` steps, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))


def game_pictures(runs: pd.DataFrame, of: str) -> Iterator[Picture]:
    """Show the game that the first run recorded."""
    for record in runs["record"]:
        frames = load_arrays(record, "game").get("frames", np.empty(0)).astype(np.uint8)
        if frames.ndim == 4 and frames.shape[0] and frames.shape[3] == 3:
            words = f"{seed(record).capitalize()}, after the last epoch, from the start of a game."
            yield Picture("game", f"A game: {of}", words, frames, STEP_SECONDS)
            return
