"""Tables and figures of the documents, written from records."""

import json
import shutil

import pytest

from weightnorm.lab.errors import ReportError
from weightnorm.lab.report import outdated, update_documents

PAGE = """# Results

<!-- results:classify-cpu-errors -->
old text
<!-- /results -->

![Training error](results/classify/figures/classify-cpu-train-error.png)
"""
FIGURE = "docs/results/classify/figures/classify-cpu-train-error.png"


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


def test_blocks_and_linked_figures_are_written(root):
    assert outdated(root) == ["docs/page.md", FIGURE]
    changed = [str(path.relative_to(root)) for path in update_documents(root)]
    assert changed == ["docs/page.md", FIGURE]
    text = (root / "docs/page.md").read_text()
    assert "old text" not in text
    assert "| weight norm | 21.50&nbsp;±&nbsp;0.71 | 10.75&nbsp;±&nbsp;0.35 | 2 |" in text
    assert text.startswith("# Results")
    assert text.endswith(PAGE[-20:])
    assert outdated(root) == []

    page, figures = root / "docs/page.md", (root / FIGURE).parent
    page.write_text(text.replace("21.50", "20.50"))
    (figures / "other.png").write_bytes(b"")  # to which no document links
    assert outdated(root) == ["docs/page.md"]
    update_documents(root)
    assert page.read_text() == text
    assert [path.name for path in figures.iterdir()] == ["classify-cpu-train-error.png"]


def test_unknown_names_and_damaged_records_are_errors(root):
    page = root / "docs/page.md"
    page.write_text("<!-- results:nothing -->\n<!-- /results -->\n")
    with pytest.raises(ReportError, match="no results are called nothing; there are classify-cpu"):
        update_documents(root)
    page.write_text("![x](results/classify/figures/nothing.png)")
    with pytest.raises(ReportError, match=r"nothing\.png, which is not a figure"):
        update_documents(root)
    next((root / "docs/results").rglob("config.json")).write_text(json.dumps([]))
    with pytest.raises(ReportError, match="cannot be used"):
        update_documents(root)
