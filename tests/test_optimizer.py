"""The optimizer-side form follows the module form, with everything an optimizer is used with."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from weightnorm import (
    WeightNormOptimizer,
    diagnostics,
    functional,
    layers,
    normalized_weights,
    parts,
    weight_norm_model,
)
from zoo import LAYERS


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


def slope(w, i):
    """∇w of a loss that changes from step to step."""
    return torch.cos(3 * w.detach() + i)


def train(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()


def both(inner, **options):
    plain, normed = network(), network()
    weight_norm_model(normed)
    on = "parts" if options.get("weight_decay", inner is torch.optim.AdamW) else "auto"
    return (
        (plain, WeightNormOptimizer(plain, inner, weight_decay_on=on, **options)),
        (normed, inner(normed.parameters(), **options)),
    )


def same_function(a, b, **tolerance):
    torch.testing.assert_close(a(batch(99)), b(batch(99)), **tolerance)


OPTIONS = {
    "last axis": {"dim": -1},
    "middle axis": {"dim": 1},
    "one g": {"dim": None},
    "log": {"scale": "log"},
    "frozen g": {"train_g": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_equal_the_module_form(options):
    plain, normed = network(), network()
    mine = WeightNormOptimizer(plain, torch.optim.Adam, lr=0.01, **options)
    weight_norm_model(normed, **options)
    theirs = torch.optim.Adam(normed.parameters(), lr=0.01)
    before = copy.deepcopy(normed.state_dict())
    train(plain, mine, range(20))
    train(normed, theirs, range(20))
    same_function(plain, normed, atol=1e-11, rtol=1e-11)
    for i in (0, 2, 5):
        torch.testing.assert_close(plain[i].weight, normed[i].weight, atol=1e-12, rtol=1e-11)
        assert not torch.equal(plain[i].weight, network()[i].weight)
    if "train_g" in options:
        g = "0.parametrizations.weight.original0"
        torch.testing.assert_close(mine.parts()["0.weight"].g, before[g], rtol=1e-15, atol=0)


def test_weight_decay_on_the_chosen_part():
    found = {}
    for on in ("parts", "w", "g", None):
        model = nn.Linear(3, 2, bias=False).double()
        nn.init.constant_(model.weight, 1.0)
        optimizer = WeightNormOptimizer(
            model, torch.optim.SGD, lr=0.1, weight_decay=0.5, weight_decay_on=on
        )
        for _ in range(2):
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        v, g = optimizer.parts()["weight"]
        found[on] = (model.weight[0, 0].item(), v[0, 0].item(), g[0, 0].item() / 3**0.5)
    shrunk = 0.95**2
    assert found["parts"] == pytest.approx((shrunk, shrunk, shrunk))
    assert found["w"] == pytest.approx((shrunk, 1, shrunk))
    assert found["g"] == pytest.approx((shrunk, 1, shrunk))
    assert found[None] == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("on", ["w", "g"])
def test_a_schedule_of_weight_decay_acts_on_the_chosen_part(on):
    trained = []
    for scheduled in (False, True):
        model = network()
        first = 0.0 if scheduled else 0.5
        optimizer = WeightNormOptimizer(
            model, torch.optim.SGD, lr=0.1, weight_decay=first, weight_decay_on=on
        )
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        for i in range(3):
            loss_of(model, i).backward()
            optimizer.step()
            model.zero_grad()
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5}
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*trained, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ({"weight_decay_on": None}, {"weight_decay_on": "parts"}),
        ({"weight_decay_on": "w"}, {"weight_decay_on": "g"}),
        ({"scale": "log"}, {"scale": "linear"}),
        ({"v_norm": 3.0}, {"v_norm": 5.0}),
        ({"retract": 1.0}, {"retract": 0.5}),
    ],
)
def test_a_state_of_another_kind_is_refused(saved, loading):
    def build(options):
        model = nn.Linear(3, 2, bias=False)
        return WeightNormOptimizer(model, torch.optim.AdamW, **options)

    state = build(saved).state_dict()
    ((name, value),) = saved.items()
    with pytest.raises(ValueError, match=f"optimizer with {name}={value!r}, this one has"):
        build(loading).load_state_dict(state)


def test_a_model_that_is_normalized_after_the_optimizer_is_built_is_refused():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.1)
    weight_norm_model(model)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight is no longer a parameter of the model"):
        optimizer.step()


def test_defaults_are_those_that_all_inner_optimizers_have():
    model = nn.Linear(3, 2)
    optimizer = WeightNormOptimizer(
        model, partial(torch.optim.SGD, lr=0.1), lengths=torch.optim.AdamW
    )
    assert "lr" in optimizer.defaults
    assert "betas" not in optimizer.defaults
    with pytest.raises(ValueError, match="momentum"):
        torch.optim.lr_scheduler.OneCycleLR(
            WeightNormOptimizer(model, torch.optim.Adagrad, lengths=torch.optim.AdamW), 0.1, 10
        )


def test_weight_decay_on_w_is_that_of_adamw():
    """Decoupled and before the step, while `weight_decay_on="g"` leaves it to the optimizer."""
    model = network()
    options = {"lr": 0.01, "weight_decay": 0.3}
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, weight_decay_on="w", **options)
    start = functional.decompose(model[0].weight.detach())
    v, g = nn.Parameter(start.v), nn.Parameter(start.g)
    adam = torch.optim.Adam([v, g], lr=0.01)
    for i in range(5):
        loss_of(model, i).backward()
        grad_w = model[0].weight.grad
        v.grad, g.grad = functional.gradients(grad_w, v=v.detach(), g=g.detach())
        with torch.no_grad():
            g.mul_(1 - 0.01 * 0.3)
        adam.step()
        optimizer.step()
        model.zero_grad()
    torch.testing.assert_close(model[0].weight, functional.compose(v=v, g=g))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.3]


def separate(model, **options):
    return WeightNormOptimizer(
        model,
        torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
        lengths=partial(torch.optim.Adam, lr=0.01),
        others=partial(torch.optim.RMSprop, lr=0.001),
        **options,
    )


def test_separate_optimizers_equal_those_of_the_module_form():
    plain, normed = network(), network()
    mine = separate(plain)
    weight_norm_model(normed)
    named = dict(normed.named_parameters())
    v = [p for n, p in named.items() if n.endswith("original1")]
    g = [p for n, p in named.items() if n.endswith("original0")]
    rest = [p for n, p in named.items() if "original" not in n]
    theirs = [
        torch.optim.SGD(v, lr=0.1, momentum=0.9),
        torch.optim.Adam(g, lr=0.01),
        torch.optim.RMSprop(rest, lr=0.001),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in [mine, *theirs]]
    for i in range(10):
        for model, optimizers in ((plain, [mine]), (normed, theirs)):
            model.zero_grad()
            loss_of(model, i).backward()
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
    same_function(plain, normed, atol=1e-11, rtol=1e-11)
    assert schedules[0].get_last_lr() == [o.param_groups[0]["lr"] for o in theirs]
    assert [len(group["params"]) for group in mine.param_groups] == [3, 0, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_follow_a_float32_model(dtype):
    """Steps far below the rounding of the weights accumulate, and writes are seen."""
    torch.manual_seed(0)
    narrow = nn.Linear(16, 8).to(dtype)
    wide = copy.deepcopy(narrow).float()
    pairs = [(m, WeightNormOptimizer(m, torch.optim.SGD, lr=1e-4)) for m in (narrow, wide)]
    direction = torch.randn(8, 16).to(dtype)
    start = narrow.weight.detach().clone()
    for i in range(100):
        if i == 50:
            for m, _ in pairs:
                m.weight.data[0].mul_(2)
        for m, optimizer in pairs:
            m.weight.grad = direction.to(m.weight.dtype)
            optimizer.step()
    assert not torch.equal(narrow.weight, start)
    torch.testing.assert_close(narrow.weight[1:], wide.weight[1:].to(dtype), atol=0, rtol=0)
    torch.testing.assert_close(narrow.weight[0].float(), wide.weight[0], atol=1e-4, rtol=0.01)
    file = io.BytesIO()
    torch.save(pairs[0][1].state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(narrow)
    resumed = WeightNormOptimizer(other, torch.optim.SGD, lr=1e-4)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for m, optimizer in ((narrow, pairs[0][1]), (other, resumed)):
        m.weight.grad = direction.clone()
        optimizer.step()
    v, other_v = pairs[0][1].parts()["weight"].v, resumed.parts()["weight"].v
    assert v.dtype == torch.float32
    assert torch.equal(v, other_v)


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "expanded gradient"])
def test_memory_layouts(layout):
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3).double()
    other = copy.deepcopy(plain)
    if layout == "channels-last":
        other.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        other.weight.data = other.weight.data.transpose(0, 3).contiguous().transpose(0, 3)
    pairs = [(m, WeightNormOptimizer(m, torch.optim.Adam, lr=0.1)) for m in (plain, other)]
    for i in range(3):
        for m, optimizer in pairs:
            m.weight.grad = slope(m.weight, i).contiguous()
            if layout == "expanded gradient":
                row = torch.arange(4.0, dtype=torch.float64).view(1, 4, 1, 1)
                m.weight.grad = row.expand(6, 4, 3, 3) if m is other else row.repeat(6, 1, 3, 3)
            optimizer.step()
    torch.testing.assert_close(plain.weight, other.weight, atol=1e-13, rtol=1e-12)


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


def test_a_closure_may_accumulate():
    found = []
    for form in ("closure", "no closure"):
        model = network()
        optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
        loss_of(model, 0).backward()
        if form == "closure":
            optimizer.step(lambda model=model: loss_of(model, 1).backward())
        else:
            loss_of(model, 1).backward()
            optimizer.step()
        found.append(model.state_dict())
    torch.testing.assert_close(*found)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    model[5].weight.grad = model[5].weight.grad.to_sparse()
    with pytest.raises(ValueError, match=r"5.weight has a sparse gradient, but ∇v is dense"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


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


def test_state_has_the_layout_of_the_inner_optimizer():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.01)
    assert not optimizer.state  # torch.distributed.checkpoint then makes a step to fill it
    train(model, optimizer, range(2))
    state = optimizer.state[model[0].weight]
    assert {"step", "exp_avg", "exp_avg_sq", "g", "v_norm", "g.exp_avg"} <= set(state)
    assert state["exp_avg"].shape == model[0].weight.shape
    assert set(optimizer.state[model[0].bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


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
    fewer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1, where=lambda n, m: n == "0.weight")
    optimizer.step()
    with pytest.raises(ValueError, match=r"has g for a parameter of shape .* not normalized here"):
        fewer.load_state_dict(optimizer.state_dict())
    smaller = WeightNormOptimizer(network()[0], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"match the size of the optimizer's groups"):
        smaller.load_state_dict(optimizer.state_dict())
    wider = WeightNormOptimizer(nn.Conv1d(3, 5, 3), torch.optim.SGD, lr=0.1)
    smaller.step()
    with pytest.raises(ValueError, match=r"weight: the state's g is \(4, 1, 1\), expected \(5, 1"):
        wider.load_state_dict(smaller.state_dict())
    with pytest.raises(ValueError, match="building a new WeightNormOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


WRONG = {
    "scale": ({"scale": "exp"}, "scale='exp' is unknown; expected"),
    "decay": ({"weight_decay_on": "v"}, "weight_decay_on='v' is unknown; expected one of"),
    "retract": ({"retract": 3.0}, "the norm to hold it at is `v_norm`"),
    "v_norm": ({"v_norm": -1.0}, r"v_norm is -1.0 for 0.weight after 0 steps; expected a positive"),
    "g": ({"g": torch.ones(5)}, "does not broadcast to"),
    "g of one layer": (
        {"g": lambda shape: len(shape) - 2.0, "train_g": False},
        "5.weight of shape",
    ),
    "axes of a stack": ({"dim": (0, 1, 2)}, r"0.weight has shape \(4, 3, 3\), and dim=\(0, 1, 2\)"),
    "log g": ({"g": -1.0, "scale": "log"}, "must be positive"),
    "project": ({"project": False}, "pass train_g=False with it"),
    "frozen decay": ({"train_g": False, "weight_decay_on": "w"}, "pass weight_decay_on=None"),
    "dim": ({"dim": 5}, "dim=5 is out of range"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_options_that_cannot_work_are_refused(options, message):
    model = network()
    with pytest.raises((ValueError, IndexError), match=message):
        WeightNormOptimizer(model, torch.optim.SGD, lr=0.1, **options)
    torch.testing.assert_close(model.state_dict(), network().state_dict(), rtol=0, atol=0)


def test_a_wrong_norm_on_a_schedule_changes_nothing():
    model = network()
    optimizer = WeightNormOptimizer(
        model, torch.optim.SGD, lr=0.1, retract=0.5, v_norm=lambda name, step: 1.0 - step
    )
    with pytest.raises(ValueError, match=r"v_norm is 0.0 for 0.weight after 1 steps"):
        train(model, optimizer, [0])
    torch.testing.assert_close(model.state_dict(), network().state_dict(), rtol=0, atol=0)


def test_optimizers_that_cannot_work_are_refused():
    lbfgs = partial(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss many times per step"):
        WeightNormOptimizer(network(), torch.optim.SGD, lr=0.1, others=lbfgs)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss many times per step"):
        WeightNormOptimizer(network(), torch.optim.LBFGS, normalize_update=True)
    with pytest.raises(ValueError, match="moves matrices only; give g and all other parameters"):
        WeightNormOptimizer(network(), torch.optim.Muon, lr=0.1)
    with pytest.raises(ValueError, match=r"needs an optimizer with `weight_decay`; it has"):
        WeightNormOptimizer(network(), torch.optim.Rprop, lr=0.1, weight_decay_on="g")


def test_what_other_shardings_leave_of_a_weight_is_refused():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]  # as DeepSpeed's ZeRO does
    with pytest.raises(RuntimeError, match=r"than at construction .* use weight_norm_model"):
        optimizer.step()
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(layer.weight.detach().flatten()[:3])  # as FSDP1 does
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), .*use torch's fully_shard"):
        WeightNormOptimizer(layer, torch.optim.SGD, lr=0.1)


class OutOfMemory(TorchDispatchMode):
    """Memory runs out where ∇w becomes ∇v."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._weight_norm_interface_backward:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_closure", [False, True])
