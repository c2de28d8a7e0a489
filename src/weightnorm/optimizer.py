"""Weight normalization on the optimizer's side: the model keeps plain weights.

v and g live in the optimizer. At each step eq. 3 turns ∇w into ∇v and ∇g, any torch optimizer moves
(v, g), and w = g·v/‖v‖ is written back into the model. The trajectory is that of the module form;
forward and backward passes cost nothing extra, and nothing in the model knows: compilers, sharding,
quantization and checkpoints see an ordinary network.

What differs from the module form: gradient clipping sees ∇w, and an average of the model's
parameters averages w.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm import layers
from weightnorm.functional import Parts
from weightnorm.held import Held


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
    state is complete, in torch's own layout: v, g and what the inner optimizer keeps for each.
    Weights may be sharded (FSDP2, tensor parallelism): v and g are sharded with them.

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
        held = {one.weight: one for one in _held(model, where)}
        if not held:
            raise ValueError(f"nothing to normalize in {type(model).__name__}")
        super().__init__(list(model.parameters()) if params is None else params, dict(options))
        self._held = {p: held[p] for p in self._parameters() if p in held}
        if not self._held:
            raise ValueError("`params` has none of the weights to normalize")
        self._ids = [id(p) for p in self._parameters()]
        groups = []
        for group in self.param_groups:
            swapped = [
                part
                for p in group["params"]
                for part in ((held[p].g, held[p].v) if p in held else (p,))
            ]
            groups.append({**_settings(group), "params": swapped})
        self._inner = inner(groups, **options)
        for outer, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update(_settings(group))  # the inner optimizer's defaults, for schedulers to see
        self.defaults.update(self._inner.defaults)

    def parts(self) -> dict[str, Parts]:
        """v and g of every normalized weight, by its name in the model."""
        return {one.name: Parts(one.v, one.g) for one in self._held.values()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on (v, g) and all other parameters."""
        if [id(p) for p in self._parameters()] != self._ids:
            raise RuntimeError(
                "the parameters of the groups are others than at the start (DeepSpeed's ZeRO puts "
                "flat ones in their place); use weight_norm_model with it instead"
            )
        for outer, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(outer))
        if closure is None:
            self._pull()
            self._inner.step()
            self._push()
            self._show_state()
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
        self._show_state()
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a saved state; the model's weights follow."""
        self._check(state_dict)
        super().load_state_dict(state_dict)
        inner: dict[Tensor, Any] = defaultdict(dict)
        for parameter in self._parameters():
            state, one = self.state.get(parameter), self._held.get(parameter)
            if one is None:
                inner.update({parameter: state} if state else {})
            elif state:
                inner.update({one.v: state["of_v"], one.g: state["of_g"]})
                one.assign((state["v"], state["g"]))
                one.push()
            else:  # saved before the first step
                one.assign(one.decomposed())
        groups = self._inner.param_groups
        self._inner.__setstate__({"state": inner, "param_groups": groups})
        self._show_state()

    def _check(self, state_dict: dict[str, Any]) -> None:
        """Refuse the state of other weights before anything is changed."""
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        for key, parameter in zip(keys, self._parameters(), strict=False):  # torch counts them
            state, one = state_dict["state"].get(key, {}), self._held.get(parameter)
            if state and (one is not None) != ("of_v" in state):
                raise ValueError(
                    f"the state has {'no ' if one else ''}v and g for "
                    f"{one.name if one else f'parameter {key}, which is not normalized here'}; "
                    "expected one of a WeightNormOptimizer with the same weights"
                )
            if state and one and state["v"].shape != one.v.shape:
                got, expected = tuple(state["v"].shape), tuple(one.v.shape)
                raise ValueError(f"{one.name}: the state's v is {got}, expected {expected}")

    def _show_state(self) -> None:
        """Let `state` tell what the inner optimizer keeps: torch saves, loads and shards that."""
        self.state.clear()
        kept = self._inner.state
        for parameter in self._parameters():
            one = self._held.get(parameter)
            self.state[parameter] = (
                kept.get(parameter, {})
                if one is None
                else {
                    "v": one.v.detach(),
                    "g": one.g.detach(),
                    "of_v": kept.get(one.v, {}),
                    "of_g": kept.get(one.g, {}),
                }
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along; together with the model, or its weights are lost."""
        return {**super().__getstate__(), "_held": self._held, "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ids = [id(p) for p in self._parameters()]

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed once the optimizer is built: build another one instead."""
        if hasattr(self, "_inner"):
            raise ValueError("add parameter groups by building a new WeightNormOptimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def _pull(self) -> None:
        for one in self._held.values():
            one.pull()

    @torch.no_grad()
    def _push(self) -> None:
        for one in self._held.values():
            one.push()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _held(model: nn.Module, where: Callable[[str, nn.Module], bool] | None) -> Iterator[Held]:
    seen: set[int] = set()
    for path, module, name in layers.chosen_weights(model, where):
        weight = module._parameters.get(name)
        if weight is not None and weight.requires_grad and id(weight) not in seen:
            seen.add(id(weight))
            if weight.is_meta:
                raise ValueError(
                    f"{path} is on the meta device: there is nothing to take apart; give the model "
                    "memory and values first"
                )
            if weight.ndim < 2:
                raise ValueError(
                    f"{path} has shape {tuple(weight.shape)}: not one row for each unit, but what "
                    "FullyShardedDataParallel or DeepSpeed's ZeRO leaves of it on this rank; shard "
                    "the model with torch.distributed.fsdp.fully_shard instead"
                )
            yield Held(path, weight, *layers.unit_axis(module, name))
