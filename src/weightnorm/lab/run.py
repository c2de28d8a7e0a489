"""What every experiment needs around its algorithm: folder, clock, checkpoints, resume, ranks.

    with Run("classify", config, PRESETS) as run:
        model = ...                                   # build, initialize
        run.restore(model=model, optimizer=optimizer) # load the latest checkpoint, if there is one
        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(data), config.batch_size):
                loss = ...                            # one training step on run.batch examples
                run.add(loss=loss, count=1)
            run.log(loss=run.mean("loss"))
        run.finish({...})

A run that was killed at any moment continues from its last checkpoint when the same command is
repeated, and ends with the same bits: the order of the data follows from seed and epoch, and a
checkpoint holds everything else (parameters, optimizer, random states, metrics).
"""

from __future__ import annotations

import io
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from weightnorm.files.atomic import write_atomically
from weightnorm.init_report import InitReport
from weightnorm.lab.config import RunConfig, completed, folder, scientific_fields
from weightnorm.lab.environment import (
    Ranks,
    environment,
    flushes_denormals,
    is_collective,
    pick_device,
    prepare_process,
    random_state,
    set_random_state,
)
from weightnorm.lab.errors import (
    ConfigError,
    Diverged,
    Interrupted,
    LabError,
    RecordError,
    RunError,
)
from weightnorm.lab.files import (
    load_state,
    lock_folder,
    previous,
    recover_state,
    remove_temporary,
    save_state,
)
from weightnorm.lab.progress import EpochProgress
from weightnorm.lab.records import Row, RunRecord, append_row, load_record, write_json, write_rows
from weightnorm.lab.weights import largest_norms

T = TypeVar("T")
LIVE_SECONDS = 0.5
"""Time between updates of the metrics on the screen; each synchronizes with the device."""


