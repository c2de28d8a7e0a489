"""`weightnorm bench`: every benchmark runs, the record is complete, two records are compared.

Nothing here depends on how long anything takes.
"""

import copy
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import weightnorm
from weightnorm import Parameterization, normalized_weights
from weightnorm.lab import dqn
from weightnorm.lab.atari import Atari
from weightnorm.lab.bench import dqn as dqn_benchmark
from weightnorm.lab.bench import launches
from weightnorm.lab.bench.benchmark import Settings, compare, cpu, load, measure
from weightnorm.lab.bench.layers import FORMULA, OPERATION, TORCH, operation_cases
from weightnorm.lab.bench.registry import BENCHMARKS
from weightnorm.lab.cli import main
from weightnorm.lab.errors import RecordError
from weightnorm.lab.replay_buffer import Transitions

CPU = torch.device("cpu")
QUICK = Settings(CPU, quick=True, rounds=2)
RESULT = Path(__file__).parents[3] / "docs" / "results" / "bench" / "result.json"

pytestmark = pytest.mark.xdist_group("bench")  # share one record


@contextmanager
def in_this_process(makers):
    yield {name: make() for name, make in makers.items()}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_case_is_well_defined_and_runs(name, monkeypatch):
    monkeypatch.setattr(dqn_benchmark, "in_processes", in_this_process)
    lines = []
    for case in BENCHMARKS[name].cases(QUICK):
        ones = {peer: np.ones((7, 2)) for peer in case.peers}
        assert case.base in case.peers
        for limit in case.limits:
            assert f" {limit.limit:g} ×" in limit.text  # the printed limit is the limit
            assert float(f"{limit.limit:g}") == limit.limit
            assert np.isfinite(limit.value(ones)).all()
            assert limit.value(ones).shape == (7,)  # vectorized over resamples
        for line in case.summary:
            columns = (line.ours, line.torch_parametrization, line.torch_hook, line.batch_norm)
            assert {name for name in columns if name} <= set(case.peers)
            assert line.goal < len(case.limits)
            lines.append(line.work)
        assert set(case.at_least_base) <= set(case.peers)
        for call in case.peers.values():
            value = call()
            assert value is None or value > 0
            assert case.unit == "s" or value is not None
    assert len(lines) == len({*lines})


def test_all_peers_compute_the_same_operation(monkeypatch):
    found, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda w, *rest: found.append((w.detach(), *grad(w, *rest)))
    )
    for case in operation_cases(QUICK):
        for peer in (TORCH, OPERATION, FORMULA):
            case.peers[peer]()
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])
        found.clear()


def test_torchs_dqn_agent_learns_the_same_as_ours():
    game = Atari("pong")
    config = replace(dqn.PAPER, width=0.125, parameterization=Parameterization.WEIGHT_NORM)
    frames = torch.randint(0, 256, (30, 5, 84, 84), dtype=torch.uint8)
    actions, rewards = torch.randint(0, game.actions, (30,)), torch.randn(30)
    batch = Transitions(frames[:, :-1], actions, rewards, torch.zeros(30), frames[:, 1:])
    losses, values = [], []
    for kind in (dqn.Agent, dqn_benchmark.TorchAgent):
        torch.manual_seed(0)
        agent = kind(config, game, CPU)
        agent.initialize(frames[:, :-1])
        losses.append(torch.stack([agent.update(batch) for _ in range(4)]))
        agent.update_target()
        values.append(agent.target(batch.states))
    assert len(normalized_weights(agent.model)) == 5
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*values, rtol=1e-2, atol=1e-2)


def test_launches_are_the_same_every_time_and_within_their_limits():
    for case in launches.cases(QUICK):
        first, second = (measure(case, QUICK) for _ in range(2))
        assert first["results"] == second["results"]
        assert {limit["verdict"] for limit in first["goals"]} == {"met"}, case.name
        assert first["results"][launches.OURS]["median"] > first["results"]["plain"]["median"] > 0


def test_views_and_allocations_are_not_counted():
    x, count = torch.ones(2, 3), launches.count_launches
    assert not count(lambda: [torch.empty(2), x.t(), x.view(6), x.expand(4, 2, 3), x[0]])
    assert count(lambda: x.add_(1) + x.clone()) == {"add_": 1, "add": 1, "clone": 1}


