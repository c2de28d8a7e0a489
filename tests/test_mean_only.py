"""Mean-only batch norm: eq. 7 and 8, torch's conventions, and around a layer."""

import copy
import functools
import itertools
import math
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
    "strided": (lambda: nn.Conv2d(3, 6, 3, stride=(2, 3), padding=2), (5, 3, 8, 9)),
    "dilated": (lambda: nn.Conv2d(3, 6, 3, dilation=2, padding="same"), (5, 3, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (5, 4, 6, 6)),
    "reflect": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), (5, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (5, 4, 4, 4)),
    "transposed-padded": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
        (5, 4, 6),
    ),
}


def centered_by_hand(layer, x):
    """Return t − μ[t] + b and the running mean after this batch, from the layer's outputs."""
    t = layer(x).movedim(-1 if isinstance(layer, nn.Linear) else 1, -1)
    b = torch.zeros_like(t[..., :1]) if layer.bias is None else layer.bias
    mean = (t - b).flatten(0, -2).mean(0)
    out = (t - mean).movedim(-1, -1 if isinstance(layer, nn.Linear) else 1)
    return out, 0.1 * mean.detach()


@pytest.mark.parametrize("name", LINEAR)
def test_around_a_layer_it_gives_the_plain_forms_numbers(name):
    make, shape = LINEAR[name]
    layer = make().double()
    if list(LINEAR).index(name) % 2:
        weight_norm(layer)
    centered = mean_only_batch_norm(copy.deepcopy(layer))
    x = (torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
    by_hand, ours = centered_by_hand(layer, x), (centered(x), centered.norm.running_mean)
    torch.testing.assert_close(ours, by_hand)
    counts = torch.arange(ours[0].numel(), dtype=x.dtype).view_as(ours[0]).sin()
    torch.testing.assert_close(
        torch.autograd.grad((ours[0] * counts).sum(), [x, *centered.parameters()]),
        torch.autograd.grad((by_hand[0] * counts).sum(), [x, *layer.parameters()]),
    )


@pytest.mark.parametrize("name", ["linear", "linear-on-sequences", "strided", "transposed"])
def test_second_derivatives(name):
    make, shape = LINEAR[name]
    layer = mean_only_batch_norm(make().double())
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True), *layer.parameters()]
    assert gradgradcheck(lambda x, *_: layer(x), inputs, fast_mode=True)


def test_it_writes_to_nobody_elses_gradient_and_keeps_no_output():
    make, shape = LINEAR["conv2d"]
    layer = mean_only_batch_norm(make())
    x, kept = torch.randn(shape, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert sum(t.shape[0] == len(x) for t in kept) == 1  # the input alone
    grad = torch.randn_like(out)
    before = grad.clone()
    out.backward(grad)
    assert torch.equal(grad, before)


def test_around_a_bilinear_layer():
    layer = mean_only_batch_norm(nn.Bilinear(3, 4, 5).double())
    a, b = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(a, input2=b).mean(0), layer.bias)
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
    torch.testing.assert_close(centered.fold()(x), centered(x))
    centered.layer.bfloat16()
    assert centered.fold()(x.bfloat16()).dtype is torch.bfloat16


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


@pytest.mark.parametrize("training", [True, False])
def test_copies_and_pickles(training):
    layer = mean_only_batch_norm(weight_norm(nn.Linear(3, 2)).train(training))
    assert layer.norm.training is layer.layer.training is training
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


