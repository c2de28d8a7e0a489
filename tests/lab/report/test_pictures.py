"""Images from the arrays that runs saved: samples, drawings, games."""

import io

import numpy as np
import pytest
from PIL import Image

from weightnorm.lab.records import RunRecord
from weightnorm.lab.report.page import experiment_section
from weightnorm.lab.report.pictures import (
    BOX,
    LAST,
    ZOOM,
    Picture,
    image_grid,
    load_arrays,
    with_box,
)

SIDE, STEPS = 6, 12
RANDOM = np.random.default_rng(0)


def pictures(record):
    (part,) = experiment_section([record]).parts
    return {item.body.name: item.body for item in part.items if isinstance(item.body, Picture)}


def test_arrays_that_are_damaged_or_pickles_are_not_read(tmp_path):
    record = RunRecord(tmp_path, "draw", "demo", {})
    assert load_arrays(record, "samples") == {}
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    np.savez_compressed(tmp_path / "samples.npz", images=images)
    assert (load_arrays(record, "samples")["images"] == images).all()
    content = (tmp_path / "samples.npz").read_bytes()
    for damaged in (b"", b"no archive", content[:40], content[:-30]):
        (tmp_path / "samples.npz").write_bytes(damaged)
        assert load_arrays(record, "samples") == {}
    np.savez(tmp_path / "samples.npz", images=np.array([{"a": 1}], dtype=object))
    assert load_arrays(record, "samples") == {}


@pytest.mark.parametrize("color", [(), (3,)])
def test_image_grid_places_images_in_rows(color):
    images = RANDOM.integers(1, 256, (5, 4, 3, *color), np.uint8)
    sheet = image_grid(images, columns=2, background=0)
    assert sheet.shape == (3 * 5 - 1, 2 * 4 - 1, *color)
    assert (sheet[5:9, 4:7] == images[3]).all()
    assert (sheet[:, 3] == 0).all()
    assert (sheet[10:, 4:] == 0).all()


@pytest.mark.parametrize("color", [(), (3,)])
def test_samples_and_reconstructions(run, color):
    record = run(experiment="vae", parameterization="standard")
    images = np.zeros((16, 4, 4, *color), np.uint8)
    arrays = {"samples": images, "originals": images + 10, "reconstructions": images + 20}
    np.savez_compressed(record.folder / "pictures.npz", **arrays)
    found = pictures(record)
    assert found["samples"].title == "Samples: standard, seed 1"
    assert found["samples"].frames.shape == (1, 9, 39, *color)
    pairs = found["reconstructions"].frames[0]
    assert [pairs[y, 0].max() for y in (0, 5, 10, 15)] == [10, 20, 10, 20]


def drawings():
    return {
        "samples": RANDOM.integers(0, 256, (100, SIDE, SIDE), np.uint8),
        "drawings": RANDOM.integers(0, 256, (STEPS, 8, SIDE, SIDE), np.uint8),
        "boxes": np.tile(np.float32([2.5, 2.5, 3.0]), (STEPS, 8, 1)),
    }


def test_drawings_are_shown_step_by_step_and_animated(run):
    record = run(experiment="draw", epochs=4)
    for epoch in (2, 4):
        np.savez_compressed(record.folder / f"epoch-{epoch}.npz", **drawings())
    found = pictures(record)
    assert [*found] == ["samples-2", "samples-4", "drawing", "moving"]
    assert "seed 1" in found["moving"].title
    assert "Steps 1, 2, 3" in found["drawing"].caption
    assert len(found["moving"].frames) == STEPS + LAST
    kind, content = found["moving"].file()
    with Image.open(io.BytesIO(content)) as image:
        assert (kind, image.info["loop"], image.info["duration"]) == ("gif", 0, 120)


def test_a_box_is_drawn_around_the_window():
    image = with_box(np.zeros((SIDE, SIDE), np.uint8), np.float32([2.5, 2.5, 3.0]))
    edges = np.argwhere((image == BOX).all(-1))
    low, high = (2.5 - 1.5 + 0.5) * ZOOM, (2.5 + 1.5 + 0.5) * ZOOM
    assert (edges.min(0) == low).all()
    assert (edges.max(0) == high).all()
    assert (image[round(low) + 1 : round(high), round(low) + 1 : round(high)] == 0).all()
    outside = with_box(np.zeros((SIDE, SIDE), np.uint8), np.float32([-50.0, 90.0, 5.0]))
    assert outside.shape == (SIDE * ZOOM, SIDE * ZOOM, 3)


def test_a_recorded_game_is_an_animation(run):
    record = run(experiment="dqn", game="pong")
    (record.folder / "game.npz").write_bytes(b"no archive")
    assert pictures(record) == {}
    frames = RANDOM.integers(0, 256, (5, 8, 6, 3), np.uint8)
    np.savez_compressed(record.folder / "game.npz", frames=frames)
    kind, content = pictures(record)["game"].file()
    with Image.open(io.BytesIO(content)) as image:
        assert (kind, image.n_frames) == ("gif", 5)
        assert image.size[0] / image.size[1] == 6 / 8
