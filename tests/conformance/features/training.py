"""Training"""

import torch
from torch.testing import assert_close

from conformance.feature import feature
from conformance.subject import Subject, flat, leaves


@feature()
def first_derivatives(subject: Subject):
    """The gradients of v and g are those of eq. 3."""
    _matches_the_formula(subject, _gradients)


@feature(unsupported=["embedding-bag"])
def second_derivatives(subject: Subject):
    """Second derivatives, as a gradient penalty needs them."""

    def second(out, parts):
        first = _gradients(out, parts, create_graph=True)
        return torch.autograd.grad(sum(grad.sin().sum() for grad in first), parts)

    _matches_the_formula(subject, second)


@feature()
def optimizer_step(subject: Subject):
    """After a step of SGD the output uses the new v and g (pytorch#65688)."""
    subject = subject.double()
    layer = subject.trained()
    own = leaves(subject.parts(layer))
    subject.run(layer).sin().sum().backward()
    grads = iter(_gradients(subject.oracle(layer, own), flat(own)))
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    stepped = [tuple(part - 0.1 * next(grads) for part in pair) for pair in own]
    assert_close(subject.run(layer), subject.oracle(layer, stepped))


@feature()
def freezing_g(subject: Subject):
    """g can be frozen while v is trained."""
    layer = subject.trained()
    for _, g in subject.parts(layer):
        g.requires_grad_(False)
    before = leaves(subject.parts(layer))
    subject.run(layer).sin().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    for (v, g), (old_v, old_g) in zip(subject.parts(layer), before, strict=True):
        assert torch.equal(g, old_g)
        assert not torch.equal(v, old_v)


@feature()
def frozen_layer(subject: Subject):
    """A frozen layer stays frozen."""
    layer = subject.normalized(subject.case.make().requires_grad_(False))
    assert not any(p.requires_grad for p in layer.parameters())


def _gradients(out, parts, create_graph=False):
    return torch.autograd.grad(out.sin().sum(), parts, create_graph=create_graph)


def _matches_the_formula(subject, derivatives):
    subject = subject.double()
    layer = subject.trained()
    own = leaves(subject.parts(layer))
    expected = derivatives(subject.oracle(layer, own), flat(own))
    got = derivatives(subject.run(layer), flat(subject.parts(layer)))
    assert_close(got, expected)
