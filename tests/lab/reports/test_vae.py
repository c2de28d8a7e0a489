"""Report section of the VAE."""

import numpy as np
import pytest

from weightnorm.lab.reports import report, vae
from weightnorm.lab.reports.document import Picture, Plot, Section, Table
from weightnorm.lab.reports.style import STYLES

SETTINGS = {
    "experiment": "vae",
    "learning_rate": 0.002,
    "importance_samples": 128,
    "importance_examples": 1000,
}


@pytest.fixture
def pair(run):
    """`pair(…)`: standard ends at a bound of −90, weight norm at −88, with three seeds each."""

    def write(data="mnist", layers=1, **changes):
        records = []
        for kind, end in (("standard", 90.0), ("weight-norm", 88.0)):
            for seed in (1, 2, 3):
                bound = end + 0.5 * (seed - 2)
                rows = [row(epoch, bound, data, layers) for epoch in (1, 2, 3, 4)]
                result = rows[-1] | {
                    "importance_negative_log_likelihood": bound - 3,
                    "importance_negative_elbo": bound + 1,
                }
                settings = SETTINGS | {"data": data} | changes
                label = f"{settings.pop('label', 'cpu')}/{data}"
                records.append(
                    run(
                        parameterization=kind,
                        seed=seed,
                        label=label,
                        metrics=rows,
                        result=result,
                        **settings,
                    )
                )
        return records

    return write


def row(epoch, bound, data, layers):
    now = bound + 10 * (4 - epoch)
    metrics = {"epoch": epoch, "seconds": 2.0, "train_negative_elbo": now - 1}
    metrics["test_negative_elbo"] = now
    if data == "cifar10":
        metrics["test_bits_per_dim"] = now / 25
    return metrics | {f"test_kl_{i}": 20.0 + i for i in range(1, layers + 1)}


def parts(section: Section) -> dict[str, Section]:
    return {part.title: part for part in section.content}


def found(part: Section, kind, ending: str):
    (one,) = (
        item
        for item in part.content
        if isinstance(item, kind)
        and (item.title == ending if kind is Table else item.name.endswith(ending))
    )
    return one


def cells(part: Section, title: str):
    table = found(part, Table, title)
    return {line[0]: dict(zip(table.head, line, strict=True)) for line in table.rows}


def test_figure_2_has_error_bars_over_seeds(pair):
    (part,) = vae.section(pair()).content
    assert part.title == "vae: MNIST, cpu"
    plot = found(part, Plot, "test-negative-elbo")
    assert [line.style for line in plot.lines] == [STYLES["standard"], STYLES["weight-norm"]]
    standard = plot.lines[0]
    assert standard.name == "standard, lr 0.002, n = 3"
    assert standard.x == (1, 2, 3, 4)
    assert standard.y == pytest.approx((-120, -110, -100, -90))
    assert standard.spread == pytest.approx([0.5] * 4)


def test_bounds_table_has_published_bounds_and_spread_over_seeds(pair):
    (part,) = vae.section(pair()).content
    rows = cells(part, "Bounds")
    ours = rows["weight norm"]
    assert ours["bound, nats"] == "−88.00 ± 0.50"
    assert ours["log p(x), nats"] == "−85.00 ± 0.50"
    assert ours["its bound, nats"] == "−89.00 ± 0.50"
    assert (ours["n"], ours["lr"], ours["epochs"]) == ("3", "0.002", "4")
    published = {name: cells["bound, nats"] for name, cells in rows.items() if "memory" in name}
    assert sorted(published.values()) == ["−82.02", "−84.08"]
    notes = found(part, Table, "Bounds").notes
    assert "128 importance samples on the first 1000 test examples" in notes[1]
    assert notes[2].endswith("These: width 0.25, depth not recorded, latents not recorded.")
    assert "bits/dim" not in ours


