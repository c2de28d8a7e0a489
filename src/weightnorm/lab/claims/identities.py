"""Identities: claims 1, 2, 3, 7, 10, 11, 13, 14 and 17, as the largest deviation from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import (
    Parameterization,
    mean_only_batch_norm,
    normalized_weights,
    parameterize,
    parts,
    weight_norm,
)
from weightnorm.functional import compose, gradients, norm, project
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    Context,
    Outcome,
    Statement,
    Verdict,
    claim,
    identity,
)
from weightnorm.lab.claims.covariance import scaled_and_projected
from weightnorm.lab.claims.probes import example_gradients, gradient_covariance
from weightnorm.lab.claims.problem import Problem

SHAPES = ((3, 4), (5, 1, 3), (2, 3, 3, 3))
UNITS = 8
"""Units of each layer whose covariance is computed."""


def is_identity(
    number: int, section: str, statement: str, rule: str, paper: str = "exact"
) -> Callable[[Callable[[Context], Outcome]], Callable[[Context], Outcome]]:
    """Register the decorated function as the measurement of an identity."""

    def register(measure: Callable[[Context], Outcome]) -> Callable[[Context], Outcome]:
        found = Statement(statement, paper, rule)
        claim(number, section, found, kind="identity")(lambda context: [measure(context)])
        return measure

    return register


def largest(deviations: dict[str, float], tolerance: float) -> Outcome:
    """The outcome of an identity that is checked in several ways or places."""
    worst = float(np.max([*deviations.values()]))  # NaN if any is
    return Outcome(f"{worst:.1e}", identity(worst, tolerance), len(deviations), deviations)


def random_parts() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random (v, g, ∇w) of several shapes, float64."""
    torch.manual_seed(1)
    found = []
    for shape in SHAPES:
        v, grad_w = torch.randn(2, *shape, dtype=torch.float64)
        g = torch.randn(shape[0], *(1,) * (len(shape) - 1), dtype=torch.float64)
        found.append((v, g, grad_w))
    return found


@is_identity(
    1, "2", "∇g and ∇v are those of eq. 3",
    "relative difference to central differences below 10⁻⁷, float64",
)  # fmt: skip
def finite_differences(context: Context) -> Outcome:
    found = {}
    for v, g, grad_w in random_parts():
        exact = gradients(grad_w, v=v, g=g)
        for part, grad in ((0, exact.v), (1, exact.g)):
            estimate = central_difference(v, g, grad_w, part)
            found[f"∇{'vg'[part]} of {tuple(v.shape)}"] = deviation(estimate, grad)
    return largest(found, 1e-7)


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


@is_identity(
    2, "2", "eq. 3 is eq. 4: the gradient is scaled by g/‖v‖ and projected away from w",
    "eq. 3 − eq. 4, M² − M and ∇v·v below 10⁻¹², float64",
)  # fmt: skip
def projection(context: Context) -> Outcome:
    found = {}
    for v, g, grad_w in random_parts():
        eq3 = gradients(grad_w, v=v, g=g).v
        eq4 = g / norm(v) * project(grad_w, compose(v=v, g=g))
        once = project(grad_w, v)
        where = f" of {tuple(v.shape)}"
        found["eq. 3 − eq. 4" + where] = deviation(eq3, eq4)
        found["M² − M" + where] = deviation(project(once, v), once)
        found["∇v·v" + where] = (eq3 * v).flatten(1).sum(1).abs().max().item()
    return largest(found, 1e-12)


@is_identity(
    3, "2", "‖w‖ = |g| for every v", "relative deviation below 10⁻¹², ‖v‖ over 12 decades",
    paper="exact (as ‖w‖ = g, for g ≥ 0)",
)  # fmt: skip
def fixed_length(context: Context) -> Outcome:
    return largest(
        {
            f"{scale:g} · v of {tuple(v.shape)}": deviation(
                norm(compose(v=scale * v, g=g)), g.abs()
            )
            for v, g, _ in random_parts()
            for scale in (1e-6, 1.0, 1e6)
        },
        1e-12,
    )


@is_identity(
    7, "2", "The covariance of ∇v is D = (g²/‖v‖²)·M C M, with C that of ∇w",
    "relative deviation from the covariance of the gradients of 64 real examples in v below 10⁻⁹, "
    f"{UNITS} units of every layer, float64",
)  # fmt: skip
def transformed_covariance(context: Context) -> Outcome:
    problem = context.problem("cifar10 at 16×16")
    model = problem.network("weight-norm", context.seeds[0]).double()
    x, y = problem.data.train[:64].double(), problem.data.train_labels[:64]
    found = normalized_weights(model)
    of_v: dict[str, list[Tensor]] = {path: [] for path in found}
    for image, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        grads = torch.autograd.grad(loss, [part.v for part in found.values()])
        for path, gradient in zip(found, grads, strict=True):
            of_v[path].append(gradient[:UNITS].flatten(1))
    of_w = example_gradients(model, F.cross_entropy, x, y)
    deviations = {}
    for path, (v, g) in found.items():
        v, g = v.detach()[:UNITS].flatten(1), g.detach()[:UNITS].flatten(1)
        c = gradient_covariance(of_w[path][:, :UNITS])
        d = scaled_and_projected(c, v, g / v.norm(dim=1, keepdim=True))
        deviations[path] = deviation(gradient_covariance(torch.stack(of_v[path])), d)
    return largest(deviations, 1e-9)


