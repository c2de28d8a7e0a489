"""Check the built distributions; run by `make dist` as `check_dist.py FOLDER CONSTRAINTS`.

The source distribution has the sources and no records. The wheel is installed into a new virtual
environment, first with torch alone and then with the extra `files`; every command is run in both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
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
from weightnorm.lab.cli.verbs import VERBS
print(*(f"{name}:{verb.extra}" for name, verb in VERBS.items()))
"""
CHECKPOINT = """
import sys, torch
layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
torch.save(layer.state_dict(), "model.pt")
try:
    from safetensors.torch import save_file
except ModuleNotFoundError:
    sys.exit()
save_file(layer.state_dict(), "model.safetensors")
"""


def check_sdist(path: Path) -> None:
    """Check which files the source distribution has."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"}
    wanted |= {"src/weightnorm/py.typed", "tests/test_reparam.py", "docs/migration.md"}
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

    def run(self, program: str, *words: str) -> tuple[int, str]:
        """Run a program of the environment; return its exit code and all output."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        done = subprocess.run(
            [str(self.bin / program), *words],
            cwd=self.work,
            env={k: v for k, v in os.environ.items() if k not in hidden},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def succeed(self, program: str, *words: str) -> str:
        """Run a program and return its output; raise if it fails."""
        code, output = self.run(program, *words)
        assert code == 0, f"{program} {' '.join(words)}: exit code {code}\n{output}"
        return output

    def install(self, requirement: str) -> None:
        self.succeed(
            "python", "-m", "pip", "install", "-q", "-c", str(self.constraints), requirement
        )

    def fails_naming_extra(self, verb: str, extra: str) -> None:
        """Check that a command fails with a message that names the extra."""
        code, output = self.run("weightnorm", verb)
        assert code == 1, f"weightnorm {verb}: exit code {code}\n{output}"
        assert f"pip install 'weightnorm[{extra}]'" in output, output
        assert "Traceback" not in output, output


def check_wheel(wheel: Path, environment: CleanEnvironment) -> None:
    """Install the wheel without and with the extra `files`, and run every command."""
    version = wheel.name.split("-")[1]

    environment.install(str(wheel))
    printed = environment.succeed("python", "-W", "error::DeprecationWarning", "-c", LIBRARY)
    assert printed.split()[-1] == version, printed
    assert environment.succeed("weightnorm", "--version") == f"weightnorm {version}\n"
    verbs = dict(w.split(":") for w in environment.succeed("python", "-c", VERBS).split())
    overview = environment.succeed("weightnorm", "--help")
    assert all(f"weightnorm {verb}" in overview for verb in verbs), overview
    for verb, extra in verbs.items():
        environment.fails_naming_extra(verb, extra)
    print(f"{wheel.name} with torch alone: the library works, {len(verbs)} commands name an extra")

    environment.install(f"{wheel}[files]")
    environment.succeed("python", "-c", CHECKPOINT)
    for name in ("model.pt", "model.safetensors"):
        assert "1 normalized weights" in environment.succeed("weightnorm", "inspect", name)
        plain = f"plain-{name}"
        environment.succeed("weightnorm", "convert", name, plain, "--to", "folded")
        assert "0 normalized weights" in environment.succeed(
            "weightnorm", "inspect", f"plain-{name}"
        )
    for verb, extra in verbs.items():
        if extra != "files":
            environment.fails_naming_extra(verb, extra)
    print(f"{wheel.name} with the extra `files`: inspect and convert work")


def main(folder: Path, constraints: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as temporary:
        check_wheel(wheel.resolve(), CleanEnvironment(Path(temporary), constraints.resolve()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
