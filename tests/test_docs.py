"""Code in the documents runs, links and tests exist, tables and figures agree with the records."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from frameworks import IGNORED_WARNINGS, need
from weightnorm import normalized_weights
from weightnorm.lab.cli import main
from weightnorm.lab.report import outdated

ROOT = Path(__file__).parents[1]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_readme_code_runs(capsys):
    first, *rest = blocks("README.md")
    scope = {"torch": torch, "model": nn.LSTM(4, 4), "plain": nn.Linear(4, 4)}
    exec(compile(first, "README.md", "exec"), scope)
    assert list(scope["optimizer"].parts()) == ["weight"]
    assert len(normalized_weights(scope["model"])) == 2
    for block in rest:
        exec(compile(block, "README.md", "exec"), scope)
    assert list(normalized_weights(scope["model"])) == ["0.weight", "3.weight"]
    assert "Conv2d" in capsys.readouterr().out


PAGES = ["docs/deployment.md", "docs/migration.md", "docs/training.md", "docs/vocoder.md"]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.xdist_group("deployment")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_code_of_the_documents_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run((ROOT / name).read_text(), name) > 3


def run(text, name):
    """Run the Python and the commands of a text, in order; return the number of blocks."""
    fences = re.findall(r"```(python|console)\n(.*?)```", text, re.DOTALL)
    scope = {}
    for language, code in fences:
        if language == "python":
            exec(compile(code, name, "exec"), scope)
            continue
        for line in code.splitlines():
            dollar, program, *words = shlex.split(line)
            assert (dollar, program) == ("$", "weightnorm")
            assert main(words) == 0, line
    return len(fences)


SECTIONS = dict(
    re.findall(
        r"^## ([^\n]+)\n\n(Requires `pip install .*?)(?=^## |\Z)",
        (ROOT / "docs" / "frameworks.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.xdist_group("transformers")
@pytest.mark.filterwarnings(*IGNORED_WARNINGS)
def test_code_of_the_frameworks_page_runs(section, tmp_path, monkeypatch):
    """Each section alone, with the packages that it names; test_clusters runs that on ranks."""
    required = re.search(r"Requires `pip install ([\w ]+)`", SECTIONS[section])
    for package in required[1].split():
        need(package)
    monkeypatch.chdir(tmp_path)
    assert run(SECTIONS[section], f"docs/frameworks.md, {section}") > 0


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


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(EVERY_PAGE))
def test_links_exist(name):
    here = ROOT / name
    links = re.findall(
        r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)|<(?:img src|a href)=\"(?!http)([^\"#]+)\"",
        here.read_text(),
    )
    for linked, anchor, embedded in links:
        target = here.parent / (linked or embedded) if linked or embedded else here
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("name", sorted(set(EVERY_PAGE) - {"CHANGELOG.md", "CONTRIBUTING.md"}))
def test_pages_with_commands_name_the_extra(name):
    text = (ROOT / name).read_text()
    commands = re.search(r"^\$ (torchrun .*)?weightnorm ", text, re.MULTILINE)
    start = text[: commands.start()] if commands else ""
    assert not commands or re.search(r"pip install '(weightnorm|\.)\[", start)


def test_documents_agree_with_the_records():
    """If this fails, run `make tables`."""
    assert outdated(ROOT) == []


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"^(?!\|)", text, re.MULTILINE)) <= 110  # without rows of tables


def test_training_page_has_the_learning_rates_of_the_records():
    page = (ROOT / "docs" / "training.md").read_text()
    runs = re.findall(r"^\| \[.*experiments/(\w+).*\| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [experiment for experiment, *_ in runs] == ["classify", "vae", "draw", "dqn"]
    for experiment, *rates in runs:
        for how, rate in zip(("standard", "weight-norm"), rates, strict=True):
            pattern = f"{experiment}/runs/{experiment}/cpu/**/{how}/lr-{rate}"
            assert list((ROOT / "docs/results").glob(pattern)), pattern


def test_readme_of_the_package_has_no_relative_links():
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    readme = (ROOT / "README.md").read_text()
    publish = runpy.run_path(str(ROOT / "hatch_build.py"))["published_readme"]
    relative = re.compile(r"\]\((?!http)[^)]+\)|(?:src|href)=\"(?!http)[^\"]+\"")
    count = len(relative.findall(readme))
    assert count > 10
    unlinked = publish(readme, None)
    assert not relative.search(unlinked)
    assert "](" not in re.sub(r"\]\(https?:", "", unlinked)
    assert "<img" not in unlinked
    assert "*Figure, in the repository: CIFAR-10 with five parameterizations" in unlinked
    assert not re.search(r"\s[.,;:](\s|$)", unlinked)
    address = "https://example.org/weightnorm"
    published = publish(readme, address)
    assert not relative.search(published)
    assert len(re.findall(rf"{address}/(?:blob|raw)/HEAD/", published)) == count
    assert f'<img src="{address}/raw/HEAD/docs/' in published
    without = re.sub(rf"{address}/(?:blob|raw)/HEAD/", "", published)
    assert (
        without.replace("install weightnorm", "install .").replace("'weightnorm[", "'.[") == readme
    )
