"""Data-dependent initialization: eq. 5 and 6 on any model, what is reported, and failures."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

from ranks import on_ranks
from weightnorm import (
    MeanOnlyBatchNorm2d,
    data_dependent_init,
    folded,
    mean_only_batch_norm,
    parts,
    weight_norm,
    weight_norm_model,
)


def moments(t, unit=1):
    over = [d for d in range(t.ndim) if d != unit % t.ndim]
    return t.mean(over), t.std(over, correction=0)


def is_normal(t, unit=1, std=1.0, atol=1e-5):
    mean, got = moments(t, unit)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=atol, rtol=0)
    torch.testing.assert_close(got, torch.full_like(got, std), atol=atol, rtol=0)
    return True


def outputs(model, x):
    """Return the output of every layer with a weight, in the order in which they run."""
    seen = []
    hooks = [
        m.register_forward_hook(lambda m, i, o: seen.append(o.detach()))
        for m in model.modules()
        if isinstance(m, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(8, 6, 3, groups=2),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 10),
    )


def torch_hooks(model):
    for layer in model:
        if hasattr(layer, "weight"):
            nn.utils.weight_norm(layer, dim=int(isinstance(layer, nn.ConvTranspose2d)))


def torch_parametrizations(model):
    for layer in model:
        if hasattr(layer, "weight"):
            parametrizations.weight_norm(layer)


FLAVOURS = {
    "plain": lambda model: None,
    "weight-normed": weight_norm_model,
    "log-scale": lambda model: weight_norm_model(model, scale="log"),
    "other-axis": lambda model: weight_norm_model(model, dim=2, where=lambda n, m: "4" in n),
    "one-g": lambda model: weight_norm_model(model, dim=None),
    "torch-parametrization": torch_parametrizations,
    "torch-hook": torch_hooks,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
def test_every_pre_activation_has_mean_0_and_std_1(flavour):
    model, x = convnet(), 3 * torch.randn(40, 3, 6, 6) + 1
    flavour(model)
    report = data_dependent_init(model, x)
    assert [layer.name for layer in report.done] == ["0", "2", "4", "7"]
    seen = outputs(model, x)
    assert len(seen) == 4
    assert all(is_normal(t) for t in seen)
    for row, t in zip(report.done, seen, strict=True):
        mean, std = moments(t)
        assert row.mean_after == pytest.approx(mean.mean().item(), abs=1e-5)
        assert row.std_after == pytest.approx(std.mean().item(), abs=1e-5)


def test_matches_equations_5_and_6_layer_by_layer():
    model, x = convnet().double(), torch.randn(30, 3, 6, 6, dtype=torch.float64)
    weight_norm_model(model)
    v = {i: parts(model[i]).v.detach().clone() for i in (0, 2, 4, 7)}
    data_dependent_init(model, x)
    oracle = convnet().double()
    for i, layer in enumerate(oracle):
        if i not in v:
            x = layer(x)
            continue
        transposed = isinstance(layer, nn.ConvTranspose2d)
        groups = layer.groups if transposed else 1
        blocks = v[i].unflatten(0, (groups, -1))
        over = [d for d in range(blocks.ndim) if d not in ((0, 2) if transposed else (0, 1))]
        unit = blocks / blocks.square().sum(over, keepdim=True).sqrt()  # v/‖v‖
        with torch.no_grad():
            layer.weight.copy_(unit.flatten(0, 1))
            layer.bias.zero_()
        t = layer(x).detach()  # eq. 5
        mean, std = moments(t)
        torch.testing.assert_close(parts(model[i]).g.flatten(), 1 / std)  # eq. 6
        torch.testing.assert_close(model[i].bias, -mean / std)
        assert torch.equal(parts(model[i]).v, v[i])  # v stays
        shape = (-1, *[1] * (t.ndim - 2))
        x = (t - mean.view(shape)) / std.view(shape)


def test_frozen_layers_and_fixed_g_are_left_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    weight_norm(model[2], g=1.0, train_g=False)
    weight_norm(model[3])
    before = copy.deepcopy(model.state_dict())
    report = data_dependent_init(model, torch.randn(100, 4))
    assert [layer.name for layer in report.done] == ["3"]
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"3.bias", "3.parametrizations.weight.original0"}
    assert "it is frozen" in str(report)


def test_buffers_are_restored_also_those_that_the_model_replaces():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(64, 2)
            self.register_buffer("average", torch.zeros(2))
            self.register_buffer("later", None)

        def forward(self, x):
            y = super().forward(x)
            self.average = 0.9 * self.average + y.mean(0)
            self.later = y.mean(0)
            return y

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 16, 3),
        MeanOnlyBatchNorm2d(16),
        nn.Flatten(),
        Counting(),
    )
    buffers = dict(model.named_buffers())
    values = copy.deepcopy(buffers)
    x = torch.randn(20, 3, 6, 6) * 2 + 1
    data_dependent_init(model, x)
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name], name
        assert torch.equal(buffer, values[name]), name
    assert is_normal(model(x), atol=1e-4)


def test_mean_only_layers_keep_bias_and_running_mean_at_zero():
    model = nn.Sequential(
        mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3))),
        nn.ReLU(),
        nn.Flatten(),
        mean_only_batch_norm(nn.Linear(64, 5)),
    )
    x = torch.randn(30, 3, 6, 6) + 2
    report = data_dependent_init(model, x)
    assert [(row.name, row.kind) for row in report] == [("0", "Conv2d"), ("3", "Linear")]
    assert (model[0].bias == 0).all()
    assert (model[0].norm.running_mean == 0).all()
    assert is_normal(model[0](x))
    assert is_normal(model(x))


def test_training_mode_is_kept():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    x = torch.randn(100, 4)
    for mode in (True, False):
        twin = copy.deepcopy(model).train(mode)
        torch.manual_seed(7)
        data_dependent_init(twin, x)
        assert twin[1].training is mode
        torch.manual_seed(7)
        assert is_normal(twin(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("target", "stds"),
    [
        (0.5, [0.5, 0.5, 0.5, 0.5]),
        ({"a[0].second": 0.1}, [1, 1, 0.1, 1]),  # a name that looks like a pattern
        ({"*.second": 0.1, "2": 3}, [1, 1, 0.1, 3]),
    ],
)
def test_target_std_by_layer_name_or_pattern(target, stds):
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(60, 6)
    model.add_module("a[0]", Residual())
    model.add_module("2", nn.Linear(6, 2))
    report = data_dependent_init(model, x, target_std=target)
    assert all(is_normal(t, std=std) for t, std in zip(outputs(model, x), stds, strict=True))
    assert [row.target_std for row in report] == stds


def test_several_inputs_and_custom_forward():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.out = nn.Bilinear(3, 4, 5), nn.Linear(5, 2)

        def loss(self, a, b, scale):
            return scale * self.out(self.mix(a, b))

    model, a, b = Pair(), torch.randn(50, 3), torch.randn(50, 4)
    data_dependent_init(model, a, b, 3.0, forward=model.loss)
    assert is_normal(model.mix(a, b))
    assert is_normal(model.out(model.mix(a, b)))


def test_a_layer_without_bias_is_only_scaled_and_all_axes_but_units_count_as_examples():
    layer, x = nn.Linear(4, 3, bias=False), torch.randn(5, 7, 4) + 1
    mean, std = moments(layer(x), unit=-1)
    report = data_dependent_init(layer, x)
    after = moments(layer(x), unit=-1)
    torch.testing.assert_close(after, (mean / std, torch.ones(3)))
    assert "no bias: the mean stays" in str(report)


def test_dead_units_are_unchanged_and_reported():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    weight_norm_model(model)
    before = model[0].weight[1].detach().clone(), model[0].bias[1].item()
    report = data_dependent_init(model, torch.randn(50, 4))
    assert report.dead == {"0": (1,)}
    assert torch.equal(model[0].weight[1], before[0])
    assert model[0].bias[1].item() == before[1]
    assert "1 dead: 1" in str(report)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("wrap", [lambda layer: layer, mean_only_batch_norm])
def test_units_that_are_constant_up_to_rounding_are_dead(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(3, 3)))
    x = torch.randn(400, 3)
    x[:, 0] = 1234.567 * (1 + 1e-7 * torch.randn(400))
    with torch.no_grad():
        getattr(model[0], "layer", model[0]).weight[:2, 1:] = 0  # these see the constant alone
    report = data_dependent_init(model, x)
    assert report.dead == {"0": (0, 1)}
    assert [row.name for row in report.done] == ["0"]
    assert moments(model(x))[1][2].item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_inputs_whose_squares_overflow_or_vanish(size):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), weight_norm(nn.Linear(8, 2)))
    with torch.no_grad():
        model[0].bias.zero_()
    x = size * torch.randn(100, 4)
    assert len(data_dependent_init(model, x).done) == 2
    assert is_normal(model(x), atol=1e-4)


def test_recurrent_and_unused_layers_are_skipped_with_a_reason():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.unused, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.rnn(self.embed(x))[0]
            return self.out(self.attention(h, h, h)[0])

    model, x = Model(), torch.randint(9, (20, 5))
    weight_norm_model(model)
    before = copy.deepcopy(model.rnn.state_dict())
    report = data_dependent_init(model, x)
    assert [row.name for row in report.done] == ["out"]
    reasons = {row.name: row.skipped for row in report.skipped}
    assert set(reasons) == {"embed", "rnn", "attention", "attention.out_proj", "unused"}
    assert "recurrent" in reasons["rnn"]
    assert "did not run" in reasons["unused"]
    assert "skipped: recurrent layers keep their initialization" in str(report)
    torch.testing.assert_close(model.rnn.state_dict(), before)
    assert is_normal(model(x), unit=-1)


def test_lazy_layers():
    model, x = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2)), torch.randn(40, 3)
    weight_norm_model(model)
    data_dependent_init(model, x)
    assert parts(model[0]).g.shape == (5, 1)
    assert is_normal(model(x))


def test_report_prints_as_a_table():
    model = nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    model.unused = nn.Linear(3, 3)
    model.forward = lambda x: model[:3](x)
    text = str(data_dependent_init(model, torch.randn(100, 4)))
    head, line, first, second, third = text.splitlines()
    assert head.split("  ")[0] == "layer"
    assert set(line) == {"─"}
    assert first.split()[:3] == ["0", "Linear", "8"]
    assert second.split()[:3] == ["2", "Linear", "2"]
    assert second.split()[5:] == ["0", "1", "1"]
    assert third.split(maxsplit=2) == ["unused", "Linear", "skipped: it did not run on this batch"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(200, 4)
    model, x = model.to(dtype), x.to(dtype)
    weight_norm_model(model)
    data_dependent_init(model, x)
    assert is_normal(model(x).float(), atol=3e-2)


def unchanged(model, before):
    """Assert that no parameter, buffer or hook differs from before."""
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
    assert not any(m._forward_hooks for m in model.modules())


class Poison(nn.Module):
    """Replaces the largest input by a value that is not finite, or raises."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        if self.value is None:
            raise ValueError("broken forward")
        return torch.where(x == x.max(), self.value, x)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("where", "bad", "message"),
    [
        ("batch", NAN, "the init batch contains NaN or infinity"),
        ("module", INF, "layer '3' received NaN or infinity, though the init batch has"),
        ("weight", NAN, "layer '3' gave NaN or infinity for a finite input"),
        ("weight", INF, "layer '3' gave NaN or infinity for a finite input"),
        ("module", None, "broken forward"),
    ],
)
def test_an_error_names_its_origin_and_leaves_the_model_as_it_was(where, bad, message):
    poison = Poison(bad) if where == "module" else nn.Identity()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), poison, nn.Linear(4, 2))
    if bad is not INF:
        weight_norm_model(model)
    x = torch.randn(20, 4)
    with torch.no_grad():
        if where == "batch":
            x[3, 2] = bad
        if where == "weight":
            model[3].bias[0] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        data_dependent_init(model, x)
    unchanged(model, before)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 3), torch.randn(1, 4)),
        (nn.Linear(4, 3), torch.randn(4)),
        (nn.Conv2d(3, 4, 3), torch.randn(0, 3, 8, 8)),
        (nn.Conv2d(3, 4, 3), torch.randn(3, 8, 8)),
    ],
)
def test_batch_of_one_or_none_raises(model, x):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"saw [01] example\(s\): .* two or more"):
        data_dependent_init(model, x)
    unchanged(model, before)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"3.secnd": 0.1}, r"no layer matches '3.secnd'; there are \['0'\]"),
        (0.0, "must be a positive number; got 0.0"),
        ({"0": INF}, "must be a positive number; got inf for '0'"),
    ],
)
def test_invalid_target_std_raises(target, message):
    model = nn.Sequential(nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        data_dependent_init(model, torch.randn(20, 4), target_std=target)
    unchanged(model, before)


def test_models_that_cannot_be_written_are_refused():
    model, x = nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2)), torch.randn(20, 4)
    before = copy.deepcopy(model.state_dict())
    with folded(model):  # noqa: SIM117 (what is outside of the block must not raise)
        with pytest.raises(RuntimeError, match=r"cannot initialize the weights .* leave the block"):
            data_dependent_init(model, x)
    with pytest.raises(ValueError, match=r"initialize the one inside, model\.module"):
        data_dependent_init(nn.DataParallel(model), x)
    unchanged(model, before)
    assert len(data_dependent_init(model, x).done) == 2


