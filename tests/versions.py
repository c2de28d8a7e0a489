"""Test the library with several versions of torch and Python: ``make test-versions``.

For each environment: create a virtual environment in build/versions, install torch and what the
tests need, run the library's tests (not the lab's), write a record to docs/results/versions, delete
the virtual environment. After an interruption, the same command continues: an environment that has
a record is not tested again (--again), and a finished installation is reused. The table of
docs/conformance.md is written from the records.

torch's Linux wheels on PyPI include CUDA: several gigabytes each. PIP_EXTRA_INDEX_URL may name an
index with CPU wheels, as .github/workflows/tests.yml does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "results" / "versions"
PAGE = ROOT / "docs" / "conformance.md"
BUILD = ROOT / "build" / "versions"
BEGIN, END = "<!-- table: make test-versions -->", "<!-- end of versions -->"

Record = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    """A version of torch on a version of Python, with packages that must not be the newest."""

    torch: str
    python: str
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"


# Every torch on one Python, every Python on one torch that has wheels for it (2.15: from 3.11 on).
# torchao supports the few releases of torch before it.
ENVIRONMENTS = (
    Environment("2.9.0", "3.10", ("torchao==0.17.0",)),
    Environment("2.9.0", "3.11", ("torchao==0.17.0",)),
    Environment("2.11.0", "3.11"),
    Environment("2.13.0", "3.11"),
    Environment("2.15.0", "3.11"),
    Environment("2.15.0", "3.12"),
    Environment("2.15.0", "3.13"),
)

TESTS = ("tests", "src/weightnorm")
NOT_TESTED = (
    "tests/lab",
    "tests/files",
    "src/weightnorm/lab",
    "src/weightnorm/files",
    "src/weightnorm/__main__.py",
    # Needs the packages of the extra `frameworks`, which depend on many versions of others.
    "tests/test_frameworks.py",
    # The same for every version: source text and documents.
    "tests/test_architecture.py",
    "tests/test_docs.py",
    "tests/test_site.py",
    "tests/test_versions.py",
)

PYTEST = (
    *TESTS,
    *(f"--ignore={path}" for path in NOT_TESTED),
    "--numprocesses=1",
    "--quiet",
    "-p",
    "no:cacheprovider",
    # Packages are installed without bytecode, so that importing one compiles it.
    "-W=ignore:invalid escape sequence",
    "--override-ini=junit_family=xunit1",  # with the file of each test
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [environment.name for environment in ENVIRONMENTS]
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=names,
        help=f"test only these environments; all: {', '.join(names)}",
    )
    parser.add_argument("--again", action="store_true", help="test again where a record exists")
    parser.add_argument("--matrix", action="store_true", help="print the environments as JSON")
    parser.add_argument("--table", action="store_true", help="write the table and test nothing")
    args = parser.parse_args(arguments)
    if args.matrix:
        print(json.dumps([{"name": e.name, "python": e.python} for e in ENVIRONMENTS]))
        return 0
    chosen = [e for e in ENVIRONMENTS if args.only is None or e.name in args.only]
    succeeded = args.table or all([*run_all(chosen, args.again)])
    write_table(PAGE, table(read_records(RECORDS)))
    return 0 if succeeded else 1


def run_all(chosen: Sequence[Environment], again: bool) -> Iterator[bool]:
    """Test one environment after the other; yield whether all of its tests passed."""
    for i, environment in enumerate(chosen, 1):
        title = f"[{i}/{len(chosen)}] torch {environment.torch}, Python {environment.python}"
        path = RECORDS / f"{environment.name}.json"
        if path.exists() and not again:
            record = json.loads(path.read_text())
            print(f"{title}: tested on {record['date']}, {cell(total(record))}; --again repeats it")
            yield not record["failures"]
            continue
        interpreter = find_interpreter(environment.python)
        if interpreter is None:
            print(f"{title}: skipped, no python{environment.python} on PATH or in pyenv")
            continue
        try:
            record = run(environment, interpreter, title)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{title}: not tested: {error}", flush=True)
            yield False
            continue
        shutil.rmtree(BUILD / environment.name, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"{title}: {cell(total(record))} in {record['seconds']:.0f} s", flush=True)
        for test, reason in record["failures"].items():
            print(f"    {test}: {reason}")
        yield not record["failures"]


def find_interpreter(version: str) -> Path | None:
    """Find an interpreter of this version: on PATH as pythonX.Y, or among pyenv's."""
    found = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [Path(found)] if found else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    return next((path for path in candidates if _version(path) == version), None)


