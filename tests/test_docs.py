"""Code in the documents runs, links and tests exist, tables and figures agree with the records."""

import re
import shlex
from pathlib import Path

import pytest

from weightnorm.lab.cli import main
from weightnorm.lab.reports import outdated

ROOT = Path(__file__).parents[1]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_readme_code_runs(capsys):
    assert len(blocks("README.md")) >= 2
    scope = {}
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["names"] == ["0.weight", "2.weight", "5.weight"]
    assert "ConvTranspose2d" in capsys.readouterr().out


PAGES = ["docs/deployment.md", "docs/checkpoints.md"]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.xdist_group("deployment")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_code_of_the_documents_runs(name, tmp_path, monkeypatch):
    """Python and commands, in order."""
    monkeypatch.chdir(tmp_path)
    scope = {}
    fences = re.findall(r"```(python|console)\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert len(fences) > 3
    for language, text in fences:
        if language == "python":
            exec(compile(text, name, "exec"), scope)
            continue
        for line in text.splitlines():
            dollar, program, *words = shlex.split(line)
            assert (dollar, program) == ("$", "weightnorm")
            assert main.main(words) == 0, line


def test_paper_map_names_existing_tests():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    rows = [line for line in text.splitlines() if "test_" in line]
    assert len(rows) > 10
    for row in rows:
        last = None
        for file, test in re.findall(r"`((?:\w+/)*test_\w+)?(?:::(\w+))?`", row):
            last = file or last
            if last is None:
                continue
            source = (ROOT / "tests" / f"{last}.py").read_text()
            assert not test or f"def {test}(" in source, f"{last}::{test}"


EVERY_PAGE = [str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]]


@pytest.mark.parametrize("name", sorted(EVERY_PAGE))
def test_links_exist(name):
    here = ROOT / name
    links = re.findall(r"\]\((?!http)([^)#]+)\)|<img src=\"([^\"]+)\"", here.read_text())
    for target in map("".join, links):
        assert (here.parent / target).exists(), target


def test_documents_agree_with_the_records():
    """If this fails, run `make docs`."""
    assert outdated(ROOT) == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