def test_instruction_sets(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: CPU\nflags\t\t: fpu avx2 avx512_bf16 aes fma\nflags\t: x\n")
    assert cpu(path)["instruction_sets"] == ["avx2", "avx512_bf16", "fma"]
    assert cpu(tmp_path / "absent")["instruction_sets"] == []


# The command and its record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of three benchmarks, made by the command."""
    out = tmp_path_factory.mktemp("bench")
    code, _, err = weightnorm("bench", "recurrent", "mean-only", "memory", "--quick", "--out", out)
    assert code == 0, err
    assert "recurrent: LSTM" in err
    assert err.endswith("memory: passes of a training step, batch of 100\n")  # no profiler's log
    return out


def bench(*words):
    return main(["bench", *map(str, words)])


def test_a_record_is_complete_and_its_benchmarks_replaced_one_by_one(folder, tmp_path):
    out = tmp_path / "bench"
    shutil.copytree(folder, out)
    before = load(out / "result.json")
    assert {"machine", "torch", "threads", "device", "load", "cpu"} <= before["environment"].keys()
    assert [each["name"] for each in before["benchmarks"]] == ["recurrent", "mean-only", "memory"]
    rounds = {case["rounds"] for each in before["benchmarks"] for case in each["cases"]}
    assert rounds == {1, 2}  # bytes are the same every time
    assert bench("mean-only", "--quick", "--rounds", 1, "--out", out) == 0
    after = load(out / "result.json")
    assert after["benchmarks"][1]["cases"][0]["rounds"] == 1
    assert after["benchmarks"][::2] == before["benchmarks"][::2]
    sessions = [json.loads(line) for line in (out / "sessions.jsonl").read_text().splitlines()]
    assert {row["started"] for row in sessions} == {x["started"] for x in after["benchmarks"]}


def test_a_record_of_another_machine_is_not_mixed(folder, tmp_path, capsys):
    record = load(folder / "result.json")
    record["environment"]["machine"] = "another one"
    (tmp_path / "result.json").write_text(json.dumps(record))
    assert bench("mean-only", "--quick", "--out", tmp_path) == 1
    assert "measured under other conditions: machine" in " ".join(capsys.readouterr().err.split())
    assert load(tmp_path / "result.json") == record


def shifted(record, shift):
    other = copy.deepcopy(record)
    for benchmark in other["benchmarks"]:
        for case in benchmark["cases"]:
            for goal in case["goals"]:
                for key in ("value", "low", "high"):
                    goal[key] = None if goal[key] is None else goal[key] + shift
    return other


def test_exit_code_of_compare(folder, tmp_path, capsys):
    record = load(folder / "result.json")
    other = tmp_path / "other.json"
    words = ("recurrent", "--quick", "--out", tmp_path / "new", "--compare", other)
    for shift, code, line in (
        (-1000.0, 3, "slower: recurrent, LSTM: weight norm ≤ 1.02 × plain: was -99"),
        (1000.0, 0, "faster: recurrent, LSTM"),
    ):
        other.write_text(json.dumps(shifted(record, shift)))
        assert bench(*words) == code
        assert line in capsys.readouterr().out


def test_compare_matches_values_whatever_their_limit(folder):
    record = load(folder / "result.json")
    same = compare(record, record)
    assert not same["slower"].any() | same["faster"].any()
    stricter = json.loads(json.dumps(record).replace("1.02 ", "1.015 "))
    assert len(compare(stricter, record)) == len(same) > 0
    unbounded = copy.deepcopy(record)
    unbounded["benchmarks"][0]["cases"][0]["goals"][0]["high"] = None  # infinite, in JSON
    assert not compare(unbounded, shifted(record, 1e3))["slower"].iloc[0]
    record["benchmarks"] = []
    with pytest.raises(RecordError, match="no goal in common"):
        compare(record, stricter)
    record["settings"]["quick"] = False
    with pytest.raises(RecordError, match="--quick"):
        compare(record, stricter)


def test_the_committed_record_is_readable(tmp_path):
    record = load(RESULT)
    assert len(compare(record, record)) > 50
    for text in ("", "[]", '{"benchmarks": []}', '{"settings": 1}'):
        (tmp_path / "old.json").write_text(text)
        with pytest.raises(RecordError, match="not a record of weightnorm bench"):
            load(tmp_path / "old.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mean-onyl"], "there is no benchmark 'mean-onyl'; did you mean 'mean-only'?"),
        (["op", "--rounds", "0"], "rounds is 0; expected 1 or more"),
        (["op", "--compare", "absent.json"], "absent.json cannot be read"),
    ],
)
def test_bad_options_are_refused_before_measuring(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench("--quick", *words) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