def test_an_exception_on_the_way_to_v_leaves_the_weights(with_closure):
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.3, retract=True, v_norm=4.0)
    before = copy.deepcopy(model.state_dict())

    def closure():
        loss_of(model, 0).backward()

    if not with_closure:
        closure()
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory():
        optimizer.step(closure if with_closure else None)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], msg=name)
    assert all(model[i].weight.grad is None for i in (0, 2, 5))
    closure()
    optimizer.step()
    torch.testing.assert_close(parts_norm(optimizer), torch.full((4,), 4.0, dtype=torch.float64))


def parts_norm(optimizer):
    return optimizer.parts()["0.weight"].v.flatten(1).norm(dim=1)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_weight_frozen_when_built_is_refused_once_it_is_trained(is_ours):
    model = network()
    model[0].requires_grad_(False)
    params = [p for p in model.parameters() if is_ours or p.requires_grad]
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, params, lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    assert list(optimizer.parts()) == ["2.weight", "5.weight"]
    model[0].requires_grad_(True)
    loss_of(model, 0).backward()
    if is_ours:
        with pytest.raises(
            RuntimeError, match=r"0\.weight was frozen .* build the optimizer again"
        ):
            optimizer.step()
    else:  # another optimizer trains it
        optimizer.step()


def test_the_state_of_a_float32_run_loads_into_a_bfloat16_model():
    wide, narrow = network().float(), network().float()
    optimizer = WeightNormOptimizer(wide, torch.optim.Adam, lr=0.1)
    wide(batch(0).float()).square().mean().backward()
    optimizer.step()
    narrow.load_state_dict(wide.state_dict())
    narrow.bfloat16()
    loaded = WeightNormOptimizer(narrow, torch.optim.Adam, lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    for name, (v, g) in loaded.parts().items():
        expected = optimizer.parts()[name]
        torch.testing.assert_close(v, expected.v, atol=0, rtol=2**-7)
        torch.testing.assert_close(g, expected.g, atol=0, rtol=2**-7)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_inputs_is_stepped_over():
    model = nn.Linear(0, 5)
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 0)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.parts()["weight"].g, torch.zeros(5, 1))


