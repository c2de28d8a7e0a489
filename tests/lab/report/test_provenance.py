"""Records whose code is in the repository's history, and the others."""

import subprocess
from dataclasses import replace

from weightnorm.lab.report.provenance import commits, provenance


def git(root, *words):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True
    )


def test_history(tmp_path):
    assert commits(tmp_path) == []  # no repository
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    assert len(commits(tmp_path)) == 1
    inside = tmp_path / "inside"
    inside.mkdir()
    assert commits(inside) == []  # the repository around it is another one


def test_records_of_other_code_are_counted(run):
    known = "1234567890ab"
    sessions = ([known], [known, f"{known}+"], ["fedcba098765"], [None], [])
    record = run()
    records = [replace(record, sessions=[{"commit": x} for x in each]) for each in sessions]
    assert provenance(records, [known + "0" * 28]).endswith("4 of 5.")
    assert provenance(records[:1], [known + "0" * 28]).endswith("0 of 1.")
