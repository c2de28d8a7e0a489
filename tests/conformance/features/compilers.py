"""Compilers and transforms"""

import torch
from torch.testing import assert_close

from conformance.feature import feature
from conformance.subject import Subject

# Compiling takes about a second per layer, so only one of each family is tested.
FAMILIES = ("linear", "conv2d", "conv-transpose2d-grouped", "embedding", "lstm-cell", "attention")


@feature(FAMILIES)
def compiling(subject: Subject):
    """torch.compile captures one graph, forward and backward (pytorch#121304, pytorch#118742)."""
    torch._dynamo.reset()
    layer = subject.trained()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        out = subject.run(run)
        out.sin().sum().backward()
        results.append((out, [p.grad.clone() for p in layer.parameters()]))
    assert_close(*results)


@feature([*FAMILIES, "lstm"])
def exporting(subject: Subject):
    """torch.export."""
    layer = subject.trained().eval()
    program = torch.export.export(layer, subject.inputs)
    assert_close(subject.run(program.module()), subject.run(layer))


@feature()
def tracing(subject: Subject):
    """torch.jit.trace, with its own check of the trace."""
    layer = subject.trained().eval()
    module = torch.jit.trace(layer, subject.inputs)
    assert_close(subject.run(module), subject.run(layer))


@feature()
def transforming(subject: Subject):
    """torch.func.functional_call under vmap and grad."""
    layers = [subject.trained() for _ in range(2)]
    call = _functional(subject, layers[0])
    stacked = {
        name: torch.stack([dict(layer.named_parameters())[name].detach() for layer in layers])
        for name, _ in layers[0].named_parameters()
    }
    each = torch.func.vmap(torch.func.grad(lambda p: call(p).sin().sum()))(stacked)
    for i, layer in enumerate(layers):
        subject.run(layer).sin().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_close(each[name][i], parameter.grad)


@feature(unsupported=["embedding-bag"])
def forward_mode(subject: Subject):
    """Forward-mode derivatives by torch.func.jvp."""
    subject = subject.double()
    layer = subject.trained()
    call = _functional(subject, layer)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    _, forward = torch.func.jvp(lambda p: call(p).sin().sum(), (parameters,), (tangents,))
    subject.run(layer).sin().sum().backward()
    backward = sum((p.grad * tangents[name]).sum() for name, p in layer.named_parameters())
    assert_close(forward, backward)


def _functional(subject: Subject, layer):
    inputs = subject.inputs

    def call(parameters):
        out = torch.func.functional_call(layer, parameters, inputs)
        return out[0] if isinstance(out, tuple) else out

    return call
