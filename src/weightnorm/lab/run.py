"""What every experiment needs around its algorithm: folder, clock, checkpoints, resume, ranks.

    with Run("classify", config, PRESETS) as run:
        model = ...                                   # build, initialize
        run.restore(model=model, optimizer=optimizer) # load the latest checkpoint, if there is one
        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(data), config.batch_size):
                loss = ...                            # one training step on run.batch examples
                run.add(loss=loss, count=1)
            run.log(loss=run.total("loss") / run.total("count"))
        run.finish({...})

A run that was killed at any moment continues from its last checkpoint when the same command is
repeated, and ends with the same bits: the order of the data follows from seed and epoch, and a
checkpoint holds everything else (parameters, optimizer, random states, metrics).

Note [digest in the zip comment]
    torch writes a zip archive but does not check its CRCs when it reads one, so a flipped bit would
    be loaded as another number. The SHA-256 digest of the file is appended as the archive's
    comment: `torch.load` still reads the file, and the digest is replaced together with the data.
"""

from __future__ import annotations

import io
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from weightnorm.files.atomic import atomic_writer, write_atomically
from weightnorm.init_report import InitReport
from weightnorm.lab.config import RunConfig, completed, folder, scientific_fields
from weightnorm.lab.environment import (
    RankLost,
    Ranks,
    environment,
    flushes_denormals,
    is_collective,
    pick_device,
    prepare_process,
)
from weightnorm.lab.errors import (
    CheckpointError,
    ConfigError,
    Diverged,
    Interrupted,
    LabError,
    RecordError,
    RunError,
)
from weightnorm.lab.files import lock_folder, remove_temporary
from weightnorm.lab.progress import EpochProgress
from weightnorm.lab.records import (
    Row,
    RunRecord,
    append_row,
    load_record,
    write_json,
    write_rows,
)
from weightnorm.lab.weights import weight_rows

