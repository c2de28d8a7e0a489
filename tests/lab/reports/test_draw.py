"""Report section of DRAW: bounds, initial g, pictures."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from weightnorm.lab.reports import report
from weightnorm.lab.reports.document import Picture, Plot, Table
from weightnorm.lab.reports.draw import LAST, SQUARE, ZOOM, section, with_box

SIDE, STEPS = 6, 12


@pytest.fixture
def drawn(run):
    """`drawn([−ELBO of each epoch], kind)`: a run that kept its drawings."""

    def write(values, kind="standard", keep=True, **changes):
        epochs = changes.pop("epochs", len(values))
        metrics = [
            {"epoch": e, "train_negative_elbo": v + 1, "test_negative_elbo": v, "seconds": 2.0}
            for e, v in enumerate(values, 1)
        ]
        last = {"train_negative_elbo": values[-1] + 1, "test_negative_elbo": values[-1]}
        record = run(
            experiment="draw",
            parameterization=kind,
            metrics=metrics,
            result=last | {"test_kl": 20.0, "seconds": 8.0},
            **({"data": "binarized-mnist", "epochs": epochs, "steps": STEPS} | changes),
        )
        for epoch in {epochs // 2, epochs} if keep else ():
            np.savez_compressed(record.folder / f"epoch-{epoch}.npz", **arrays())
        return record

    return write


def arrays():
    random = np.random.default_rng(0)
    drawings = random.integers(0, 256, (STEPS, 8, SIDE, SIDE), np.uint8)
    boxes = np.tile(np.float32([2.5, 2.5, 3.0]), (STEPS, 8, 1))
    return {
        "samples": random.integers(0, 256, (100, SIDE, SIDE), np.uint8),
        "drawings": drawings,
        "boxes": boxes,
    }


def found(records, kind, title):
    (part,) = section(records).content
    (one,) = (x for x in part.content if isinstance(x, kind) and x.title.startswith(title))
    return one


def rows(records, title):
    table = found(records, Table, title)
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_the_papers_figure_shows_the_bound_rising(drawn):
    records = [
        drawn([130.0, 110.0, 100.0, 96.0]),
        drawn([130.0, 112.0, 100.0, 98.0], seed=2),
        drawn([120.0, 97.0, 95.0, 90.0], "weight-norm"),
    ]
    plot = found(records, Plot, "Bound on the test set")
    assert "figure 3" in plot.title
    assert [line.name for line in plot.lines] == [
        "standard, lr 0.003, n = 2",
        "weight norm, g = ‖v‖, lr 0.003, n = 1",
    ]
    assert plot.lines[0].y == (-130.0, -111.0, -100.0, -97.0)
    assert plot.lines[0].spread[-1] == pytest.approx(2**0.5)


def test_bounds_table_has_the_published_bound(drawn):
    records = [drawn([130.0, 96.0]), drawn([130.0, 98.0], seed=2)]
    ours = rows(records, "Bounds")["standard"]
    assert (ours["test bound"], ours["n"], ours["KL, test"]) == (
        "−97.00 ± 1.41",
        "2",
        "20.00 ± 0.00",
    )
    published = rows(records, "Bounds")["DRAW with attention (published)"]
    assert published["published"] == "−80.97"
    notes = found(records, Table, "Bounds").notes
    assert "from memory" in notes[1]
    assert notes[2].endswith(
        "These: steps 12, hidden not recorded, epochs 2, attention not recorded."
    )
    assert "published" not in " ".join(rows([drawn([9.0], data="digits", seed=3)], "Bounds"))


def test_epochs_to_the_bound_that_every_run_reaches(drawn):
    records = [
        drawn([130.0, 110.0, 100.0, 96.0]),
        drawn([120.0, 97.0, 95.0, 90.0], "weight-norm"),
        drawn([120.0, 94.0, 93.0, 92.0], "weight-norm", seed=2),
    ]
    needed = rows(records, "Epochs to the same test bound")
    assert needed["standard"]["epochs to −96.00"] == "4.0"
    assert needed["weight norm, g = ‖v‖"]["epochs to −96.00"] == "2.5 ± 0.7"
    assert needed["weight norm, g = ‖v‖"]["n"] == "2"


def test_each_initial_g_has_its_own_curve_in_one_figure(drawn):
    records = [
        drawn([130.0, 96.0]),
        drawn([120.0, 97.0], "weight-norm"),  # recorded before there was an initial_g
        drawn([121.0, 98.0], "weight-norm", seed=2, initial_g="norm"),
        drawn([110.0, 90.0], "weight-norm", label="cpu+initial-g=one", initial_g="one"),
        drawn(
            [111.0, 91.0],
            "weight-norm",
            label="cpu+initial-g=one-except-windows",
            initial_g="one-except-windows",
        ),
    ]
    (part,) = section(records).content
    assert part.title == "draw: cpu"
    plot = found(records, Plot, "Bound on the test set")
    assert [line.name for line in plot.lines] == [
        "standard, lr 0.003, n = 1",
        "weight norm, g = ‖v‖, lr 0.003, n = 2",
        "weight norm, g = 1 except windows, lr 0.003, n = 1",
        "weight norm, g = 1, lr 0.003, n = 1",
    ]
    assert len({line.style for line in plot.lines}) == 4
    assert "−91.0 (weight norm, g = 1 except windows, n = 1)" in part.findings[0]


def test_no_epochs_table_for_one_parameterization(drawn):
    (part,) = section([drawn([130.0, 96.0])]).content
    assert not [x for x in part.content if x.title.startswith("Epochs to")]


def test_difference_to_standard_is_paired_by_seed(drawn):
    records = [
        drawn([120.0, 110.0, 105.0, 101.0], seed=1),
        drawn([130.0, 115.0, 105.0, 102.0], seed=2),
        drawn([90.0, 90.0, 90.0, 90.0], seed=3),  # weight norm lacks this seed
        drawn([100.0, 100.0, 100.0, 100.0], "weight-norm", seed=1),
        drawn([100.0, 105.0, 105.0, 104.0], "weight-norm", seed=2),
    ]
    row = rows(records, "Difference to standard")["weight norm, g = ‖v‖"]
    assert row["n"] == "2"
    for part, (a, b) in {
        "first quarter": (20, 30),
        "all epochs": (9, 9.5),
        "last quarter": (1, -2),
        "last epoch": (1, -2),
    }.items():
        half = 12.7062 * abs(a - b) / 2  # Student's t with one degree of freedom
        values = (a + b) / 2, (a + b) / 2 - half, (a + b) / 2 + half
        assert row[part].replace("−", "-") == "{:+.1f} [{:+.1f}, {:+.1f}]".format(*values)


def test_no_difference_without_standard_or_of_a_diverged_run(drawn):
    one = drawn([100.0, 90.0], "weight-norm", seed=1)
    (part,) = section([one]).content
    assert not [x for x in part.content if x.title == "Difference to standard"]
    standard = replace(drawn([120.0, 110.0], seed=1), diverged={"epoch": 2})
    assert rows([one, standard], "Difference")["weight norm, g = ‖v‖"]["all epochs"] == "—"


def test_time_is_relative_to_standard_without_a_paper_column(drawn):
    found_times = rows([drawn([9.0]), drawn([9.0], "weight-norm")], "Time per epoch")
    assert found_times["weight norm, g = ‖v‖"]["relative to standard"] == "1.00"
    assert "paper" not in found_times["weight norm, g = ‖v‖"]


def test_several_rates_are_compared(drawn):
    records = [drawn([100.0 + k], learning_rate=rate) for k, rate in enumerate((0.001, 0.003))]
    plot = found(records, Plot, "Test bound by learning rate")
    assert plot.log_x
    assert plot.lines[0].y == (-100.0, -101.0)
    assert (
        found(records, Plot, "Bound on the test set").lines[0].name.startswith("standard, lr 0.001")
    )


def test_pictures_of_each_parameterization(drawn):
    records = [drawn([9.0, 8.0]), drawn([9.0, 8.0], seed=2), drawn([9.0, 7.0], "weight-norm")]
    (part,) = section(records).content
    pictures = [x for x in part.content if isinstance(x, Picture)]
    assert [one.name.removeprefix("draw-cpu-") for one in pictures] == [
        f"{kind}-{what}"
        for kind in ("standard", "weight-norm")
        for what in ("samples-1", "samples-2", "drawing", "moving")
    ]
    samples, _, still, moving = pictures[:4]
    assert samples.frames.shape == (1, 10 * (SIDE + 1) - 1, 10 * (SIDE + 1) - 1)
    assert still.frames.shape == (1, 8 * (SIDE * ZOOM + 1) - 1, 10 * (SIDE * ZOOM + 1) - 1, 3)
    assert len(moving.frames) == STEPS + LAST
    assert (moving.frames[-1] == moving.frames[STEPS - 1]).all()
    assert (moving.frames[0] != moving.frames[1]).any()
    assert "Steps 1, 2, 3, 5, 6, 7, 8, 10, 11, 12 " in still.caption


def test_box_is_drawn_within_the_picture():
    black = np.zeros((SIDE, SIDE), np.uint8)
    image = with_box(black, np.float32([2.5, 1.5, 2.0]))  # rows 1.5 … 3.5, columns 0.5 … 2.5
    marked = (image == SQUARE).all(-1)
    ys, xs = np.nonzero(marked)
    assert (ys.min(), ys.max(), xs.min(), xs.max()) == (8, 16, 4, 12)
    assert marked[8, 4:13].all()
    assert marked[8:17, 12].all()
    assert not marked[9:16, 5:12].any()
    whole = (with_box(black, np.float32([2.5, 2.5, 1e30])) == SQUARE).all(-1)
    assert whole[0].all()
    assert whole[:, -1].all()
    assert whole.sum() == 4 * (SIDE * ZOOM - 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept.pop("boxes"),
        lambda kept: kept.update(boxes=kept["boxes"][:-1]),
        lambda kept: kept.update(samples=kept["samples"][0]),
        lambda kept: kept.update(drawings=kept["drawings"][0]),
        lambda kept: kept.update(drawings=kept["drawings"][:0], boxes=kept["boxes"][:0]),
    ],
)
def test_damaged_arrays_are_not_drawn(drawn, damage):
    record = drawn([9.0, 8.0])
    kept = arrays()
    damage(kept)
    for epoch in (1, 2):
        np.savez_compressed(record.folder / f"epoch-{epoch}.npz", **kept)
    (part,) = section([record]).content
    assert not [x for x in part.content if isinstance(x, Picture)]


def test_page_embeds_the_pictures(drawn, tmp_path):
    drawn([9.0, 8.0])
    drawn([9.0, 7.0], "weight-norm", keep=False)
    files = report(tmp_path / "runs", tmp_path / "out")
    names = {path.name for path in files.figures}
    assert {"draw-cpu-standard-drawing.png", "draw-cpu-standard-moving.gif"} <= names
    page = files.page.read_text()
    assert page.count("<img") == 4
    assert "data:image/gif;base64" in page
    moving = (tmp_path / "out" / "figures" / "draw-cpu-standard-moving.gif").read_bytes()
    assert Image.open(io.BytesIO(moving)).n_frames >= STEPS