def test_decay_of_a_log_scale_to_nothing_is_refused():
    model = network()
    optimizer = WeightNormOptimizer(
        model, torch.optim.SGD, lr=2.0, weight_decay=0.5, weight_decay_on="w", scale="log"
    )
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="log-scale cannot represent"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before)


def test_parameters_that_share_memory_are_refused():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model = nn.Sequential(first, second)
    second.weight = nn.Parameter(first.weight.data)
    with pytest.raises(ValueError, match=r"1\.weight shares its memory with 0\.weight"):
        WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="shares its memory"):  # the other one is not normalized
        WeightNormOptimizer(
            model, torch.optim.SGD, lr=0.1, where=lambda name, _: name == "0.weight"
        )
    second.weight = first.weight
    WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)


class Moving(torch.optim.SGD):
    """Has modes, as schedule-free optimizers: evaluation doubles every parameter."""

    def train(self):
        pass

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(2)


@pytest.mark.parametrize(("retract", "growth"), [(1.0, 1), (0.5, 1.5), (0.0, 2)])
def test_a_change_of_mode_is_retracted_as_a_step_is(retract, growth):
    model = nn.Linear(3, 2)
    optimizer = WeightNormOptimizer(model, Moving, lr=0.1, retract=retract)
    v, g = optimizer.parts()["weight"]
    optimizer.eval()
    after = optimizer.parts()["weight"]
    torch.testing.assert_close(after.g, 2 * g)
    torch.testing.assert_close(after.v, growth * v)


