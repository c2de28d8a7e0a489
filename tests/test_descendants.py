"""The snippets of docs/descendants.md, each compared with a formula written from its paper."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from frameworks import need

PAGE = Path(__file__).parents[1] / "docs" / "descendants.md"
SETUP, *SECTIONS = PAGE.read_text().split("\n## ")
BLOCKS = {
    text.splitlines()[0]: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in SECTIONS
}
[START] = re.findall(r"```python\n(.*?)```", SETUP, re.DOTALL)
STEPS = 20


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(title, blocks=None):
    """Run the snippets of a section as the page has them; return what they define."""
    torch.manual_seed(0)
    scope = {"__name__": "page"}
    for block in [START, *BLOCKS[title][:blocks]]:
        exec(compile(block, PAGE.name, "exec"), scope)
    return scope


def slope(w, i):
    """∇w of a loss that changes from step to step."""
    return torch.cos(3 * w + i)


def train(model, optimizer):
    for i in range(STEPS):
        for p in model.parameters():
            p.grad = slope(p.detach(), i)
        optimizer.step()
        optimizer.zero_grad()


class Adam:
    """Adam's update m̂/(√v̂ + ε), from its paper."""

    def __init__(self, beta1=0.9, beta2=0.999):
        self.betas, self.m, self.s, self.t = (beta1, beta2), 0, 0, 0

    def update(self, grad):
        beta1, beta2 = self.betas
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.s = beta2 * self.s + (1 - beta2) * grad**2
        mean, square = self.m / (1 - beta1**self.t), self.s / (1 - beta2**self.t)
        return mean / (square.sqrt() + 1e-8)


class Muon:
    """Muon's update: Nesterov momentum, made orthogonal by five Newton-Schulz steps in bfloat16.

    The momentum is an exponential average, as in torch: proportional to the paper's sum, and the
    length of what is made orthogonal has no effect.
    """

    def __init__(self, momentum=0.95):
        self.momentum, self.m = momentum, 0

    def update(self, grad):
        mu = self.momentum
        self.m = torch.lerp(torch.zeros_like(grad) + self.m, grad, 1 - mu)
        x = torch.lerp(grad, self.m, mu).bfloat16()
        x = x.T if grad.shape[0] > grad.shape[1] else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            poly = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, poly, x, beta=3.4445)
        return x.T if grad.shape[0] > grad.shape[1] else x


def length(w, axis=1):
    return w.norm(dim=axis, keepdim=True)


def muown(w, lr=0.001, lr_g=0.001, beta2=0.95, match_rms=True, norm=lambda i, start, new: new):
    """Muon moves v, Adam g; `norm` says what ‖v‖ is after step i, given ‖v‖ before it and after."""
    g, muon, adam = length(w), Muon(), Adam(0.9, beta2)
    v = w / length(w) * norm(-1, length(w), length(w))
    rows, columns = w.shape
    scale = 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
    for i in range(STEPS):
        grad, u, start = slope(w, i), v / length(v), length(v)
        grad_g = (grad * u).sum(1, keepdim=True)
        grad_v = g / start * (grad - grad_g * u)
        v = v - lr * scale * muon.update(grad_v).to(v.dtype)
        v = v / length(v) * norm(i, start, length(v))
        g = g - lr_g * adam.update(grad_g)
        w = g * v / length(v)
    return w


def hyperball(w, inner):
    radius = w.norm()
    for i in range(STEPS):
        u = inner.update(slope(w, i)).to(w.dtype)
        moved = w - 0.01 * radius * u / u.norm()
        w = radius * moved / moved.norm()
    return w


def ngpt(w, axis=1):
    adam = Adam()
    w = w / length(w, axis)
    for i in range(STEPS):
        w = w - 0.001 * adam.update(slope(w, i))
        w = w / length(w, axis)
    return w


def edm2(w):
    adam, fan_in = Adam(), w.shape[1]
    stored = w / length(w) * math.sqrt(fan_in)  # RMS 1 in every row
    for i in range(STEPS):
        v = stored.clone().requires_grad_()
        used = v / (length(v) / math.sqrt(fan_in)) / math.sqrt(fan_in)
        used.backward(slope(used.detach(), i))
        stored = stored - 0.01 * adam.update(v.grad)
        stored = stored / (length(stored) / math.sqrt(fan_in))
    return stored / math.sqrt(fan_in)


def fixed_norm(w):
    radius, momentum = length(w), 0
    for i in range(STEPS):
        grad, u = slope(w, i), w / radius
        momentum = 0.9 * momentum + grad - (grad * u).sum(1, keepdim=True) * u
        w = w - 0.1 * momentum
        w = radius * w / length(w)
    return w


def with_radius(w):
    """v keeps the norm that the weight had, and 1 where it was zero."""
    radius, adam = 1 / math.sqrt(w.shape[1]), Adam()
    norm = length(w)
    if not w.any():
        w, norm = run("A radius, and projections that start at zero")["model"][2].weight, 1.0
    v = (w / length(w) * norm).detach()
    for i in range(STEPS):
        u = v / length(v)
        grad = slope(radius * u, i)
        v = v - 0.01 * adam.update(radius / norm * (grad - (grad * u).sum(1, keepdim=True) * u))
        v = v / length(v) * norm
    return radius * v / length(v)


