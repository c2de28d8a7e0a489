"""A command in place of the runs of a sweep."""

import json
import sys

from weightnorm.lab.config import scientific_fields

STUB = """
import json, os, shlex, signal, sys, time
from pathlib import Path

jobs = json.loads(Path(__file__).with_suffix(".json").read_text())
job = jobs[shlex.join(sys.argv[1:])]
folder, seed, behaviour = Path(job["folder"]), job["config"]["seed"], job["behaviour"]

def note(name, **what):
    row = {"seed": seed, "pid": os.getpid(), "time": time.monotonic(), **what}
    with Path(__file__).with_name(name).open("a") as file:
        file.write(json.dumps(row) + "\\n")

signals = []
def on_sigint(number, frame):
    signals.append(number)
    if len(signals) > 1:
        note("interrupted twice")

signal.signal(signal.SIGINT, on_sigint)
note("started", threads=[os.environ.get(f"{x}_NUM_THREADS") for x in ("OMP", "MKL")],
     gpu=os.environ.get("CUDA_VISIBLE_DEVICES"), parent=os.getppid())
print("hello from", seed, flush=True)
if behaviour == "fail":
    print("\\n".join(f"line {i}" for i in range(9)), "\\n[red]out of luck[/]", file=sys.stderr)
    sys.exit(1)
if behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "silent":
    sys.exit(0)
if behaviour == "diverge":
    head = {"experiment": "classify", "preset": "demo", "config": job["config"]}
    (folder / "config.json").write_text(json.dumps(head))
    place = {"epoch": 1, "step": 4, "message": "diverged at epoch 1, step 4: loss nan.\\nMore"}
    (folder / "result.json").write_text(json.dumps({"test_error": None, "diverged": place}))
    sys.exit(1)
lost = folder / "lost"
if behaviour == "lose worker" or (behaviour == "lose worker once" and not lost.exists()):
    lost.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if behaviour == "hang":
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # a second signal would be noted
    note("saved")
    sys.exit(130)
if behaviour == "finish after a signal":
    while not signals:
        time.sleep(0.01)
if behaviour == "finish beside another":
    started, end = Path(__file__).with_name("started"), time.monotonic() + 600
    while started.read_text().count("\\n") < 2 and time.monotonic() < end:
        time.sleep(0.01)
if behaviour == "stubborn":
    while True:
        time.sleep(0.01)
head = {"experiment": "classify", "preset": "demo", "config": job["config"]}
(folder / "config.json").write_text(json.dumps(head))
for epoch in range(3):
    time.sleep(job["seconds"] / 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": epoch + 1}) + "\\n")
(folder / "result.json").write_text(json.dumps({"test_error": seed / 100}))
note("ended")
"""


class StubRuns:
    """A command in place of the runs of a grid, with a behaviour for each seed."""

    def __init__(self, place, grid, seconds=0.0, **behaviours):
        place.mkdir(exist_ok=True)
        self.place, self.script = place, place / "stub.py"
        self.command = [sys.executable, "-S", str(self.script)]
        self.script.write_text(STUB)
        jobs = {
            " ".join(job.words): {
                "folder": str(job.folder),
                "config": scientific_fields(job.config),
                "behaviour": behaviours.get(f"seed_{job.config.seed}", "finish"),
                "seconds": seconds,
            }
            for job in grid.plan(())
        }
        self.script.with_suffix(".json").write_text(json.dumps(jobs))

    def rows(self, name):
        path = self.place / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def seeds(self, name):
        return sorted(row["seed"] for row in self.rows(name))