def tied_gradients(model):
    """All weights get one tensor."""
    grad = torch.randn(4, 4)
    return {layer.weight: grad for layer in model}


def overlapping_gradients(model):
    """The gradients are rows of one storage, some in two of them, and the bias has a part too."""
    storage = torch.randn(6, 4)
    first, second = (layer.weight for layer in model)
    return {first: storage[:4], second: storage[2:], model[0].bias: storage[0]}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("gradients", [tied_gradients, overlapping_gradients])
def test_gradients_that_share_memory(gradients, dim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = {p: grad.clone() for p, grad in gradients(other).items()}
    torch.manual_seed(1)
    for each, found in ((other, expected), (model, gradients(model))):
        optimizer = WeightNormOptimizer(each, torch.optim.SGD, lr=0.1, dim=dim)
        for p, grad in found.items():
            p.grad = grad
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "dtype"), [(0.0, torch.float32), (1e-13, torch.float64), (-1e-20, torch.float16)]
)
def test_a_row_of_no_length_keeps_its_direction(size, dtype):
    model = nn.Linear(8, 3, bias=False).to(dtype)

    class Setting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data[1] = size

    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.0, lengths=Setting)
    before = optimizer.parts()["weight"].v[1]
    for i in range(3):
        model.weight.grad = slope(model.weight, i)
        optimizer.step()
        v, g = optimizer.parts()["weight"]
        assert g[1].item() == pytest.approx(size, rel=1e-6, abs=0)
        assert model.weight[1].float().norm() <= 3e-12
        torch.testing.assert_close(v[1], before, atol=1e-5, rtol=1e-5)


