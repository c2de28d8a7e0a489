"""Three formats of state dict, every way between them, and into every flavour of model."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import convert_state_dict, parts, weight_norm
from weightnorm.layers import unit_axis, weight_names
from weightnorm.state_dicts import FORMATS, StateDictError, entries, infer_axis, load_state_dict
from zoo import every_layer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ours(layer):
    return weight_norm(layer)


def log_scaled(layer):
    return weight_norm(layer, scale="log")


def torchs(layer):
    for name in weight_names(layer):
        parametrizations.weight_norm(layer, name, unit_axis(layer, name).dim)
    return layer


def hooked(layer):
    for name in weight_names(layer):
        nn.utils.weight_norm(layer, name, unit_axis(layer, name).dim)
    return layer


def plain(layer):
    return layer


FLAVOURS = {f.__name__: f for f in (ours, log_scaled, torchs, hooked, plain)}
MADE_BY_TORCH = {"parametrize": torchs, "hook": hooked, "folded": plain}


def disturbed(module):
    """Away from g = ‖v‖, as training leaves it; g may be negative."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def network():
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 8, 4)
    )


def normalized(flavour):
    model = network()
    for layer in model:
        if weight_names(layer):
            flavour(layer)
    return disturbed(model)


def equal(a, b):
    assert list(a) == list(b)
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("start", "there"), [*product(FORMATS[:2], FORMATS[:2])])
def test_renaming_there_and_back_is_exact(start, there):
    state = normalized(MADE_BY_TORCH[start]).state_dict()
    back = convert_state_dict(convert_state_dict(state, there), start)
    assert equal(dict(sorted(back.items())), dict(sorted(state.items())))


@pytest.mark.parametrize("format", FORMATS[:2])
def test_unfolding_and_folding_is_exact(format):
    state = disturbed(network()).state_dict()
    there = convert_state_dict(state, format, weights=["*.weight"])
    assert len(entries(there)) == 3
    back = convert_state_dict(there, "folded")
    assert equal(dict(sorted(back.items())), dict(sorted(state.items())))


@pytest.mark.parametrize("format", FORMATS[:2])
@every_layer
def test_folding_gives_what_the_model_computes(case, format):
    layer, inputs = disturbed(MADE_BY_TORCH[format](case.make())), case.inputs()
    case.run(layer, inputs)
    target = case.make()
    if "grouped" in str(target) or getattr(target, "groups", 1) > 1:
        layer, format = disturbed(ours(case.make())), "parametrize"
    target.load_state_dict(convert_state_dict(layer.state_dict(), "folded"))
    torch.testing.assert_close(case.run(target, inputs), case.run(layer, inputs))


@pytest.mark.parametrize(("saved", "into"), [*product(FLAVOURS, FLAVOURS)])
def test_any_format_loads_into_any_flavour(saved, into):
    source = FLAVOURS[saved]
    model = normalized(source)
    if "log_scaled" in (saved, into):  # a log-scale has no negative g
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(("original0", "weight_g")):
                    p.abs_()
    x = torch.randn(2, 3, 8)
    expected = model(x)
    target = normalized(FLAVOURS[into])
    load_state_dict(target, model.state_dict())
    torch.testing.assert_close(target(x), expected)


def test_parts_survive_loading_into_another_flavour():
    source = normalized(hooked)
    target = normalized(ours)
    assert load_state_dict(target, source.state_dict()) == ["0.weight", "1.weight", "3.weight"]
    for i in (0, 1, 3):
        assert torch.equal(parts(target[i]).v, parts(source[i]).v)
        assert torch.equal(parts(target[i]).g, parts(source[i]).g)
    assert load_state_dict(target, target.state_dict()) == []


def test_log_scales_come_out_linear():
    layer = disturbed(weight_norm(nn.Linear(3, 4), scale="log"))
    for format in FORMATS[:2]:
        state = convert_state_dict(layer.state_dict(), format)
        (entry,) = entries(state).values()
        assert not entry.is_log
        torch.testing.assert_close(entry.g, parts(layer).g)
        assert not any("log_scale" in key for key in state)


def test_recurrent_keys():
    state = hooked(nn.LSTM(3, 4)).state_dict()
    assert "weight_hh_l0_g" in state
    new = convert_state_dict(state, "parametrize")
    assert "parametrizations.weight_hh_l0.original0" in new
    assert equal(dict(sorted(convert_state_dict(new, "hook").items())), dict(sorted(state.items())))
    assert set(convert_state_dict(new, "folded")) == set(nn.LSTM(3, 4).state_dict())


