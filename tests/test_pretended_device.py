"""Every layer, mean-only batch norm, both forms and initialization on a pretended accelerator."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from pretended_device import DEVICE, failures
from weightnorm import (
    MeanOnlyBatchNorm2d,
    WeightNormOptimizer,
    _kernels,
    data_dependent_init,
    mean_only_batch_norm,
    parameterize,
    weight_norm,
    weight_norm_model,
)
from zoo import LAYERS


@contextmanager
def own_kernels():
    """Let fake tensors take the path of an accelerator's kernels."""
    plain = _kernels._PLAIN
    _kernels._PLAIN = (*plain, FakeTensor)
    try:
        yield
    finally:
        _kernels._PLAIN = plain


def on_device(case):
    move = partial(tree_map, lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x)
    return case.make().to(DEVICE), move(case.inputs())


def module_form(case, **options):
    layer, inputs = on_device(case)
    weight_norm(layer, **options)
    case.run(layer, inputs).sum().backward()


def module_form_with_kernels(case):
    with own_kernels():
        module_form(case)


def optimizer_form(case):
    layer, inputs = on_device(case)
    optimizer = WeightNormOptimizer(layer, torch.optim.Adam, where=lambda *_: True, foreach=True)
    for _ in range(2):
        case.run(layer, inputs).sum().backward()
        optimizer.step()


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        mean_only_batch_norm(nn.ConvTranspose2d(4, 6, 3, groups=2)),
        MeanOnlyBatchNorm2d(6, None),
        nn.Flatten(),
        mean_only_batch_norm(nn.Linear(6 * 64, 4)),
    ).to(DEVICE)


def mean_only(layout):
    model, x = network(), torch.randn(5, 3, 8, 8, device=DEVICE)
    model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    weight_norm_model(model)
    for _ in range(2):
        model(x).sum().backward()
    model.eval()(x)


def parameterization(how):
    layer = parameterize(nn.Conv2d(3, 4, 3).to(DEVICE), how)
    layer(torch.randn(5, 3, 8, 8, device=DEVICE)).sum().backward()


def reads():
    weight = torch.randn(2, 2, device=DEVICE)
    return bool(weight.min() > 0)


def mixes():
    return torch.randn(3, device=DEVICE) + torch.randn(3)


def initializes():
    data_dependent_init(network(), torch.randn(5, 3, 8, 8, device=DEVICE))


def initializes_with_one_read_per_layer():
    """The numbers that initialization reads are made up; any other read raises."""
    reads = []

    def to_host(numbers):
        reads.append(numbers.device.type)
        head = [1e4, 0.0, 0.0, 1.0, 0.0, 1.0]  # count, deviation, mean and std before and after
        return head + [0.0] * (len(numbers) - len(head))

    model = weight_norm_model(network().append(nn.Linear(4, 2).to(DEVICE)))
    with mock.patch.object(FakeTensor, "tolist", to_host):
        report = data_dependent_init(model, torch.randn(5, 3, 8, 8, device=DEVICE))
    assert len(report.done) == 4, report
    assert reads == [DEVICE] * 4, reads


MUST_FAIL = {"reads": reads, "mixes": mixes, "initializes": initializes}

# torch itself cannot run a GRU on a Python backend.
KINDS = {name: case for name, case in LAYERS.items() if "gru" not in name}
FAMILIES = ("linear", "conv-transpose2d-grouped", "embedding", "lstm", "attention")
MUST_PASS = {
    **{f"formula, {name}": partial(module_form, KINDS[name]) for name in FAMILIES},
    **{f"kernels, {name}": partial(module_form_with_kernels, case) for name, case in KINDS.items()},
    **{f"optimizer form, {name}": partial(optimizer_form, case) for name, case in KINDS.items()},
    "log scale": partial(module_form, LAYERS["linear"], scale="log"),
    "one g": partial(module_form, LAYERS["linear"], dim=None),
    "mean-only, NCHW": partial(mean_only, torch.contiguous_format),
    "mean-only, channels-last": partial(mean_only, torch.channels_last),
    "initialization": initializes_with_one_read_per_layer,
    **{
        f"parameterization {how}": partial(parameterization, how)
        for how in ("standard", "weight-norm", "mean-only-batch-norm", "weight-norm-mean-only")
    },
}
CASES = MUST_PASS | MUST_FAIL


@pytest.fixture(scope="module")
def found():
    return failures(__file__)


@pytest.mark.xdist_group("pretended device")
@pytest.mark.parametrize("case", MUST_PASS)
def test_neither_reads_nor_mixes_devices(case, found):
    assert found[case] == ""


@pytest.mark.xdist_group("pretended device")
@pytest.mark.parametrize("case", sorted(MUST_FAIL))
def test_reads_and_mixed_devices_are_found(case, found):
    """Data-dependent initialization reads on purpose: its report holds numbers."""
    assert found[case] != ""
