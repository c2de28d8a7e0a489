"""Mean-only batch norm: eq. 7 and 8, torch's conventions, and around a layer."""

import copy
import functools
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.modules.module import register_module_forward_hook

from ranks import on_ranks
from weightnorm import (
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
    mean_only_batch_norm,
    update_running_means,
    weight_norm,
)

SHAPES = [
    (MeanOnlyBatchNorm1d, (6, 3)),
    (MeanOnlyBatchNorm1d, (6, 3, 5)),
    (MeanOnlyBatchNorm2d, (6, 3, 4, 5)),
    (MeanOnlyBatchNorm3d, (6, 3, 2, 4, 3)),
]
every_norm = pytest.mark.parametrize(("kind", "shape"), SHAPES)


def axes(t):
    return [d for d in range(t.ndim) if d != 1]


@every_norm
def test_eq_7_and_eq_8(kind, shape):
    norm = kind(3, dtype=torch.float64)
    nn.init.normal_(norm.bias)
    t = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = norm(t)
    bias = norm.bias.view(-1, *[1] * (t.ndim - 2))
    torch.testing.assert_close(out, t - t.mean(axes(t), keepdim=True) + bias)
    grad = torch.randn_like(out)
    (grad_t,) = torch.autograd.grad(out, t, grad)
    torch.testing.assert_close(grad_t, grad - grad.mean(axes(t), keepdim=True))
    assert gradcheck(kind(3, dtype=torch.float64), (t,))


@every_norm
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_the_running_mean_is_batch_norms(kind, shape, momentum):
    ours = kind(3, momentum)
    theirs = getattr(nn, kind.__name__.removeprefix("MeanOnly"))(3, momentum=momentum)
    for _ in range(5):
        t = torch.randn(shape) + 2
        ours(t), theirs(t)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == 5
    ours.eval()
    torch.testing.assert_close(ours(t), t - ours.running_mean.view(-1, *[1] * (t.ndim - 2)) + 0.0)


def test_without_running_statistics_evaluation_uses_the_batch():
    norm = MeanOnlyBatchNorm1d(3, track_running_stats=False).eval()
    assert norm.running_mean is None
    torch.testing.assert_close(norm(torch.randn(8, 3)).mean(0), torch.zeros(3))
    assert list(norm.state_dict()) == ["bias"]


def test_half_types_take_the_mean_in_float32():
    t = torch.full((4096, 2), 300.0, dtype=torch.float16)  # its sum overflows float16
    out = MeanOnlyBatchNorm1d(2, dtype=torch.float16)(t)
    assert out.dtype == torch.float16
    assert (out == 0).all()


@pytest.mark.parametrize("shape", [(6, 4), (6,), (6, 3, 2, 2)])
def test_a_wrong_input_is_refused(shape):
    with pytest.raises(ValueError, match=r"MeanOnlyBatchNorm1d got .* 2-d or 3-d with 3 features"):
        MeanOnlyBatchNorm1d(3)(torch.randn(shape))


LINEAR = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear-no-bias": (lambda: nn.Linear(5, 4, bias=False), (6, 5)),
    "linear-on-sequences": (lambda: nn.Linear(5, 4), (6, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (5, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, padding=1), (5, 3, 7, 7)),
    "conv2d-no-bias": (lambda: nn.Conv2d(3, 6, 3, padding=1, bias=False), (5, 3, 7, 7)),
    "strided": (lambda: nn.Conv2d(3, 6, 3, stride=(2, 3), padding=2), (5, 3, 8, 9)),
    "dilated": (lambda: nn.Conv2d(3, 6, 3, dilation=2, padding="same"), (5, 3, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (5, 4, 6, 6)),
    "reflect": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), (5, 3, 6, 6)),
    "circular": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), (5, 3, 6, 6)),
    "replicate": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="replicate"), (5, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (5, 4, 4, 4)),
    "transposed-padded": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
        (5, 4, 6),
    ),
}