SPLITS = [(0, 11), (11, 40), (40, 40)]  # uneven, and one rank has no examples


def _initialized(rows=slice(None), wrap=lambda model: model, group=None):
    torch.manual_seed(0)
    model = convnet().append(nn.ReLU()).append(SquashedLinear(10, 5))
    weight_norm_model(model, where=lambda name, module: name != "2")
    data_dependent_init(wrap(model), torch.randn(40, 3, 6, 6)[rows], group=group)
    return {k: v.clone() for k, v in model.state_dict().items()}


def _ranked(rank):
    rows = slice(*SPLITS[rank])
    return {
        "plain": _initialized(rows, group=dist.group.WORLD),
        "wrapped": _initialized(rows, wrap=DistributedDataParallel),  # whose group it takes
    }


@pytest.mark.xdist_group("clusters")
def test_ranks_give_the_result_of_one_process():
    results = on_ranks(len(SPLITS), _ranked)
    alone = _initialized()
    for result in results:
        for how in ("plain", "wrapped"):
            torch.testing.assert_close(result[how], alone, atol=1e-5, rtol=1e-5)
            for name in alone:
                assert torch.equal(result[how][name], results[0][how][name])


# Layers that share parameters


def by_memory(model):
    model[2].weight = nn.Parameter(model[0].weight.data)