def test_a_zero_row_whose_length_is_not_trained_stays_zero():
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.1, train_g=False)
    for i in range(3):
        model.weight.grad = slope(model.weight, i)
        optimizer.step()
    assert not model.weight.any()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_leaves_weights_without_gradient(inner):
    """To the bit, with ‖v‖, although v is not w."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    optimizer = WeightNormOptimizer(model, inner, lr=0.1, v_norm=3.7)
    for p in model.parameters():
        p.grad = slope(p, 1)
    if inner is torch.optim.SGD:
        optimizer.step()
    before, norm = model[1].weight.detach().clone(), optimizer.v_norms()["1.weight"]

    def closure():
        optimizer.zero_grad()
        loss = model[0](torch.ones(2, 16)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert torch.equal(model[1].weight, before)
    assert torch.equal(optimizer.v_norms()["1.weight"], norm)


@pytest.mark.parametrize(("dim", "compiled"), [(0, False), (0, True), (1, False)])
def test_sums_of_squares_do_not_overflow_silently(dim, compiled):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.mul_(1e20)
    before = model.weight.detach().clone()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.0, dim=dim)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    model.weight.grad = torch.ones(4, 4)
    step()
    assert model.weight.isnan().any() or torch.allclose(model.weight, before)


INITIAL = {"number": 2.0, "tensor": torch.arange(1.0, 5.0).view(4, 1, 1).double()}


@pytest.mark.parametrize("g", INITIAL.values(), ids=INITIAL)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_initial_length_is_that_of_the_module_form(g, scale, zeros):
    plain, normed = network()[0], network()[0]
    for layer in (plain, normed) if zeros else ():
        nn.init.zeros_(layer.weight[:2])
    weight_norm_model(normed, g=g, scale=scale)
    mine = WeightNormOptimizer(plain, torch.optim.Adam, lr=0.01, g=g, scale=scale)
    theirs = torch.optim.Adam(normed.parameters(), lr=0.01)
    torch.testing.assert_close(plain.weight, normed.weight)
    for i in range(5):
        plain.weight.grad = slope(plain.weight, i)
        normed.weight.backward(slope(normed.weight, i))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(plain.weight, normed.weight, atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(mine.parts()["weight"].v, parts(normed).v.detach())


def test_zero_units_of_a_fixed_length_train():
    model = network()
    nn.init.zeros_(model[5].weight)
    optimizer = WeightNormOptimizer(
        model, torch.optim.SGD, lr=0.1, g=0.5, train_g=False, retract=True
    )
    before = model[5].weight.detach().clone()
    train(model, optimizer, range(5))
    assert (model[5].weight - before).norm(dim=1).min() > 1e-3
    torch.testing.assert_close(functional.norm(model[5].weight), torch.full((4, 1), 0.5).double())


class Experts(nn.Module):
    """A stack of matrices in one parameter."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 5, 4, dtype=torch.float64))