T = TypeVar("T")
Sums = dict[str, Tensor]
"""Name → sum over the steps of an epoch; the others are divided by the one called ``count``."""
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
        self.epoch = self.step = 0
        self.batch = 0
        """Examples in the current minibatch, over all ranks."""
        self.totals: Sums = {}
        self.metrics: list[Row] = []
        """The rows of metrics.jsonl."""
        self.stateful: dict[str, Any] = {}
        self.seconds = 0.0
        """Training time of the current epoch."""
        self._progress: EpochProgress | None = None
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
            self.ranks.gather(None, "the folder")  # no rank reads it before it is locked
            for which in (signal.SIGINT, signal.SIGTERM):
                self._handlers[which] = signal.signal(which, self._on_signal)
            prepare_process()
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
        """Raise a RunError with the way to continue, if a disk or another rank failed."""
        if error is not None and is_collective(error):  # one of the library's
            error = self.ranks.lost(error, "statistics of a batch")
        advice = {OSError: "correct this, then repeat", RankLost: "start all ranks again with"}
        for kind, way in advice.items():
            if isinstance(error, kind):
                reason = getattr(error, "strerror", None) or error
                message = f"{self.folder}: {reason}. Nothing already written is lost"
                raise RunError(f"{message}; {way} the same command to continue") from error

    def _open_folder(self) -> None:
        """Create and lock the folder, and check that it belongs to this config."""
        self._lock = lock_folder(self.folder)
        remove_temporary(self.folder)
        recover_checkpoint(self.checkpoint)
        self._check_config()

    def _check_config(self) -> None:
        """Compare config.json with the config; write it if no run has finished in the folder."""
        fields = scientific_fields(self.config)
        try:
            self._refuse_other_settings(load_record(self.folder).config)
            if (self.folder / "result.json").exists():
                previous(self.checkpoint).unlink(missing_ok=True)
        except RecordError as error:
            if (self.folder / "result.json").exists():
                raise RunError(f"{error}; delete {self.folder} to run it again") from None
            # Nothing is lost: `restore` compares the config with that of the checkpoint.
            head = {"experiment": self.experiment, "preset": self.config.preset, "config": fields}
            write_json(self.folder / "config.json", head)

    def _refuse_other_settings(self, recorded: Mapping[str, Any]) -> None:
        fields, before = scientific_fields(self.config), completed(recorded, type(self.config))
        differing = [name for name, value in fields.items() if before[name] != value]
        if differing:
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({', '.join(differing)}); "
                "choose another --runs folder, or delete this one"
            )

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if "_events" in self.__dict__:
            self._events.close()
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
        dead = {name: len(units) for name, units in report.dead.items()}
        skipped = {layer.name: layer.skipped for layer in report.skipped}
        path = self.folder / "initialization.json"
        if not self.ranks.first or path.exists():  # when resuming it is done again and overwritten
            return
        write_json(path, {"layers": len(report.done), "dead_units": dead, "skipped": skipped})
        if dead or skipped:
            parts = [f"{n} constant units of {name}" for name, n in dead.items()]
            parts += [f"{name} ({reason})" for name, reason in skipped.items()]
            self._print(f"not initialized on data: {', '.join(parts)}")

    def seed_by_rank(self) -> None:
        """Let ranks, which start with the same weights, draw different noise from here on."""
        if self.ranks.rank:
            torch.manual_seed(self.config.seed + 1_000_003 * self.ranks.rank)

    def restore(self, **stateful: Any) -> bool:
        """Register what a checkpoint holds, and load the latest one. False if there is none.

        Args:
            stateful: objects with `state_dict` and `load_state_dict`.
        """
        self.stateful = stateful
        state = load_checkpoint(self.checkpoint)
        if state is not None:
            self._load(state)
        else:
            self.seed_by_rank()
        self._refuse_different_checkpoints()
        self._savable = True
        if self.ranks.first:
            session = {**environment(self.device, self.ranks.world), "epoch": self.epoch}
            append_row(self.folder / "sessions.jsonl", session)
            # Drops rows that are later than the checkpoint, and repairs damaged ones.
            write_rows(self.folder / "metrics.jsonl", self.metrics)
        return state is not None

    def _refuse_different_checkpoints(self) -> None:
        """Ranks read by themselves: a folder that they do not share would mix two networks."""
        places = self.ranks.gather((self.epoch, self.step), "the place in training")
        if len({*places}) > 1:
            read = "; ".join(f"rank {i}: epoch {e}, step {s}" for i, (e, s) in enumerate(places))
            raise CheckpointError(
                f"the ranks read different checkpoints from {self.folder} ({read}); all of them "
                "need the same folder, readable and up to date"
            )

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self._refuse_other_settings(state["config"])
            if len(state["random"]) != self.ranks.world:
                raise ConfigError(
                    f"{self.folder} was started on {len(state['random'])} ranks; "
                    f"got {self.ranks.world}"
                )
            for name, thing in self.stateful.items():
                thing.load_state_dict(state["states"][name])
            self.epoch, self.step, self.metrics = state["epoch"], state["step"], state["metrics"]
            totals = state["totals"][self.ranks.rank]
            self.totals = {name: total.to(self._sums_device) for name, total in totals.items()}
            self.seconds = state["seconds"]
            set_random_state(state["random"][self.ranks.rank], self.device)
        except LabError:
            raise
        except (KeyError, RuntimeError) as error:  # what load_state_dict raises
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{self.checkpoint} was written by another version of the experiment ({reason}); "
                "delete the folder to start over"
            ) from error

    def save(self, path: Path | None = None) -> None:
        """Write a checkpoint, by default to ``checkpoint.pt``."""
        mine = random_state(self.device), {k: v.cpu() for k, v in self.totals.items()}
        parts = self.ranks.gather(mine, "parts of a checkpoint")
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
            save_checkpoint(path or self.checkpoint, state)

    # — the loop —

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the remaining epochs, with a checkpoint after each."""
        console = self.console if self.ranks.first else Console(quiet=True)
        self._progress = EpochProgress(console, f"{self.experiment}  {self.folder}", count)
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
        if self._progress is not None:
            self._progress.start_epoch(self.epoch, len(steps), self.step)
        began = saved = shown = time.monotonic()
        saved_at = self.step
        for step in steps[self.step :]:
            yield step
            self.step += 1
            now = time.monotonic()
            self.seconds, began = self.seconds + now - began, now
            live = now - shown > LIVE_SECONDS
            if self._progress is not None:
                self._progress.step(self.step, _text(self.means) if live else "")
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

    def parts(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Iterate over work that follows the last epoch, with progress.

        With one rank, a signal stops it between two items; the same command then repeats all of it.
        """
        if self._progress is not None:
            self._progress.start_part(name, len(items))
        for done, item in enumerate(items, 1):
            yield item
            if self._progress is not None:
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
    def means(self) -> dict[str, float]:
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

    def total(self, name: str) -> float:
        """Return the epoch's sum over steps and ranks."""
        return self.ranks.sum(self.totals[name].clone(), f"the epoch's sum of {name}").item()

    def log(self, **metrics: Tensor | float) -> None:
        """Record an epoch: a line of metrics.jsonl, TensorBoard, and a row on the screen."""
        if any(self.ranks.any(not self._finite)):
            self._diverge()
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        row = {"epoch": self.epoch + 1, **numbers, "seconds": round(self.seconds, 3)}
        self.metrics.append(row)
        if self.ranks.first:
            append_row(self.folder / "metrics.jsonl", row)
            for name, value in row.items():
                if name != "epoch":
                    self._events.add_scalar(name, value, self.epoch + 1)
            self._events.flush()
        if self._progress is not None:
            self._progress.end_epoch(numbers)

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
        numbers = {name: _number(name, value) for name, value in result.items()}
        broken = [name for name, value in numbers.items() if not math.isfinite(value)]
        values = ", ".join(f"{name} {numbers[name]:g}" for name in broken)
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
            write_json(self.folder / "result.json", outcome)
            previous(self.checkpoint).unlink(missing_ok=True)
        self.ranks.gather(None, "the result")

    def _stop_if(self, asked: bool) -> None:
        if asked:
            self.save()
            self.ranks.gather(None, "the checkpoint")  # written by the first rank
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


