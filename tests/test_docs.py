"""What the documents say runs, and what they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_runs(capsys):
    assert len(blocks("README.md")) >= 3
    scope = {}
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["names"] == ["0.weight", "2.weight", "5.weight"]
    assert "ConvTranspose2d" in capsys.readouterr().out


def test_the_paper_map_names_tests_that_exist():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    rows = [line for line in text.splitlines() if "test_" in line]
    assert len(rows) > 10
    for row in rows:
        last = None
        for file, test in re.findall(r"`((?:lab/\w+/)?test_\w+)?(?:::(\w+))?`", row):
            last = file or last
            if last is None:
                continue
            source = (ROOT / "tests" / f"{last}.py").read_text()
            assert not test or f"def {test}(" in source, f"{last}::{test}"


PAGES = ["README.md", "CONTRIBUTING.md", "docs/paper-map.md", "docs/conformance.md"]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    here = ROOT / name
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", here.read_text()):
        assert (here.parent / target).exists(), target
