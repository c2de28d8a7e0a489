"""Files of the report: complete, self-contained, reproducible; damaged records are left out."""

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
from matplotlib.image import imread

from commands import HANGS
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import write_json
from weightnorm.lab.reports import SECTIONS, report
from weightnorm.lab.reports.document import Section
from weightnorm.lab.reports.figures import PAPER
from weightnorm.lab.reports.style import INK, STYLES


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the tags left open."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def named(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


@pytest.fixture(scope="module")
def elements(files):
    return Elements(files.page.read_text())


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_files_are_the_page_and_two_of_each_figure(files):
    assert {files.page, *files.figures} == {p for p in files.page.parent.rglob("*") if p.is_file()}
    names = {path.stem for path in files.figures}
    assert len(files.figures) == 2 * len(names)
    cpu = {"train-error", "test-error", "v-norm", "effective-step"}
    cpu |= {"rate-train-error", "rate-train-loss"}
    assert {name for name in names if name.startswith("classify-cpu-")} >= {
        f"classify-cpu-{name}" for name in cpu
    }
    assert "other-cpu-bound" in names
    for path in files.figures:
        start = {".png": b"\x89PNG", ".svg": b"<?xml"}[path.suffix]
        assert path.read_bytes().startswith(start)


def test_every_figure_shows_something(files):
    for path in files.figures:
        if path.suffix == ".png":
            assert imread(path)[..., :3].std() > 0.05, path


def test_every_figure_is_in_the_page_with_a_text_alternative(files, elements):
    pictures = elements.named("svg")
    assert len(pictures) == len(elements.named("figure")) == len(files.figures) // 2
    assert len(elements.named("figcaption")) == len(pictures)
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 40 for svg in pictures)


def test_figures_in_the_page_use_its_colors(files):
    pictures = files.page.read_text().partition("</style>")[2]
    assert "currentColor" in pictures
    assert INK not in pictures
    assert PAPER not in pictures


def test_page_is_self_contained(files, elements):
    assert elements.open == []
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in elements.found:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed")
        for name in ("href", "xlink:href", "src", "data", "action"):
            if name in attrs:
                assert attrs[name].startswith("#"), (tag, attrs)
                assert attrs[name][1:] in ids, (tag, attrs)
    page = files.page.read_text()
    assert "@import" not in page
    assert page.count("url(") == page.count("url(#")


def test_the_same_records_give_the_same_bytes(example, files, tmp_path):
    """In another folder, process, time zone and matplotlib style."""
    shutil.copytree(example, tmp_path / "copy")
    code = (
        "import sys, pathlib, matplotlib; matplotlib.rcParams['axes.linewidth'] = 9;"
        "from weightnorm.lab.reports import report; report(*map(pathlib.Path, sys.argv[1:]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    where = [str(tmp_path / "copy"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code, *where], check=True, env=environment, timeout=HANGS)
    assert contents(tmp_path / "out") == contents(files.page.parent)


def test_user_matplotlib_style_is_unchanged(run, tmp_path):
    def style():  # to read the backend would choose one
        return {key: params[key] for key in params if key != "backend"}

    params = matplotlib.rcParams
    run(parameterization="standard")
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "mine"}):
        before = style()
        report(tmp_path / "runs", tmp_path / "out")
        assert style() == before


def test_damaged_records_are_named_and_the_rest_reported(files):
    (problem,) = files.problems
    assert problem.startswith("classify/cpu/standard/lr-0.1/seed-1/config.json is damaged")
    assert "lr-0.1/seed-1/config.json is damaged" in files.page.read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", []),
        ("config.json", {"experiment": "classify", "preset": "cpu", "config": None}),
        ("config.json", {"experiment": 3, "preset": "cpu", "config": {}}),
        ("result.json", [0.1]),
    ],
)
def test_json_that_is_not_a_record_is_listed(run, tmp_path, name, content):
    run()
    write_json(run(seed=2).folder / name, content)
    files = report(tmp_path / "runs", tmp_path / "out")
    assert len(files.problems) == 1
    assert "seed-2" in files.problems[0]
    assert "1 run, 1 of them finished" in files.page.read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [{"epoch": "one", "train_error": "low"}, {"train_error": 10**400}, {}]},
        {"metrics": [], "result": {}},
        {"epochs": None, "seed": {}, "data": ["cifar10"], "metrics": [{"train_error": 0.5}]},
        {"parameterization": 3, "learning_rate": -1.0},
        {"seconds": 0, "parameterization": "standard"},
    ],
)
def test_odd_values_raise_no_error(run, tmp_path, changes):
    run(seed=5, parameterization="standard")
    run(**changes)
    assert report(tmp_path / "runs", tmp_path / "out").problems == ()