def capped(w):
    v, g, of_v, of_g = w.clone(), length(w), Adam(), Adam()
    for i in range(STEPS):
        grad, u = slope(w, i), v / length(v)
        grad_g = (grad * u).sum(1, keepdim=True)
        grad_v = g / length(v) * (grad - grad_g * u)
        v, g = v - 0.01 * of_v.update(grad_v), g - 0.01 * of_g.update(grad_g)
        g = torch.where(g.abs() > 0.6, 0.6 * g / (g.abs() + 1e-7), g)  # as torch's renorm
        w = g * v / length(v)
    return w


MUON = {"lr": 0.02, "beta2": 0.999, "match_rms": False}


def braked(w):
    return muown(w, **MUON, norm=lambda i, start, new: (start + new) / 2)


def scheduled(w):
    factor = 3.33 if w.shape == (16, 32) else 1.0
    return muown(w, **MUON, norm=lambda i, *_: factor * (1 + (i + 1) / 10))


def angular(w):
    return muown(w, lr=0.01, lr_g=0.01, match_rms=False, norm=lambda *_: 1.0)


RADIUS = "A radius, and projections that start at zero"
FORMULAS = {
    # Section and number of its snippets to run: the formula of its weights.
    ("Muown", 1): muown,
    ("AngularMuown", 1): angular,
    ("Hyperball", 1): lambda w: hyperball(w, Adam()),
    ("Hyperball", 2): lambda w: hyperball(w, Muon()),
    ("nGPT's normalization", 1): lambda w: ngpt(w, 1 if w.shape == (32, 16) else 0),
    ("EDM2's forced weight norm", 1): edm2,
    ("Fixed-norm training", 1): fixed_norm,
    (RADIUS, 1): with_radius,
    ("A brake on ‖v‖", 1): braked,
    ("A schedule of ‖v‖", 1): scheduled,
    ("A cap on the norm", 1): capped,
    ("Stacks: experts, and q, k, v in one parameter", 2): lambda w: torch.stack(
        [muown(matrix) for matrix in w]
    ),
    ("A critic in reinforcement learning", 1): ngpt,
}


@pytest.mark.parametrize(("title", "blocks"), FORMULAS)
def test_20_steps_equal_the_formula(title, blocks):
    scope = run(title, blocks)
    model, optimizer = scope.get("critic", scope["model"]), scope["optimizer"]
    weights = {name: weight.weight for name, weight in optimizer.normalized().items()}
    before = copy.deepcopy(weights)
    # A snippet may change the page's model before the optimizer sees it.
    start = {**before, **dict(run(title, 0)["model"].named_parameters())}
    if title == RADIUS:
        nn.init.zeros_(start["2.weight"])
    expected = {n: FORMULAS[title, blocks](start[n].detach().clone()) for n in weights}
    train(model, optimizer)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[name], atol=1e-12, rtol=1e-10)
        assert (weight - before[name]).norm() > 0.001 * before[name].norm()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_recipe_trains_as_peft_does(dropout, monkeypatch):
    need("peft")
    import peft
    from peft.tuners.lora.dora import DoraLinearLayer

    monkeypatch.setattr(DoraLinearLayer, "forward", DoraLinearLayer.forward)  # restored at the end
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    config = peft.LoraConfig(
        r=2,
        use_dora=True,
        target_modules=["0", "2"],
        lora_dropout=dropout,
        init_lora_weights=False,
    )
    model, x = peft.get_peft_model(base, config), torch.randn(5, 8)
    start, states = copy.deepcopy(model.state_dict()), []
    for recipe in (False, True):
        if recipe:
            run("DoRA in peft")
            monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", None)  # not called any more
            model.load_state_dict(start)
        torch.manual_seed(0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    theirs, mine = states
    torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
    assert any((mine[name] - start[name]).abs().max() > 0.01 for name in mine)


def test_critic_learns_the_values_of_a_random_policy():
    gymnasium = pytest.importorskip("gymnasium")
    scope = run("A critic in reinforcement learning")
    critic, optimizer = scope["critic"], scope["optimizer"]
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(0)
    rows, (state, _) = [], env.reset(seed=0)
    action = env.action_space.sample()
    for _ in range(600):
        following, reward, _, ended, _ = env.step(action)
        after = env.action_space.sample()
        rows.append([*state, *action, *following, *after, reward / 10])
        state, action = (env.reset()[0] if ended else following), after
    data, losses = torch.tensor(rows, dtype=torch.float64), []
    for _ in range(200):
        batch = data[torch.randint(len(data), (128,))]
        # As in CrossQ, both pairs pass together, and there is no target network.
        now, then = critic(torch.cat([batch[:, :4], batch[:, 4:8]]))[:, 0].chunk(2)
        loss = (now - batch[:, 8] - 0.9 * then.detach()).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    for name in ("1.weight", "4.weight"):
        rows = critic.get_parameter(name)
        torch.testing.assert_close(length(rows).detach(), torch.ones(64, 1))


def test_every_snippet_is_short_and_tested():
    assert {title for title, _ in FORMULAS} | {"DoRA in peft", "Not covered"} == set(BLOCKS)
    blocks = [START, *(block for section in BLOCKS.values() for block in section)]
    assert all(sum(map(bool, block.splitlines())) <= 10 for block in blocks)
