"""One run: its folder, its clock, its place in time. Not the algorithm.

An experiment reads top to bottom and calls on a Run for the rest:

    with Run("classify", config, PRESETS) as run:
        model = ...                                   # build, initialize
        run.restore(model=model, optimizer=optimizer) # go back to where a killed run was
        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(data), config.batch_size):
                loss = ...                            # one training step on run.batch examples
                run.add(loss=loss, count=1)
            run.log(loss=run.total("loss") / run.total("count"))
        run.finish({...})

Killed at any moment, the same command continues from the last checkpoint and ends with the same
bits: the order of the data follows from seed and epoch, and a checkpoint holds everything else
(parameters, optimizer, random states, the epoch's sums so far).
"""

from __future__ import annotations

import fcntl
import io
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from weightnorm.distributed import RankLost
from weightnorm.lab.errors import ConfigError, Interrupted, RunError
from weightnorm.lab.malloc import keep_freed_memory
from weightnorm.lab.runs.checkpoints import (
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from weightnorm.lab.runs.config import RunConfig, folder, recorded, what
from weightnorm.lab.runs.environment import environment, pick_device
from weightnorm.lab.runs.epoch_metrics import Sums, stacked
from weightnorm.lab.runs.failure import longest
from weightnorm.lab.runs.progress import Reporter, Silent, reporter
from weightnorm.lab.runs.ranks import Ranks
from weightnorm.lab.runs.records import (
    RunRecord,
    append_row,
    keep_rows,
    load_record,
    read_rows,
    write_atomically,
    write_json,
)

T = TypeVar("T")
LIVE_SECONDS = 0.5
"""How often the live metrics are read off the device; each reading waits for it."""


class Run:
    """The folder, clock, ranks and random state of one run, as a context."""

    def __init__(
        self,
        experiment: str,
        config: RunConfig,
        presets: Mapping[str, RunConfig],
        console: Console | None = None,
    ) -> None:
        self.experiment, self.config = experiment, config
        self.console = console or Console(stderr=True)
        self.folder = folder(experiment, config, presets)
        self.device = pick_device(config.device)
        self.ranks = Ranks()
        self.epoch = self.step = self.rows = 0
        self.batch = 0
        """Examples of the step at hand, over all ranks."""
        self.totals = Sums()
        self.stateful: dict[str, Any] = {}
        self.seconds = 0.0
        self._reporter: Reporter = Silent()
        self._lock: IO[str] | None = None
        self._events: Any = None
        self._stop = self._savable = False
        self._handlers: dict[signal.Signals, Any] = {}

    # — entering and leaving —

    def __enter__(self) -> Run:
        try:
            self.ranks = Ranks.join(self.device, self.config.wait_seconds)
            if self.ranks.first:
                self._open_folder()
            self.ranks.gather(None, "the folder")  # there, and ours, before any rank goes on
            for which in (signal.SIGINT, signal.SIGTERM):
                self._handlers[which] = signal.signal(which, self._on_signal)
            keep_freed_memory()
            torch.manual_seed(self.config.seed)
        except BaseException as error:
            self._close()
            self._explain(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._close()
        self._explain(error)

    def _explain(self, error: BaseException | None) -> None:
        """Say how to go on after what is not the run's own fault."""
        ways = {OSError: "make room, then run", RankLost: "start all ranks again with"}
        for kind, way in ways.items():
            if isinstance(error, kind):
                what = getattr(error, "strerror", None) or error
                lost = f"{self.folder}: {what}. Nothing already written is lost"
                raise RunError(f"{lost}; {way} the same command to go on") from error

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise RunError(f"cannot write to {self.folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is running in {self.folder}") from None
        head = {
            "experiment": self.experiment,
            "preset": self.config.preset,
            "config": what(self.config),
        }
        if not (self.folder / "config.json").exists():
            write_json(self.folder / "config.json", head)
            return
        before, now = load_record(self.folder).config, recorded(self.config)
        differing = [key for key in now if before.get(key) != now[key]]
        if differing:
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({', '.join(differing)}); "
                "choose another --runs folder, or delete this one"
            )

    def _close(self) -> None:
        self._reporter.close()
        if self._events is not None:
            self._events.close()
        for which, handler in self._handlers.items():
            signal.signal(which, handler)
        self._handlers.clear()
        if self._lock is not None:
            self._lock.close()
        self.ranks.leave()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop or not self._savable:  # nothing to save yet, or no patience
            raise KeyboardInterrupt
        self._stop = True

    # — resuming —

    @property
    def finished(self) -> RunRecord | None:
        """The record, if this very run has been finished before."""
        record = load_record(self.folder)
        return record if record.finished else None

    def restore(self, **stateful: Any) -> bool:
        """Name what a checkpoint holds, and go back to the last one if there is one."""
        self.stateful = stateful
        state = load_checkpoint(self.folder / "checkpoint.pt")
        if state is not None:
            if len(state["random"]) != self.ranks.world:
                raise ConfigError(
                    f"{self.folder} was begun on {len(state['random'])} ranks; "
                    f"this is {self.ranks.world}"
                )
            for name, thing in stateful.items():
                thing.load_state_dict(state["states"][name])
            self.epoch, self.step, self.rows = state["epoch"], state["step"], state["rows"]
            self.totals = Sums.of_rank(state["totals"], self.ranks.rank, self.device)
            self.seconds = state["seconds"]
            set_random_state(state["random"][self.ranks.rank])
        elif self.ranks.rank:  # all ranks begin with the same weights, but draw their own noise
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank)
        self._savable = True
        if self.ranks.first:
            append_row(
                self.folder / "sessions.jsonl",
                {**environment(self.device, self.ranks.world), "epoch": self.epoch},
            )
            if state is not None or read_rows(self.folder / "metrics.jsonl"):
                keep_rows(self.folder / "metrics.jsonl", self.rows)
        return state is not None

    def save(self, path: Path | None = None) -> None:
        """Write a checkpoint; elsewhere than in its usual place if told so."""
        parts = self.ranks.gather((random_state(), self.totals.cpu()), "parts of a checkpoint")
        if self.ranks.first:
            state = {
                "epoch": self.epoch,
                "step": self.step,
                "rows": self.rows,
                "totals": stacked([totals for _, totals in parts]),
                "seconds": self.seconds,
                "random": [random for random, _ in parts],
                "states": {name: thing.state_dict() for name, thing in self.stateful.items()},
            }
            save_checkpoint(path or self.folder / "checkpoint.pt", state)

    # — the loop —

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs still to do."""
        if self.ranks.first:
            title = f"{self.experiment}  {self.folder}"
            self._reporter = reporter(self.console, title, count)
            self._events = _events(self.folder, self.epoch)
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1
            self.step, self.totals, self.seconds = 0, Sums(), 0.0
            self.save()
            self._stop_if(*self.ranks.any(self._stop))

    def batches(self, examples: int, size: int) -> Iterator[Tensor]:
        """This rank's rows of each minibatch still to do in this epoch, reshuffled every epoch."""
        seed = (self.config.seed * 1_000_003 + self.epoch) % 2**63
        order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
        # On the device: an index on the CPU would make every step wait for a copy.
        for rows in self._watched(order.to(self.device).split(size)):
            self.batch = len(rows)
            yield self.ranks.share(rows)

    def steps(self, count: int, save_every: float = math.inf) -> Iterator[int]:
        """The steps still to do in this epoch, where it is not over examples."""
        return self._watched(range(count), save_every)

    def _watched(self, steps: Sequence[T], save_every: float = math.inf) -> Iterator[T]:
        """What is left of an epoch's steps; in between, progress, checkpoints, the end if asked."""
        self._reporter.epoch(self.epoch, len(steps), self.step)
        began = saved = shown = time.monotonic()
        before, saved_at = self.seconds, self.step
        for step in steps[self.step :]:
            yield step
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - began
            live = now - shown > LIVE_SECONDS
            self._reporter.step(self.step, _shown(self.totals.means) if live else "")
            shown = now if live else shown
            due = now - saved > self.config.checkpoint_seconds or self.step - saved_at >= save_every
            # On an accelerator looking at the sums waits for it, so not at every step.
            broken = (live or due or self.device.type == "cpu") and not self.totals.finite
            stop, due, broken = self.ranks.any(self._stop, due, broken)
            if broken:
                self._fail()
            if due:
                self.save()
                saved, saved_at = time.monotonic(), self.step
            self._stop_if(stop)

    def add(self, **amounts: Tensor | float) -> None:
        """Add to this epoch's sums, on the device and without waiting for it."""
        self.totals.add(amounts, self.device)

    def total(self, name: str) -> float:
        """This epoch's sum over steps and ranks."""
        return self.ranks.sum(self.totals[name].clone(), f"the epoch's sum of {name}").item()

    def log(self, **metrics: float) -> None:
        """Record an epoch: a line of metrics.jsonl, TensorBoard, and the screen."""
        if any(self.ranks.any(not self.totals.finite)):
            self._fail()
        row = {"epoch": self.epoch + 1, **metrics, "seconds": round(self.seconds, 3)}
        self.rows += 1
        if self.ranks.first:
            append_row(self.folder / "metrics.jsonl", row)
            for name, value in row.items():
                if name != "epoch":
                    self._events.add_scalar(name, value, self.epoch + 1)
            self._events.flush()
            self._reporter.row(_shown(metrics))

    def keep(self, name: str, **arrays: Tensor) -> None:
        """Write arrays (samples, say) beside the record as ``name.npz``, for the report to draw."""
        if self.ranks.first:
            memory = io.BytesIO()
            plain: dict[str, Any] = {key: x.cpu().numpy() for key, x in arrays.items()}
            np.savez_compressed(memory, **plain)
            write_atomically(self.folder / f"{name}.npz", memory.getvalue())

    @property
    def last(self) -> dict[str, Any]:
        """The newest row of metrics."""
        return read_rows(self.folder / "metrics.jsonl")[-1]

    def finish(self, result: dict[str, Any]) -> RunRecord:
        """Record the outcome. After this the run is never run again."""
        if self.ranks.first:
            seconds = sum(row["seconds"] for row in read_rows(self.folder / "metrics.jsonl"))
            write_json(self.folder / "result.json", {**result, "seconds": round(seconds, 3)})
        self.ranks.gather(None, "the result")
        return load_record(self.folder)

    def _stop_if(self, asked: bool) -> None:
        if asked:
            self.save()
            raise Interrupted(str(self.folder))

    def _fail(self) -> None:
        """The sums are not finite: keep the state as it is, beside the last good checkpoint."""
        state = self.folder / "failed.pt"
        self.save(state)
        sums = ", ".join(f"{name} {float(value):g}" for name, value in self.totals.items())
        weights = longest(self.stateful.get("model"))
        raise RunError(
            f"not finite at epoch {self.epoch + 1}, step {self.step}: {sums}.\n"
            f"The longest weights, each the norm of its longest unit: {weights}.\n"
            f"The state is in {state}; the checkpoint from before it is kept. "
            "A smaller --learning-rate is the usual way out"
        )


def _shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


def _events(folder: Path, epoch: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "events"), purge_step=epoch + 1)
