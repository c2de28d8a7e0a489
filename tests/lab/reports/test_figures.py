"""Matplotlib figures of plots and charts, and files of pictures."""

import io
import math

import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image, ImageSequence

from weightnorm.lab.reports.bar_chart import bar_figure, dot_figure
from weightnorm.lab.reports.document import Bar, BarChart, BarGroup, Line, Picture, Plot, PlotPanels
from weightnorm.lab.reports.figures import (
    LEGEND_WIDTH,
    STYLE,
    panel_figure,
    picture_files,
    plot_figure,
    render_figures,
)
from weightnorm.lab.reports.style import STYLES


def line(kind="weight-norm", x=(1.0, 2.0, 3.0), y=(30.0, 20.0, 10.0), **changes):
    return Line(**{"name": kind, "style": STYLES[kind], "x": x, "y": y, **changes})


def plot(*lines, **changes):
    return Plot("name", "Title", "Caption.", "epoch", "error, %", lines, **changes)


def axes(*lines, **changes):
    return plot_figure(plot(*lines, **changes)).axes[0]


def test_a_line_has_its_color_marker_and_dashes():
    done, running = axes(line(), line("standard", unfinished=True)).lines
    assert (done.get_linestyle(), running.get_linestyle()) == ("-", "--")
    assert (done.get_color(), done.get_marker()) == (STYLES["weight-norm"].color, "^")
    assert (running.get_color(), running.get_marker()) == (STYLES["standard"].color, "o")
    assert list(done.get_ydata()) == [30, 20, 10]


def test_a_band_is_spread_around_its_line():
    (band,) = axes(line(spread=(3.0, 2.0, 1.0)), line("standard")).collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(1, 27), (1, 33), (2, 18), (2, 22), (3, 9), (3, 11)}
    assert to_hex(band.get_facecolor()[0]) == STYLES["weight-norm"].color


def test_from_zero_starts_the_y_axis_at_zero():
    assert axes(line(), from_zero=True).get_ylim()[0] == 0
    assert axes(line()).get_ylim()[0] > 0


def test_learning_rates_are_their_own_ticks():
    found = axes(line(x=(0.0003, 0.003), y=(1.0, 2.0)), line(x=(0.01,), y=(1.0,)), log_x=True)
    assert found.get_xscale() == "log"
    assert [text.get_text() for text in found.get_xticklabels()] == ["0.0003", "0.003", "0.01"]


def test_epoch_ticks_are_integers():
    ticks = axes(line(x=(1.0, 2.0), y=(1.0, 2.0))).get_xticks()
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize("epochs", [1, 7, 200])
def test_a_long_line_has_few_markers(epochs):
    x = tuple(float(epoch) for epoch in range(1, epochs + 1))
    (drawn,) = axes(line(x=x, y=x)).lines
    assert 1 <= len(range(0, epochs, drawn.get_markevery())) <= 15


def test_legend_is_below_the_axes_and_complete():
    names = ["short", "a name that goes on " * 5]
    with matplotlib.style.context(["default", STYLE]):
        drawing = plot_figure(plot(*(line(name=name) for name in names)))
        drawing.draw_without_rendering()
    (legend,) = drawing.legends
    texts = [text.get_text() for text in legend.texts]
    assert " ".join(texts[1].split()) == names[1].strip()
    assert max(len(row) for text in texts for row in text.split("\n")) <= LEGEND_WIDTH
    box = legend.get_window_extent()
    assert box.y1 <= drawing.axes[0].get_tightbbox().y0
    assert box.x1 <= drawing.bbox.x1


def test_the_legend_of_panels_has_as_many_columns_as_fit():
    few, many = (
        panel_figure(PlotPanels("name", "Title", "Caption.", (plot(*lines),) * 2)).legends[0]
        for lines in (
            [line(name="short")] * 3,
            [line(name=f"a name that takes a third of the width, {i}") for i in range(5)],
        )
    )
    assert (few._ncols, many._ncols) == (3, 1)


def test_gaps_and_dollars_are_drawn():
    gap = plot(line(name="$x$ costs $5", y=(30.0, math.nan, 10.0)))
    (picture,) = render_figures([gap]).values()
    assert b"$x$ costs $5" in picture.files["svg"]
    assert b"NaN" not in picture.files["svg"].replace(b"nan", b"NaN")


def test_two_plots_of_one_name_are_two_pictures():
    first, second = plot(line()), plot(line("standard"))
    pictures = render_figures([first, second])
    assert [pictures[one].name for one in (first, second)] == ["name", "name-2"]