def test_cifar10_is_a_separate_part_in_bits_per_dimension(pair):
    section = vae.section([*pair(), *pair("cifar10", layers=6)])
    assert list(parts(section)) == ["vae: MNIST, cpu", "vae: CIFAR-10, cpu"]
    part = parts(section)["vae: CIFAR-10, cpu"]
    rows = cells(part, "Bounds")
    assert rows["weight norm"]["bits/dim"] == "3.52 ± 0.02"
    assert [line["bits/dim"] for name, line in rows.items() if "published" in name] == [
        "3.28",
        "3.15",
    ]
    assert found(part, Plot, "test-bits-per-dim").lines[1].y[-1] == pytest.approx(3.52)
    kl = cells(part, "KL of each stochastic layer")["standard"]
    assert [kl[f"layer {i}"] for i in (1, 6)] == ["21.00 ± 0.00", "26.00 ± 0.00"]
    names = [one.name for one in section.figures]
    assert len(set(names)) == len(names)


def test_no_plot_without_a_line_and_nothing_published_for_digits(pair):
    (part,) = vae.section(pair("digits")).content
    assert [item.name for item in part.content if isinstance(item, Plot)] == [
        "vae-digits-cpu-test-negative-elbo",
        "vae-digits-cpu-train-negative-elbo",
    ]
    assert set(cells(part, "Bounds")) == {"standard", "weight norm"}
    assert cells(part, "Time per epoch")["weight norm"]["relative to standard"] == "1.00"


def test_learning_rates_are_drawn_if_there_are_several(pair, run):
    records = pair()
    more = dict(SETTINGS, learning_rate=0.01, data="mnist", label="cpu/mnist")
    end = row(4, 95.0, "mnist", 1)
    records.append(run(**more, metrics=[end], result=end))
    (part,) = vae.section(records).content
    drawn = found(part, Plot, "-rate").lines
    assert drawn[1].x == (0.002, 0.01)
    assert drawn[1].y == pytest.approx((-88, -95))


@pytest.mark.parametrize("color", [(), (3,)])
def test_samples_and_reconstructions_are_pictures(pair, tmp_path, color):
    records = pair()
    images = np.zeros((16, 4, 4, *color), np.uint8)
    above, below = images + 10, images + 20
    for record in records[:4]:  # standard's three, and weight norm's first
        np.savez_compressed(
            record.folder / "pictures.npz", samples=images, originals=above, reconstructions=below
        )
    (part,) = vae.section(records).content
    drawn = [item for item in part.content if isinstance(item, Picture)]
    assert [item.title for item in drawn] == [
        "Samples: standard, seed 1",
        "Reconstructions: standard, seed 1",
        "Samples: weight norm, seed 1",
        "Reconstructions: weight norm, seed 1",
    ]
    samples, pairs = (item.frames[0] for item in drawn[:2])
    assert samples.shape == (9, 39, *color)
    assert [pairs[y, 0].max() for y in (0, 5, 10, 15)] == [10, 20, 10, 20]
    assert report(tmp_path / "runs", tmp_path / "out").problems == ()


@pytest.mark.parametrize(
    "arrays",
    [
        {"samples": np.zeros((16, 4, 4))},
        {"samples": np.zeros((2, 4, 4), np.uint8)},
        {"samples": np.zeros((16, 4, 4, 2), np.uint8)},
        {"originals": np.zeros((16, 4, 4), np.uint8)},
        {"samples": np.zeros(3, np.uint8)},
    ],
)
def test_arrays_that_are_not_images_are_ignored(pair, arrays):
    records = pair()
    np.savez_compressed(records[0].folder / "pictures.npz", **arrays)
    (part,) = vae.section(records).content
    assert not [item for item in part.content if isinstance(item, Picture)]


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [], "result": {}},
        {"metrics": [{"test_negative_elbo": "low", "test_kl_x": 1, "test_kl_": 2}], "data": None},
        {"done": 1, "metrics": [{"test_negative_elbo": 100.0}]},
    ],
)
def test_odd_records_raise_no_error(pair, run, tmp_path, changes):
    pair()
    run(**SETTINGS, label="cpu/odd", seed=9, **changes)
    assert report(tmp_path / "runs", tmp_path / "out").problems == ()
