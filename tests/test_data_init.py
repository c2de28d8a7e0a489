"""Data-dependent initialization: eq. 5 and 6 on any model, reported, and undone when it fails."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from ranks import on_ranks
from weightnorm import (
    MeanOnlyBatchNorm2d,
    data_dependent_init,
    mean_only_batch_norm,
    parts,
    weight_norm,
    weight_norm_model,
)
from weightnorm.data_init import _mean_and_variance


def moments(t, unit=1):
    over = [d for d in range(t.ndim) if d != unit % t.ndim]
    return t.mean(over), t.std(over, correction=0)


def is_normal(t, unit=1, std=1.0, atol=1e-5):
    mean, got = moments(t, unit)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=atol, rtol=0)
    torch.testing.assert_close(got, torch.full_like(got, std), atol=atol, rtol=0)
    return True


def outputs(model, x):
    """The output of every layer with a weight, in running order."""
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


def hooked(model):
    for layer in model:
        if hasattr(layer, "weight"):
            nn.utils.weight_norm(layer, dim=int(isinstance(layer, nn.ConvTranspose2d)))


def torchs(model):
    for layer in model:
        if hasattr(layer, "weight"):
            parametrizations.weight_norm(layer)


FLAVOURS = {
    "plain": lambda model: None,
    "weight-normed": weight_norm_model,
    "log-scale": lambda model: weight_norm_model(model, scale="log"),
    "other-axis": lambda model: weight_norm_model(model, dim=2, where=lambda n, m: "4" in n),
    "one-g": lambda model: weight_norm_model(model, dim=None),
    "torch-parametrization": torchs,
    "torch-hook": hooked,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
def test_every_pre_activation_starts_at_mean_0_and_std_1(flavour):
    model, x = convnet(), 3 * torch.randn(40, 3, 6, 6) + 1
    flavour(model)
    report = data_dependent_init(model, x)
    assert [layer.name for layer in report.done] == ["0", "2", "4", "7"]
    seen = outputs(model, x)
    assert len(seen) == 4
    assert all(is_normal(t) for t in seen)


def test_it_is_the_papers_formula_layer_by_layer():
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


def test_other_batches_come_out_nearly_normal():
    model = convnet()
    data_dependent_init(model, torch.randn(200, 3, 6, 6))
    for t in outputs(model, torch.randn(200, 3, 6, 6)):
        mean, std = moments(t)
        assert mean.abs().max() < 0.4
        assert (std - 1).abs().max() < 0.4


def test_layers_without_bias_get_their_scale_only():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    x = torch.randn(50, 4) + 1
    data_dependent_init(model, x)
    for t in outputs(model, x):
        torch.testing.assert_close(moments(t)[1], torch.ones(t.shape[1]))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, MeanOnlyBatchNorm2d])
def test_batch_statistics_behind_a_layer_are_not_touched(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    weight_norm_model(model)
    before = copy.deepcopy(dict(model.named_buffers()))
    x = torch.randn(20, 3, 6, 6) * 2 + 1
    data_dependent_init(model, x)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert is_normal(model[:2](x), atol=1e-4)
    assert is_normal(model(x))
    assert (model[1].bias == 0).all()


def test_centred_layers_keep_b_at_zero_and_their_running_mean():
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


def test_noise_and_dropout_stay_as_the_mode_has_them():
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


@pytest.mark.parametrize("target", [{"1.second": 0.1}, {"*.second": 0.1}])
def test_a_target_std_for_each_layer(target):
    model, x = nn.Sequential(nn.Linear(6, 6), Residual(), nn.Linear(6, 2)), torch.randn(60, 6)
    report = data_dependent_init(model, x, target_std=target)
    seen = outputs(model, x)
    assert is_normal(seen[2], std=0.1)
    assert is_normal(seen[1])
    assert is_normal(seen[3])
    assert [row.target_std for row in report] == [1, 1, 0.1, 1]


def test_one_target_std_for_all():
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(60, 6)
    data_dependent_init(model, x, target_std=0.5)
    assert all(is_normal(t, std=0.5) for t in outputs(model, x))


def test_shared_layers_are_set_at_their_first_use():
    shared = nn.Linear(6, 6)
    model, x = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 2)), torch.randn(60, 6)
    report = data_dependent_init(model, x)
    assert [row.name for row in report] == ["0", "3"]
    seen = outputs(model, x)
    assert is_normal(seen[0])
    assert is_normal(seen[2])


def test_models_with_several_inputs_and_another_forward():
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


def test_sequences_and_unbatched_axes_count_as_examples():
    layer, x = nn.Linear(4, 3), torch.randn(5, 7, 4) + 1
    data_dependent_init(layer, x)
    assert is_normal(layer(x), unit=-1)


@pytest.mark.parametrize("normed", [False, True])
def test_dead_units_are_left_alone_and_reported(normed):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
    if normed:
        weight_norm_model(model)
    before = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    report = data_dependent_init(model, torch.randn(50, 4))
    assert report.dead == {"0": (1,)}
    assert torch.equal(model[0].weight[1], before[0][1])
    assert torch.equal(model[0].bias[1], before[1][1])
    assert "1 dead: 1" in str(report)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_constant_channel_far_from_zero_is_dead_too():
    layer, x = nn.Linear(3, 2), torch.full((40, 3), 1234.567)
    report = data_dependent_init(layer, x)
    assert report.dead == {"": (0, 1)}


def test_recurrent_layers_and_other_strangers_are_skipped_with_a_reason():
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


def test_lazy_layers_are_set_on_their_first_pass():
    model, x = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2)), torch.randn(40, 3)
    weight_norm_model(model)
    data_dependent_init(model, x)
    assert parts(model[0]).g.shape == (5, 1)
    assert is_normal(model(x))


def test_the_report_prints_as_a_table():
    model = nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    text = str(data_dependent_init(model, torch.randn(100, 4)))
    head, line, first, second = text.splitlines()
    assert head.split("  ")[0] == "layer"
    assert set(line) == {"─"}
    assert first.split()[:3] == ["0", "Linear", "8"]
    assert second.split()[:3] == ["2", "Linear", "2"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(200, 4)
    model, x = model.to(dtype), x.to(dtype)
    weight_norm_model(model)
    data_dependent_init(model, x)
    assert is_normal(model(x).float(), atol=3e-2)


def unchanged(model, before):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_layer(bad, normed):
    class Poison(nn.Module):
        def forward(self, x):
            return torch.where(x == x.max(), bad, x)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Poison(), nn.Linear(4, 2))
    if normed:
        weight_norm_model(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="layer '3' gave NaN or infinity on the init batch"):
        data_dependent_init(model, torch.randn(20, 4))
    unchanged(model, before)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 3), torch.randn(1, 4)),
        (nn.Linear(4, 3), torch.randn(4)),
        (nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)),
        (nn.Conv2d(3, 4, 3), torch.randn(3, 8, 8)),
    ],
)
def test_a_batch_of_one_is_refused(model, x):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"saw 1 example\(s\): .* two or more"):
        data_dependent_init(model, x)
    unchanged(model, before)


def test_a_failing_model_is_put_back():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of order")

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Broken())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of order"):
        data_dependent_init(model, torch.randn(20, 4))
    unchanged(model, before)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"3.secnd": 0.1}, "no layer is called so"),
        (0.0, "must be a positive number; got 0.0"),
        ({"0": -1.0}, "must be a positive number; got -1.0 for '0'"),
        (float("nan"), "must be a positive number"),
    ],
)
def test_impossible_targets_are_refused(target, says):
    model = nn.Sequential(nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        data_dependent_init(model, torch.randn(20, 4), target_std=target)
    unchanged(model, before)


SPLITS = {2: [(0, 11), (11, 40)], 3: [(0, 1), (1, 40), (40, 40)]}


def _initialized(rows=slice(None), wrap=lambda model: model, group=None):
    torch.manual_seed(0)
    model = convnet()
    weight_norm_model(model, where=lambda name, module: name != "2")
    data_dependent_init(wrap(model), torch.randn(40, 3, 6, 6)[rows], group=group)
    return {k: v.clone() for k, v in model.state_dict().items()}


def _ranked(rank, world):
    rows = slice(*SPLITS[world][rank])
    return {
        "plain": _initialized(rows, group=dist.group.WORLD),
        "wrapped": _initialized(rows, wrap=DistributedDataParallel),  # whose group it takes
    }


@pytest.mark.parametrize("world", [2, 3], ids=["uneven", "one-rank-empty"])
def test_ranks_together_are_one_process(world):
    results = on_ranks(world, _ranked, world)
    alone = _initialized()
    for result in results:
        for how in ("plain", "wrapped"):
            torch.testing.assert_close(result[how], alone, atol=1e-5, rtol=1e-5)
            for name in alone:
                assert torch.equal(result[how][name], results[0][how][name])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_are_exact_to_rounding_in_every_layout(layout):
    torch.manual_seed(0)
    spread = torch.tensor([2.0, 0.1, 1e-3, 0.0]).view(4, 1, 1)
    t = (1 + spread * torch.randn(50, 4, 16, 16)).to(memory_format=layout)
    mean, variance = _mean_and_variance(t)
    expected, expected_mean = torch.var_mean(t.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-6, atol=0)
