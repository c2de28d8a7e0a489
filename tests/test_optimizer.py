"""The optimizer-side form follows the module form, with everything an optimizer is used with."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from weightnorm import WeightNormOptimizer, parts, weight_norm_model


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 3),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 4),
        nn.LayerNorm(4),
    ).double()


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 3, 8, dtype=torch.float64, generator=generator)


def loss_of(model, i):
    return (model(batch(i)) - batch(i)[:, 0, :4]).square().mean()


def both(inner, **options):
    plain, normed = network(), network()
    weight_norm_model(normed)
    return (
        (plain, WeightNormOptimizer(plain, inner, **options)),
        (normed, inner(normed.parameters(), **options)),
    )


INNER = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam-foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}
every_inner = pytest.mark.parametrize(("inner", "options"), INNER.values(), ids=INNER.keys())


def same_function(a, b, **tolerance):
    torch.testing.assert_close(a(batch(99)), b(batch(99)), **tolerance)


@every_inner
def test_it_follows_the_module_form(inner, options):
    pairs = both(inner, **options)
    for i in range(50):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
    (plain, mine), (normed, _) = pairs
    same_function(plain, normed, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(mine.parts()["0.weight"].v, parts(normed[0]).v)
    assert list(plain.state_dict()) == list(network().state_dict())


def test_closures_and_lbfgs():
    for inner, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.LBFGS, {"lr": 0.5})):
        pairs = both(inner, **options)
        losses = []
        for model, optimizer in pairs:

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                loss.backward()
                return loss

            losses.append([optimizer.step(closure).item() for _ in range(3)])
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_schedulers_reach_the_inner_optimizer():
    pairs = both(torch.optim.Adam, lr=0.02)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for _, o in pairs]
    for i in range(10):
        for (model, optimizer), schedule in zip(pairs, schedules, strict=True):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            schedule.step()
    same_function(pairs[0][0], pairs[1][0])
    one = torch.optim.lr_scheduler.OneCycleLR(both(torch.optim.Adam, lr=0.1)[0][1], 0.1, 10)
    assert one.get_last_lr()[0] < 0.1


def test_parameter_groups():
    plain = network()
    weights = [p for n, p in plain.named_parameters() if n.endswith("weight")]
    others = [p for n, p in plain.named_parameters() if not n.endswith("weight")]
    groups = [{"params": weights, "lr": 0.1}, {"params": others, "lr": 0.0}]
    optimizer = WeightNormOptimizer(plain, torch.optim.SGD, groups, lr=1.0)
    before = copy.deepcopy(plain.state_dict())
    loss_of(plain, 0).backward()
    optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name]) is name.endswith("bias")


def test_accumulation_and_clipping_see_the_gradient_of_w():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    for i in range(3):
        loss_of(model, i).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bad", [False, True])
def test_gradient_scaling(bad):
    model = network().float()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    twin = copy.deepcopy(model)
    twins = WeightNormOptimizer(twin, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = batch(0).float()
    scaler.scale(model(x).square().mean()).backward()
    if bad:
        model[0].weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    if not bad:
        twin(x).square().mean().backward()
        twins.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def train(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()


@pytest.mark.parametrize("first", ["model", "optimizer"])
@every_inner
def test_saved_and_loaded_it_goes_on_exactly(inner, options, first):
    model = network()
    optimizer = WeightNormOptimizer(model, inner, **options)
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 10))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    resumed = WeightNormOptimizer(other, inner, **options)
    both = {"model": other, "optimizer": resumed}
    for name in sorted(both, reverse=first == "optimizer"):
        both[name].load_state_dict(saved[name])
    train(other, resumed, range(5, 10))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@every_inner
def test_a_copy_goes_on_exactly_and_on_its_own(inner, options, copied):
    model = network()
    optimizer = WeightNormOptimizer(model, inner, **options)
    train(model, optimizer, range(5))
    other, resumed = copied((model, optimizer))
    train(other, resumed, range(5, 10))
    train(model, optimizer, range(5, 10))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    for name, (v, g) in optimizer.parts().items():
        assert torch.equal(v, resumed.parts()[name].v)
        assert torch.equal(g, resumed.parts()[name].g)


WRITES = {
    "load_state_dict": lambda model, source: model.load_state_dict(source.state_dict()),
    "data": lambda model, source: model[0].weight.data.copy_(source[0].weight),
    "swapped memory": lambda model, source: setattr(
        model[0].weight, "data", source[0].weight.detach().clone()
    ),
    "clipping": lambda model, source: model[0].weight.data.clamp_(-0.1, 0.1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_weights_written_from_outside_are_taken_as_they_are(write):
    model, source = network(), network()
    nn.init.normal_(source[0].weight)
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer, range(3))
    norm = optimizer.parts()["0.weight"].v.flatten(1).norm(dim=1)
    write(model, source)
    written = model[0].weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [3])
    torch.testing.assert_close(model[0].weight.detach(), written)
    v, g = optimizer.parts()["0.weight"]
    torch.testing.assert_close(g.flatten(), written.flatten(1).norm(dim=1))
    torch.testing.assert_close(v.flatten(1).norm(dim=1), norm)  # the effective step stays


def test_weights_without_gradient_stay():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.1)
    before = model[1].weight.detach().clone()
    model[0](torch.randn(2, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[1].weight, before)


def test_bad_input():
    with pytest.raises(ValueError, match="nothing to normalize in ReLU"):
        WeightNormOptimizer(nn.ReLU(), torch.optim.SGD, lr=0.1)
    model = network()
    with pytest.raises(ValueError, match="none of the weights to normalize"):
        WeightNormOptimizer(model, torch.optim.SGD, [model[0].bias], lr=0.1)
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    adam = torch.optim.Adam(model.parameters())
    loss_of(model, 0).backward()
    adam.step()
    with pytest.raises(ValueError, match=r"no g for 0.weight; expected one of a WeightNorm"):
        optimizer.load_state_dict(adam.state_dict())
    fewer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1, where=lambda n, m: n == "0")
    optimizer.step()
    with pytest.raises(ValueError, match=r"has g for a parameter of shape .* not normalized here"):
        fewer.load_state_dict(optimizer.state_dict())
    smaller = WeightNormOptimizer(network()[0], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"match the size of optimizer's group"):
        smaller.load_state_dict(optimizer.state_dict())
    wider = WeightNormOptimizer(nn.Conv1d(3, 5, 3), torch.optim.SGD, lr=0.1)
    smaller.step()
    with pytest.raises(ValueError, match=r"weight: the state's g is \(4, 1, 1\), expected \(5, 1"):
        wider.load_state_dict(smaller.state_dict())
    with pytest.raises(ValueError, match="building a new WeightNormOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_what_other_shardings_leave_of_a_weight_is_refused():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]  # as DeepSpeed's ZeRO does
    with pytest.raises(RuntimeError, match=r"than at construction .* use weight_norm_model"):
        optimizer.step()
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(layer.weight.detach().flatten()[:3])  # as FSDP1 does
    with pytest.raises(ValueError, match=r"weight has shape \(3,\): .*fully_shard instead"):
        WeightNormOptimizer(layer, torch.optim.SGD, lr=0.1)