def test_checkpoints_within_checkpoints_and_prefixes():
    inner = {f"module.{k}": v for k, v in normalized(hooked).state_dict().items()}
    checkpoint = {"epoch": 7, "generator": {"state_dict": inner}, "optimizer": {"state": {0: {}}}}
    new = convert_state_dict(checkpoint, "parametrize")
    assert new["epoch"] == 7
    assert new["optimizer"] == checkpoint["optimizer"]
    assert "module.0.parametrizations.weight.original0" in new["generator"]["state_dict"]
    assert equal(
        dict(sorted(convert_state_dict(new, "hook")["generator"]["state_dict"].items())),
        dict(sorted(inner.items())),
    )
    assert checkpoint["generator"]["state_dict"] is inner  # nothing changed in place


def test_mixed_checkpoints():
    mixed = nn.Sequential(hooked(nn.Linear(3, 3)), torchs(nn.Linear(3, 3)), ours(nn.Linear(3, 3)))
    state = convert_state_dict(mixed.state_dict(), "hook")
    assert [key for key in state if key.endswith("_g")] == [f"{i}.weight_g" for i in range(3)]


def test_keys_that_only_look_like_weight_norm_stay():
    state = {"decay_g": torch.ones(3), "original0": torch.ones(2), "x.original0": torch.ones(1)}
    assert convert_state_dict(state, "folded") == state


@pytest.mark.parametrize(
    ("v", "g", "axis"),
    [
        ((4, 3), (4, 1), (0, 1)),
        ((4, 3), (1, 3), (1, 1)),
        ((4, 3), (), (None, 1)),
        ((4, 3, 2), (1, 1, 2), (2, 1)),
        ((4, 3, 2), (2, 3, 1), (1, 2)),
        ((4, 3), (4,), (0, 1)),
        ((4, 3), (3,), (1, 1)),
    ],
)
def test_the_axis_is_read_off_the_shapes(v, g, axis):
    state = {"w_v": torch.randn(v), "w_g": torch.randn(g)}
    assert infer_axis(entries(state)["w"]) == axis


def test_an_ambiguous_axis_is_asked_for():
    state = {"a.w_v": torch.randn(3, 3), "a.w_g": torch.randn(3)}
    with pytest.raises(StateDictError, match=r"a.w: g of shape \(3,\) .* axes \[0, 1\]; say which"):
        convert_state_dict(state, "folded")
    w = convert_state_dict(state, "folded", dim=1)["a.w"]
    torch.testing.assert_close(w.norm(dim=0), state["a.w_g"].abs())
    with pytest.raises(StateDictError, match="fits none of its axes"):
        convert_state_dict({"w_v": torch.randn(3, 3), "w_g": torch.randn(5)}, "folded")
    beside = {**state, "b.w_v": torch.randn(4, 2), "b.w_g": torch.randn(4, 1)}
    w = convert_state_dict(beside, "folded", dim=1)["b.w"]  # its own shape is plain enough
    torch.testing.assert_close(w.norm(dim=1, keepdim=True), beside["b.w_g"].abs())
    one = {"w_v": torch.randn(3, 3), "w_g": torch.tensor([2.0])}
    assert convert_state_dict(one, "folded", dim=None)["w"].norm() == pytest.approx(2)


def test_the_same_number_of_units_along_another_axis_is_another_parameterization():
    source = disturbed(parametrizations.weight_norm(nn.ConvTranspose1d(4, 4, 3), dim=0))
    target = weight_norm(nn.ConvTranspose1d(4, 4, 3))  # keeps axis 1: its output channels
    x = torch.randn(2, 4, 5)
    load_state_dict(target, source.state_dict())
    torch.testing.assert_close(target(x), source(x))


def test_bad_input():
    with pytest.raises(StateDictError, match=r"'fold' is unknown.*'folded'"):
        convert_state_dict({}, "fold")
    model = normalized(ours)
    state = normalized(hooked).state_dict()
    del state["0.weight_g"], state["0.weight_v"]
    state["9.weight_g"], state["9.weight_v"] = torch.ones(1, 1), torch.ones(1, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=r"missing: 0.weight\n  left over: 9.weight"):
        load_state_dict(model, state)
    assert equal(model.state_dict(), before)
    load_state_dict(model, state, strict=False)
    with pytest.raises(StateDictError, match=r"0.weight has shape \(9, 9\) in the checkpoint"):
        load_state_dict(model, {"0.weight": torch.ones(9, 9)}, strict=False)
    with pytest.raises(StateDictError, match=r"a.w: dim=2 is out of range for a weight of 2"):
        convert_state_dict({"a.w": torch.ones(2, 2)}, "hook", weights=["a.w"], dim=2)


def test_a_key_that_ends_like_a_part_keeps_its_name_in_errors():
    model = weight_norm(nn.Linear(2, 2))
    model.register_buffer("relative_v", torch.zeros(2))  # attention's v, not weight norm's
    with pytest.raises(StateDictError, match=r"missing: bias, weight, relative_v"):
        load_state_dict(model, {})
