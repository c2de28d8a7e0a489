"""Tables and figures of the documents, written from records."""

import json
import shutil

import pytest

from weightnorm.lab.errors import ReportError
from weightnorm.lab.reports import outdated, update_documents
from weightnorm.lab.reports.document import Line, Plot
from weightnorm.lab.reports.documents import digest
from weightnorm.lab.reports.style import STYLES

PAGE = """# Results

<!-- results:classify-cpu-errors -->
old text
<!-- /results -->

![Training error](results/classify/figures/classify-cpu-train-error.png)
"""


@pytest.fixture
def root(tmp_path, run):
    """A repository with one document and the records of three runs."""
    for kind, seed in (("standard", 1), ("weight-norm", 1), ("weight-norm", 2)):
        run(parameterization=kind, seed=seed, end=0.2 + 0.01 * seed)
    results = tmp_path / "docs" / "results" / "classify"
    results.mkdir(parents=True)
    shutil.move(tmp_path / "runs", results / "runs")
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    return tmp_path


def test_blocks_and_figures_are_written_once(root):
    names = [str(path.relative_to(root)) for path in update_documents(root)]
    figure = "docs/results/classify/figures/classify-cpu-train-error.png"
    assert names == ["docs/page.md", figure, "docs/results/figures.json"]
    text = (root / "docs/page.md").read_text()
    assert "old text" not in text
    assert "| weight norm | 21.50&nbsp;±&nbsp;0.71 | 10.75&nbsp;±&nbsp;0.35 | 2 |" in text
    assert text.startswith("# Results")
    assert text.endswith(PAGE[-20:])
    assert update_documents(root) == []
    assert outdated(root) == []


def test_new_records_make_documents_and_figures_outdated(root, run, tmp_path):
    update_documents(root)
    run(parameterization="standard", seed=2, end=0.3)
    shutil.copytree(tmp_path / "runs", root / "docs/results/classify/runs", dirs_exist_ok=True)
    assert outdated(root) == ["docs/page.md", "classify/figures/classify-cpu-train-error.png"]


def test_edited_tables_are_outdated(root):
    update_documents(root)
    page = root / "docs/page.md"
    page.write_text(page.read_text().replace("21.50", "20.50"))
    assert outdated(root) == ["docs/page.md"]


def test_missing_figures_are_outdated_and_unlinked_ones_removed(root):
    update_documents(root)
    figures = root / "docs/results/classify/figures"
    (figures / "other.png").write_bytes(b"")
    (figures / "classify-cpu-train-error.png").unlink()
    assert outdated(root) == ["classify/figures/classify-cpu-train-error.png"]
    update_documents(root)
    assert [path.name for path in figures.iterdir()] == ["classify-cpu-train-error.png"]


def test_unknown_blocks_and_figures_are_errors(root):
    page = root / "docs/page.md"
    page.write_text("<!-- results:nothing -->\n<!-- /results -->\n")
    with pytest.raises(ReportError, match="no results are called nothing; there are classify-cpu"):
        update_documents(root)
    page.write_text("![x](results/classify/figures/nothing.png)")
    with pytest.raises(ReportError, match=r"nothing\.png, which is not a figure"):
        update_documents(root)


def test_damaged_records_are_an_error(root):
    config = next((root / "docs/results").rglob("config.json"))
    config.write_text(json.dumps([]))
    with pytest.raises(ReportError, match="cannot be used"):
        update_documents(root)


def test_digest_ignores_rounding_but_not_values():
    def plot(y):
        line = Line("a", STYLES["standard"], (1.0,), (y,))
        return Plot("name", "Title", "Caption.", "x", "y", (line,))

    assert digest(plot(1.0)) == digest(plot(1.0 + 1e-12))
    assert digest(plot(1.0)) != digest(plot(1.001))