@pytest.mark.parametrize(("make", "shape"), LINEAR.values(), ids=LINEAR.keys())
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "weight-normed"])
def test_around_a_layer_it_gives_the_plain_forms_numbers(make, shape, normed):
    layer = make().double()
    if normed:
        weight_norm(layer)
    centered = mean_only_batch_norm(copy.deepcopy(layer))
    x = torch.randn(shape, dtype=torch.float64) + 1
    results = []
    for direct in (False, True):
        module = layer if direct else centered
        x = x.detach().requires_grad_()
        if direct:
            t = module(x)
            unit = -1 if isinstance(layer, nn.Linear) else 1
            over = [d for d in range(t.ndim) if d != unit % t.ndim]
            mean = t.mean(over, keepdim=True)
            b = 0 if layer.bias is None else layer.bias
            shape_b = [1] * t.ndim
            shape_b[unit] = -1
            out = t - mean + (b if layer.bias is None else b.view(shape_b))
            running = 0.1 * (mean.flatten() - b).detach()
        else:
            out = module(x)
            running = module.norm.running_mean
        weights = list(module.parameters())
        loss = (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum()
        results.append((out, running, torch.autograd.grad(loss, [x, *weights])))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", ["linear", "linear-on-sequences", "strided", "transposed"])
def test_second_derivatives(name):
    make, shape = LINEAR[name]
    layer = mean_only_batch_norm(make().double())
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True), *layer.parameters()]
    assert gradgradcheck(lambda x, *_: layer(x), inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_it_writes_to_nobody_elses_gradient_and_keeps_no_output(name):
    make, shape = LINEAR[name]
    layer = mean_only_batch_norm(make())
    x, kept = torch.randn(shape, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert sum(t.shape[0] == len(x) for t in kept) == 1  # the input alone
    grad = torch.randn_like(out)
    before = grad.clone()
    out.backward(grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_what_needs_no_gradient_gets_none(frozen):
    layer = mean_only_batch_norm(nn.Conv2d(3, 4, 3))
    inputs = {"x": torch.randn(5, 3, 6, 6), **dict(layer.layer.named_parameters())}
    for name, tensor in inputs.items():
        tensor.requires_grad_(name not in frozen)
    layer(inputs["x"]).square().sum().backward()
    assert {name for name, tensor in inputs.items() if tensor.grad is None} == set(frozen)


def test_around_a_bilinear_layer():
    layer = mean_only_batch_norm(nn.Bilinear(3, 4, 5).double())
    a, b = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(a, b).mean(0), layer.bias)
    plain = layer.layer(a, b) - layer.bias
    torch.testing.assert_close(layer.norm.running_mean, 0.1 * plain.mean(0))
    layer.eval()
    torch.testing.assert_close(layer(a, b), plain - layer.norm.running_mean + layer.bias)


@pytest.mark.parametrize("name", ["linear", "linear-no-bias", "strided", "transposed"])
def test_folding_the_running_mean_into_the_bias(name):
    make, shape = LINEAR[name]
    centered = mean_only_batch_norm(weight_norm(make()))
    for _ in range(3):
        centered(torch.randn(shape) + 1)
    centered.eval()
    x = torch.randn(shape)
    plain = centered.fold()
    torch.testing.assert_close(plain(x), centered(x))
    assert type(plain) is type(centered.layer) or type(plain).__name__.startswith("Parametrized")


def test_folding_a_norm_behind_a_layer():
    layer, norm = nn.Conv2d(3, 4, 3), MeanOnlyBatchNorm2d(4)
    nn.init.normal_(norm.bias)
    norm(layer(torch.randn(5, 3, 6, 6)))
    norm.eval()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(norm.fold_into(layer)(x), norm(layer(x)))
    with pytest.raises(ValueError, match="no fixed mean to fold"):
        MeanOnlyBatchNorm2d(4, track_running_stats=False).fold_into(layer)


def test_a_convolution_needs_a_batch():
    with pytest.raises(ValueError, match="needs a batch: expected 4 dimensions"):
        mean_only_batch_norm(nn.Conv2d(3, 4, 3))(torch.randn(3, 6, 6))
    with pytest.raises(ValueError, match="needs a batch: expected 3 dimensions"):
        mean_only_batch_norm(nn.Conv1d(3, 4, 3))(torch.randn(3, 6))


def test_recurrent_layers_are_refused():
    with pytest.raises(TypeError, match="no batch statistics behind LSTM"):
        mean_only_batch_norm(nn.LSTM(3, 4))


def test_copies_and_pickles():
    layer = mean_only_batch_norm(weight_norm(nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


def test_autocast():
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(8, 3, 6, 6))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert layer.norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(out.float().mean((0, 2, 3)), layer.bias.detach(), atol=2e-2, rtol=0)


SPLITS = {2: [(0, 5), (5, 8)], 3: [(0, 1), (1, 8), (8, 8)]}
SYNCED = {
    "linear": (lambda: nn.Linear(4, 3), (8, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (8, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (8, 2, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (8, 4, 5)),
}


def _synced_case(name):
    """A layer, its input, and how much each number of its output counts in the loss."""
    torch.manual_seed(0)
    make, shape = SYNCED[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64) + 1
    t = layer(*[x] * (1 + (name == "bilinear")))
    return layer, x, torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t).sin()


def _synced(rank, world):
    results, (a, b) = {}, SPLITS[world][rank]
    for name in SYNCED:
        for form in ("module", "around"):
            layer, x, counts = _synced_case(name)
            group = dist.group.WORLD
            if form == "module":
                norm = {2: MeanOnlyBatchNorm1d, 3: MeanOnlyBatchNorm1d, 4: MeanOnlyBatchNorm2d}
                norm = norm[counts.ndim](counts.shape[1], group=group, dtype=torch.float64)
                model = lambda *x, layer=layer, norm=norm: norm(layer(*x))  # noqa: E731
            else:
                model = mean_only_batch_norm(layer, group=group)
                model = copy.deepcopy(model)  # as an average or a target network does
                layer, norm = model.layer, model.norm
            x = x[a:b].clone().requires_grad_()
            out = model(*[x] * (1 + (name == "bilinear")))
            (out * counts[a:b]).sum().backward()
            dist.all_reduce(layer.weight.grad)
            results[f"{name} {form}"] = {
                "out": out.detach(),
                "x": x.grad,
                "weight": layer.weight.grad,
                "running": norm.running_mean,
            }
    return results


@pytest.mark.parametrize(
    "register", [nn.Module.register_forward_hook, None], ids=["its own", "of all modules"]
)
def test_a_hook_on_the_layer_keeps_what_it_saw(register):
    layer, seen = nn.Linear(3, 2), {}

    def hook(module, inputs, output):
        seen.setdefault(module, output)

    hooked = register(layer, hook) if register else register_module_forward_hook(hook)
    x = torch.randn(5, 3)
    with hooked:
        mean_only_batch_norm(layer)(x)
    torch.testing.assert_close(seen[layer], layer(x))


class Causal(nn.Conv1d):
    """A convolution whose forward is its own."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (2, 0)))


def halved(layer):
    layer.register_forward_pre_hook(lambda layer, x: (x[0] / 2,))
    return layer


def replaced(layer):
    own = layer.forward
    layer.forward = lambda x: own(x) * 3
    return layer


BESIDES = {
    "forward of a subclass": (lambda: Causal(3, 4, 3), torch.randn(5, 3, 7)),
    "forward of its own": (lambda: replaced(nn.Linear(3, 4)), torch.randn(5, 3)),
    "hook": (lambda: halved(nn.Linear(3, 4)), torch.randn(5, 3)),
    "weight by hook": (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), torch.randn(5, 3)),
    "output size": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), torch.randn(5, 3, 4), [10]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", BESIDES)
def test_what_a_layer_does_besides_is_done(case):
    make, *inputs = BESIDES[case]
    layer = make()
    centered = mean_only_batch_norm(layer)

    def per_unit(x):
        return x.view(-1, *[1] * (inputs[0].ndim - 2))

    def change():  # a weight by hook is stale from here to the next call
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.1)

    change()
    out, t = centered(*inputs), layer(*inputs)
    torch.testing.assert_close(out, t - t.mean(axes(t), keepdim=True) + per_unit(layer.bias))
    change()
    out, t = centered.eval()(*inputs), layer(*inputs)
    torch.testing.assert_close(out, t - per_unit(centered.norm.running_mean))


def test_a_layer_does_not_keep_its_group_alive(tmp_path):
    # the threads of a group that is still there when the interpreter ends abort the process
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    layer = MeanOnlyBatchNorm1d(3, group=dist.group.WORLD)
    layer(torch.randn(4, 3)).sum().backward()
    group = weakref.ref(dist.group.WORLD)
    assert layer.group is group()
    dist.destroy_process_group()
    assert group() is None
    layer.eval()(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="process group of MeanOnlyBatchNorm1d was destroyed"):
        layer.train()(torch.randn(4, 3))


@pytest.fixture(scope="module", params=[2, 3], ids=["uneven", "one-rank-empty"])
def synced(request):
    return on_ranks(request.param, _synced, request.param)


@pytest.mark.xdist_group("synced")
@pytest.mark.parametrize("form", ["module", "around"])
@pytest.mark.parametrize("name", SYNCED)
def test_ranks_together_are_one_process(synced, name, form):
    layer, x, counts = _synced_case(name)
    x.requires_grad_()
    t = layer(*[x] * (1 + (name == "bilinear")))
    bias = layer.bias.detach().view(-1, *[1] * (t.ndim - 2))
    mean = t.mean(axes(t), keepdim=True)
    out = t - mean + (bias if form == "around" else 0)
    (out * counts).sum().backward()
    results = [rank[f"{name} {form}"] for rank in synced]
    torch.testing.assert_close(torch.cat([r["out"] for r in results]), out.detach())
    torch.testing.assert_close(torch.cat([r["x"] for r in results]), x.grad)
    running = 0.1 * (mean - (bias if form == "around" else 0)).flatten().detach()
    for r in results:
        torch.testing.assert_close(r["weight"], layer.weight.grad)
        torch.testing.assert_close(r["running"], running)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts_agree(layout):
    torch.manual_seed(0)
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 6, 3, padding=1)).double())
    x = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).pow(3).sum(), list(layer.parameters()))
    layer, x = layer.to(memory_format=layout), x.to(memory_format=layout)
    out = layer(x)
    torch.testing.assert_close(
        torch.autograd.grad(out.pow(3).sum(), list(layer.parameters())), expected
    )
    assert out.is_contiguous(memory_format=layout)


def test_compiled_in_one_graph():
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 6, 3, stride=2, padding=1)))
    eager, x = copy.deepcopy(layer), torch.randn(5, 3, 7, 7)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for module, parameters in ((compiled, layer.parameters()), (eager, eager.parameters())):
        inputs = x.clone().requires_grad_()
        out = module(inputs)
        grads = torch.autograd.grad(out.square().sum(), [inputs, *parameters])
        results.append((out, *grads))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(layer.norm.running_mean, eager.norm.running_mean)


class Halves(nn.Module):
    """Full batch norm, mean-only behind a layer and around one, dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            mean_only_batch_norm(nn.Linear(3, 4)),
            nn.Dropout(0.0),
            nn.Linear(4, 4),
            MeanOnlyBatchNorm1d(4),
            nn.BatchNorm1d(4),
        )

    def forward(self, x):
        return self.body(x)


def test_running_means_of_an_averaged_model():
    torch.manual_seed(0)
    averaged = torch.optim.swa_utils.AveragedModel(Halves())
    loader = [(torch.randn(8, 3) + 1, None) for _ in range(4)]
    with torch.no_grad():
        averaged(torch.randn(8, 3) + 9)  # to be forgotten
    torch.optim.swa_utils.update_bn(loader, averaged)
    averaged.module.body[1].eval()
    update_running_means(loader, averaged)
    body, x = averaged.module.body, torch.cat([x for x, _ in loader])
    first = body[0].layer
    expected = (first(x) - first.bias).mean(0)
    torch.testing.assert_close(body[0].norm.running_mean, expected.detach())
    assert [m.training for m in body] == [True, False, True, True, True]
    assert (body[0].norm.momentum, body[4].momentum) == (0.1, 0.1)
    assert body[3].num_batches_tracked == body[4].num_batches_tracked == 4
    update_running_means([], nn.Linear(2, 2))  # nothing to update


def test_an_empty_batch_leaves_the_running_mean():
    norm = MeanOnlyBatchNorm1d(3)
    norm(torch.ones(4, 3))
    before = norm.running_mean.clone()
    assert norm(torch.ones(0, 3)).shape == (0, 3)
    torch.testing.assert_close(norm.running_mean, before)
    assert norm.num_batches_tracked == 1


def test_inputs_may_be_given_by_name():
    layer = mean_only_batch_norm(nn.Linear(3, 2))
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(input=x), layer(x))


def replaced_forward():
    layer = nn.Linear(3, 4)
    plain = layer.forward
    layer.forward = functools.wraps(plain)(lambda x: 5 * plain(x) + 1)  # as accelerate's hooks do
    return layer, torch.randn(8, 3)


class Standardized(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True) + 0.7
        return super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize(
    "make",
    [replaced_forward, lambda: (Standardized(3, 4, 3, padding=1), torch.randn(8, 3, 6, 6) + 2)],
    ids=["forward", "_conv_forward"],
)
def test_a_replaced_forward_is_called(make):
    layer, x = make()
    centered = mean_only_batch_norm(layer)
    t = layer(x)
    bias = layer.bias.view(-1, *[1] * (t.ndim - 2))
    torch.testing.assert_close(centered(x), t - t.mean(axes(t), keepdim=True) + bias)


def test_a_batch_that_raises_an_error_is_not_counted():
    centered = mean_only_batch_norm(nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        centered(torch.randn(4, 3, dtype=torch.float64))
    assert centered.norm.num_batches_tracked == 0
    assert (centered.norm.running_mean == 0).all()


def test_folded_bias_has_the_type_of_the_layer():
    centered = mean_only_batch_norm(nn.Linear(3, 2))
    centered(torch.randn(4, 3))
    centered.layer.bfloat16()
    assert centered.fold()(torch.ones(1, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_recomputed_activations_do_not_count_twice():
    layer, x = mean_only_batch_norm(nn.Linear(3, 2)), torch.randn(8, 3)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.norm.num_batches_tracked == 1
    twin = mean_only_batch_norm(layer.layer)
    twin(x)
    torch.testing.assert_close(layer.norm.running_mean, twin.norm.running_mean)


@pytest.mark.parametrize("training", [True, False])
def test_it_starts_in_the_mode_of_the_layer(training):
    layer = mean_only_batch_norm(nn.Linear(3, 2).train(training))
    assert [module.training for module in layer.modules()][1:] == [training] * 2


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_of_the_layer_run(register):
    layer, calls = nn.Linear(3, 2), []
    getattr(layer, register)(lambda *args: calls.append(len(args)))
    mean_only_batch_norm(layer)(torch.randn(5, 3, requires_grad=True)).square().sum().backward()
    assert len(calls) == 1


def test_a_replaced_convolution_is_used():
    layer, x = nn.Conv1d(3, 4, 1), torch.randn(5, 3, 6)
    own = layer._conv_forward
    layer._conv_forward = lambda x, weight, bias: own(x, 2 * weight, bias)
    t = layer(x)
    expected = t - t.mean((0, 2), keepdim=True) + layer.bias[:, None]
    torch.testing.assert_close(mean_only_batch_norm(layer)(x), expected)


def test_running_means_on_another_device():
    model = mean_only_batch_norm(nn.Linear(3, 2, device="meta"))
    update_running_means([torch.randn(4, 3)], model, device="meta")
