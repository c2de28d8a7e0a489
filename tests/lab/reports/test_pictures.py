"""Loading arrays of a run, and grids of images."""

import numpy as np
import pytest

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.pictures import image_grid, load_arrays


def test_load_arrays_skips_damaged_files(tmp_path):
    record = RunRecord(tmp_path, "draw", "demo", {})
    assert load_arrays(record, "samples") == {}
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    np.savez_compressed(tmp_path / "samples.npz", images=images)
    assert (load_arrays(record, "samples")["images"] == images).all()
    content = (tmp_path / "samples.npz").read_bytes()
    for damaged in (b"", b"no archive", content[:40], content[:-30]):
        (tmp_path / "samples.npz").write_bytes(damaged)
        assert load_arrays(record, "samples") == {}


def test_arrays_that_are_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "samples.npz", images=np.array([{"a": 1}], dtype=object))
    assert load_arrays(RunRecord(tmp_path, "draw", "demo", {}), "samples") == {}


@pytest.mark.parametrize("color", [(), (3,)])
def test_image_grid_places_images_in_rows(color):
    images = np.random.default_rng(0).integers(1, 256, (5, 4, 3, *color), np.uint8)
    sheet = image_grid(images, columns=2, background=0)
    assert sheet.shape == (3 * 5 - 1, 2 * 4 - 1, *color)
    assert (sheet[5:9, 4:7] == images[3]).all()
    assert (sheet[:, 3] == 0).all()
    assert (sheet[4] == 0).all()
    assert (sheet[10:, 4:] == 0).all()
