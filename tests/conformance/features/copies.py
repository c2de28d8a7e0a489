"""Copies and checkpoints"""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch.testing import assert_close

from conformance.feature import feature
from conformance.implementation import TorchHook, TorchParametrization
from conformance.subject import Subject


@feature()
def deepcopy(subject: Subject):
    """copy.deepcopy gives an independent layer, before and after a forward pass (pytorch#28594,
    pytorch#69413)."""
    layer = subject.trained()
    _is_independent(subject, layer, copy.deepcopy(layer))
    subject.run(layer).sum().backward()
    _is_independent(subject, layer, copy.deepcopy(layer))


@feature()
def removing_from_a_copy(subject: Subject):
    """Removing weight norm from a copy does not change the original."""
    layer = subject.trained()
    duplicate, before = copy.deepcopy(layer), subject.run(layer)
    subject.remove(duplicate)
    assert torch.equal(subject.run(layer), before)
    _follows_g(subject, layer)


@feature()
def pickling(subject: Subject):
    """A normalized layer can be pickled and stays normalized (pytorch#102983)."""
    layer = subject.trained()
    subject.run(layer)
    _is_independent(subject, layer, pickle.loads(pickle.dumps(layer)))


@feature()
def sending_to_another_process(subject: Subject):
    """A layer can be sent to a spawned process (pytorch#61470)."""
    layer = subject.trained()
    subject.run(layer)
    received = pickle.loads(ForkingPickler.dumps(layer))
    assert_close(subject.run(received), subject.run(layer))


@feature()
def state_dict(subject: Subject):
    """The state dict can be saved to a file and loaded."""
    layer, other, file = subject.trained(), subject.normalized(), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(subject.run(other), subject.run(layer))


@feature()
def checkpoints_of_torchs_hook(subject: Subject):
    """A checkpoint of torch's older weight norm loads (pytorch#102999)."""
    _loads_from(subject, TorchHook())


@feature()
def checkpoints_of_torchs_parametrization(subject: Subject):
    """A checkpoint of torch's newer weight norm loads (transformers#26796)."""
    _loads_from(subject, TorchParametrization())


@feature()
def older_keys_through_load_state_dict(subject: Subject):
    """load_state_dict accepts the older keys weight_g and weight_v (pytorch#102999)."""
    source, plain = subject.trained(), subject.case.make()
    state = {n: p for n, p in source.state_dict().items() if n in plain.state_dict()}
    for name, (v, g) in zip(subject.names, subject.parts(source), strict=True):
        state |= {f"{name}_g": g.detach(), f"{name}_v": v.detach()}
    layer = subject.normalized()
    layer.load_state_dict(state)
    assert torch.equal(subject.run(layer), subject.run(source))


@feature()
def meta_device(subject: Subject):
    """It can be applied on the meta device, with values loaded afterwards (pytorch#96409)."""
    source = subject.trained()
    for assign in (False, True):
        with torch.device("meta"):
            layer = subject.normalized()
        assert all(p.is_meta for p in layer.parameters())
        if not assign:
            layer.to_empty(device="cpu")
        layer.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(subject.run(layer), subject.run(source))


@feature()
def changing_dtype(subject: Subject):
    """A normalized layer can be converted to another dtype."""
    wide = subject.double()
    layer = subject.trained().double()
    assert_close(wide.run(layer), wide.oracle(layer, wide.parts(layer)))


def _is_independent(subject: Subject, layer, duplicate):
    """The copy gives the same output, and changing its g does not change the original."""
    before = subject.run(layer)
    assert torch.equal(subject.run(duplicate), before)
    _follows_g(subject, duplicate)
    assert not torch.equal(subject.run(duplicate), before)
    assert torch.equal(subject.run(layer), before)


def _follows_g(subject: Subject, layer):
    """Changing g changes the output as the formula predicts."""
    with torch.no_grad():
        for _, g in subject.parts(layer):
            g.mul_(2)
    assert_close(subject.run(layer), subject.oracle(layer, subject.parts(layer)))


def _loads_from(subject: Subject, other):
    source = Subject(other, subject.case).trained()
    layer = subject.normalized()
    subject.implementation.load(layer, source.state_dict())
    assert_close(subject.run(layer), subject.run(source))