def largest_norms(model: object, count: int = 5) -> str:
    """List the weights with the largest norm of a unit, NaNs first."""
    weights = weight_rows(model) if isinstance(model, nn.Module) else {}
    norms = {name: w.norm(dim=1).max().item() for name, w in weights.items()}
    names = sorted(norms, key=lambda name: (not math.isnan(norms[name]), -norms[name]))
    return ", ".join(f"{name} {norms[name]:.4g}" for name in names[:count])


def _number(name: str, value: Tensor | float) -> float:
    """Convert a metric to a Python number; a tensor or array must have one element."""
    if isinstance(value, bool | int):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"metric {name} must be a number, got {kind}: {error}") from error


def _text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


# — checkpoints: two generations, each written atomically and with a digest —

END_OF_DIRECTORY = b"PK\x05\x06"
"""Signature of the last 22 bytes of a zip archive, which end with the length of its comment."""
DIGEST_LENGTH = 64


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a new generation and keep the one before it."""
    memory = io.BytesIO()  # on a full disk, torch.save raises other errors than OSError
    torch.save(state, memory)
    with atomic_writer(path) as file:
        file.write(_with_digest(memory.getvalue()))
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            path.replace(previous(path))


def recover_checkpoint(path: Path) -> None:
    """Make the latest intact generation the one at `path`.

    A run resumes exactly from either generation, so falling back costs time and nothing else. The
    next save must not move a damaged file over the intact one.
    """
    for generation in (path, previous(path)):
        try:
            _verified(generation)
        except (OSError, ValueError):
            continue
        generation.replace(path)
        return


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the checkpoint; None if there is none. Raises CheckpointError if it is damaged."""
    if not path.exists() and not previous(path).exists():
        return None
    try:
        content = io.BytesIO(_verified(path))
        state: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"no checkpoint in {path.parent} is intact ({path.name}: {reason}); "
            "delete the folder to start over"
        ) from error
    return state


def previous(path: Path) -> Path:
    """Return the path of the previous generation."""
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's random number generators on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned; on another type of device, the CPU's alone."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that selects a device; mps has only one and takes none."""
    return () if device.type == "mps" else (device,)


def _with_digest(archive: bytes) -> bytes:
    """Append the digest as the zip archive's comment; see Note [digest in the zip comment]."""
    if archive[-22:-18] != END_OF_DIRECTORY or archive[-2:] != b"\0\0":
        raise ValueError("expected a zip archive without a comment from torch.save")
    body = archive[:-2] + DIGEST_LENGTH.to_bytes(2, "little")
    return body + sha256(body).hexdigest().encode()


def _verified(path: Path) -> bytes:
    """Read a checkpoint file. Raises ValueError unless its digest is that of its content."""
    content = path.read_bytes()
    body, expected = content[:-DIGEST_LENGTH], content[-DIGEST_LENGTH:]
    if sha256(body).hexdigest().encode() != expected:
        raise ValueError(f"its {len(content):,} bytes do not have the digest they were saved with")
    return content
