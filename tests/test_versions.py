"""The runner of make test-versions, and what the project declares about versions."""

import json
import re
import sys
from pathlib import Path

import pytest

import versions
from versions import ENVIRONMENTS, FEATURES, PAGE, RECORDS, ROOT, Environment

XML = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_one[x]" />
<testcase file="tests/test_a.py" name="test_two"><failure message="ValueError: no&#10;more" />
</testcase>
<testcase file="tests/test_a.py" name="test_three"><error message="setup" /></testcase>
<testcase file="tests/test_b.py" name="test_four"><skipped message="needs torch 2.10" /></testcase>
<testcase file="tests/test_b.py" name="test_five"><skipped type="pytest.xfail" /></testcase>
</testsuite></testsuites>"""


def record(file="tests/test_kernels.py", **counts):
    of = {"date": "2026-01-01", "seconds": 1.0, "failures": {}, "skips": {}, "without": []}
    return {**of, "files": {file: counts}}


def test_results_are_counted_by_file():
    parsed = versions.parse(XML)
    assert parsed == {
        "files": {
            "tests/test_a.py": {"passed": 1, "failed": 2},
            "tests/test_b.py": {"skipped": 1, "passed": 1},
        },
        "failures": {
            "tests/test_a.py::test_two": "ValueError: no",
            "tests/test_a.py::test_three": "setup",
        },
        "skips": {"needs torch 2.10": 1},
    }
    assert versions.failed(parsed)
    assert versions.summary(parsed) == "2 failed, 2 passed, 1 skipped"


def test_results_of_some_files_are_replaced():
    old = {**record(passed=3, failed=1), "commit": "a"}
    old["files"]["tests/test_folding.py"] = {"passed": 2, "failed": 1}
    failures = {"tests/test_kernels.py::test_x": "wrong", "tests/test_folding.py::test_y": "no"}
    new = {**record(passed=4), "commit": "b"}
    replaced = versions.replace_results({**old, "failures": failures}, new)
    assert replaced["files"]["tests/test_kernels.py"] == {"passed": 4}
    assert replaced["failures"] == {"tests/test_folding.py::test_y": "no"}
    assert (replaced["commit"], replaced["later"]) == ("a", {"tests/test_kernels.py": "b"})


def test_table_has_a_row_per_feature_and_a_column_per_environment():
    first, second = Environment("2.9.0", "3.11"), Environment("2.15.0", "3.13")
    older, newer = record(passed=1, failed=1, skipped=2), record(passed=4)
    older["failures"] = {"tests/test_kernels.py::test_x": "wrong"}
    older["skips"] = {"needs torch 2.10": 2, "no wheel": 1}
    newer["skips"] = {"no wheel": 1}
    newer["without"] = ["tests/test_mean_only.py"]
    text = versions.table({first: older, second: newer})
    header, _, module_form, *_ = text.splitlines()
    assert header == "|  | torch 2.9.0<br>Python 3.11 | torch 2.15.0<br>Python 3.13 |"
    assert module_form.endswith("| **1 failed**, 1 passed, 2 skipped | 4 passed |")
    assert all(f"| {feature} |" in text for feature in FEATURES)
    assert "- `tests/test_kernels.py::test_x`: wrong (2.9.0 on 3.11)" in text
    assert "- needs torch 2.10 (2.9.0 on 3.11)" in text
    assert "- no wheel (everywhere)" in text
    assert "- `tests/test_mean_only.py` (2.15.0 on 3.13)" in text


def test_every_test_file_belongs_to_one_feature():
    files = [
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("src/weightnorm/**/*.py")]
    ]
    tested = [file for file in files if not file.startswith(versions.NOT_TESTED)]
    assert len(tested) > 30
    for file in tested:
        features = [f for f, prefixes in FEATURES.items() if file.startswith(prefixes)]
        assert len(features) == 1, f"{file}: {features}"
    for prefix in [prefix for prefixes in FEATURES.values() for prefix in prefixes]:
        assert any(file.startswith(prefix) for file in tested), prefix


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Run with a folder of its own, and without installing anything."""
    page, tested = tmp_path / "page.md", []

    def run(environment, interpreter, title, without, tests):
        tested.append(environment.name)
        return record(passed=3, failed=int(environment.python == "3.13"))

    page.write_text(f"before\n{versions.BEGIN}\nformer\n{versions.END}\nafter\n")
    monkeypatch.setattr(versions, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(versions, "BUILD", tmp_path / "build")
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "run", run)
    found = {"3.10": None}
    monkeypatch.setattr(versions, "find_interpreter", lambda v: found.get(v, Path(sys.executable)))
    return page, tested


def test_finished_environments_are_not_tested_again(runner, capsys):
    page, tested = runner
    with_interpreter = [e.name for e in ENVIRONMENTS if e.python != "3.10"]
    assert versions.main([]) == 1  # one test fails on 3.13
    assert tested == with_interpreter
    assert "skipped, no python3.10 on PATH or in pyenv" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "3 passed" in text
    assert "former" not in text
    assert versions.main([]) == 1
    assert tested == with_interpreter
    assert "--again repeats it" in capsys.readouterr().out
    chosen = with_interpreter[0]
    assert versions.main(["--again", "--only", chosen]) == 0
    assert tested == [*with_interpreter, chosen]


@pytest.mark.parametrize("keep", [False, True])
def test_virtual_environments_are_deleted_unless_kept(keep, runner):
    chosen = ENVIRONMENTS[1].name
    folder = versions.BUILD / chosen
    folder.mkdir(parents=True)
    assert versions.main(["--only", chosen, *["--keep"] * keep]) == 0
    assert folder.exists() == keep


def test_an_environment_that_cannot_be_installed_has_no_record(runner, monkeypatch, capsys):
    def run(*args, **kwargs):
        raise RuntimeError("pip install failed")

    monkeypatch.setattr(versions, "run", run)
    assert versions.main(["--only", ENVIRONMENTS[-1].name]) == 1
    assert "not tested: pip install failed" in capsys.readouterr().out
    assert not list(versions.RECORDS.glob("*"))


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
    for page in ("README.md", "docs/compatibility.md"):
        text = " ".join((ROOT / page).read_text().split())
        newest = torchs[-1].removesuffix(".0")
        assert f"torch {oldest} to {newest}" in text, page
        assert f"Python {pythons[0]} to {pythons[-1]}" in text, page
    constrained = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constrained[1] in torchs


def test_every_torch_is_tested_on_one_python():
    by_python = {}
    for environment in ENVIRONMENTS:
        by_python.setdefault(environment.python, set()).add(environment.torch)
    assert {e.torch for e in ENVIRONMENTS} in by_python.values()


def test_workflow_tests_the_same_environments(capsys):
    assert versions.main(["--matrix"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(e["name"], e["python"]) for e in listed] == [(e.name, e.python) for e in ENVIRONMENTS]
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert "tests/versions.py --matrix" in workflow
    assert "fromJSON(needs.matrix.outputs.environments)" in workflow
    used = set(re.findall(r"matrix\.environment\.(\w+)", workflow))
    assert used == set(listed[0])
    assert "make test" in workflow
