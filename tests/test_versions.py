"""The runner of make test-versions, and what the project declares about versions."""

import json
import re
import sys
from pathlib import Path

import versions
from versions import ENVIRONMENTS, PAGE, RECORDS, ROOT, Environment

XML = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_one[x]" />
<testcase file="tests/test_a.py" name="test_two"><failure message="ValueError: no&#10;more" />
</testcase>
<testcase file="tests/test_a.py" name="test_three"><error message="setup" /></testcase>
<testcase file="tests/test_mean_only.py" name="test_four"><skipped message="needs torch 2.10" />
</testcase>
<testcase file="tests/test_mean_only.py" name="test_five"><skipped type="pytest.xfail" /></testcase>
</testsuite></testsuites>"""


def test_results_are_counted_and_formatted():
    older = versions.parse(XML) | {"date": "2026-01-01"}
    assert older["files"]["tests/test_a.py"] == {"passed": 1, "failed": 2}
    newer = {**older, "failures": {}, "files": {"tests/test_mean_only.py": {"passed": 4}}}
    text = versions.table(
        {Environment("2.9.0", "3.11"): older, Environment("2.15.0", "3.13"): newer}
    )
    assert text.splitlines()[2:4] == [
        "| 2.9.0 | 3.11 | 2 | 2 | 1 | 2026-01-01 |",
        "| 2.15.0 | 3.13 | 4 | 0 | 0 | 2026-01-01 |",
    ]
    assert "- `tests/test_a.py::test_two`: ValueError: no (2.9.0 on 3.11)" in text
    assert "- needs torch 2.10 (everywhere)" in text


def test_finished_environments_are_not_tested_again(tmp_path, monkeypatch, capsys):
    """One environment fails a test, one has no interpreter, one cannot be installed."""
    page, tested = tmp_path / "page.md", []

    def run(environment, interpreter, title):
        if environment.torch == "2.13.0":
            raise RuntimeError("pip install failed")
        tested.append(environment.name)
        (versions.BUILD / environment.name).mkdir(parents=True)
        failures = {"tests/test_a.py::test": "no"} if environment.python == "3.13" else {}
        files = {"tests/test_a.py": {"passed": 3, "failed": len(failures)}}
        return {"date": "today", "seconds": 1.0, "skips": {}, "failures": failures, "files": files}

    page.write_text(f"before\n{versions.BEGIN}\nformer\n{versions.END}\nafter\n")
    for name in ("RECORDS", "BUILD"):
        monkeypatch.setattr(versions, name, tmp_path / name)
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "run", run)
    missing = {"3.10": None}
    monkeypatch.setattr(
        versions, "find_interpreter", lambda v: missing.get(v, Path(sys.executable))
    )
    runnable = [e.name for e in ENVIRONMENTS if e.python != "3.10" and e.torch != "2.13.0"]
    assert versions.main([]) == 1
    assert tested == runnable
    assert not list(versions.BUILD.glob("*"))  # virtual environments are deleted
    printed = capsys.readouterr().out
    assert "skipped, no python3.10 on PATH or in pyenv" in printed
    assert "not tested: pip install failed" in printed
    assert re.fullmatch(r"before\n.*\| 3 \| 0 \| 0 \|.*\nafter\n", page.read_text(), re.DOTALL)
    assert "former" not in page.read_text()
    assert versions.main(["--only", runnable[-1]]) == 1  # its record has a failure
    assert "--again repeats it" in capsys.readouterr().out
    assert versions.main(["--again", "--only", runnable[0]]) == 0
    assert tested == [*runnable, runnable[0]]


def test_interpreters_are_found_in_pyenv(tmp_path, monkeypatch):
    here = "{}.{}".format(*sys.version_info)
    binary = tmp_path / "versions" / f"{here}.0" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    binary.symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert versions.find_interpreter(here) == binary
    assert versions.find_interpreter("3.99") is None


def test_written_table_agrees_with_the_records():
    """If this fails, run ``python tests/versions.py --table``."""
    written = PAGE.read_text().split(versions.BEGIN)[1].split(versions.END)[0].strip()
    assert written == versions.table(versions.read_records(RECORDS))
    known = {f"{environment.name}.json" for environment in ENVIRONMENTS}
    assert {path.name for path in RECORDS.glob("*")} <= known


def as_numbers(version):
    return tuple(map(int, version.split(".")))


def test_declared_versions_are_those_that_are_tested():
    project = (ROOT / "pyproject.toml").read_text()
    torchs = sorted({e.torch for e in ENVIRONMENTS}, key=as_numbers)
    pythons = sorted({e.python for e in ENVIRONMENTS}, key=as_numbers)
    oldest = torchs[0].removesuffix(".0")
    assert f'dependencies = ["torch>={oldest}"]' in project
    assert f'requires-python = ">={pythons[0]}"' in project
    assert re.findall(r"Python :: (3\.\d+)", project) == pythons
    for page in ("README.md", "docs/conformance.md"):
        text = " ".join((ROOT / page).read_text().split())
        newest = torchs[-1].removesuffix(".0")
        assert f"torch {oldest} to {newest}" in text, page
        assert f"Python {pythons[0]} to {pythons[-1]}" in text, page
    constrained = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constrained[1] in torchs


def test_workflow_tests_the_same_environments(capsys):
    assert versions.main(["--matrix"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(e["name"], e["python"]) for e in listed] == [(e.name, e.python) for e in ENVIRONMENTS]
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert "tests/versions.py --matrix" in workflow
    assert set(re.findall(r"matrix\.environment\.(\w+)", workflow)) == set(listed[0])