def by_parametrization(model):
    model[2].weight = model[0].weight
    weight_norm_model(model)


def by_module(model):
    model[2] = model[0]


@pytest.mark.parametrize("tie", [by_memory, by_parametrization, by_module])
def test_a_tied_layer_is_set_at_its_first_use(tie):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    tie(model)
    x = 2 * torch.randn(80, 6) + 1
    report = data_dependent_init(model, x)
    assert [row.name for row in report.done] == ["0", "3"]
    reasons = [(row.name, row.skipped) for row in report.skipped]
    tied = [("2", "shares a parameter with '0', which ran first")]
    assert reasons == ([] if tie is by_module else tied)
    assert torch.equal(model[0].weight, model[2].weight)
    seen = outputs(model, x)
    assert is_normal(seen[0])
    assert is_normal(seen[2])


def test_head_tied_to_an_embedding_is_skipped():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.inner = nn.Linear(6, 6)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.inner(self.embed(x)))

    model, x = Language(), torch.randint(9, (30, 4))
    before = model.embed.weight.detach().clone()
    report = data_dependent_init(model, x)
    assert [row.name for row in report.done] == ["inner"]
    reason = "shares a parameter with 'embed' (Embedding), which would change too"
    assert {row.name: row.skipped for row in report.skipped}["head"] == reason
    assert torch.equal(model.embed.weight, before)
    assert is_normal(model.inner(model.embed(x)), unit=-1)


