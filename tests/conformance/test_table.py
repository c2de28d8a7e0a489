"""The page about conformance says what running the suite gives."""

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
from conformance.test_ours import KNOWN_MISSES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"


def test_the_table_is_what_running_gives():
    """Of torch's two by running them, of ours by what test_ours checks."""
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    of = re.match(r"torch (\S+):", written)[1]
    if of != release():
        pytest.skip(f"the page is of torch {of}, this is {release()}: make conformance")
    columns = {one.name: run(one, FEATURES) for one in (TorchHook(), TorchParametrization())}
    columns[Ours.name] = {
        f.name: dict.fromkeys(f.layers) if f.name in KNOWN_MISSES else {} for f in FEATURES
    }
    assert written == table(FEATURES, columns), "make conformance"


def test_writing_keeps_the_rest_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_readers_own_implementation(tmp_path):
    """The page's example, by the page's command."""
    text = PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"PYTHONPATH=tests python (-m .* mine:Mine)", text)
    (tmp_path / "mine.py").write_text(example)
    words = [*command.split(), "--why", "--feature", "applying_changes_nothing", "negative_dim"]
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