def test_a_stack_of_experts_has_one_length_for_each_row_of_each():
    plain, options = Experts(), {"where": lambda name, _: name == "experts", "dim": (0, 1)}
    normed = weight_norm_model(copy.deepcopy(plain), **options)
    mine = WeightNormOptimizer(plain, torch.optim.Adam, lr=0.01, **options)
    theirs = torch.optim.Adam(normed.parameters(), lr=0.01)
    for i in range(10):
        plain.experts.grad = slope(plain.experts, i)
        normed.experts.backward(slope(normed.experts, i))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert mine.parts()["experts"].g.shape == (3, 5, 1)
    torch.testing.assert_close(plain.experts, normed.experts, atol=1e-12, rtol=1e-11)
    lengths = partial(torch.optim.Adam, lr=0.01)
    muon = WeightNormOptimizer(plain, torch.optim.Muon, lr=0.1, lengths=lengths, **options)
    plain.experts.grad = slope(plain.experts, 0)
    muon.step()
    assert {"block0.momentum_buffer", "block2.momentum_buffer"} <= set(muon.state[plain.experts])


NORMS = {
    "held": ({"retract": True}, lambda step, start, new: start),
    "held at a number": ({"retract": 1, "v_norm": 3}, lambda step, start, new: 3.0),
    "started at a number": ({"v_norm": 3.0}, None),
    "brake": ({"retract": 0.5}, lambda step, start, new: (start + new) / 2),
    "schedule": (
        {"retract": 1.0, "v_norm": lambda name, step: 2.0 + step},
        lambda step, start, new: 2.0 + step,
    ),
}


@pytest.mark.parametrize(("options", "norm"), NORMS.values(), ids=NORMS)
def test_norm_of_v(options, norm):
    plain = network()[0]
    optimizer = WeightNormOptimizer(plain, torch.optim.SGD, lr=0.3, **options)
    v, g = optimizer.parts()["weight"]
    if "v_norm" in options:
        start = 2.0 if callable(options["v_norm"]) else 3.0
        torch.testing.assert_close(functional.norm(v), torch.full_like(g, start))
    for i in range(4):
        plain.weight.grad = slope(plain.weight, i)
        grad_v, grad_g = functional.gradients(plain.weight.grad, v=v, g=g)
        optimizer.step(*[lambda: None] * (i % 2))  # a closure makes no difference
        start, v, g = functional.norm(v), v - 0.3 * grad_v, g - 0.3 * grad_g
        if norm is not None:
            v = functional.compose(v=v, g=norm(i + 1, start, functional.norm(v)) * (g * 0 + 1))
        torch.testing.assert_close(plain.weight, functional.compose(v=v, g=g))
        torch.testing.assert_close(optimizer.parts()["weight"].v, v)


