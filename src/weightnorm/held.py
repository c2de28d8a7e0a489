"""v and g of a plain weight, kept outside of the model that the weight is in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightnorm import functional
from weightnorm.dtensor import has_whole_rows, local, placed_like, spread_like
from weightnorm.functional import Parts
from weightnorm.kernels import compose, unit_shape


class Held:
    """The parts of one plain weight of the model. A sharded weight has sharded parts."""

    def __init__(self, name: str, weight: nn.Parameter, dim: int, groups: int) -> None:
        self.name, self.weight, self.dim, self.groups = name, weight, dim, groups
        # Where every rank has whole units, it can work on them alone.
        self.alone = dim == 0 and has_whole_rows(weight)
        v, g = self.decomposed()
        self.v, self.g = nn.Parameter(v), nn.Parameter(g)
        self.version = self._version()

    def pull(self) -> None:
        """∇v and ∇g from ∇w (eq. 3)."""
        if self._version() != self.version:
            self._take_up()
        grad = self.weight.grad
        if grad is None:
            self.v.grad = self.g.grad = None
            return
        grad_w, v, g = (self._mine(x) for x in (grad, self.v, self.g))
        parts = functional.gradients(grad_w, v=v, g=g, dim=self.dim, groups=self.groups)
        self.v.grad, self.g.grad = self._joined(parts)

    def push(self) -> None:
        """Write w = g·v/‖v‖ into the model."""
        w = compose(self._mine(self.v), self._mine(self.g), self.dim, self.groups)
        self.weight.copy_(spread_like(w, self.weight, self.weight.shape) if self.alone else w)
        self.version = self._version()

    def assign(self, parts: Parts | tuple[Tensor, Tensor]) -> None:
        self.v.copy_(placed_like(parts[0], self.v))
        self.g.copy_(placed_like(parts[1], self.g))

    def decomposed(self) -> Parts:
        """v and g of the weight as it is now."""
        w = self._mine(self.weight.detach())
        return self._joined(functional.decompose(w, self.dim, groups=self.groups))

    def _take_up(self) -> None:
        """Take apart anew every unit that was given another value.

        The same value says nothing new: a checkpoint of the model may be loaded after that of the
        optimizer, and ‖v‖, which w does not tell, is to stay.
        """
        dim, groups, now = self.dim, self.groups, self.decomposed()
        v, g, w, new_v, new_g = map(self._mine, (self.v, self.g, self.weight, *now))
        change = functional.norm(w - compose(v, g, dim, groups), dim, groups=groups)
        same = change <= 8 * torch.finfo(change.dtype).eps * g.abs()  # but for rounding
        kept_v = torch.where(functional.per_weight(same, v, dim, groups), v, new_v)
        self.assign(self._joined(Parts(kept_v, torch.where(same, g, new_g))))

    def _mine(self, x: Tensor) -> Tensor:
        return local(x) if self.alone else x

    def _joined(self, parts: Parts) -> Parts:
        """Something of v's shape and something of g's, spread over ranks as the weight is."""
        if not self.alone:
            return Parts(placed_like(parts.v, self.weight), parts.g)
        shape = self.weight.shape
        return Parts(
            spread_like(parts.v, self.weight, shape),
            spread_like(parts.g, self.weight, unit_shape(shape, self.dim)),
        )

    def _version(self) -> int:
        """Changes when the weight is written to.

        Loading a checkpoint in shards writes to each rank's part and not to the whole; but where
        ranks work together they must agree, and only the whole has one version on all of them.
        """
        return (local(self.weight) if self.alone else self.weight)._version