# Layers whose output is not a linear map of their weight


class StandardizedConv(nn.Conv2d):
    """Weight standardization: (w − mean)/std per unit, with a gain, as in NF-ResNet and BiT."""

    gain = 5.0

    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True, correction=0)
        return self._conv_forward(x, self.gain * (self.weight - mean) / (std + 1e-6), self.bias)


class SquashedLinear(nn.Linear):
    """Depends on its weight smoothly but not linearly."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight / (1 + self.weight.abs()).sqrt(), self.bias)


class NoisyLinear(nn.Linear):
    """Adds noise in forward, so that two calls differ."""

    def forward(self, x):
        return super().forward(x) + 0.01 * torch.randn(x.shape[0], self.out_features)


@pytest.mark.parametrize(("bias", "normed"), [(False, True), (True, False)])
def test_weight_standardized_layers_are_skipped(bias, normed):
    model = nn.Sequential(
        StandardizedConv(3, 8, 3, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )
    if normed:
        weight_norm_model(model)
    x = torch.randn(50, 3, 6, 6)
    before, out = copy.deepcopy(model[0].state_dict()), model[0](x)
    report = data_dependent_init(model, x)
    assert [row.name for row in report.done] == ["3"]
    (row,) = report.skipped
    assert row.name == "0"
    std = moments(out)[1].mean().item()
    assert std > 10
    assert row.skipped == (
        f"rescaling its weight did not bring the std to the target: it stays {std:.3g}"
    )
    unchanged(model[0], before)
    assert is_normal(model(x))


@pytest.mark.parametrize(
    ("make", "target"), [(SquashedLinear, 1.0), (SquashedLinear, 1e-3), (NoisyLinear, 0.3)]
)
def test_layers_that_are_not_linear_in_their_weight_are_corrected(make, target):
    model, x = nn.Sequential(make(6, 5), nn.ReLU(), nn.Linear(5, 2)), 3 * torch.randn(400, 6) + 1
    report = data_dependent_init(model, x, target_std={"0": target})
    assert [row.name for row in report.done] == ["0", "2"]
    mean, std = moments(model[0](x))
    assert mean.abs().max() < 0.06 * target
    torch.testing.assert_close(std, torch.full((5,), target), rtol=0.06, atol=0)
    assert report.done[0].std_after == pytest.approx(std.mean().item(), abs=5e-3)


def test_hook_that_changes_the_input_is_applied_once():
    layer, x = nn.Linear(4, 3), torch.randn(60, 4)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
    report = data_dependent_init(layer, x)
    assert len(report.done) == 1
    assert is_normal(layer(x))


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Heads(nn.Linear):
    def forward(self, x):
        return super().forward(x).unflatten(-1, (2, -1))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Pair(4, 4), "its output is not a floating-point tensor (tuple)"),
        (Heads(4, 4), "its output of shape (20, 2, 2) has no axis of its units"),
        (parametrizations.spectral_norm(nn.Linear(4, 4)), "its weight is computed by another"),
        (nn.utils.spectral_norm(nn.Linear(4, 4)), "its weight is computed by another"),
        (prune.identity(nn.Linear(4, 4), "bias"), "its bias is computed by another"),
    ],
    ids=["tuple", "reshaped", "parametrization", "hook", "pruned-bias"],
)
def test_layers_that_cannot_be_set_are_skipped(layer, reason):
    before = copy.deepcopy({n: p.detach() for n, p in layer.named_parameters()})
    (row,) = data_dependent_init(layer, torch.randn(20, 4))
    assert row.skipped.startswith(reason)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(("normalized", "inside"), [(False, True), (True, False)])
def test_under_autocast_every_layer_reaches_the_target(normalized, inside):
    class Autocast(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return super().forward(x)

    torch.manual_seed(0)
    model = Autocast(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    if normalized:
        weight_norm_model(model)
    images = torch.rand(100, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        report = data_dependent_init(model, images)
        outputs = model(images).float()
    assert len(report.done) == 2
    assert all(layer.std_after == pytest.approx(1, abs=0.05) for layer in report.done)
    assert outputs.std().item() == pytest.approx(1, abs=0.05)


def test_a_compiled_model_that_has_run_is_initialized():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(100, 4)
    compiled(x)
    report = data_dependent_init(compiled, x)
    assert len(report.done) == 2
    torch.testing.assert_close(compiled(x).std(0, correction=0), torch.ones(2))


def test_a_unit_that_varies_little_around_a_large_mean_is_alive():
    """σ is 1e-5 of |μ|: far above what rounding leaves of a constant."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).double(), torch.full((200, 3), 1000.0, dtype=torch.float64)
    x[:, 0] += 0.01 * torch.randn(200, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    report = data_dependent_init(layer, x)
    assert report.dead == {}
    assert is_normal(layer(x), atol=1e-5)
