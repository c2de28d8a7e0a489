"""The report's files and its page, also in headless Chromium."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from commands import HANGS
from weightnorm.lab.errors import ReportError
from weightnorm.lab.report import write_report
from weightnorm.lab.report.style import INK, PAPER, STYLES

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=NetworkTimeServiceQuerying",
    "--no-first-run",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
]
FRAMES = """<!DOCTYPE html><title>?</title>
<iframe src="index.html" style="width: 1280px; height: 800px; border: 0"></iframe>
<iframe src="index.html" style="width: 420px; height: 800px; border: 0"></iframe>
<script>
onload = () => {
  const numbers = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, all = name => [...page.querySelectorAll(name)];
    const height = page.documentElement.scrollHeight;
    all("details").forEach(x => x.open = true);
    const boxes = name => all(name).map(x => x.getBoundingClientRect());
    const cut = all("figure").filter(figure => {
      const edge = figure.getBoundingClientRect();
      const texts = [...figure.querySelectorAll("text")].map(x => x.getBoundingClientRect());
      return texts.some(x => x.right > edge.right || x.left < edge.left);
    });
    const sticky = getComputedStyle(page.querySelector("nav")).position;
    return [page.documentElement.scrollWidth, height, cut.length, sticky,
            Math.min(...boxes("figure text").map(x => x.height)),
            Math.max(...boxes("figure svg").map(x => x.width))].join(" ");
  });
  document.title = numbers.join("|");
};
</script>"""


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


def test_the_files_are_the_page_and_its_figures(files, elements):
    assert {files.page, *files.figures} == {p for p in files.page.parent.rglob("*") if p.is_file()}
    names = {path.stem for path in files.figures}
    assert {f"classify-cpu-{x}" for x in ("train-error", "test-error", "v-norm", "rate")} <= names
    pictures = elements.named("svg")
    assert len(pictures) == len(elements.named("figure")) == len(files.figures)
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 40 for svg in pictures)
    label = next(svg["aria-label"] for svg in pictures if "test error" in svg["aria-label"])
    assert "weight norm, lr 0.003, n = 2: 45 to 14.8." in label


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
    body = files.page.read_text().partition("</style>")[2]
    assert "currentColor" in body
    assert INK not in body
    assert PAPER not in body
    assert not re.search(r"url\((?!#)", body)


def test_verdicts_come_first_then_experiments_with_settings_folded(files):
    page = files.page.read_text()
    order = ['id="summary"', 'class="verdicts', "<h2>Classification", "<summary>", 'id="problems"']
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    verdicts = page[places[1] : places[2]]
    assert verdicts.count('class="mark better"') == 4
    assert "classify: demo" not in verdicts
    assert re.search(r'<details id="classify-cpu-epochs-3">', page)


def test_left_out_records_are_listed(files):
    other, copy, damaged = sorted(files.problems, key=lambda x: ("other" not in x, "copy" not in x))
    assert "there is no report of experiment other" in other
    assert re.search(r"cpu/weight-norm/lr-0.003/seed-2 is the same run as", copy)
    assert "classify/cpu/standard/lr-0.1/seed-1/config.json is damaged" in damaged
    page = files.page.read_text()
    assert all(problem.split(" ")[0] in page for problem in files.problems)


def test_the_same_records_give_the_same_bytes_and_paths_are_not_shown(run, tmp_path, monkeypatch):
    run(label="cpu+epochs=3", epochs=3, parameterization="standard")
    first = write_report(tmp_path / "runs", tmp_path / "one")
    monkeypatch.chdir(tmp_path / "runs" / "classify")
    second = write_report(Path("."), Path("two"))  # any folder above the runs
    assert contents(first.page.parent) == contents(second.page.parent)
    assert str(tmp_path) not in first.page.read_text()


@pytest.mark.parametrize("name", ['<script>alert("x")</script>', "a & b' $x$ {{ 1 }}", "π\n\x00"])
def test_names_are_escaped(run, tmp_path, name):
    run(parameterization="standard", data=name, session={"machine": name})
    run(parameterization="standard", experiment="vae", data=name)
    page = write_report(tmp_path / "runs", tmp_path / "out").page.read_text()
    assert Elements(page).open == []
    assert "<script" not in page


def test_errors_say_what_to_do(run, tmp_path):
    with pytest.raises(ReportError, match="nowhere is not a folder; expected"):
        write_report(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ReportError, match="weightnorm run classify --preset demo"):
        write_report(tmp_path / "runs", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run()
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ReportError, match="choose another folder"):
        write_report(tmp_path / "runs", tmp_path / "out")


def test_damaged_benchmarks_and_claims_are_left_out(run, tmp_path):
    run(done=0)
    run(experiment="bench", result={"benchmarks": []})
    row = dict.fromkeys(("section", "statement", "paper", "value", "verdict", "n"), "")
    run(experiment="claims", metrics=[{**row, "number": 3, "figures": [{}]}])
    files = write_report(tmp_path / "runs", tmp_path / "out")
    damaged = [problem for problem in files.problems if "it is damaged (KeyError" in problem]
    assert [problem.split("/")[0] for problem in damaged] == ["bench", "claims"]
    assert files.page.exists()


@pytest.fixture
def browse(tmp_path):
    def browse(*words):
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
        return done.stdout

    return browse


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")


@needs_browser
def test_the_page_fits_a_desktop_and_a_phone(browse, files, tmp_path):
    """No horizontal scrolling, no cut label, readable text, and a height that can be read."""
    shutil.copy(files.page, tmp_path)
    (tmp_path / "frames.html").write_text(FRAMES)
    dom = browse("--dump-dom", (tmp_path / "frames.html").as_uri())
    frames = re.search("<title>(.*)</title>", dom)[1].split("|")
    for frame, width in zip(frames, (1280, 420), strict=True):
        scroll, height, cut, sticky, smallest, widest = frame.split()
        assert int(scroll) == width
        assert int(height) < (3000 if width == 1280 else 4000)
        assert (cut, sticky) == ("0", "sticky")
        assert float(smallest) > 8
        assert float(widest) <= min(480, width)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_figures_have_their_colors_on_both_schemes(browse, files, tmp_path, dark):
    picture = tmp_path / "page.png"
    words = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(*words, "--window-size=1280,1600", f"--screenshot={picture}", files.page.as_uri())
    page = (imread(picture)[..., :3] * 255).round().astype(int)
    assert page.shape[:2] == (1600, 1280)
    if dark:
        assert page.mean() < 60
        assert (page.min(-1) == 255).sum() > 300  # the figures' ink, brighter than the page's
        return
    assert page.mean() > 200
    for style in STYLES.values():
        color = [int(style.color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(page - color).max(-1) <= 2).sum() > 100, style
