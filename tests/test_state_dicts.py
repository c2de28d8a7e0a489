"""Conversion between the three formats of state dict, and loading into every kind of model."""

import copy
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import convert_state_dict, folded, parts, weight_norm
from weightnorm.checkpoints import (
    FORMATS,
    StateDictError,
    kept_axis,
    load_state_dict,
    log_key,
    part_keys,
    stored_weights,
)
from weightnorm.layers import unit_axis, weight_names
from zoo import every_layer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ours(layer):
    return weight_norm(layer)


def log_scale(layer):
    return weight_norm(layer, scale="log")


def torch_parametrize(layer):
    for name in weight_names(layer):
        parametrizations.weight_norm(layer, name, unit_axis(layer, name).dim)
    return layer


def torch_hook(layer):
    for name in weight_names(layer):
        nn.utils.weight_norm(layer, name, unit_axis(layer, name).dim)
    return layer


def plain(layer):
    return layer


KINDS = {f.__name__: f for f in (ours, log_scale, torch_parametrize, torch_hook, plain)}
TORCH = {"parametrize": torch_parametrize, "hook": torch_hook, "folded": plain}


def perturbed(module):
    """Move g away from ‖v‖, as training does; g may become negative."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def network():
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 6, 3), nn.Flatten(), nn.Linear(6 * 8, 4)
    )


def normalized(kind):
    model = network()
    for layer in model:
        if weight_names(layer):
            kind(layer)
    return perturbed(model)


def equal(a, b):
    assert list(a) == list(b)
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("start", "there"), [*product(FORMATS[:2], FORMATS[:2])])
def test_renaming_round_trip_is_exact(start, there):
    state = normalized(TORCH[start]).state_dict()
    back = convert_state_dict(convert_state_dict(state, there), start)
    assert equal(dict(sorted(back.items())), dict(sorted(state.items())))


@pytest.mark.parametrize("format", FORMATS[:2])
def test_decomposing_and_folding_is_exact(format):
    state = perturbed(network()).state_dict()
    there = convert_state_dict(state, format, weights=["*.weight"])
    assert len(stored_weights(there)) == 3
    back = convert_state_dict(there, "folded")
    assert equal(dict(sorted(back.items())), dict(sorted(state.items())))


@pytest.mark.parametrize("format", FORMATS[:2])
@every_layer
def test_folded_weight_is_what_the_model_computes(case, format):
    layer, inputs = perturbed(TORCH[format](case.make())), case.inputs()
    case.run(layer, inputs)
    target = case.make()
    if "grouped" in str(target) or getattr(target, "groups", 1) > 1:
        layer, format = perturbed(ours(case.make())), "parametrize"
    target.load_state_dict(convert_state_dict(layer.state_dict(), "folded"))
    torch.testing.assert_close(case.run(target, inputs), case.run(layer, inputs))


@pytest.mark.parametrize(("saved", "into"), [*product(KINDS, KINDS)])
def test_every_format_loads_into_every_kind_of_model(saved, into):
    source = KINDS[saved]
    model = normalized(source)
    if "log_scale" in (saved, into):  # a log-scale cannot represent a negative g
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(("original0", "weight_g")):
                    p.abs_()
    x = torch.randn(2, 3, 8)
    expected = model(x)
    target = normalized(KINDS[into])
    load_state_dict(target, model.state_dict())
    torch.testing.assert_close(target(x), expected)


def test_loading_into_another_kind_keeps_v_and_g():
    source = normalized(torch_hook)
    target = normalized(ours)
    assert load_state_dict(target, source.state_dict()) == ["0.weight", "1.weight", "3.weight"]
    for i in (0, 1, 3):
        assert torch.equal(parts(target[i]).v, parts(source[i]).v)
        assert torch.equal(parts(target[i]).g, parts(source[i]).g)
    assert load_state_dict(target, target.state_dict()) == []


def test_log_scale_is_converted_to_linear_g():
    layer = perturbed(weight_norm(nn.Linear(3, 4), scale="log"))
    for format in FORMATS[:2]:
        state = convert_state_dict(layer.state_dict(), format)
        (entry,) = stored_weights(state)
        assert not entry.is_log
        torch.testing.assert_close(entry.g, parts(layer).g)
        assert not any("log_scale" in key for key in state)


def test_recurrent_layer_keys():
    state = torch_hook(nn.LSTM(3, 4)).state_dict()
    assert "weight_hh_l0_g" in state
    new = convert_state_dict(state, "parametrize")
    assert "parametrizations.weight_hh_l0.original0" in new
    assert equal(dict(sorted(convert_state_dict(new, "hook").items())), dict(sorted(state.items())))
    assert set(convert_state_dict(new, "folded")) == set(nn.LSTM(3, 4).state_dict())


def test_state_dict_of_several_formats():
    mixed = nn.Sequential(
        torch_hook(nn.Linear(3, 3)), torch_parametrize(nn.Linear(3, 3)), ours(nn.Linear(3, 3))
    )
    state = convert_state_dict(mixed.state_dict(), "hook")
    assert [key for key in state if key.endswith("_g")] == [f"{i}.weight_g" for i in range(3)]


def test_keys_without_a_counterpart_are_copied():
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
def test_kept_axis_is_inferred_from_shapes(v, g, axis):
    state = {"w_v": torch.randn(v), "w_g": torch.randn(g)}
    assert kept_axis(stored_weights(state)[0]) == axis


def test_ambiguous_axis_needs_dim():
    state = {"a.w_v": torch.randn(3, 3), "a.w_g": torch.randn(3)}
    with pytest.raises(StateDictError, match=r"a.w: g of shape \(3,\) .* axes \[0, 1\]; choose"):
        convert_state_dict(state, "folded")
    w = convert_state_dict(state, "folded", dim=1)["a.w"]
    torch.testing.assert_close(w.norm(dim=0), state["a.w_g"].abs())
    beside = {**state, "b.w_v": torch.randn(4, 2), "b.w_g": torch.randn(4, 1)}
    w = convert_state_dict(beside, "folded", dim=1)["b.w"]  # its shape decides
    torch.testing.assert_close(w.norm(dim=1, keepdim=True), beside["b.w_g"].abs())
    one = {"w_v": torch.randn(3, 3), "w_g": torch.tensor([2.0])}
    assert convert_state_dict(one, "folded", dim=None)["w"].norm() == pytest.approx(2)


def test_loading_a_flat_g():
    model, v = ours(nn.Linear(3, 4)), torch.randn(4, 3)
    load_state_dict(model, {"weight_v": v, "weight_g": torch.arange(4.0)}, strict=False)
    assert torch.equal(parts(model).g, torch.arange(4.0).reshape(4, 1))
    with pytest.raises(StateDictError, match=r"weight: g .* along any of the axes \[0, 1\]"):
        load_state_dict(
            ours(nn.Linear(4, 4)), {"weight_v": torch.ones(4, 4), "weight_g": torch.ones(4)}
        )


def test_loading_g_of_another_axis_keeps_the_weight():
    source = perturbed(parametrizations.weight_norm(nn.ConvTranspose1d(4, 4, 3), dim=0))
    target = weight_norm(nn.ConvTranspose1d(4, 4, 3))  # keeps axis 1: its output channels
    x = torch.randn(2, 4, 5)
    load_state_dict(target, source.state_dict())
    torch.testing.assert_close(target(x), source(x))


def test_errors_name_the_weight():
    with pytest.raises(StateDictError, match=r"'fold' is unknown.*'folded'"):
        convert_state_dict({}, "fold")
    model = normalized(ours)
    state = normalized(torch_hook).state_dict()
    del state["0.weight_g"], state["0.weight_v"]
    state["9.weight_g"], state["9.weight_v"] = torch.ones(1, 1), torch.ones(1, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=r"missing: 0.weight\n  unexpected: 9.weight"):
        load_state_dict(model, state)
    assert equal(model.state_dict(), before)
    load_state_dict(model, state, strict=False)
    with pytest.raises(StateDictError, match=r"0.weight has shape \(9, 9\) in the checkpoint"):
        load_state_dict(model, {"0.weight": torch.ones(9, 9)}, strict=False)
    with pytest.raises(StateDictError, match=r"a.w: dim=2 is out of range for a weight of 2"):
        convert_state_dict({"a.w": torch.ones(2, 2)}, "hook", weights=["a.w"], dim=2)


def test_errors_name_plain_keys_that_end_like_parts():
    model = weight_norm(nn.Linear(2, 2))
    model.register_buffer("relative_v", torch.zeros(2))  # attention's v, not weight norm's
    with pytest.raises(StateDictError, match=r"missing: bias, relative_v, weight"):
        load_state_dict(model, {})


# — collisions —

w, v, g = torch.ones(4, 3), torch.randn(4, 3), torch.randn(4, 1)
HOOK = {"a.w_g": g, "a.w_v": v}
PARAMETRIZE = {"a.parametrizations.w.original0": g, "a.parametrizations.w.original1": v}


@pytest.mark.parametrize(
    ("state", "to", "names"),
    [
        ({"a.w": w, **HOOK}, "folded", ["a.w", "a.w_v"]),
        ({"a.w": w, **PARAMETRIZE}, "folded", ["a.w", "a.parametrizations.w.original1"]),
        ({**HOOK, **PARAMETRIZE}, "folded", ["a.w_v", "a.parametrizations.w.original1"]),
        ({**HOOK, **PARAMETRIZE}, "hook", ["a.w_g", "a.parametrizations.w.original0"]),
        ({**HOOK, **PARAMETRIZE}, "parametrize", ["a.w_g", "a.parametrizations.w.original0"]),
        ({"a.w": w, **HOOK}, "hook", ["a.w", "a.w_g"]),  # it is decomposed: see below
        ({"a.w_g": "text", **PARAMETRIZE}, "hook", ["a.w_g", "a.parametrizations.w.original0"]),
    ],
)
def test_name_collisions_are_refused_with_both_names(state, to, names):
    for ordered in (state, dict(reversed(state.items()))):
        with pytest.raises(StateDictError, match="would both become") as error:
            convert_state_dict(ordered, to, weights=lambda name, _: name == "a.w")
        assert all(repr(name) in str(error.value) for name in names)


@pytest.mark.parametrize("kind", KINDS.values())
def test_loading_refuses_two_values_of_one_weight(kind):
    model = kind(nn.Linear(3, 4))
    plain, hook = {"weight": w}, {"weight_g": g, "weight_v": v}
    new = {"parametrizations.weight.original0": g, "parametrizations.weight.original1": v}
    before = copy.deepcopy(model.state_dict())
    for first, second in [(plain, hook), (plain, new), (hook, new), (new, plain)]:
        with pytest.raises(StateDictError, match="are both values of 'weight'"):
            load_state_dict(model, {**first, **second}, strict=False)
    assert equal(model.state_dict(), before)


def test_result_that_would_be_misread_is_refused():
    state = {"a_v_g": g, "a_v_v": v, "a_g": g}  # once folded, a_v fits a_g
    with pytest.raises(StateDictError, match="'a_g' and 'a_v' of the result would be read as"):
        convert_state_dict(state, "folded")
    one_by_one = nn.ConvTranspose1d(4, 12, 1, groups=4)  # a g as large as v
    with pytest.raises(StateDictError, match="weight: g has the shape of v"):
        convert_state_dict(weight_norm(one_by_one).state_dict(), "hook")


# — which pairs are weight norm —

ints = torch.ones(4, 3, dtype=torch.int64)
NOT_WEIGHT_NORM = {
    "v has one dimension": (torch.ones(4), torch.ones(4)),
    "v has one dimension, g has none": (torch.ones(4), torch.ones(())),
    "equal shapes": (v, v),
    "equal shapes, three dimensions": (torch.ones(4, 3, 2),) * 2,
    "g of shape (1, 1)": (v, torch.ones(1, 1)),
    "g of shape (1,)": (v, torch.ones(1)),
    "g along no axis": (torch.ones(3, 3), torch.ones(5)),
    "g along two other axes": (torch.ones(4, 3, 2), torch.ones(1, 3, 2)),
    "integer v": (ints, g),
    "integer g": (v, ints[:, :1]),
    "boolean g": (v, g > 0),
    "complex v": (v.to(torch.complex64), g),
    "sparse v": (v.to_sparse(), g),
    "sparse g": (v, g.to_sparse()),
    "v is no tensor": ([1, 2], g),
    "g is no tensor": (v, 2.0),
}
KEYS = [part_keys("attn.bias", format)[::-1] for format in ("hook", "parametrize")]


@pytest.mark.parametrize("keys", KEYS, ids=["hook", "parametrize"])
@pytest.mark.parametrize("case", NOT_WEIGHT_NORM)
def test_pairs_that_are_not_weight_norm_are_copied(case, keys):
    state = dict(zip(keys, NOT_WEIGHT_NORM[case], strict=True))
    assert stored_weights(state) == []
    for to in FORMATS:
        converted = convert_state_dict(state, to)
        assert list(converted) == list(state)
        assert all(converted[key] is state[key] for key in state)


class Attention(nn.Module):
    """Owns parameters whose names and shapes are those of a normalized `w`."""

    def __init__(self):
        super().__init__()
        self.w_g, self.w_v = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(4, 3))
        self.out = nn.Linear(3, 3)


@pytest.mark.parametrize("kind", KINDS.values())
def test_keys_of_the_model_itself_are_loaded_as_they_are(kind):
    model, other = Attention(), Attention()
    kind(model.out), kind(other.out)
    assert load_state_dict(model, other.state_dict()) == []
    assert equal(model.state_dict(), other.state_dict())


def test_normalized_vectors_load_where_the_model_has_them():
    make = lambda: parametrizations.weight_norm(nn.LayerNorm(4), dim=None)  # noqa: E731
    source, target, old = perturbed(make()), make(), nn.LayerNorm(4)
    assert load_state_dict(target, source.state_dict()) == []
    assert equal(target.state_dict(), source.state_dict())
    nn.utils.weight_norm(old, dim=None)
    load_state_dict(old, source.state_dict())
    assert torch.equal(old.weight_v, source.parametrizations.weight.original1)


# — wrong shapes and types —


@pytest.mark.parametrize("kind", [ours, torch_parametrize, torch_hook])
@pytest.mark.parametrize("shape", [(1, 1), (1,), (2, 1), (3, 1)])
def test_g_is_not_broadcast(kind, shape):
    model = kind(nn.Linear(3, 4))
    state = {**model.state_dict()}
    key = next(key for key in state if key.endswith(("original0", "_g")))
    state[key] = torch.full(shape, 2.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=r"weight: g of shape .* fits no axis"):
        load_state_dict(model, state)
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(5), r"bias has shape \(5,\) in the checkpoint, \(4,\) in the model"),
        ([1.0], "bias is a list; expected a tensor"),
        (torch.ones(4, dtype=torch.complex64), "bias is torch.complex64"),
        (torch.ones(4).to_sparse(), "bias is torch.float32 .torch.sparse_coo."),
    ],
)
def test_loading_a_wrong_value_changes_nothing(value, message):
    model = ours(nn.Linear(3, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=message):
        load_state_dict(model, {**plain(nn.Linear(3, 4)).state_dict(), "bias": value})
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize("kind", KINDS.values())
def test_zero_rows_load_as_zero_rows(kind):
    model = kind(nn.Linear(2, 2))
    load_state_dict(model, {"weight": torch.tensor([[0.0, 0.0], [3.0, 4.0]])}, strict=False)
    out = model(torch.eye(2)) - model.bias
    torch.testing.assert_close(out, torch.tensor([[0.0, 3.0], [0.0, 4.0]]))


@pytest.mark.parametrize("kind", [ours, log_scale, torch_parametrize, torch_hook])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_loading_what_has_no_finite_norm_is_refused(kind, value):
    with pytest.raises(StateDictError, match="weight: ‖w‖ is not finite"):
        load_state_dict(kind(nn.Linear(2, 2)), {"weight": torch.full((2, 2), value)}, strict=False)


def test_negative_g_loads_into_a_log_scale():
    source, target = torch_hook(nn.Linear(3, 4)), log_scale(nn.Linear(3, 4))
    with torch.no_grad():
        source.weight_g.neg_()
    load_state_dict(target, source.state_dict())
    x = torch.randn(2, 3)
    torch.testing.assert_close(target(x), source(x))


def test_further_parametrizations_are_not_folded_away():
    layer = ours(nn.Linear(3, 4))
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.PReLU())
    for to in ("folded", "hook"):
        with pytest.raises(StateDictError, match=r"weight: 'parametrizations.weight.1.weight'"):
            convert_state_dict(layer.state_dict(), to)
    with pytest.raises(StateDictError, match="further parametrization"):
        load_state_dict(nn.Linear(3, 4), layer.state_dict(), strict=False)
    assert equal(convert_state_dict(layer.state_dict(), "parametrize"), layer.state_dict())


def test_keys_that_would_become_a_further_parametrization_are_refused():
    state = {"w": torch.randn(2, 3), "parametrizations.w.0.a": torch.randn(2)}
    with pytest.raises(StateDictError, match=r"w: 'parametrizations.w.0.a' belongs"):
        convert_state_dict(state, "parametrize", weights=["w"])
    assert list(convert_state_dict(state, "hook", weights=["w"]))[:2] == ["w_g", "w_v"]


def test_float8_is_renamed_but_not_computed_with():
    state = {"w_g": g.to(torch.float8_e4m3fn), "w_v": v.to(torch.float8_e4m3fn)}
    renamed = convert_state_dict(state, "parametrize")
    assert renamed["parametrizations.w.original1"] is state["w_v"]
    with pytest.raises(StateDictError, match=r"w: is stored as torch.float8_e4m3fn"):
        convert_state_dict(state, "folded")
    with pytest.raises(StateDictError, match=r"w_v: is stored as torch.float8_e4m3fn"):
        convert_state_dict({"w_v": state["w_v"]}, "hook", weights="w_v")


# — selection of plain weights —


def test_a_string_is_one_pattern():
    state = {"a.weight": w, "b.kernel": w}
    assert len(convert_state_dict({"a[0]": w}, "hook", weights="a[0]")) == 2  # or a name
    assert set(convert_state_dict(state, "hook", weights="*.weight")) == {
        "a.weight_g", "a.weight_v", "b.kernel",
    }  # fmt: skip


@pytest.mark.parametrize("to", FORMATS)
def test_a_pattern_without_matches_is_an_error(to):
    state = {"conv.weight": w, "conv.bias": torch.ones(3)}
    for weights in ("conv.wieght", ["*.weight", "conv.wieght"]):
        with pytest.raises(StateDictError, match=r"'conv.wieght' matches no weight.*conv.weight'"):
            convert_state_dict(state, to, weights=weights)
    with pytest.raises(StateDictError, match=r"'conv.bias' matches no weight"):
        convert_state_dict(state, to, weights="conv.bias")
    with pytest.raises(StateDictError, match="weights has 3; expected names"):
        convert_state_dict(state, to, weights=[3])
    assert len(stored_weights(convert_state_dict(state, "hook", weights="conv.weight"))) == 1


@pytest.mark.parametrize("value", [ints, torch.ones(3), torch.ones(0, 3), v.to_sparse()])
def test_selected_tensors_that_cannot_be_decomposed_are_refused(value):
    with pytest.raises(StateDictError, match=r"a.w: cannot decompose"):
        convert_state_dict({"a.w": value}, "hook", weights=lambda *_: True)


def test_norms_beyond_the_type_are_refused():
    for large in (torch.full((1, 4), 6e4, dtype=torch.float16), torch.full((1, 4), 3e38)):
        with pytest.raises(StateDictError, match=r"w: ‖w‖ is too large for torch.float"):
            convert_state_dict({"w": large}, "hook", weights="w")


@pytest.mark.parametrize("row", [1e-13, 1e-30, 0.0, float("nan"), float("inf"), 1e-45])
def test_decomposing_and_folding_is_exact_for_special_values(row):
    state = {"w": torch.tensor([[row, 0.0], [3.0, 4.0]])}
    there = convert_state_dict(state, "hook", weights="w")
    back = convert_state_dict(there, "folded")
    torch.testing.assert_close(back, state, rtol=0, atol=0, equal_nan=True)


def test_a_checkpoint_instead_of_its_state_dict_is_refused():
    with pytest.raises(StateDictError, match="'model' is a mapping: pass the state dict itself"):
        convert_state_dict({"model": dict(HOOK), "steps": 7}, "folded")


# — random state dicts —

CONVERSIONS, LOADS = 400, 200
"""Numbers of random cases."""

COMPONENTS = st.sampled_from(
    ["a", "b", "w", "w_g", "w_v", "parametrizations", "original0", "", "0"]
)
NAMES = st.one_of(
    st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join),
    st.builds(
        lambda path, form: form(path),
        st.lists(st.sampled_from(["a", "b", "w"]), min_size=1, max_size=2).map(".".join),
        st.sampled_from(
            [
                str,
                *(
                    lambda path, f=f, i=i: part_keys(path, f)[i]
                    for f in FORMATS[:2]
                    for i in (0, 1)
                ),
                log_key,
            ]
        ),
    ),
    st.text(max_size=3),
    st.integers(0, 3),
)
SHAPES = st.sampled_from(
    [(), (1,), (2,), (2, 2), (2, 1), (1, 2), (1, 1), (2, 2, 2), (2, 1, 1), (0, 2)]
)
DTYPES = st.sampled_from(
    [torch.float32] * 6 + [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2,
     torch.int64, torch.bool, torch.complex64]
)  # fmt: skip
VALUES = st.sampled_from([0.0, 1.0, -2.0, 1e-20, 1e30, float("nan"), float("inf"), 0.1])


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(DTYPES)
    count = int(torch.Size(shape).numel())
    values = draw(st.lists(VALUES, min_size=count, max_size=count))
    tensor = torch.tensor(values, dtype=torch.float64).reshape(shape)
    tensor = tensor.nan_to_num(0, 1, -1) if dtype in (torch.int64, torch.bool) else tensor
    return tensor.to(dtype)


ITEMS = st.one_of(tensors(), tensors(), tensors(), st.sampled_from(["text", 3, None]))
STATES = st.dictionaries(NAMES, ITEMS, max_size=7)


LINEAR = st.dictionaries(st.sampled_from(["weight", "bias"]), tensors(), max_size=2)


def pair_states(path_names=("w", "a.w", "b.w_v")):
    """State dicts of which most entries are weight norm."""
    pair = st.tuples(
        st.sampled_from(path_names),
        st.sampled_from(FORMATS[:2]),
        st.sampled_from([((2, 2), (2, 1)), ((2, 2), ()), ((2, 2), (2,)), ((2, 2, 2), (1, 2, 1))]),
        st.integers(0, 3),
    )

    def build(pairs, rest):
        state = dict(rest)
        for path, format, (v_shape, g_shape), seed in pairs:
            random = torch.Generator().manual_seed(seed)
            g_key, v_key = part_keys(path, format)
            state[g_key] = torch.randn(g_shape, generator=random)
            state[v_key] = torch.randn(v_shape, generator=random)
        return state

    return st.builds(build, st.lists(pair, max_size=3), STATES)


def identical(a, b):
    """Whether two values are the same, bit for bit."""
    if not isinstance(a, torch.Tensor):
        return a is b or a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=0, atol=0, equal_nan=True)


def identical_states(a, b):
    return set(a) == set(b) and all(identical(a[key], b[key]) for key in a)


def is_folded(w, weight, dim="infer"):
    """Whether w = g·v/‖v‖ by torch in float64; True for values that leave the range of a type."""
    (v, g), (axis, groups) = weight.parts, kept_axis(weight, dim)
    v, g = v.double(), g.double()
    axes = [i for i in range(v.ndim) if i != axis]
    norm = torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    expected = v / norm * (g if axis is None else g.reshape(norm.shape))
    ordinary = torch.cat([x.abs().flatten() for x in (v[v != 0], g[g != 0], norm)])
    if groups > 1 or not bool(((ordinary > 1e-4) & (ordinary < 1e4)).all()):
        return True
    return torch.allclose(w.double(), expected, rtol=1e-2, atol=1e-6)


@settings(max_examples=CONVERSIONS, derandomize=True, deadline=None, database=None)
@given(
    st.one_of(STATES, pair_states()),
    st.sampled_from(FORMATS),
    st.sampled_from([(), "*", "*w"]),
    st.sampled_from(["infer", "infer", 0, 1, None, 5]),
)
def test_random_state_dicts_convert_exactly_or_are_refused(state, to, weights, dim):
    before = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in state.items()}
    stored = stored_weights(state, dim)
    try:
        new = convert_state_dict(state, to, weights=weights, dim=dim)
    except StateDictError:
        return
    finally:
        assert identical_states(state, before)  # the input is never changed
    parts = {key for weight in stored for key in weight.keys}
    rest = {key: x for key, x in state.items() if key not in parts}
    selected = {
        key
        for key, x in rest.items()
        if to != "folded" and isinstance(key, str) and isinstance(x, torch.Tensor)
        if x.ndim > 1 and x.is_floating_point() and weights and fnmatchcase(key, weights)
    }
    # What is neither weight norm nor selected is copied.
    assert all(identical(new[key], x) for key, x in rest.items() if key not in selected)
    paths = {weight.path for weight in stored} | selected
    found = stored_weights(new, dim)
    if to == "folded":
        assert not found
        assert set(new) == set(rest) | paths
        assert all(is_folded(new[weight.path], weight, dim) for weight in stored)
    else:
        assert {weight.path for weight in found} == paths
        assert all(weight.format == to for weight in found)
        decomposed = {key: new[key] for path in selected for key in part_keys(path, to)}
        back = convert_state_dict(decomposed, "folded", dim=dim)
        assert identical_states(back, {key: state[key] for key in selected})
        reversible = not selected and not any(weight.is_log for weight in stored)
        if reversible and len({weight.format for weight in stored}) == 1:
            assert identical_states(convert_state_dict(new, stored[0].format, dim=dim), state)


@settings(max_examples=LOADS, derandomize=True, deadline=None, database=None)
@given(st.one_of(STATES, LINEAR, pair_states(["weight", "0.weight"])), st.sampled_from([*KINDS]))
def test_random_state_dicts_load_or_are_refused(state, kind):
    model = KINDS[kind](nn.Linear(2, 2))
    before = copy.deepcopy(model.state_dict())
    try:
        load_state_dict(model, state, strict=False)
    except StateDictError:
        assert equal(model.state_dict(), before)
        return
    with torch.no_grad():
        model(torch.zeros(1, 2))  # the hook computes the weight
    for weight in stored_weights(state):
        if weight.path == "weight":
            assert is_folded(model.weight.detach(), weight)
    if isinstance(state.get("weight"), torch.Tensor):
        torch.testing.assert_close(
            model.weight.detach(), state["weight"].float(), rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_document_has_the_counts_of_the_tests():
    page = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text()
    assert f"{CONVERSIONS} random state dicts: names" in page
    assert f"{LOADS} random state dicts into five kinds of layer" in page
    assert len(KINDS) == 5
    assert f"{len(NOT_WEIGHT_NORM)} kinds of pair" in page


def test_loading_into_a_folded_model_is_refused():
    model = weight_norm(nn.Linear(2, 3))
    state = nn.Linear(2, 3).state_dict()
    with folded(model), pytest.raises(RuntimeError, match="cannot load the weights of"):
        load_state_dict(model, state)
    assert load_state_dict(model, state) == ["weight"]


class Versioned(nn.Linear):
    """A layer that migrates the values of checkpoints older than version 2."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}bias"] = state[f"{prefix}bias"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_modules_reach_them():
    model = nn.Sequential(weight_norm(Versioned(2, 3)))
    bias, state = model[0].bias.detach().clone(), model.state_dict()
    load_state_dict(model, state)
    torch.testing.assert_close(model[0].bias.detach(), bias)
    for to in FORMATS:
        load_state_dict(model, convert_state_dict(state, to=to))
        torch.testing.assert_close(model[0].bias.detach(), bias)


def test_keys_of_both_flavours_are_refused():
    layer = weight_norm(nn.Linear(2, 3))
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match="weight_g"):
        layer.load_state_dict({**state, **convert_state_dict(state, to="hook")})