class Run:
    """Folder, clock, ranks and random state of one run, as a context manager.

    Args:
        experiment: name of the experiment.
        config: its config.
        presets: its presets, which decide the name of the folder.
        console: where progress is shown; standard error by default.
        results: names of the final metrics, which are recorded as null if the run diverges.
    """

    def __init__(
        self,
        experiment: str,
        config: RunConfig,
        presets: Mapping[str, RunConfig],
        console: Console | None = None,
        results: Sequence[str] = (),
    ) -> None:
        self.experiment, self.config, self.results = experiment, config, results
        self.console = console or Console(stderr=True)
        self.folder = folder(experiment, config, presets)
        self.checkpoint = self.folder / "checkpoint.pt"
        self.device = pick_device(config.device)
        self.ranks = Ranks()
        self.epoch = self.step = self._epochs = 0
        self.batch = 0
        """Examples in the current minibatch, over all ranks."""
        self.totals: dict[str, Tensor] = {}
        """Sums over the steps of the epoch; ``count`` is what the others are divided by."""
        self.metrics: list[Row] = []
        """The rows of metrics.jsonl."""
        self.stateful: dict[str, Any] = {}
        self.seconds = 0.0
        """Training time of the current epoch."""
        self._lock: IO[str] | None = None
        self._flushed = flushes_denormals()
        self._stop = self._savable = False
        self._handlers: dict[signal.Signals, Any] = {}

    # — entering and leaving —

    def __enter__(self) -> Run:
        try:
            self.ranks = Ranks.join(self.device, self.config.wait_seconds)
            if self.ranks.first:
                self._open_folder()
            self.ranks.gather()  # no rank reads it before it is locked
            for which in (signal.SIGINT, signal.SIGTERM):
                self._handlers[which] = signal.signal(which, self._on_signal)
            prepare_process()
            torch.manual_seed(self.config.seed)
        except BaseException as error:
            self._close()
            self._explain(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self._close()
        self._explain(error)

    def _explain(self, error: BaseException | None) -> None:
        """Raise a RunError with the way to continue, if a disk or another rank failed."""
        if is_collective(error):
            here = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
            first = str(error).splitlines()[0]
            reason = f"{here}: another rank died, hangs, or runs different code ({first})"
            way = "start all ranks again with"
        elif isinstance(error, OSError):
            reason, way = error.strerror or str(error), "correct this, then repeat"
        else:
            return
        message = f"{self.folder}: {reason}. Nothing already written is lost"
        raise RunError(f"{message}; {way} the same command to continue") from error

    def _open_folder(self) -> None:
        """Create and lock the folder, and check that it belongs to this config."""
        self._lock = lock_folder(self.folder)
        remove_temporary(self.folder)
        recover_state(self.checkpoint)
        try:
            self._refuse_other_settings(load_record(self.folder).config)
        except RecordError as error:
            if (self.folder / "result.json").exists():
                raise RunError(f"{error}; delete {self.folder} to run it again") from None
            # Nothing is lost: `restore` compares the config with that of the checkpoint.
            fields = scientific_fields(self.config)
            head = {"experiment": self.experiment, "preset": self.config.preset, "config": fields}
            write_json(self.folder / "config.json", head)

    def _refuse_other_settings(self, recorded: Mapping[str, Any]) -> None:
        fields, before = scientific_fields(self.config), completed(recorded, type(self.config))
        differing = [name for name, value in fields.items() if before[name] != value]
        if differing:
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({', '.join(differing)}); "
                "choose another --out folder, or delete this one"
            )

    def _close(self) -> None:
        for name in {"_progress", "_events"} & vars(self).keys():  # those that were used
            getattr(self, name).close()
        for which, handler in self._handlers.items():
            signal.signal(which, handler)
        self._handlers.clear()
        if self._lock is not None:
            self._lock.close()
        torch.set_flush_denormal(self._flushed)
        self.ranks.leave()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop or not self._savable:  # the second signal, or nothing to save yet
            raise KeyboardInterrupt
        self._stop = True

    # — resuming —

    @property
    def finished(self) -> RunRecord | None:
        """The record if this run has finished before. Raises Diverged if it has diverged."""
        record = load_record(self.folder)
        if record.diverged is not None:
            message = str(record.diverged.get("message", "the run diverged"))
            raise Diverged(f"{message}. Delete {self.folder} to run it again")
        if not record.finished:
            return None
        if self.ranks.first:
            self._print("this run had finished before; nothing is left to compute")
        return record

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def record_initialization(self, report: InitReport) -> None:
        """Write initialization.json: the layers and units that data-dependent initialization left
        as they were. Prints a line if there are any."""
        path = self.folder / "initialization.json"
        if not self.ranks.first or path.exists():  # when resuming it is done again and overwritten
            return
        dead = {name: len(units) for name, units in report.dead.items()}
        skipped = {layer.name: layer.skipped for layer in report.skipped}
        write_json(path, {"layers": len(report.done), "dead_units": dead, "skipped": skipped})
        if dead or skipped:
            parts = [f"{n} constant units of {name}" for name, n in dead.items()]
            parts += [f"{name} ({reason})" for name, reason in skipped.items()]
            self._print(f"not initialized on data: {', '.join(parts)}")

    def seed_by_rank(self) -> None:
        """Let ranks, which start with the same weights, draw different noise from here on."""
        if self.ranks.rank:
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank)

    def initial_examples(self, examples: Tensor, count: int) -> Tensor:
        """Return this rank's part of `count` random examples for data-dependent initialization.

        From here on the ranks draw different noise.
        """
        chosen = self.ranks.share(torch.randperm(len(examples))[:count])
        self.seed_by_rank()
        return examples[chosen.to(self.device)]

    def restore(self, **stateful: Any) -> bool:
        """Register what a checkpoint holds, and load the latest one. False if there is none.

        Args:
            stateful: objects with `state_dict` and `load_state_dict`.
        """
        self.stateful = stateful
        found = self.checkpoint.exists() or previous(self.checkpoint).exists()
        if found:
            self._load()
        else:
            self.seed_by_rank()
        places = self.ranks.gather((self.epoch, self.step))
        if len({*places}) > 1:  # a folder that ranks do not share would mix two networks
            raise RunError(
                f"the ranks read different checkpoints from {self.folder}, of (epoch, step) "
                f"{places}; all of them need the same folder, readable and up to date"
            )
        self._savable = True
        if self.ranks.first:
            session = {**environment(self.device, self.ranks.world), "epoch": self.epoch}
            append_row(self.folder / "sessions.jsonl", session)
            # Drops rows that are later than the checkpoint, and repairs damaged ones.
            write_rows(self.folder / "metrics.jsonl", self.metrics)
        return found

    def _load(self) -> None:
        try:
            state = load_state(self.checkpoint)
            self._refuse_other_settings(state["config"])
            if (ranks := len(state["random"])) != self.ranks.world:
                message = f"{self.folder} was started on {ranks} ranks; got {self.ranks.world}"
                raise ConfigError(message)
            for name, thing in self.stateful.items():
                thing.load_state_dict(state["states"][name])
            self.epoch, self.step, self.metrics = state["epoch"], state["step"], state["metrics"]
            totals = state["totals"][self.ranks.rank]
            self.totals = {name: total.to(self._sums_device) for name, total in totals.items()}
            self.seconds = state["seconds"]
            set_random_state(state["random"][self.ranks.rank], self.device)
        except LabError:  # of other settings, or of data beside the checkpoint
            raise
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            raise RunError(
                f"{self.checkpoint} is damaged or was written by another version of the experiment "
                f"({str(error).splitlines()[0]}); delete the folder to start over"
            ) from error

    def save(self, path: Path | None = None) -> None:
        """Write a checkpoint, by default to ``checkpoint.pt``."""
        mine = random_state(self.device), {k: v.cpu() for k, v in self.totals.items()}
        parts = self.ranks.gather(mine)
        if self.ranks.first:
            state = {
                "config": scientific_fields(self.config),
                "epoch": self.epoch,
                "step": self.step,
                "metrics": self.metrics,
                "totals": [totals for _, totals in parts],
                "seconds": self.seconds,
                "random": [random for random, _ in parts],
                "states": {name: thing.state_dict() for name, thing in self.stateful.items()},
            }
            save_state(path or self.checkpoint, state, keep_previous=path is None)

    # — the loop —

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the remaining epochs, with a checkpoint after each."""
        self._epochs = count
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1
            self.step, self.totals, self.seconds = 0, {}, 0.0
            self.save()
            self._stop_if(*self.ranks.any(self._stop))

    def batches(self, examples: int, size: int) -> Iterator[Tensor]:
        """Iterate over this rank's rows of the epoch's remaining minibatches.

        The order is a new permutation in every epoch.
        """
        seed = (self.config.seed * 1_000_003 + self.epoch) % 2**63
        order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
        # On the device: an index on the CPU would make every step wait for a copy.
        for rows in self._remaining(order.to(self.device).split(size)):
            self.batch = len(rows)
            yield self.ranks.share(rows)

    def steps(self, count: int, save_every: float = math.inf) -> Iterator[int]:
        """Iterate over the epoch's remaining steps, with a checkpoint every `save_every` steps."""
        return self._remaining(range(count), save_every)

    def _remaining(self, steps: Sequence[T], save_every: float = math.inf) -> Iterator[T]:
        """Iterate over the remaining steps; show progress, save, and stop between them.

        Not after the last one: an epoch's evaluation belongs to it, and `epochs` saves after that.
        """
        self._progress.start_epoch(self.epoch, len(steps), self.step)
        began = saved = shown = time.monotonic()
        saved_at = self.step
        for step in steps[self.step :]:
            yield step
            self.step += 1
            now = time.monotonic()
            self.seconds, began = self.seconds + now - began, now
            live = now - shown > LIVE_SECONDS
            means = self._means if live else {}
            text = "  ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in means.items())
            self._progress.step(self.step, text)
            shown = now if live else shown
            due = now - saved > self.config.checkpoint_seconds or self.step - saved_at >= save_every
            # Reading the sums synchronizes with an accelerator, so not at every step.
            broken = (live or due or self.device.type == "cpu") and not self._finite
            stop, due, broken = self.ranks.any(self._stop, due, broken)
            if broken:
                self._diverge()
            if self.step == len(steps):
                return
            if due:
                self.save()
                saved = began = time.monotonic()  # saving is no part of training's time
                saved_at = self.step
            self._stop_if(stop)

    @torch.no_grad()
    def evaluate(self, sums: Callable[..., Tensor], size: int, *data: Tensor) -> list[float]:
        """Return means over all examples. `sums` adds up the numbers of its part of a batch.

        Args:
            sums: called with this rank's part of every batch of the data: (numbers,).
            size: examples in a batch, over all ranks.
            data: tensors with one row for each example.
        """
        totals = []
        for batch in zip(*(x.split(size) for x in data), strict=True):
            self.batch = len(batch[0])
            totals.append(sums(*(self.ranks.share(x) for x in batch)))
        total = torch.stack(totals).cpu().double().sum(0)  # one read from the device
        means: list[float] = (self.ranks.sum(total) / len(data[0])).tolist()
        return means

    def parts(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Iterate over work that follows the last epoch, with progress.

        With one rank, a signal stops it between two items; the same command then repeats all of it.
        """
        self._progress.start_part(name, len(items))
        for done, item in enumerate(items, 1):
            yield item
            self._progress.part(done)
            if self._stop and self.ranks.world == 1:  # ranks may have other numbers of items
                raise Interrupted(str(self.folder))

    def add(self, **amounts: Tensor | float) -> None:
        """Add to the epoch's sums, without synchronizing with the device."""
        for name, amount in amounts.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros((), dtype=torch.float64, device=self._sums_device)
            self.totals[name] += amount.detach() if isinstance(amount, Tensor) else amount

    @property
    def _means(self) -> dict[str, float]:
        """This rank's sums divided by the count; empty without one. Synchronizes."""
        if "count" not in self.totals:
            return {}
        count = self.totals["count"]
        return {name: (x / count).item() for name, x in self.totals.items() if name != "count"}

    @property
    def _finite(self) -> bool:
        """Whether every sum is finite. Synchronizes with the device."""
        return all(math.isfinite(total) for total in self.totals.values())

    @property
    def _sums_device(self) -> torch.device:
        return torch.device("cpu") if self.device.type == "mps" else self.device  # no float64

    def mean(self, name: str) -> float:
        """Return the epoch's sum divided by the count, over steps and ranks."""
        total, count = self.ranks.sum(torch.stack([self.totals[name], self.totals["count"]]))
        return float(total / count)

    def log(self, **metrics: Tensor | float) -> None:
        """Record an epoch: a line of metrics.jsonl, TensorBoard, and a row on the screen."""
        if any(self.ranks.any(not self._finite)):
            self._diverge()
        numbers = {name: _number(value) for name, value in metrics.items()}
        row = {"epoch": self.epoch + 1, **numbers, "seconds": round(self.seconds, 3)}
        self.metrics.append(row)
        if self.ranks.first:
            append_row(self.folder / "metrics.jsonl", row)
            for name, value in row.items():
                if name != "epoch":
                    self._events.add_scalar(name, value, self.epoch + 1)
            self._events.flush()
        self._progress.end_epoch(numbers)

    @cached_property
    def _progress(self) -> EpochProgress:
        console = self.console if self.ranks.first else Console(quiet=True)
        return EpochProgress(console, f"{self.experiment}  {self.folder}", self._epochs)

    @cached_property
    def _events(self) -> Any:
        """The TensorBoard writer; the events of epochs that are repeated are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder / "events"), purge_step=self.epoch + 1)

    def save_arrays(self, name: str, **arrays: Tensor) -> None:
        """Write arrays, such as samples, to ``name.npz`` beside the record for the report."""
        if self.ranks.first:
            memory = io.BytesIO()
            plain: dict[str, Any] = {key: x.cpu().numpy() for key, x in arrays.items()}
            np.savez_compressed(memory, **plain)
            write_atomically(self.folder / f"{name}.npz", memory.getvalue())

    @property
    def last(self) -> Row:
        """The latest row of metrics."""
        return self.metrics[-1]

    def finish(self, result: Mapping[str, Tensor | float]) -> RunRecord:
        """Record the final metrics. Raises Diverged if one of them is not finite."""
        numbers = {name: _number(value) for name, value in result.items()}
        broken = [f"{name} {x:g}" for name, x in numbers.items() if not math.isfinite(x)]
        values = ", ".join(broken)
        diverged = f"the result is not finite after epoch {self.epoch}: {values}" if broken else ""
        self._end(numbers, diverged)
        if diverged:
            raise Diverged(diverged)
        return load_record(self.folder)

    def _end(self, result: Mapping[str, float | None], diverged: str) -> None:
        """Write result.json and delete what only resuming needs."""
        if self.ranks.first:
            seconds = sum(row["seconds"] for row in self.metrics) + self.seconds
            outcome: Row = {**result, "seconds": round(seconds, 3)}
            if diverged:
                at = {"epoch": len(self.metrics) + bool(self.step), "step": self.step}
                outcome["diverged"] = {**at, "message": diverged}
            previous(self.checkpoint).unlink(missing_ok=True)
            write_json(self.folder / "result.json", outcome)
        self.ranks.gather()

    def _stop_if(self, asked: bool) -> None:
        if asked:
            self.save()
            self.ranks.gather()  # written by the first rank
            raise Interrupted(str(self.folder))

    def _diverge(self) -> NoReturn:
        """Record that the epoch's sums are not finite; save the state beside the checkpoint."""
        state = self.folder / "diverged.pt"
        self.save(state)
        sums = ", ".join(f"{name} {float(value):g}" for name, value in self.totals.items())
        norms = largest_norms(self.stateful.get("model"))
        message = (
            f"diverged at epoch {self.epoch + 1}, step {self.step}: {sums}.\n"
            f"The weights with the largest norm of a unit: {norms}.\n"
            f"The state is in {state}. A smaller --learning-rate usually helps"
        )
        self._end(dict.fromkeys(self.results), message)
        raise Diverged(message)


def _number(value: Tensor | float) -> float:
    """Convert a metric to a Python number; a tensor or array must have one element."""
    return value if isinstance(value, int) else float(value)
