"""Sums over the steps of an epoch, kept on the device: adding to them does not synchronize."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class EpochMetrics(dict[str, Tensor]):
    """Name → sum, a float64 scalar. The other sums are divided by the one called ``count``."""

    def add(self, amounts: Mapping[str, Tensor | float], device: torch.device) -> None:
        """Add each amount to its sum, which starts at 0."""
        for name, amount in amounts.items():
            if name not in self:
                place = "cpu" if device.type == "mps" else device  # mps has no float64
                self[name] = torch.zeros((), dtype=torch.float64, device=place)
            self[name] += amount.detach() if isinstance(amount, Tensor) else amount

    @classmethod
    def of_rank(
        cls, stacked: Mapping[str, Tensor], rank: int, device: torch.device
    ) -> EpochMetrics:
        """Select one rank's sums from the output of `stack_ranks`."""
        return cls({name: sums.flatten()[rank].to(device) for name, sums in stacked.items()})

    def cpu(self) -> dict[str, Tensor]:
        """Copy the sums to the CPU."""
        return {name: total.cpu() for name, total in self.items()}

    @property
    def finite(self) -> bool:
        """Whether every sum is finite. Synchronizes with the device."""
        return all(math.isfinite(total) for total in self.values())

    @property
    def means(self) -> dict[str, float]:
        """Each sum divided by the count; empty without a count. Synchronizes with the device."""
        if "count" not in self:
            return {}
        return {k: (v / self["count"]).item() for k, v in self.items() if k != "count"}


def stack_ranks(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the sums of all ranks for a checkpoint: name → (ranks,)."""
    return {name: torch.stack([sums[name] for sums in ranks]) for name in ranks[0]}