def test_a_module_that_is_used_twice_is_loaded_from_any_format():
    plain, layer = nn.Linear(3, 3), weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(layer, nn.ReLU(), layer)
    state = nn.Sequential(plain, nn.ReLU(), plain).state_dict()
    assert load_state_dict(model, state) == ["0.weight", "2.weight"]
    torch.testing.assert_close(layer.weight, plain.weight)
    for format in ("hook", "parametrize"):
        nn.init.zeros_(parts(layer).g)
        load_state_dict(model, convert_state_dict(state, to=format, weights="*.weight"))
        torch.testing.assert_close(layer.weight, plain.weight)


def test_flat_g_of_input_channels_is_not_loaded_as_that_of_groups():
    plain = nn.ConvTranspose1d(6, 6, 5, groups=2)  # 6 input channels; 6 units in each of 2 groups
    state = dict(nn.utils.weight_norm(copy.deepcopy(plain)).state_dict())
    state["weight_g"] = state["weight_g"].flatten()
    layer = weight_norm(copy.deepcopy(plain))
    nn.init.ones_(parts(layer).v)
    load_state_dict(layer, state)
    torch.testing.assert_close(layer.weight, plain.weight)


def test_loading_into_the_meta_device_is_refused():
    with torch.device("meta"):
        layer = weight_norm(nn.Linear(3, 2))
    with pytest.raises(StateDictError, match="on the meta device and has no memory to load into"):
        load_state_dict(layer, nn.Linear(3, 2).state_dict())