def test_text_from_records_is_escaped(run, tmp_path):
    evil = """\"><script>alert('$x$')</script>"""
    row = {"epoch": 1, evil: 1.0}
    kind = evil.replace("/", "_")  # which is a folder, too
    run(experiment="<b>x", parameterization=kind, metrics=[row], session={"machine": evil})
    run(experiment="<b>x", parameterization="other", metrics=[row])
    files = report(tmp_path / "runs", tmp_path / "out")
    elements = Elements(files.page.read_text())
    assert elements.open == []
    assert not elements.named("script") + elements.named("b")
    assert all(path.parent == tmp_path / "out" / "figures" for path in files.figures)


def test_figures_of_equal_name_get_different_files(run, tmp_path):
    run(experiment="other", metrics=[{"epoch": 1, "a_b": 1.0, "a b": 2.0}])
    files = report(tmp_path / "runs", tmp_path / "out")
    names = {path.stem for path in files.figures}
    assert names == {"other-cpu-a-b", "other-cpu-a-b-2"}


def test_a_copied_run_is_counted_once(run, tmp_path):
    record = run()
    shutil.copytree(record.folder, tmp_path / "runs" / "copy" / "classify" / "cpu" / "x")
    files = report(tmp_path / "runs", tmp_path / "out")
    assert "1 run, 1 of them finished" in files.page.read_text()
    assert files.problems == (
        "copy/classify/cpu/x is the same run as classify/cpu/weight-norm/lr-0.003/seed-1",
    )


def test_no_records_is_an_error(tmp_path):
    with pytest.raises(ReportError, match="weightnorm run classify --preset demo"):
        report(tmp_path, tmp_path / "out")
    with pytest.raises(ReportError, match="missing is not a folder"):
        report(tmp_path / "missing", tmp_path / "out")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ReportError, match=r"config\.json is damaged"):
        report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_an_error(run, tmp_path):
    run()
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ReportError, match=r"cannot write the report to .*out: .*; choose another"):
        report(tmp_path / "runs", tmp_path / "out")


def test_full_disk_keeps_the_old_page(run, tmp_path, monkeypatch):
    run(parameterization="standard")
    before = report(tmp_path / "runs", tmp_path / "out").page.read_bytes()
    run(parameterization="standard", seed=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ReportError, match="No space left"):
        report(tmp_path / "runs", tmp_path / "out")
    assert (tmp_path / "out" / "index.html").read_bytes() == before
    assert not [path for path in contents(tmp_path / "out") if path.name.startswith(".")]


def test_an_experiment_adds_a_section_by_its_name(run, tmp_path, monkeypatch):
    monkeypatch.setitem(SECTIONS, "vae", lambda runs: Section("Bounds", f"{len(runs)} runs seen"))
    run(experiment="vae")
    page = report(tmp_path / "runs", tmp_path / "out").page.read_text()
    assert "1 runs seen" in page
    assert "Every metric" not in page


def test_the_page_can_be_made_from_any_folder_above_the_runs(run, tmp_path, monkeypatch):
    run(label="cpu+epochs=3", epochs=3)
    monkeypatch.chdir(tmp_path / "runs" / "classify")
    page = report(Path("."), Path("out")).page.read_text()
    assert "classify: cpu+epochs=3" in page
    assert str(tmp_path) not in page


def test_colors_stand_out_on_both_schemes():
    def light(color):
        parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    colors = {style.color for style in STYLES.values()} - {INK}  # which turns with the scheme
    assert len(colors) == 4
    for color in colors:
        assert 1.05 / (light(color) + 0.05) >= 3
        assert (light(color) + 0.05) / (light("#15191f") + 0.05) >= 3


def test_summary_comes_first_and_sections_follow_the_papers_order(run, tmp_path):
    run(parameterization="standard", end=0.3)
    run(parameterization="weight-norm", end=0.2)
    for experiment in ("other", "draw", "vae", "dqn"):
        run(experiment=experiment)
    page = report(tmp_path / "runs", tmp_path / "out").page.read_text()
    headings = [page.index(f"<h2>{text}") for text in ("Summary", "Contents", "Classification")]
    assert headings == sorted(headings)
    order = [page.rindex(name) for name in ("classify: cpu", "vae: ", "draw: cpu", "dqn: cpu")]
    assert order == sorted(order)
    assert page.rindex("other: cpu") > order[-1]
    assert "30.0 (standard), 20.0 (weight norm); n = 1" in page


def test_damaged_benchmarks_and_claims_are_left_out(run, tmp_path):
    run()
    run(experiment="bench", result={"benchmarks": []})
    row = dict.fromkeys(("section", "statement", "paper", "value", "verdict", "n"), "")
    run(experiment="claims", metrics=[{**row, "number": 3, "figures": [{}]}])
    files = report(tmp_path / "runs", tmp_path / "out")
    damaged = [problem for problem in files.problems if "it is damaged (KeyError" in problem]
    assert [problem.split("/")[0] for problem in damaged] == ["bench", "claims"]
    assert files.page.exists()