def decoded(files):
    ((kind, content),) = files.items()
    image = Image.open(io.BytesIO(content))
    frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    return kind, frames, image.info


@pytest.mark.parametrize("color", [(), (3,)])
def test_a_picture_is_a_png_with_square_pixels(color):
    pixels = np.random.default_rng(1).integers(0, 256, (1, 8, 20, *color), np.uint8)
    kind, (frame,), _ = decoded(picture_files(Picture("a", "A", "Words.", pixels)))
    assert kind == "png"
    assert frame.shape == (8 * 32, 20 * 32, 3)
    large = np.repeat(np.repeat(pixels[0], 32, 0), 32, 1)
    assert (frame == (large if color else large[..., None])).all()


def test_several_frames_become_a_gif():
    pixels = np.zeros((3, 4, 4), np.uint8)
    pixels[1:, 1], pixels[2, :, 2] = 255, 255
    kind, frames, info = decoded(picture_files(Picture("a", "A", "Words.", pixels, seconds=0.2)))
    assert (kind, info["duration"], info["loop"]) == ("gif", 200, 0)
    assert [frame[::160, ::160, 0].tolist() for frame in frames] == pixels.tolist()


def test_wide_pictures_keep_their_size():
    _, (frame,), _ = decoded(picture_files(Picture("a", "A", "B.", np.zeros((1, 2, 900), "u1"))))
    assert frame.shape[:2] == (2, 900)


def test_bar_groups_with_intervals():
    bars = [
        Bar(kind, STYLES[kind], x, x - 0.1, x + 0.2)
        for kind, x in (("standard", 0.9), ("weight-norm", 1.5))
    ]
    chart = BarChart(
        "name",
        "Title",
        "Caption.",
        "ratio",
        (BarGroup("a", tuple(bars)), BarGroup("b", tuple(bars[:1]))),
    )
    (axes,) = bar_figure(chart).axes
    assert [bar.get_width() for bar in axes.patches] == [0.9, 1.5, 0.9]
    assert to_hex(axes.patches[1].get_facecolor()) == STYLES["weight-norm"].color
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "standard",
        "weight-norm",
        "standard",
    ]
    shown = [text.get_text().strip() for text in axes.texts]
    assert shown == ["a", "0.9", "1.5", "b", "0.9"]
    spans = [list(line.get_xdata()) for line in axes.lines]
    assert spans.count([1, 1]) == 2  # where the base is, in each group
    assert [1.4, 1.7] in spans
    assert chart.alt == "Title: ratio. a: standard 0.9, weight-norm 1.5; b: standard 0.9."
    assert set(render_figures([chart])[chart].files) == {"svg", "png"}


def test_long_group_names_are_wrapped():
    bar = Bar("standard", STYLES["standard"], 1.0, 0.9, 1.1)
    chart = BarChart(
        "n", "T", "C.", "x", (BarGroup("a network, a quarter of its width, " * 4, (bar,)),)
    )
    with matplotlib.style.context(STYLE):
        drawing = bar_figure(chart)
        drawing.draw_without_rendering()
    name, _ = drawing.axes[0].texts
    assert name.get_text().split() == chart.groups[0].name.split()
    inside, whole = name.get_window_extent(), drawing.bbox
    assert whole.x0 <= inside.x0 < inside.x1 <= whole.x1
    assert inside.y1 <= whole.y1


def test_dot_chart_has_one_row_per_group_and_one_legend_entry_per_name():
    bars = tuple(Bar(kind, STYLES[kind], 1.0, 0.9, 1.2) for kind in ("standard", "batch-norm"))
    groups = (BarGroup("first", bars), BarGroup("second", bars[:1]))
    with matplotlib.style.context(STYLE):
        drawing = dot_figure(BarChart("n", "T", "C.", "x", groups, dots=True))
    (axes,) = drawing.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    (legend,) = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == ["standard", "batch-norm"]
    intervals = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2]
    assert sum(list(x) == [0.9, 1.2] for x in intervals) == 3


def test_the_legend_of_panels_is_that_of_the_first():
    first = plot(line("standard", unfinished=True), line())
    drawing = panel_figure(PlotPanels("name", "Title", "Caption.", (first, plot(line()))))
    (legend,) = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == ["standard", "weight-norm"]
    colors = [handle.get_color() for handle in legend.get_lines()]
    assert colors == [STYLES["standard"].color, STYLES["weight-norm"].color]
    assert not panel_figure(PlotPanels("name", "Title", "Caption.", (plot(), plot()))).legends
