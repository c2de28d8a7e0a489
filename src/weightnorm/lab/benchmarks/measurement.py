"""What a case gave: every sample, the ratios to the base, and how each goal fared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from weightnorm.lab.benchmarks.benchmark import Case, Setting
from weightnorm.lab.benchmarks.goals import Verdict, verdict
from weightnorm.lab.benchmarks.interleaved import interleaved
from weightnorm.lab.benchmarks.roofline import Roofline
from weightnorm.lab.benchmarks.statistics import Interval, interval, medians


@dataclass(frozen=True)
class Judged:
    """A goal and what came of it."""

    says: str
    limit: float
    value: Interval
    verdict: Verdict


@dataclass(frozen=True)
class Share:
    """How much of one of the machine's limits a peer reached."""

    peer: str
    limit: str
    value: float


@dataclass(frozen=True)
class Measurement:
    """A case, measured."""

    case: str
    base: str
    unit: str
    samples: dict[str, list[float]]
    ratios: dict[str, Interval]
    """To the base, for every other peer."""
    goals: tuple[Judged, ...]
    share: Share | None = None
    examples: int | None = None

    def row(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def measure(case: Case, setting: Setting, roofline: Roofline) -> Measurement:
    """All peers of a case, in turns."""
    budget = setting.budget if case.rounds is None else 0.0
    samples = interleaved(case.peers, case.rounds or setting.rounds, setting.least, budget)
    middles = medians(samples)
    goals = []
    for goal in case.goals:
        value = interval(goal.value(middles))
        goals.append(Judged(goal.says, goal.limit, value, verdict(value, goal.limit)))
    share = None
    if (work := case.work) is not None:
        taken = median(samples[work.peer])
        if work.limit in samples:
            reached = work.amount * median(samples[work.limit]) / taken
        else:
            reached = roofline.share(work.amount, work.limit, taken)
        share = Share(work.peer, work.limit, reached)
    others = [name for name in samples if name != case.base]
    return Measurement(
        case=case.name,
        base=case.base,
        unit=case.unit,
        samples=samples,
        ratios={name: interval(middles[name] / middles[case.base]) for name in others},
        goals=tuple(goals),
        share=share,
        examples=case.examples,
    )
