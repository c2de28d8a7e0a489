"""Provenance: the commit is that of this project's own repository, or None."""

import shutil
import subprocess
from pathlib import Path

import pytest

from weightnorm.lab import environment
from weightnorm.lab.environment import commit

INSIDE = Path("src/weightnorm/lab/environment.py")


def git(folder, *words):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with this module at its place."""
    file = tmp_path / "repository" / INSIDE
    file.parent.mkdir(parents=True)
    shutil.copy(environment.__file__, file)
    root = tmp_path / "repository"
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_commit_of_the_own_repository(repository):
    head = git(repository, "rev-parse", "--short=12", "HEAD")
    assert commit(repository / INSIDE) == head
    (repository / "README.md").write_text("outside of src")
    assert commit(repository / INSIDE) == head
    (repository / "src/weightnorm/new.py").write_text("")
    assert commit(repository / INSIDE) == f"{head}+"


def test_other_repositories_are_not_used(repository, tmp_path):
    """An installed copy, a vendored one, one that is not tracked, and none at all."""
    for place in (f"venv/site-packages/{INSIDE.name}", f"external/{INSIDE}"):
        file = repository / place
        file.parent.mkdir(parents=True)
        shutil.copy(environment.__file__, file)
        assert commit(file) is None
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "vendored")
        assert commit(file) is None
    git(repository, "rm", "-q", "--cached", str(INSIDE))
    assert commit(repository / INSIDE) is None
    outside = tmp_path / INSIDE
    outside.parent.mkdir(parents=True)
    shutil.copy(environment.__file__, outside)
    assert commit(outside) is None


def test_git_variables_are_ignored(repository, tmp_path, monkeypatch):
    """A git hook sets GIT_DIR to the repository it belongs to."""
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-qm", "other", "--allow-empty")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(repository))
    expected = commit(repository / INSIDE)
    monkeypatch.undo()
    assert expected == git(repository, "rev-parse", "--short=12", "HEAD")
