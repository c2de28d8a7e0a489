"""Weight normalization on the optimizer's side: the model keeps plain weights.

v and g live in the optimizer. At each step eq. 3 turns ∇w into ∇v and ∇g, any torch optimizer moves
(v, g), and w = g·v/‖v‖ is written back into the model. The trajectory is that of the module form;
forward and backward passes cost nothing extra, and nothing in the model knows: compilers, sharding,
quantization and checkpoints see an ordinary network.

What differs from the module form: gradient clipping sees ∇w, and an average of the model's
parameters averages w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm import functional, layers
from weightnorm.functional import Parts
from weightnorm.kernels import compose


class _Held:
    """The parts of one plain weight of the model."""

    def __init__(self, name: str, weight: nn.Parameter, dim: int, groups: int) -> None:
        self.name, self.weight, self.dim, self.groups = name, weight, dim, groups
        v, g = functional.decompose(weight.detach(), dim, groups=groups)
        self.v, self.g = nn.Parameter(v), nn.Parameter(g)
        self.version = weight._version

    def pull(self) -> None:
        """∇v and ∇g from ∇w (eq. 3). A weight that was written to since is taken apart anew."""
        if self.weight._version != self.version:
            self.assign(functional.decompose(self.weight.detach(), self.dim, groups=self.groups))
        grad = self.weight.grad
        if grad is None:
            self.v.grad = self.g.grad = None
            return
        parts = functional.gradients(grad, self.v, self.g, self.dim, groups=self.groups)
        self.v.grad, self.g.grad = parts

    def push(self) -> None:
        """Write w = g·v/‖v‖ into the model."""
        self.weight.copy_(compose(self.v, self.g, self.dim, self.groups))
        self.version = self.weight._version

    def assign(self, parts: Parts | tuple[Tensor, Tensor]) -> None:
        self.v.copy_(parts[0])
        self.g.copy_(parts[1])


class WeightNormOptimizer(torch.optim.Optimizer):
    """Any torch optimizer on (v, g), for a model whose weights stay plain.

    Args:
        model: its linear, bilinear, convolutional, recurrent and attention weights are normalized.
        inner: the optimizer's class, such as ``torch.optim.Adam``.
        params: parameter groups, as for any optimizer; by default all of the model's parameters.
        where: narrows the choice of weights, or widens it to embeddings, as in
            ``weight_norm_model``.
        options: for the inner optimizer, such as ``lr=0.001``.

    Schedulers, gradient scaling, clipping and accumulation work on it as on any optimizer. Its
    state dict is complete: the inner optimizer's, v and g.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    >>> model(torch.randn(4, 3)).sum().backward()
    >>> optimizer.step()
    >>> list(optimizer.parts())
    ['weight']
    """

    def __init__(
        self,
        model: nn.Module,
        inner: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        where: Callable[[str, nn.Module], bool] | None = None,
        **options: Any,
    ) -> None:
        held = {id(one.weight): one for one in _held(model, where)}
        if not held:
            raise ValueError(f"nothing to normalize in {type(model).__name__}")
        self._held: list[_Held] = []
        super().__init__(list(model.parameters()) if params is None else params, dict(options))
        groups = []
        for group in self.param_groups:
            mine = [held[id(p)] for p in group["params"] if id(p) in held]
            self._held += mine
            swapped = [
                part
                for p in group["params"]
                for part in ((held[id(p)].g, held[id(p)].v) if id(p) in held else (p,))
            ]
            groups.append({**_settings(group), "params": swapped})
        if not self._held:
            raise ValueError("`params` has none of the weights to normalize")
        self._inner = inner(groups, **options)
        for outer, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update(_settings(group))  # the inner optimizer's defaults, for schedulers to see
        self.defaults.update(self._inner.defaults)

    def parts(self) -> dict[str, Parts]:
        """v and g of every normalized weight, by its name in the model."""
        return {one.name: Parts(one.v, one.g) for one in self._held}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on (v, g) and all other parameters."""
        for outer, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(outer))
        if closure is None:
            self._pull()
            self._inner.step()
            self._push()
            return None

        def evaluate() -> Any:
            self._push()
            with torch.enable_grad():
                loss = closure()
            self._pull()
            return loss

        self._pull()  # takes note of weights that were written to
        loss = self._inner.step(evaluate)
        self._push()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, the settings of the groups, and v and g by name."""
        parts = {one.name: {"v": one.v.detach(), "g": one.g.detach()} for one in self._held}
        groups = [_settings(group) for group in self.param_groups]
        return {"inner": self._inner.state_dict(), "parts": parts, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a saved state; the model's weights follow."""
        names = {one.name for one in self._held}
        if set(state_dict.get("parts", ())) != names:
            missing = sorted(names - set(state_dict.get("parts", ())))
            unknown = sorted(set(state_dict.get("parts", ())) - names)
            raise ValueError(
                f"the state is of other weights: missing {missing}, left over {unknown}"
            )
        self._inner.load_state_dict(state_dict["inner"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        for one in self._held:
            part = state_dict["parts"][one.name]
            one.assign((part["v"], part["g"]))
            one.push()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed once the optimizer is built: build another one instead."""
        if hasattr(self, "_inner"):
            raise ValueError("add parameter groups by building a new WeightNormOptimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def _pull(self) -> None:
        for one in self._held:
            one.pull()

    @torch.no_grad()
    def _push(self) -> None:
        for one in self._held:
            one.push()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _held(model: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> Iterator[_Held]:
    seen: set[int] = set()
    for path, module, name in layers.chosen_weights(model, where):
        weight = module._parameters.get(name)
        if weight is not None and weight.requires_grad and id(weight) not in seen:
            seen.add(id(weight))
            yield _Held(path, weight, *layers.unit_axis(module, name))