class Renaming(nn.Linear):
    """Renames a key of its older checkpoints."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if f"{prefix}shift" in state_dict:
            state_dict[f"{prefix}bias"] = state_dict.pop(f"{prefix}shift")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_keys_that_modules_migrate_are_accepted():
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Renaming(4, 2))
    model = copy.deepcopy(plain)
    weight_norm(model[0])
    nn.init.zeros_(model[2].bias)
    state = plain.state_dict()
    old = {key: value for key, value in state.items() if "num_batches" not in key}
    old["2.shift"] = old.pop("2.bias")
    assert load_state_dict(model, old) == ["0.weight"]
    assert torch.equal(model[2].bias, plain[2].bias)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match=r"missing: 1\.weight, .*2\.bias"):
        load_state_dict(model, {k: v for k, v in old.items() if k not in ("1.weight", "2.shift")})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_one_number_loads_into_a_scalar():
    """torch's own load_state_dict accepts it, as from checkpoints of old versions."""
    source, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    state = source.state_dict() | {"num_batches_tracked": torch.tensor([5])}
    load_state_dict(target, state)
    assert target.num_batches_tracked == 5
    state["num_batches_tracked"] = torch.tensor([5, 6])
    with pytest.raises(StateDictError, match=r"num_batches_tracked has shape \(2,\) in the check"):
        load_state_dict(target, state)


@pytest.mark.parametrize("dim", ["first", 1.0, (0,)])
def test_a_dim_that_is_no_axis_is_refused(dim):
    state = weight_norm(nn.Linear(2, 3)).state_dict()
    with pytest.raises(StateDictError, match=r"dim=.*; expected an axis, None or 'infer'"):
        convert_state_dict(state, "folded", dim=dim)
