"""The monitor logs the values of the probes at its interval, and resumes from a checkpoint."""

import pytest
import torch
from torch import nn

import zoo
from weightnorm import (
    WeightNormOptimizer,
    normalized_weights,
    remove_weight_norm,
    weight_norm_model,
)
from weightnorm.diagnostics import TrainingMonitor, effective_step, v_norms
from weightnorm.lab.weights import direction_angle, weight_rows


def trained(steps, monitor=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    weight_norm_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = monitor(model, optimizer) if monitor else None
    data = torch.randn(32, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
    return model, optimizer, attached


def test_logs_the_probes_every_n_steps():
    rows = []
    trained(7, lambda m, o: TrainingMonitor(m, o, lambda *r: rows.append(r), every=3))
    assert sorted({step for _, _, step in rows}) == [3, 6]
    tags = {tag for tag, _, _ in rows}
    assert tags == {
        f"{layer}.weight/{what}"
        for layer in (0, 2)
        for what in ("v_norm", "effective_step", "dead_units", "angle_change")
    }
    at_six, _, _ = trained(6)
    logged = {tag: value for tag, value, step in rows if step == 6}
    norms = v_norms(at_six)
    assert logged["0.weight/v_norm"] == pytest.approx(norms["0.weight"].mean().item())
    angle = direction_angle(at_six, weight_rows(trained(3)[0]))["2.weight"].mean().item()
    assert logged["2.weight/angle_change"] == pytest.approx(angle, rel=1e-4)


@zoo.every_layer
def test_logs_the_probes_of_every_layer(case):
    torch.manual_seed(0)
    layer, rows = case.make(), {}
    weight_norm_model(layer, where=lambda name, module: True)
    with torch.no_grad():
        next(iter(normalized_weights(layer).values())).g.view(-1)[0] = 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = weight_rows(layer)
    monitor = TrainingMonitor(layer, optimizer, lambda tag, value, _: rows.update({tag: value}))
    for v, _ in normalized_weights(layer).values():
        with torch.no_grad():
            v.add_(torch.randn_like(v))
    monitor.measure()
    steps, angles = effective_step(layer), direction_angle(layer, before)
    for name, norm in v_norms(layer).items():
        assert rows[f"{name}/v_norm"] == pytest.approx(norm.mean().item())
        assert rows[f"{name}/effective_step"] == pytest.approx(steps[name].mean().item())
        assert rows[f"{name}/dead_units"] == (steps[name] == 0).sum()
        assert rows[f"{name}/angle_change"] == pytest.approx(angles[name].mean().item(), rel=1e-4)


def test_optimizer_form_logs_what_the_module_form_logs():
    logged = {}
    for form in ("module", "optimizer"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Tanh(), nn.Conv1d(4, 2, 1))
        if form == "module":
            weight_norm_model(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
        rows = logged[form] = {}
        data = torch.randn(8, 3, 5)
        with TrainingMonitor(model, optimizer, lambda *r, rows=rows: rows.update([r[:2]]), every=3):
            for _ in range(6):
                optimizer.zero_grad()
                model(data).square().sum().backward()
                optimizer.step()
    assert len(logged["module"]) == 8
    assert logged["optimizer"] == pytest.approx(logged["module"], rel=1e-3)


def test_state_does_not_require_grad():
    _, _, monitor = trained(3, lambda m, o: TrainingMonitor(m, o, lambda *r: None, every=2))
    assert not any(rows.requires_grad for rows in monitor.state_dict()["before"].values())
    _, _, new = trained(0, lambda m, o: TrainingMonitor(m, o, lambda *r: None))
    assert not any(rows.requires_grad for rows in new.state_dict()["before"].values())


def test_training_is_unchanged():
    monitored, _, _ = trained(5, lambda m, o: TrainingMonitor(m, o, lambda *r: None, every=1))
    alone, _, _ = trained(5)
    for a, b in zip(monitored.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)


def test_steps_after_remove_weight_norm_log_nothing():
    rows = []
    model, optimizer, _ = trained(
        2, lambda m, o: TrainingMonitor(m, o, lambda *r: rows.append(r), every=1)
    )
    count = len(rows)
    remove_weight_norm(model)
    optimizer.step()
    assert len(rows) == count


def test_tensorboard_writer(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs the lab extra")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        trained(2, lambda m, o: TrainingMonitor(m, o, writer, every=2, prefix="wn/"))
    (events,) = tmp_path.iterdir()
    assert b"wn/0.weight/v_norm" in events.read_bytes()


def test_a_closed_monitor_resumes_from_its_state():
    rows = {}

    def log(tag, value, step):
        rows[tag] = value, step

    model, optimizer, monitor = trained(2, lambda m, o: TrainingMonitor(m, o, log, every=1))
    monitor.close()
    before, state = weight_rows(model), monitor.state_dict()
    rows.clear()
    optimizer.step()
    assert not rows
    with TrainingMonitor(model, optimizer, log, every=3) as again:
        again.load_state_dict(state)
        optimizer.step()
    for name, angle in direction_angle(model, before).items():
        assert rows[f"{name}/angle_change"] == (pytest.approx(angle.mean().item(), rel=1e-4), 3)


@pytest.mark.parametrize(
    ("normed", "every", "message"),
    [(False, 100, "no normalized weight"), (True, 0, "every is 0; expected 1 step or more")],
)
def test_invalid_arguments_raise(normed, every, message):
    model = nn.Linear(2, 2)
    if normed:
        weight_norm_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(ValueError, match=message):
        TrainingMonitor(model, optimizer, print, every=every)


def test_angles_of_a_bfloat16_weight_are_those_of_its_float32_copy():
    torch.manual_seed(0)
    layer = nn.Linear(64, 4).bfloat16()
    optimizer = WeightNormOptimizer(layer, torch.optim.Adam, lr=1e-5)
    before = nn.functional.normalize(optimizer.parts()["weight"].v)
    logged = {}
    with TrainingMonitor(layer, optimizer, lambda *row: logged.update([row[:2]]), every=1):
        layer(torch.randn(8, 64).bfloat16()).square().sum().backward()
        optimizer.step()
    moved = (
        (nn.functional.normalize(optimizer.parts()["weight"].v) - before).norm(dim=1).mean().item()
    )
    assert logged["weight/angle_change"] == pytest.approx(moved, rel=0.01)


def test_a_zero_row_is_dead_and_takes_no_step():
    layer, rows = nn.Linear(3, 2), {}
    weight_norm_model(layer)
    v, g = normalized_weights(layer)["weight"]
    with torch.no_grad():
        v[0] = 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    TrainingMonitor(layer, optimizer, lambda tag, value, _: rows.update({tag: value})).measure()
    assert rows["weight/dead_units"] == 1
    assert rows["weight/effective_step"] == pytest.approx((g[1].abs() / v[1].norm()).item() / 2)
    assert rows["weight/angle_change"] == 0


def test_a_weight_that_is_normalized_later_is_logged_from_then_on():
    model, rows = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), {}
    weight_norm_model(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, optimizer, lambda tag, value, _: rows.update({tag: value}))
    weight_norm_model(model[1])
    monitor.measure()
    assert rows["1.weight/angle_change"] == 0
