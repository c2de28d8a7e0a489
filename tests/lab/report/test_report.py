"""The report's files and its page, also in headless Chromium."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from commands import HANGS
from weightnorm.lab.errors import ReportError
from weightnorm.lab.report import write_report

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
    const page = frame.contentDocument, height = page.documentElement.scrollHeight;
    page.querySelectorAll("details").forEach(x => x.open = true);
    const sticky = getComputedStyle(page.querySelector("nav")).position;
    const images = [...page.images], widths = images.map(x => x.getBoundingClientRect().width);
    return [page.documentElement.scrollWidth, height, sticky, Math.max(...widths),
            images.filter(x => !x.naturalWidth).length].join(" ");
  });
  document.title = numbers.join("|");
};
</script>"""


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the tags left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_page_is_self_contained_and_shows_every_figure(files):
    assert {files.page, *files.figures} == {p for p in files.page.parent.rglob("*") if p.is_file()}
    names = {path.stem for path in files.figures}
    assert {f"classify-cpu-{x}" for x in ("train-error", "test-error", "v-norm", "rate")} <= names
    elements = Elements(files.page.read_text())
    assert elements.open == []
    images = [attrs for tag, attrs in elements.found if tag == "img"]
    assert len(images) == len(files.figures)
    assert all(x["src"].startswith("data:image/") and x["alt"] for x in images)
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {attrs["href"] for _, attrs in elements.found if "href" in attrs}
    assert links <= {f"#{id}" for id in ids}
    assert not {tag for tag, _ in elements.found} & {"script", "link", "iframe", "object", "embed"}


def test_verdicts_come_first_then_experiments_with_settings_folded(files):
    page = files.page.read_text()
    order = ['id="summary"', 'class="verdicts', "<h2>Classification", "<summary>", 'id="problems"']
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    verdicts = page[places[1] : places[2]]
    assert verdicts.count('class="mark better"') == 4
    assert "classify: demo" not in verdicts
    assert '<details id="classify-cpu-epochs-3">' in page


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


def test_names_are_escaped(run, tmp_path):
    for seed, name in enumerate(['<script>alert("x")</script>', "a & b' $x$ {{ 1 }}", "π\n\x00"]):
        run(data=name, seed=seed, label=f"cpu+data={seed}", session={"machine": name})
        run(experiment="vae", data=name, seed=seed)
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
    run(done=0)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ReportError, match="choose another folder"):
        write_report(tmp_path / "runs", tmp_path / "out")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
def test_the_page_fits_a_desktop_and_a_phone(files, tmp_path):
    """No horizontal scrolling, images of sensible size, and a height that can be read."""
    shutil.copy(files.page, tmp_path)
    (tmp_path / "frames.html").write_text(FRAMES)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command.append((tmp_path / "frames.html").as_uri())
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
    frames = re.search("<title>(.*)</title>", done.stdout)[1].split("|")
    for frame, width in zip(frames, (1280, 420), strict=True):
        scroll, height, sticky, widest, missing = frame.split()
        assert int(scroll) == width
        assert int(height) < (3000 if width == 1280 else 4000)
        assert (sticky, missing) == ("sticky", "0")
        assert float(widest) <= min(480, width)
