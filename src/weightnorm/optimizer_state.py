"""State of the optimizer form in torch's layout: one flat dict for each of the model's parameters.

A normalized weight's has the inner optimizer's state of v under its own keys, that of g with keys
like ``g.exp_avg``, and besides ``g``, ``v_norm`` and, for bfloat16 or float16, ``float32``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weightnorm._dtensor import is_sharded
from weightnorm._in_place import InPlaceWeight


class OptimizerState(dict[nn.Parameter, dict[str, Any]]):
    """A state by parameter, whose ``clear`` resets the optimizer."""

    def __init__(self, reset: Callable[[], None]) -> None:
        super().__init__()
        self._reset = reset

    def __reduce__(self) -> Any:
        """A copy or pickle is a plain dict: it has no optimizer to reset."""
        return dict, (dict(self),)

    def clear(self) -> None:
        super().clear()
        self._reset()


def packed_state(weight: InPlaceWeight, kept: dict[Tensor, dict[str, Any]]) -> dict[str, Any]:
    """A weight's state under flat keys."""
    state: dict[str, Any] = {}
    for i, direction in enumerate(weight.directions):
        prefix = f"block{i}." if len(weight.directions) > 1 else ""
        state.update({f"{prefix}{k}": v for k, v in kept.get(direction, {}).items()})
    state.update({f"g.{k}": v for k, v in kept.get(weight.g, {}).items()})
    own = {"g": weight.g, "v_norm": weight.norm}
    if weight.copy is not None:
        own["float32"] = weight.copy
    state.update({key: _for_copies(value.detach()) for key, value in own.items()})
    return state


def _for_copies(x: Tensor) -> Tensor:
    """x, as a tensor that can be copied and pickled: torch cannot do so with a DTensor's views."""
    return x.clone() if is_sharded(x) else x


def unpack_state(
    weight: InPlaceWeight, state: dict[str, Any], kept: dict[Tensor, dict[str, Any]]
) -> None:
    weight.g.detach().copy_(state["g"])
    weight.norm.copy_(state["v_norm"])
    if weight.copy is not None:
        # The state of a run in float32 has no copy; the weight itself is loaded with the model.
        weight.copy.detach().copy_(state.get("float32", weight.weight.detach()))
    kept[weight.g] = {k[2:]: v for k, v in state.items() if k.startswith("g.")}
    if len(weight.directions) == 1:
        own = {k: v for k, v in state.items() if not k.startswith("g.")}
        for key in ("g", "v_norm", "float32"):
            own.pop(key, None)
        kept[weight.directions[0]] = own
        return
    for i, direction in enumerate(weight.directions):
        prefix = f"block{i}."
        kept[direction] = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def state_by_parameter(
    groups: list[dict[str, Any]], state_dict: dict[str, Any]
) -> dict[nn.Parameter, dict[str, Any]]:
    """The saved state of each parameter, with torch's checks and words."""
    saved = state_dict["param_groups"]
    for argument, key in {"weight_decay_on": "weight_decay_on", "scale": "g_scale"}.items():
        ours = groups[0][key]
        theirs = saved[0].get(key, ours) if saved else ours
        if theirs != ours:
            raise ValueError(
                f"the loaded state dict is of an optimizer with {argument}={theirs!r}, this one "
                f"has {ours!r}; build it as it was when the state was saved"
            )
    if len(saved) != len(groups):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, expected {len(groups)}"
        )
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )
    keys = (key for group in saved for key in group["params"])
    params = (p for group in groups for p in group["params"])
    found = ((p, state_dict["state"].get(key)) for p, key in zip(params, keys, strict=True))
    return {p: state for p, state in found if state}


def check_state(weights: list[InPlaceWeight], saved: dict[Any, dict[str, Any]]) -> None:
    """Refuse the state of other weights before anything is changed."""
    expected = {weight.weight: weight for weight in weights}
    for p, state in saved.items():
        if (weight := expected.get(p)) is None:
            if "v_norm" in state:
                raise ValueError(
                    f"the state has g for a parameter of shape {tuple(p.shape)} that is not "
                    "normalized here; expected one of a WeightNormOptimizer with the same weights"
                )
            continue
        if "v_norm" not in state:
            raise ValueError(
                f"the state has no g for {weight.name}; expected one of a WeightNormOptimizer with "
                "the same weights. To start from a trained model, build the optimizer on it"
            )
        for key in ("g", "v_norm"):
            if state[key].shape != weight.g.shape:
                got, shape = tuple(state[key].shape), tuple(weight.g.shape)
                raise ValueError(f"{weight.name}: the state's {key} is {got}, expected {shape}")
