"""Check the built distributions; run by `make dist` as `check_dist.py FOLDER CONSTRAINTS`.

The source distribution has the sources and no records. The wheel is installed into a new virtual
environment, first with torch alone and then with the extra `files`; every command is run in both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

LIBRARY = """
import torch, weightnorm
layer = weightnorm.weight_norm(torch.nn.Linear(3, 4))
before = layer.weight.clone()
v, g = weightnorm.parts(layer)
assert torch.allclose(before.norm(dim=1, keepdim=True), g)
layer(torch.ones(2, 3)).sum().backward()
assert layer.parametrizations.weight.original1.grad.isfinite().all()
weightnorm.remove_weight_norm(layer)
assert torch.allclose(layer.weight, before)
print(weightnorm.__version__)
"""
VERBS = """
from weightnorm.lab.cli import COMMANDS, EXTRAS, FOR_MAINTAINERS
print(*(f"{x}:{EXTRAS.get(x, 'lab')}" for x in COMMANDS if x not in FOR_MAINTAINERS))
"""
CHECKPOINT = """
import torch
from safetensors.torch import save_file
state = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4)).state_dict()
torch.save(state, "model.pt")
save_file(state, "model.safetensors")
"""


def check_sdist(path: Path) -> None:
    """Check which files the source distribution has."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"}
    wanted |= {"src/weightnorm/py.typed", "tests/test_module_form.py", "docs/migration.md"}
    assert wanted <= names, f"{path.name} lacks {sorted(wanted - names)}"
    records = sorted(name for name in names if name.startswith("docs/results"))
    assert not records, f"{path.name} has records: {records[:3]}"
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")


class CleanEnvironment:
    """A new virtual environment with the wheel, and a working folder outside of the repository."""

    def __init__(self, folder: Path, constraints: Path) -> None:
        self.bin, self.work, self.constraints = folder / "venv/bin", folder / "work", constraints
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=True)

    def run(self, program: str, *words: str) -> tuple[int, str, str]:
        """Run a program of the environment; return exit code, standard output, standard error."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        done = subprocess.run(
            [str(self.bin / program), *words],
            cwd=self.work,
            env={k: v for k, v in os.environ.items() if k not in hidden},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def succeed(self, program: str, *words: str) -> str:
        """Run a program and return its standard output; raise if it fails."""
        code, output, errors = self.run(program, *words)
        assert code == 0, f"{program} {' '.join(words)}: exit code {code}\n{output}{errors}"
        return output

    def install(self, requirement: str) -> None:
        self.succeed(
            "python", "-m", "pip", "install", "-q", "-c", str(self.constraints), requirement
        )

    def fails_naming_extra(self, verb: str, extra: str) -> None:
        """Check that a command fails with a message that names the extra."""
        words = ["classify"] if verb in ("run", "sweep") else []
        code, _, errors = self.run("weightnorm", verb, *words)
        assert code == 1, f"weightnorm {verb}: exit code {code}\n{errors}"
        assert f"pip install 'weightnorm[{extra}]'" in errors, errors
        assert "Traceback" not in errors, errors


def check_readme(wheel: Path) -> None:
    """Check that the description for the package index has no relative link or image."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        description = archive.read(name).decode()
    relative = re.findall(r'\]\((?!https?:|#)[^)]*\)|(?:src|href)="(?!https?:)[^"]*"', description)
    assert "# weightnorm" in description
    assert not relative, f"{wheel.name}: relative links in the description: {relative[:3]}"


def check_wheel(wheel: Path, environment: CleanEnvironment) -> None:
    """Install the wheel without and with the extra `files`, and run every command."""
    version = wheel.name.split("-")[1]

    environment.install(str(wheel))
    printed = environment.succeed("python", "-W", "error::DeprecationWarning", "-c", LIBRARY)
    assert printed.split()[-1] == version, printed
    printed = environment.succeed("weightnorm", "--version")
    assert printed == f"weightnorm {version}\n", printed
    verbs = dict(w.split(":") for w in environment.succeed("python", "-c", VERBS).split())
    overview = environment.succeed("weightnorm", "--help")
    assert all(f"weightnorm {verb}" in overview for verb in verbs), overview
    for verb, extra in verbs.items():
        environment.fails_naming_extra(verb, extra)
    print(f"{wheel.name} with torch alone: the library works, {len(verbs)} commands name an extra")

    environment.install(f"{wheel}[files]")
    environment.succeed("python", "-c", CHECKPOINT)
    for name in ("model.pt", "model.safetensors"):
        assert "1 normalized weight " in environment.succeed("weightnorm", "inspect", name)
        plain = f"plain-{name}"
        environment.succeed("weightnorm", "convert", name, plain, "--to", "folded")
        assert "0 normalized weights" in environment.succeed(
            "weightnorm", "inspect", f"plain-{name}"
        )
    for verb, extra in verbs.items():
        if extra != "files" and verb != "status":  # without records, it needs no more
            environment.fails_naming_extra(verb, extra)
    print(f"{wheel.name} with the extra `files`: inspect and convert work")


def main(folder: Path, constraints: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_sdist(sdist)
    check_readme(wheel)
    with tempfile.TemporaryDirectory() as temporary:
        check_wheel(wheel.resolve(), CleanEnvironment(Path(temporary), constraints.resolve()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
