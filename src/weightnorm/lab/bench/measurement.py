"""Measures a case: samples, ratios to the base, goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from weightnorm.lab.bench.benchmark import Case, Settings, Summary
from weightnorm.lab.bench.goals import Goal, Verdict, verdict
from weightnorm.lab.bench.roofline import Roofline
from weightnorm.lab.bench.statistics import estimate, ratio_interval
from weightnorm.lab.interleaved import OnRound, Samples, interleaved
from weightnorm.lab.statistics import Interval


@dataclass(frozen=True)
class PeerResult:
    """The measurement of one peer."""

    median: float
    """In the case's unit, per call."""
    value: float
    """Ratio to the base; 1 for the base itself."""
    low: float
    high: float
    noise: bool = False
    """The peer does at least the base's work and measured faster: by more than the interval, or by
    more than the precision. The ratio is not a result and must not be printed as one."""


@dataclass(frozen=True)
class GoalResult:
    """A goal and the value that was measured."""

    goal: str
    limit: float
    value: float
    low: float
    high: float
    verdict: Verdict
    met: bool


@dataclass(frozen=True)
class Share:
    """Which share of a limit of the machine a peer reached."""

    peer: str
    limit: str
    value: float


@dataclass(frozen=True)
class Measurement:
    """The measurement of a case, as it is recorded."""

    case: str
    base: str
    unit: str
    rounds: int
    results: dict[str, PeerResult]
    goals: tuple[GoalResult, ...]
    samples: Samples
    share: Share | None = None
    examples: int | None = None
    summary: tuple[Summary, ...] = ()

    def row(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def measure(
    case: Case,
    settings: Settings,
    roofline: Roofline,
    on_round: OnRound = lambda round, rounds: None,
) -> Measurement:
    """Measure the peers of a case in alternation until the ratios are precise or time is up."""
    samples = interleaved(
        case.peers,
        case.rounds or settings.rounds,
        shortest=settings.shortest,
        most=case.rounds or settings.size(settings.most, settings.rounds),
        seconds=settings.seconds if case.summary else settings.seconds / 10,
        done=lambda samples: is_precise(samples, case.base, settings.precision),
        on_round=on_round,
    )
    results = {peer: peer_result(case, samples, peer, settings.precision) for peer in samples}
    return Measurement(
        case=case.name,
        base=case.base,
        unit=case.unit,
        rounds=len(samples[case.base]),
        results=results,
        goals=tuple(goal_result(goal, samples, results) for goal in case.goals),
        samples=samples,
        share=_share(case, samples, roofline),
        examples=case.examples,
        summary=case.summary,
    )


def is_precise(samples: Samples, base: str, precision: float) -> bool:
    """Whether the interval of every ratio to the base is within ± precision, relative to ratios
    above 1 and absolute for those below."""
    intervals = (ratio_interval(samples, peer, base) for peer in samples if peer != base)
    return all(x.half_width <= precision * max(1.0, x.value) for x in intervals)


def peer_result(case: Case, samples: Samples, peer: str, precision: float) -> PeerResult:
    """The ratio of a peer to the base, and whether it can only be noise."""
    ratio = ratio_interval(samples, peer, case.base)
    faster = ratio.high < 1 or ratio.value < 1 - precision
    noise = peer in case.at_least_base and faster
    return PeerResult(median(samples[peer]), *ratio, noise=noise)


def goal_result(goal: Goal, samples: Samples, results: dict[str, PeerResult]) -> GoalResult:
    """The value of a goal; undecided if a peer's ratio can only be noise."""
    value: Interval = estimate(samples, goal.peers, goal.value)
    noise = any(results[peer].noise for peer in goal.peers)
    found: Verdict = "within noise" if noise else verdict(value, goal.limit)
    return GoalResult(goal.text, goal.limit, *value, verdict=found, met=found == "met")


def _share(case: Case, samples: Samples, roofline: Roofline) -> Share | None:
    if (work := case.work) is None:
        return None
    seconds: float = median(samples[work.peer])
    if work.limit in samples:
        others: Sequence[float] = samples[work.limit]
        return Share(work.peer, work.limit, work.amount * median(others) / seconds)
    return Share(work.peer, work.limit, roofline.share(work.amount, work.limit, seconds))
