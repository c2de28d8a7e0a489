"""Weight normalization in the optimizer, slow and obvious: what the fast one is compared with."""

import torch
from torch import nn


class WeightNormReference:
    """Keeps v and g as parameters of their own, moves them, and writes w = g·v/‖v‖ to the model.

    Args:
        weights: parameters by name, without groups. All other parameters stay.
        inner: a function of parameters that returns the optimizer of v and g.
        kept: the kept axes of each weight.
        retract: how far ‖v‖ is moved back after a step.
    """

    def __init__(self, weights, inner, *, kept=(0,), log=False, train_g=True, retract=0.0):
        self.weights, self.kept, self.log, self.retract = weights, kept, log, retract
        self.v = {name: nn.Parameter(w.detach().clone()) for name, w in weights.items()}
        self.g = {name: nn.Parameter(self.norm(w)) for name, w in weights.items()}
        if log:
            for s in self.g.values():
                s.data.log_()
        self.inner = inner([*self.v.values(), *(self.g.values() if train_g else ())])
        self.written = {name: w.detach().clone() for name, w in weights.items()}
        self.is_new = True

    def norm(self, x):
        rest = [axis for axis in range(x.ndim) if axis not in self.kept]
        return x.detach().square().sum(rest, keepdim=True).sqrt()

    def length(self, name):
        return self.g[name].detach().exp() if self.log else self.g[name].detach()

    def w(self, name):
        v = self.v[name].detach()
        return self.length(name) * v / self.norm(v)  # eq. 2

    def follow(self):
        """Take over weights that were written to: ‖v‖ stays, unless there was no step yet."""
        for name, w in self.weights.items():
            if torch.equal(w.detach(), self.written[name]):
                continue
            v, g, length = self.v[name].data, self.g[name].data, self.norm(w)
            sign = torch.where(self.length(name) < 0, -1.0, 1.0)
            v.copy_(w if self.is_new else w.detach() * sign * self.norm(v) / length)
            g.copy_(length.log() if self.log else sign * length)
            self.written[name].copy_(w.detach())

    @torch.no_grad()
    def step(self):
        self.follow()
        self.is_new = False
        for name, w in self.weights.items():
            v, g, grad_w = self.v[name].detach(), self.length(name), w.grad
            if grad_w is None:
                self.v[name].grad = self.g[name].grad = None
                continue
            norm = self.norm(v)
            along = (grad_w * v).sum([a for a in range(v.ndim) if a not in self.kept], keepdim=True)
            grad_g = along / norm  # eq. 3
            self.v[name].grad = g / norm * grad_w - g * grad_g / norm**2 * v
            self.g[name].grad = g * grad_g if self.log else grad_g
        held = {name: self.norm(v) for name, v in self.v.items()}
        self.inner.step()
        for name, w in self.weights.items():
            if w.grad is None:
                continue
            v = self.v[name].detach()
            new = self.norm(v)
            self.v[name].data = v * (new + self.retract * (held[name] - new)) / new
            w.copy_(self.w(name))
            self.written[name].copy_(w)
            w.grad = None