def test_weight_decay_that_comes_later_has_to_be_decided():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="it was not decided what it acts on"):
        optimizer.step()


def test_an_inner_optimizer_may_replace_memory():
    class Replacing(torch.optim.SGD):
        """Moves like SGD, but into new memory, as some do that restore parameters."""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data = p.data - group["lr"] * p.grad

    found = []
    for inner in (torch.optim.SGD, Replacing):
        model = network()
        # g has to stay where it is: it is part of a vector.
        lengths = partial(torch.optim.SGD, lr=0.1)
        optimizer = WeightNormOptimizer(model, inner, lr=0.1, lengths=lengths)
        train(model, optimizer, range(3))
        found.append(model.state_dict())
    torch.testing.assert_close(*found)


TRAJECTORIES = {
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.003, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.003, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.0003, "foreach": True}),
}


@pytest.mark.parametrize(("inner", "options"), TRAJECTORIES.values(), ids=TRAJECTORIES.keys())
def test_steps_equal_the_module_form_on_every_layer(inner, options):
    """Every layer of the zoo as one model; the gradients are given, forward passes are not run."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({name: case.make() for name, case in LAYERS.items()}).double()
    normed = copy.deepcopy(plain)
    chosen = {f"{m}.{n}" for m, each in plain.named_modules() for n in layers.weight_names(each)}
    weight_norm_model(normed, where=lambda name, _: name in chosen)
    paths = [name.rpartition(".") for name in normalized_weights(normed)]
    on = "parts" if inner is torch.optim.AdamW else "auto"
    mine = WeightNormOptimizer(
        plain, inner, where=lambda name, _: name in chosen, weight_decay_on=on, **options
    )
    theirs = inner(normed.parameters(), **options)
    others = [p for n, p in normed.named_parameters() if "original" not in n]
    for i in range(60):
        for p in plain.parameters():
            p.grad = slope(p, i)
        weights = [getattr(normed.get_submodule(m), name) for m, _, name in paths]
        torch.autograd.backward(weights, [slope(w, i) for w in weights])
        for p in others:
            p.grad = slope(p, i)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for m, _, name in paths:
        w, expected = (getattr(each.get_submodule(m), name) for each in (plain, normed))
        torch.testing.assert_close(w, expected, atol=1e-12, rtol=0, msg=lambda said, m=m: m + said)
        expected = parts(normed.get_submodule(m), name)
        found = mine.parts()[f"{m}.{name}"]
        torch.testing.assert_close(found.v, expected.v, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(found.g, expected.g, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("case", ["a zero row", "g changes sign"])
def test_rows_that_reach_zero_equal_the_module_form(case):
    model = nn.Linear(4, 2, bias=False).double()
    start = model.weight.detach().clone()
    if case == "a zero row":
        nn.init.zeros_(model.weight[:1].detach())
    normed = weight_norm_model(copy.deepcopy(model))
    pairs = (
        (model, WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)),
        (normed, torch.optim.SGD(normed.parameters(), lr=0.1)),
    )
    for _ in range(12):
        for each, optimizer in pairs:
            optimizer.zero_grad()
            (each.weight + 5 * start - 0.1).square().sum().backward()
            optimizer.step()
    if case == "g changes sign":
        assert (pairs[0][1].parts()["weight"].g < 0).all()
    torch.testing.assert_close(model.weight, normed.weight)
    assert model.weight.abs().min() > 0


RESUMED = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "schedule of the norm": (
        torch.optim.SGD,
        {"lr": 0.1, "retract": True, "v_norm": lambda name, step: 2.0 + step},
    ),
}


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize(("inner", "options"), RESUMED.values(), ids=RESUMED.keys())
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
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.v_norms(), resumed.v_norms(), rtol=0, atol=0)


def test_hooks_of_the_state_dict_run():
    optimizer, seen = WeightNormOptimizer(network(), torch.optim.SGD, lr=0.1), []

    def with_another_rate(optimizer, state):
        seen.append(state["note"])
        return {**state, "param_groups": [{**g, "lr": 0.5} for g in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(with_another_rate)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", 1, "after loading"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_hooks_of_all_optimizers_see_weights():
    """An average of the weights, say: never of v."""
    model, seen = network(), []
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, v_norm=7.0)

    def hook(optimizer, *_):
        seen.append((optimizer, model[0].weight.detach().clone()))

    handle = register_optimizer_step_post_hook(hook)
    try:
        train(model, optimizer, range(3))
    finally:
        handle.remove()
    assert [each for each, _ in seen] == [optimizer] * 3
    assert torch.equal(seen[-1][1], model[0].weight)


def test_reading_a_bfloat16_form_changes_nothing():
    """Around parts and state_dict the weights are those of an average, as in an evaluation."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32).bfloat16()
    twin = copy.deepcopy(model)
    pairs = [(m, WeightNormOptimizer(m, torch.optim.SGD, lr=1e-3)) for m in (model, twin)]
    for i in range(6):
        for m, optimizer in pairs:
            m.weight.grad = slope(m.weight, i)
            optimizer.step()
        weight = model.weight.detach().clone()
        model.weight.data.mul_(0.99)
        pairs[0][1].parts()
        pairs[0][1].state_dict()
        model.weight.data.copy_(weight)
    assert torch.equal(pairs[0][1].parts()["weight"].v, pairs[1][1].parts()["weight"].v)


