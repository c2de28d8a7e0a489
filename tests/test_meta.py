"""Models normalized on the meta device, and given memory and values afterwards."""

import copy

import pytest
import torch
from torch import nn

from weightnorm import (
    MeanOnlyBatchNorm1d,
    WeightNormOptimizer,
    data_dependent_init,
    is_weight_normed,
    mean_only_batch_norm,
    parameterize,
    parts,
    weight_norm,
    weight_norm_model,
)
from zoo import every_layer


def on_meta(make):
    with torch.device("meta"):
        return weight_norm(make())


@every_layer
def test_reset_parameters_initializes_the_weight(case):
    """torch's parametrization fills a temporary weight and leaves v and g uninitialized."""
    layer, plain = on_meta(case.make).to_empty(device="cpu"), case.make()
    for p in layer.parameters():
        nn.init.constant_(p, float("nan"))
    for model in (layer, plain):
        torch.manual_seed(3)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if reset:
                reset()
    inputs = case.inputs()
    if isinstance(plain, (nn.RNNBase, nn.RNNCellBase)):  # these also draw random numbers for g
        weights = {n: p for n, p in plain.named_parameters() if n.startswith("weight")}
        bound = plain.hidden_size**-0.5
        for name, weight in weights.items():
            mine = getattr(layer, name)
            assert mine.abs().max() <= bound
            assert mine.std().item() == pytest.approx(weight.std().item(), rel=0.5)
            torch.testing.assert_close(parts(layer, name).v, mine)
    else:
        torch.testing.assert_close(case.run(layer, inputs), case.run(plain, inputs))


def test_reset_parameters_resets_running_means():
    with torch.device("meta"):
        models = [
            MeanOnlyBatchNorm1d(3),
            mean_only_batch_norm(nn.Linear(3, 3)),
            parameterize(nn.Linear(3, 3), "batch-norm"),
        ]
    for model in models:
        assert all(t.is_meta for t in model.state_dict().values())
        model.to_empty(device="cpu")
        for t in model.state_dict().values():
            t.fill_(7)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, value in model.named_buffers():
            assert (value == name.endswith("running_var")).all(), name
        norm = next(m for m in model.modules() if hasattr(m, "running_mean"))
        assert norm.bias is None or (norm.bias == 0).all()


def test_options_that_need_values_are_refused_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"mask would lose its values; .* to_empty first"):
        weight_norm(model[0], mask=torch.ones(3, 2))
    assert not is_weight_normed(model[0])
    with torch.device("meta"), pytest.raises(ValueError, match=r"g would lose its values"):
        weight_norm_model(model, g=1.0)
    with pytest.raises(ValueError, match=r"0.weight is on the meta device: there is nothing"):
        WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="on the meta device: give it memory and values first"):
        data_dependent_init(model, torch.randn(4, 2))
    twin = copy.deepcopy(model)
    weight_norm_model(twin, scale="log")
    assert all(p.is_meta for p in twin.parameters())