def _version(interpreter: Path) -> str | None:
    """Return X.Y of an interpreter that runs; pyenv's shims on PATH may not."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run(environment: Environment, interpreter: Path, title: str) -> Record:
    """Install and test one environment; return its record. A finished installation is reused."""
    folder, log = BUILD / environment.name, BUILD / f"{environment.name}.log"
    python, results = folder / "bin" / "python", BUILD / f"{environment.name}.xml"
    BUILD.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    with log.open("w") as output:
        if not (folder / "installed").exists():
            print(f"{title}: installing; log: {log}", flush=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
            _call([interpreter, "-m", "venv", "--clear", folder], output)
            own = [f"torch=={environment.torch}", *environment.packages]
            _call([*pip, *own, "--editable", f"{ROOT}[test,lab]"], output)
            _call([*pip, "--no-deps", "timm"], output)
            (folder / "installed").touch()
        print(f"{title}: testing; log: {log}", flush=True)
        start = time.monotonic()
        _call([python, "-m", "pytest", *PYTEST, f"--junitxml={results}"], output, check=False)
    if not results.exists():
        raise RuntimeError(f"pytest ended without results, see {log}")
    return {
        **describe(python),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]),
        "seconds": round(time.monotonic() - start),
        "without": [],
        **parse(results.read_text()),
    }


def _call(command: Sequence[str | Path], output: Any, *, check: bool = True) -> None:
    """Run a command with low priority and one thread."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["nice", "-n", "10", *map(str, command)],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        timeout=3600,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed, see {output.name}")


def _output(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def describe(python: Path) -> Record:
    """Return the versions of Python, torch and the other packages of an environment."""
    listed = json.loads(_output([python, "-m", "pip", "list", "--format=json"]))
    versions = {package["name"].lower(): package["version"] for package in listed}
    ours = re.findall(r"[\w-]+", " ".join(packages_of_tests()))
    return {
        "torch": versions["torch"],
        "python": _output([python, "-c", "import platform; print(platform.python_version())"]),
        "packages": {name: versions[name] for name in sorted({*ours}) if name in versions},
    }


def packages_of_tests() -> list[str]:
    """Return the requirements of the extra `test` in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    # Python 3.10 has no tomllib.
    (block,) = re.findall(r"^test = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'^\s+"([^"]+)"', block, re.MULTILINE)


def parse(xml: str) -> Record:
    """Count the results of each test file in JUnit XML, with failures and reasons of skips."""
    files: dict[str, Counter[str]] = {}
    failures: dict[str, str] = {}
    skips: Counter[str] = Counter()
    for case in ElementTree.fromstring(xml).iter("testcase"):
        file = case.get("file") or (case.get("classname") or "?").replace(".", "/") + ".py"
        outcome = "passed"
        for child in case:
            message = (child.get("message") or "").strip().partition("\n")[0]
            if child.tag in ("failure", "error"):
                outcome = "failed"
                failures[f"{file}::{case.get('name')}"] = message[:200]
            elif child.tag == "skipped" and child.get("type") != "pytest.xfail":
                outcome = "skipped"
                skips[message] += 1
        files.setdefault(file, Counter())[outcome] += 1
    return {
        "files": {file: dict(counts) for file, counts in sorted(files.items())},
        "failures": failures,
        "skips": dict(sorted(skips.items())),
    }


def total(record: Record) -> Counter[str]:
    """Sum the counts of all test files."""
    counts: Counter[str] = Counter()
    for of_file in record["files"].values():
        counts.update(of_file)
    return counts


def cell(counts: Mapping[str, int]) -> str:
    """Format the counts of an environment.

    >>> cell({"passed": 12, "failed": 1, "skipped": 0})
    '1 failed, 12 passed'
    """
    words = ("failed", "passed", "skipped")
    return ", ".join(f"{counts[word]} {word}" for word in words if counts.get(word))


def read_records(folder: Path) -> dict[Environment, Record]:
    """Return the records of the environments that have one, in order."""
    paths = {e: folder / f"{e.name}.json" for e in ENVIRONMENTS}
    return {e: json.loads(path.read_text()) for e, path in paths.items() if path.exists()}


def table(records: Mapping[Environment, Record]) -> str:
    """Format the records as Markdown: a row per environment, failures and reasons of skips."""
    counted = ("passed", "failed", "skipped")
    lines = [_row("torch", "Python", *counted, "tested on"), "|---|---|--:|--:|--:|---|"]
    for environment, record in records.items():
        counts = total(record)
        cells = (str(counts[outcome]) for outcome in counted)
        lines.append(_row(environment.torch, environment.python, *cells, record["date"]))
    lines += _listed("Failed", records, "failures")
    lines += _listed("Skipped", records, "skips")
    return "\n".join(lines)


def _listed(title: str, records: Mapping[Environment, Record], key: str) -> list[str]:
    """List failures or reasons of skips, each with the environments where it occurs."""
    where: dict[str, list[str]] = {}
    for environment, record in records.items():
        for name, detail in record[key].items():
            text = f"`{name.replace('|', ' ')}`: {detail}" if key == "failures" else name
            where.setdefault(text, []).append(f"{environment.torch} on {environment.python}")
    found = [
        f"- {text} ({'everywhere' if len(places) == len(records) else ', '.join(places)})"
        for text, places in where.items()
    ]
    return ["", f"{title}:", "", *found] if found else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def write_table(page: Path, text: str) -> None:
    """Write the table between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