def test_casting_to_a_narrow_type_after_building_is_refused():
    model = nn.Linear(3, 2)
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    model.bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(RuntimeError, match="cast the model first"):
        optimizer.step()


def test_default_weight_decay_is_that_of_w():
    """λw in the gradient for SGD; for AdamW see `test_weight_decay_on_w_is_that_of_adamw`."""
    model, twin = network(), network()
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, weight_decay=0.3, **options)
    expected = WeightNormOptimizer(twin, torch.optim.SGD, **options)
    for i in range(5):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad, q.grad = slope(p, i), slope(q, i) + 0.3 * q.detach()
        optimizer.step(*[lambda: None] * (i % 2))  # a closure makes no difference
        expected.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    decoupled = WeightNormOptimizer(model, torch.optim.AdamW)
    assert decoupled.param_groups[0]["weight_decay_on"] == "w"
    assert diagnostics.check(model, optimizer) == diagnostics.check(model, decoupled) == []


STACKED = {
    "LSTM": (lambda: nn.LSTM(5, 8), {"weight_ih_l0": 4, "weight_hh_l0": 4}),
    "GRUCell": (lambda: nn.GRUCell(5, 8), {"weight_ih": 3, "weight_hh": 3}),
    "RNNCell": (lambda: nn.RNNCell(5, 8), {"weight_ih": 1, "weight_hh": 1}),
    "projection": (lambda: nn.LSTM(5, 8, proj_size=4), {"weight_hh_l0": 4, "weight_hr_l0": 1}),
    "attention": (lambda: nn.MultiheadAttention(8, 2), {"in_proj_weight": 3, "out_proj.weight": 1}),
    "attention of several sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=6),
        {"q_proj_weight": 1, "k_proj_weight": 1, "out_proj.weight": 1},
    ),
}


@pytest.mark.parametrize(("make", "matrices"), STACKED.values(), ids=STACKED)
def test_stacked_matrices_of_every_layer(make, matrices):
    lengths = partial(torch.optim.Adam, lr=0.01)
    model, muon = make(), type("NamedMuon", (torch.optim.Muon,), {})  # a subclass is recognized
    optimizer = WeightNormOptimizer(model, muon, lengths=lengths)
    for i, p in enumerate(model.parameters()):
        p.grad = slope(p, i)
    optimizer.step()
    for name, count in matrices.items():
        state = optimizer.state[model.get_parameter(name)]
        moments = [x for key, x in state.items() if key.endswith("momentum_buffer")]
        assert len(moments) == count
        assert len({(*m.shape,) for m in moments}) == 1
