"""Claims 1, 2, 3, 10, 11 and 14: identities, measured as the largest deviation from them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import Parameterization, mean_only_batch_norm, parameterize, parts, weight_norm
from weightnorm.functional import compose, gradients, norm, project
from weightnorm.lab.claims.claim import FAILS, HOLDS, Measured, Verdict, claim, exactly
from weightnorm.lab.claims.context import Context

SHAPES = ((3, 4), (5, 1, 3), (2, 3, 3, 3))


def random_parts(context: Context) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random (v, g, ∇w) of several shapes, float64."""
    torch.manual_seed(context.seeds[0])
    found = []
    for shape in SHAPES:
        v, grad_w = torch.randn(2, *shape, dtype=torch.float64)
        g = torch.randn(shape[0], *(1,) * (len(shape) - 1), dtype=torch.float64)
        found.append((v, g, grad_w))
    return found


@claim(
    1, "2", "∇g and ∇v are those of eq. 3",
    paper="exact",
    measured="largest relative difference to central differences, float64",
)  # fmt: skip
def finite_differences(context: Context) -> Measured:
    worst = 0.0
    for v, g, grad_w in random_parts(context):
        exact = gradients(grad_w, v=v, g=g)
        for part, grad in ((0, exact.v), (1, exact.g)):
            worst = max(worst, deviation(central_difference(v, g, grad_w, part), grad))
    return Measured(f"{worst:.1e}", exactly(worst, 1e-7), len(SHAPES), {"deviation": worst})


def central_difference(v: Tensor, g: Tensor, grad_w: Tensor, part: int, h: float = 1e-6) -> Tensor:
    """Gradient of ∇w·w(v, g) in v or g by (f(x + h) − f(x − h))/2h, entry by entry."""
    pair = (v, g)
    out = torch.zeros_like(pair[part]).flatten()
    for i in range(out.numel()):
        ends = []
        for sign in (1, -1):
            moved = (v.clone(), g.clone())
            moved[part].view(-1)[i] += sign * h
            ends.append((grad_w * compose(v=moved[0], g=moved[1])).sum())
        out[i] = (ends[0] - ends[1]) / (2 * h)
    return out.view_as(pair[part])


@claim(
    2, "2", "eq. 3 is eq. 4: the gradient is scaled by g/‖v‖ and projected away from w",
    paper="exact",
    measured="largest deviation of eq. 3 = eq. 4, M² = M, ∇v·v = 0",
)  # fmt: skip
def projection(context: Context) -> Measured:
    numbers = {"eq. 3 − eq. 4": 0.0, "M² − M": 0.0, "∇v·v": 0.0}
    for v, g, grad_w in random_parts(context):
        length = norm(v)
        eq3 = gradients(grad_w, v=v, g=g).v
        eq4 = g / length * project(grad_w, compose(v=v, g=g))
        once = project(grad_w, v)
        dot = (eq3 * v).flatten(1).sum(1).abs().max().item()
        found = (deviation(eq3, eq4), deviation(project(once, v), once), dot)
        numbers = {k: max(a, b) for (k, a), b in zip(numbers.items(), found, strict=True)}
    worst = max(numbers.values())
    return Measured(f"{worst:.1e}", exactly(worst, 1e-12), len(SHAPES), numbers)


@claim(
    3, "2", "‖w‖ = |g| for every v",
    paper="exact (as ‖w‖ = g, for g ≥ 0)",
    measured="largest relative deviation, ‖v‖ over 12 decades",
)  # fmt: skip
def fixed_length(context: Context) -> Measured:
    worst = 0.0
    for v, g, _ in random_parts(context):
        for scale in (1e-6, 1.0, 1e6):
            worst = max(worst, deviation(norm(compose(v=scale * v, g=g)), g.abs()))
    return Measured(f"{worst:.1e}", exactly(worst, 1e-12), 3 * len(SHAPES), {"deviation": worst})


@claim(
    10, "2.2", "For one layer with whitened input, batch norm is weight norm",
    paper="exact",
    measured="largest relative deviation in output and gradient (ε → 0), float64",
)  # fmt: skip
def whitened_batch(context: Context) -> Measured:
    torch.manual_seed(context.seeds[0])
    x = whitened(64, 5)
    layer = weight_norm(nn.Linear(5, 3, bias=False).double())
    linear = nn.Linear(5, 3, bias=False).double()
    v, g = parts(layer)
    with torch.no_grad():
        linear.weight.copy_(v)
    t = linear(x)
    normed = F.batch_norm(t, None, None, g.detach().flatten(), training=True, eps=1e-300)
    out, grad = layer(x), torch.randn(64, 3, dtype=torch.float64)
    (of_v,) = torch.autograd.grad(out, v, grad)
    (of_weight,) = torch.autograd.grad(normed, linear.weight, grad)
    numbers = {"output": deviation(out, normed), "gradient": deviation(of_v, of_weight)}
    worst = max(numbers.values())
    return Measured(f"{worst:.1e}", exactly(worst, 1e-9), 1, numbers)


@claim(
    11, "2.2", "With weight norm an example's output does not depend on the others in its batch; "
    "with batch norm and mean-only batch norm it does",
    paper="no dependence",
    measured="relative change of one example's output when the others change",
)  # fmt: skip
def independence(context: Context) -> Measured:
    changes = {}
    for how in Parameterization:
        torch.manual_seed(context.seeds[0])
        layer = parameterize(nn.Linear(6, 4).double(), how).train()
        x = torch.randn(8, 6, dtype=torch.float64)
        other = torch.cat([x[:1], torch.randn(7, 6, dtype=torch.float64)])
        changes[str(how)] = deviation(layer(x)[0], layer(other)[0])
    value = ", ".join(f"{how} {change:.1e}" for how, change in changes.items())
    return Measured(value, independence_verdict(changes), len(changes), dict(changes))


def independence_verdict(changes: dict[str, float]) -> Verdict:
    """Parameterizations without batch statistics must not change; those with them must."""
    uses = {how: Parameterization(how).uses_batch for how in changes}
    as_stated = (change > 1e-3 if uses[how] else change <= 1e-12 for how, change in changes.items())
    return HOLDS if all(as_stated) else FAILS


@claim(
    14, "4", "Mean-only batch norm centres the gradient of the pre-activation (eq. 8)",
    paper="exact",
    measured="largest relative deviation of the gradients of v and g, float64",
)  # fmt: skip
def centred_gradient(context: Context) -> Measured:
    torch.manual_seed(context.seeds[0])
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3)).double())
    inner: nn.Module = layer.layer
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    grad = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    pair = tuple(parts(inner))
    found = torch.autograd.grad(layer(x), pair, grad)
    centred = grad - grad.mean((0, 2, 3), keepdim=True)
    expected = torch.autograd.grad(inner(x), pair, centred)
    worst = max(deviation(a, b) for a, b in zip(found, expected, strict=True))
    return Measured(f"{worst:.1e}", exactly(worst, 1e-9), 1, {"deviation": worst})


def whitened(n: int, k: int) -> Tensor:
    """A batch with mean 0 and covariance 1, to rounding."""
    x = torch.randn(n, k, dtype=torch.float64)
    x = x - x.mean(0)
    white: Tensor = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / n)).T
    return white


def deviation(a: Tensor, b: Tensor) -> float:
    """Largest |a − b| relative to the largest |b|."""
    return ((a - b).abs().max() / b.abs().max()).item()
