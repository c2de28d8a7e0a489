"""docs/conformance.md agrees with the results of the suite."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import environment
from conformance.features import FEATURES
from conformance.implementation import TorchHook, TorchParametrization
from conformance.ours import Ours
from conformance.table import BEGIN, END, release, run, table, write
from conformance.test_ours import KNOWN_FAILURES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"


def test_the_written_table_is_current():
    """torch's two are run; the results of this library are those that test_ours checks."""
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    of = re.match(r"torch (\S+):", written)[1]
    if of != release():
        pytest.skip(f"the table of docs/conformance.md is of torch {of}")
    columns = {one.name: run(one, FEATURES) for one in (TorchHook(), TorchParametrization())}
    columns[Ours.name] = {
        f.name: dict.fromkeys(f.layers) if f.name in KNOWN_FAILURES else {} for f in FEATURES
    }
    assert written == table(FEATURES, columns), "run make conformance"


def test_write_keeps_the_rest_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_the_example_of_the_page(tmp_path):
    text = PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"PYTHONPATH=tests python (-m .* mine:Mine)", text)
    (tmp_path / "mine.py").write_text(example)
    words = [*command.split(), "--errors", "--feature", "applying", "negative_dim"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{ROOT / 'tests'}:{ROOT / 'src'}"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.rsplit("|", 2)[1] for line in done.stdout.splitlines()[5:7]] == [
        " 20/20 ",
        " **0/20** ",
    ]
    assert "mine, negative_dim, linear: TypeError" in done.stdout
