"""The sums of an epoch, on the device: adding to them does not wait for it, reading them does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Sums(dict[str, Tensor]):
    """Name → float64 scalar. One of them, ``count``, is what the others are divided by."""

    def add(self, amounts: Mapping[str, Tensor | float], device: torch.device) -> None:
        for name, amount in amounts.items():
            if name not in self:
                place = "cpu" if device.type == "mps" else device  # mps has no float64
                self[name] = torch.zeros((), dtype=torch.float64, device=place)
            self[name] += amount.detach() if isinstance(amount, Tensor) else amount

    @classmethod
    def of_rank(cls, stacked: Mapping[str, Tensor], rank: int, device: torch.device) -> Sums:
        """This rank's, out of those of all."""
        return cls({name: totals.flatten()[rank].to(device) for name, totals in stacked.items()})

    def cpu(self) -> dict[str, Tensor]:
        return {name: total.cpu() for name, total in self.items()}

    @property
    def finite(self) -> bool:
        return all(math.isfinite(total) for total in self.values())

    @property
    def means(self) -> dict[str, float]:
        """Each sum over the count, as far as it has come; empty without one."""
        if "count" not in self:
            return {}
        return {k: (v / self["count"]).item() for k, v in self.items() if k != "count"}


def stacked(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of all ranks, for a checkpoint: (ranks,) each."""
    return {name: torch.stack([sums[name] for sums in ranks]) for name in ranks[0]}
