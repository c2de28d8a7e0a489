"""`weightnorm inspect` and `convert`, and what the commands need installed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import environment, weightnorm
from files.checkpoint_files import SHARDED, save, state_of
from weightnorm.lab.cli import console
from weightnorm.lab.cli.main import main
from weightnorm.lab.cli.verbs import VERBS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_commands(tmp_path, capsys):
    source, new = save(state_of("hook"), tmp_path / "old.pt"), tmp_path / "new.pt"
    code, out, err = weightnorm("convert", source, new, "--to", "parametrize")
    assert code == 0, err
    assert "3 normalized weights" in out
    assert main(["inspect", str(new)]) == 0
    out = capsys.readouterr().out
    assert "generator.1.weight" in out
    assert "3 normalized weights, 3 other tensors" in out
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(source), str(new), "--to", "hok"])
    assert stop.value.code == 2
    assert "did you mean --to hook?" in capsys.readouterr().err
    code, _, err = weightnorm("inspect", tmp_path / "none.pt")
    assert code == 1
    assert err == f"failed: {tmp_path / 'none.pt'}: is missing\n"


def test_long_names_are_not_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console.OUT, "width", 80)
    name = (
        ".".join(["decoder", "blocks", "17", "convolution_of_the_residual_branch"] * 2) + ".weight"
    )
    parts = {f"{name}_g": torch.ones(1024, 1, 1), f"{name}_v": torch.ones(1024, 512, 7)}
    assert main(["inspect", str(save(parts, tmp_path / "m.safetensors"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines[1:-1]) == name
    assert "1024×512×7" in lines[1]


WITHOUT = ["numpy", "sklearn", "matplotlib", "ale_py", "gymnasium", "jinja2", "pooch",
           "PIL", "pandas", "scipy"]  # fmt: skip
BLOCKED = """
import contextlib, io, json, sys
blocked, commands = map(json.loads, sys.argv[1:])
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from weightnorm.lab.cli.main import main
results = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, \\
         contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_without(packages, commands):
    """Run commands in a process that cannot import the packages: (code, output, errors) of each."""
    arguments = [json.dumps(packages), json.dumps(commands)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_for_files_need_only_the_extra_files(tmp_path):
    commands = []
    for name in ("model.pt", "model.safetensors", SHARDED):
        source, out = str(save(state_of("hook"), tmp_path / name)), str(tmp_path / "out" / name)
        commands += [["convert", source, out, "--to", "folded"], ["inspect", source]]
    for code, out, err in run_without(WITHOUT, commands):
        assert code == 0, err
        assert "3 normalized weights" in out


def test_without_extras_help_works_and_verbs_name_their_extra():
    packages = [*WITHOUT, "rich", "tyro", "safetensors"]
    (code, overview, _), (other, version, _), *verbs = run_without(
        packages, [["--help"], ["--version"], *([verb] for verb in VERBS)]
    )
    assert (code, other) == (0, 0)
    assert all(f"weightnorm {verb}" in overview for verb in VERBS)
    assert version.startswith("weightnorm ")
    for name, (code, _, err) in zip(VERBS, verbs, strict=True):
        assert code == 1
        assert re.match(f"failed: weightnorm {name} needs the package \\w+", err)
        assert f"pip install 'weightnorm[{VERBS[name].extra}]'" in err


def test_the_extra_files_lists_what_is_imported():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["files"]) == {"safetensors", "rich", "tyro"}
    assert {verb.extra for verb in VERBS.values()} <= set(extras)