SPLITS = [(0, 3), (3, 8), (8, 8)]  # uneven, and one rank has no examples
SYNCED = {
    "linear": (lambda: nn.Linear(4, 3), (8, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (8, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (8, 2, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (8, 4, 5)),
}
NORMS = {2: MeanOnlyBatchNorm1d, 3: MeanOnlyBatchNorm1d, 4: MeanOnlyBatchNorm2d}


def passes(name, form, examples=slice(None), group=None):
    """Output, gradients and running mean on these examples of a batch of eight."""
    torch.manual_seed(0)
    make, shape = SYNCED[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64) + 1
    if form == "around":
        model = copy.deepcopy(mean_only_batch_norm(layer, group=group))  # as an average does
        layer, norm = model.layer, model.norm
    else:
        norm = NORMS[len(shape)](len(layer.bias), group=group, dtype=torch.float64)
        model = lambda *x: norm(layer(*x))  # noqa: E731
    x = x[examples].clone().requires_grad_()
    out = model(*[x] * (2 if name == "bilinear" else 1))
    counts = torch.linspace(-1, 1, 8 * math.prod(out.shape[1:]), dtype=x.dtype)
    (out * counts.view(8, *out.shape[1:])[examples].sin()).sum().backward()
    return out.detach(), x.grad, layer.weight.grad, norm.running_mean


CASES = list(itertools.product(SYNCED, ["module", "around"]))


def passes_on_a_rank(rank):
    examples = slice(*SPLITS[rank])
    return [passes(*case, examples, dist.group.WORLD) for case in CASES]


@pytest.mark.xdist_group("clusters")
def test_ranks_together_are_one_process():
    for case, *ranks in zip(CASES, *on_ranks(len(SPLITS), passes_on_a_rank), strict=True):
        out, grad_x, grad_w, running_mean = zip(*ranks, strict=True)
        got = torch.cat(out), torch.cat(grad_x), sum(grad_w), running_mean[0]
        torch.testing.assert_close(
            got, passes(*case), msg=lambda text, case=case: f"{case}: {text}"
        )
        assert all(torch.equal(mean, running_mean[0]) for mean in running_mean)


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


class Standardized(nn.Conv2d):
    """A convolution that changes its weight."""

    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True) + 0.7
        return super()._conv_forward(x, weight, bias)


def halved(layer):
    layer.register_forward_pre_hook(lambda layer, x: (x[0] / 2,))
    return layer


def replaced(layer, name="forward"):
    own = getattr(layer, name)
    setattr(layer, name, functools.wraps(own)(lambda *x: own(*x) * 3))  # as accelerate's hooks do
    return layer


BESIDES = {
    "forward of a subclass": (lambda: Causal(3, 4, 3), torch.randn(5, 3, 7)),
    "_conv_forward of a subclass": (lambda: Standardized(3, 4, 3), torch.randn(5, 3, 6, 6)),
    "replaced forward": (lambda: replaced(nn.Linear(3, 4)), torch.randn(5, 3)),
    "replaced _conv_forward": (
        lambda: replaced(nn.Conv1d(3, 4, 1), "_conv_forward"),
        torch.randn(5, 3, 6),
    ),
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
    assert copy.deepcopy(layer).group is group()
    pickled = pickle.loads(pickle.dumps(layer))
    dist.destroy_process_group()
    assert group() is None
    for twin in (layer, pickled):  # which must not take the mean of one rank's batch silently
        twin.eval()(torch.randn(4, 3))
        with pytest.raises(
            RuntimeError, match="process group of MeanOnlyBatchNorm1d was destroyed"
        ):
            twin.train()(torch.randn(4, 3))
        twin.group = None
        twin(torch.randn(4, 3))


def test_channels_last_gives_the_same_numbers_and_stays():
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 6, 3, padding=1)).double())
    x = torch.randn(5, 3, 7, 7, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).pow(3).sum(), list(layer.parameters()))
    layer = layer.to(memory_format=torch.channels_last)
    out = layer(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(
        torch.autograd.grad(out.pow(3).sum(), list(layer.parameters())), expected
    )
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_running_means_of_an_averaged_model():
    model = nn.Sequential(
        mean_only_batch_norm(nn.Linear(3, 4)),
        nn.Dropout(0.0),
        nn.Linear(4, 4),
        MeanOnlyBatchNorm1d(4),
        nn.BatchNorm1d(4),
    )
    averaged = torch.optim.swa_utils.AveragedModel(model)
    loader = [(torch.randn(8, 3) + 1, None) for _ in range(4)]
    with torch.no_grad():
        averaged(torch.randn(8, 3) + 9)  # to be forgotten
    torch.optim.swa_utils.update_bn(loader, averaged)
    averaged.module[1].eval()
    update_running_means(loader, averaged)
    body, x = averaged.module, torch.cat([x for x, _ in loader])
    first = body[0].layer
    expected = (first(x) - first.bias).mean(0)
    torch.testing.assert_close(body[0].norm.running_mean, expected.detach())
    assert [m.training for m in body] == [True, False, True, True, True]
    assert (body[0].norm.momentum, body[4].momentum) == (0.1, 0.1)
    assert body[3].num_batches_tracked == body[4].num_batches_tracked == 4
    update_running_means([], nn.Linear(2, 2))  # nothing to update
    on_meta = mean_only_batch_norm(nn.Linear(3, 2, device="meta"))
    update_running_means([torch.randn(4, 3)], on_meta, device="meta")


def test_an_empty_batch_leaves_the_running_mean():
    norm = MeanOnlyBatchNorm1d(3)
    norm(torch.ones(4, 3))
    before = norm.running_mean.clone()
    assert norm(torch.ones(0, 3)).shape == (0, 3)
    torch.testing.assert_close(norm.running_mean, before)
    assert norm.num_batches_tracked == 1


def test_a_batch_that_raises_an_error_is_not_counted():
    centered = mean_only_batch_norm(nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        centered(torch.randn(4, 3, dtype=torch.float64))
    assert centered.norm.num_batches_tracked == 0
    assert (centered.norm.running_mean == 0).all()


def test_recomputed_activations_do_not_count_twice():
    layer, x = mean_only_batch_norm(nn.Linear(3, 2)), torch.randn(8, 3)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.norm.num_batches_tracked == 1
    twin = mean_only_batch_norm(layer.layer)
    twin(x)
    torch.testing.assert_close(layer.norm.running_mean, twin.norm.running_mean)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_of_the_layer_run(register):
    layer, calls = nn.Linear(3, 2), []
    getattr(layer, register)(lambda *args: calls.append(len(args)))
    mean_only_batch_norm(layer)(torch.randn(5, 3, requires_grad=True)).square().sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["constant", "halves"])
def test_the_mean_over_a_long_sequence_is_as_exact_as_that_of_the_outputs(kind):
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 4, 41, padding=20, bias=False)
    x = torch.randn(2, 2, 20_000)
    x += 1000 * (1 if kind == "constant" else torch.linspace(-1, 1, 20_000).sign())
    exact = copy.deepcopy(layer).double()(x.double()).mean((0, 2))
    centered = mean_only_batch_norm(layer, momentum=1.0)
    centered(x)
    direct = (layer(x).mean((0, 2)) - exact).abs().max()
    assert (centered.norm.running_mean - exact).abs().max() <= 2 * direct + 1e-6


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_bias_for_each_of_several_models_under_vmap():
    layer = mean_only_batch_norm(nn.Linear(12, 1))  # reads its outputs, which are fewer
    biases, x = torch.randn(3, 1), torch.randn(5, 12)
    buffers = {n: torch.stack([b] * 3) for n, b in layer.named_buffers()}

    def call(bias, buffers):
        return torch.func.functional_call(layer, {"layer.bias": bias, **buffers}, x)

    out = torch.func.vmap(call)(biases, buffers)
    torch.testing.assert_close(out.mean(1), biases)
