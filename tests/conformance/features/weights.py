"""Removing it, and writing the weight"""

import copy
import pickle
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from conformance.feature import feature
from conformance.subject import Subject


@feature()
def removing(subject: Subject):
    """Removing it gives a plain layer with the same output (waveglow#9)."""
    layer, plain = subject.trained(), subject.case.make()
    before = subject.run(layer)
    subject.remove(layer)
    assert type(layer) is type(plain)
    assert set(layer.state_dict()) == set(plain.state_dict())
    assert all(p.is_leaf and p.requires_grad for p in layer.parameters())
    assert_close(subject.run(layer), before)


@feature()
def removing_keeps_the_order(subject: Subject):
    """After removal the parameters are in the order of the plain layer (pytorch#91304)."""
    layer = subject.remove(subject.normalized())
    assert list(layer.state_dict()) == list(subject.case.make().state_dict())


@feature()
def removing_then_pickling(subject: Subject):
    """After removal the layer can be pickled (pytorch#137409)."""
    layer = subject.remove(subject.normalized())
    assert torch.equal(subject.run(pickle.loads(pickle.dumps(layer))), subject.run(layer))


@feature()
def removing_twice(subject: Subject):
    """Removing it twice is not an error."""
    layer = subject.remove(subject.trained())
    before = subject.run(layer)
    assert torch.equal(subject.run(subject.remove(layer)), before)


@feature()
def assigning(subject: Subject):
    """Assigning to the weight sets it or raises an error; it is not ignored."""
    layer = subject.trained()
    for name, value in _assigned(subject, layer).items():
        assert_close(subject.implementation.weight(layer, name), value)


@feature()
def assigning_copies(subject: Subject):
    """Training does not modify a tensor that was assigned to the weight."""
    layer = subject.trained()
    values = _assigned(subject, layer)
    before = copy.deepcopy(values)
    subject.run(layer).sin().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert_close(values, before)


@feature()
def initializing(subject: Subject):
    """nn.init on the weight sets it or raises an error; it is not ignored (pytorch#180968,
    hifi-gan#145)."""
    layer = subject.trained()
    for name in subject.names:
        try:
            nn.init.ones_(getattr(layer, name))
        except Exception:
            continue
        weight = subject.implementation.weight(layer, name)
        assert_close(weight, torch.ones_like(weight))


def _assigned(subject: Subject, layer: nn.Module) -> dict[str, Tensor]:
    """Assign to every weight; return the values of those that did not raise."""
    values = {}
    for name in subject.names:
        value = torch.randn_like(subject.implementation.weight(layer, name))
        with suppress(Exception):
            setattr(layer, name, value)
            values[name] = value
    return values