@is_identity(
    10, "2.2", "For one layer with whitened input, batch norm is weight norm",
    "relative deviation in output and gradient below 10⁻⁹ (ε → 0), float64",
)  # fmt: skip
def whitened_batch(context: Context) -> Outcome:
    torch.manual_seed(1)
    x = torch.randn(64, 5, dtype=torch.float64)
    x = x - x.mean(0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).T
    layer = weight_norm(nn.Linear(5, 3, bias=False).double())
    linear = nn.Linear(5, 3, bias=False).double()
    v, g = parts(layer)
    with torch.no_grad():
        linear.weight.copy_(v)
    normed = F.batch_norm(linear(x), None, None, g.detach().flatten(), training=True, eps=1e-300)
    out, grad = layer(x), torch.randn(64, 3, dtype=torch.float64)
    (of_v,) = torch.autograd.grad(out, v, grad)
    (of_weight,) = torch.autograd.grad(normed, linear.weight, grad)
    return largest({"output": deviation(out, normed), "gradient": deviation(of_v, of_weight)}, 1e-9)


@is_identity(
    11, "2.2", "With weight norm an example's output does not depend on the others in its batch; "
    "with batch norm and mean-only batch norm it does",
    "relative change of one example's output when the others change: below 10⁻¹² where there are "
    "no batch statistics, above 10⁻³ where there are",
    paper="no dependence",
)  # fmt: skip
def independence(context: Context) -> Outcome:
    changes = {}
    for how in Parameterization:
        torch.manual_seed(1)
        layer = parameterize(nn.Linear(6, 4).double(), how).train()
        x = torch.randn(8, 6, dtype=torch.float64)
        other = torch.cat([x[:1], torch.randn(7, 6, dtype=torch.float64)])
        changes[str(how)] = deviation(layer(x)[0], layer(other)[0])
    value = ", ".join(f"{how} {change:.1e}" for how, change in changes.items())
    return Outcome(value, independence_verdict(changes), len(changes), changes)


def independence_verdict(changes: dict[str, float]) -> Verdict:
    """Parameterizations without batch statistics must not change; those with them must."""
    uses = {how: Parameterization(how).uses_batch for how in changes}
    as_stated = (change > 1e-3 if uses[how] else change <= 1e-12 for how, change in changes.items())
    return HOLDS if all(as_stated) else FAILS


@is_identity(
    13, "5.1", "The five parameterizations start as the same function of the init batch",
    "largest difference of a logit to the standard parameterization's below 0.005, float32",
    paper="implied: all are initialized in the same way",
)  # fmt: skip
def same_initial_function(context: Context) -> Outcome:
    problem, seed = context.problem("cifar10 at 16×16"), context.seeds[0]
    with torch.no_grad():
        outputs = {
            str(how): problem.network(str(how), seed)(problem.init_images(seed))
            for how in Parameterization
        }
    reference = outputs.pop("standard")
    return largest({how: (x - reference).abs().max().item() for how, x in outputs.items()}, 5e-3)


@is_identity(
    14, "4", "Mean-only batch norm centres the gradient of the pre-activation (eq. 8)",
    "relative deviation of the gradients of v and g below 10⁻⁹, float64",
)  # fmt: skip
def centred_gradient(context: Context) -> Outcome:
    torch.manual_seed(1)
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3)).double())
    inner: nn.Module = layer.layer
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    grad = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    pair = tuple(parts(inner))
    found = torch.autograd.grad(layer(x), pair, grad)
    centred = grad - grad.mean((0, 2, 3), keepdim=True)
    expected = torch.autograd.grad(inner(x), pair, centred)
    both = zip("vg", found, expected, strict=True)
    return largest({f"∇{name}": deviation(a, b) for name, a, b in both}, 1e-9)


@is_identity(
    17, "2", "Weight norm keeps no additional activations",
    "bytes saved for the backward pass beyond standard: equal at 50 and 100 examples, and at most "
    "three copies of the weights; batch norm beside it",
    paper="no additional memory per example",
)  # fmt: skip
def memory(context: Context) -> Outcome:
    problem, seed = context.problem("cifar10 at 16×16"), context.seeds[0]
    extra = {}
    plain = problem.network("standard", seed)
    for how in ("weight-norm", "batch-norm"):
        model = problem.network(how, seed)
        extra[how] = [
            saved_bytes(problem, model, batch) - saved_bytes(problem, plain, batch)
            for batch in (50, 100)
        ]
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    text = ", ".join(f"{how} {a:,} and {b:,}" for how, (a, b) in extra.items())
    verdict = memory_verdict(extra["weight-norm"], weights)
    return Outcome(f"{text} bytes; the weights are {weights:,}", verdict, 2, extra)


def memory_verdict(extra: list[int], weights: int) -> Verdict:
    """The extra bytes must not depend on the batch, and be at most three copies of the weights."""
    return HOLDS if len(set(extra)) == 1 and extra[0] <= 3 * weights else FAILS


def saved_bytes(problem: Problem, model: nn.Module, batch: int) -> int:
    """Bytes that autograd saves from the forward for the backward pass; each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = problem.loss(model, torch.arange(batch))
    loss.backward()
    return sum(storages.values())


def deviation(a: Tensor, b: Tensor) -> float:
    """Largest |a − b| relative to the largest |b|."""
    return ((a - b).abs().max() / b.abs().max()).item()
