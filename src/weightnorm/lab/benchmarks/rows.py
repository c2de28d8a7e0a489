"""Every row, in the order in which they are measured. A new one is a line here."""

from __future__ import annotations

from weightnorm.lab.benchmarks import (
    acting,
    centering,
    convnet,
    dqn_steps,
    draw_step,
    growth,
    loop,
    monitor_step,
    op,
    optimizer_step,
    recurrent,
    vae_step,
    vocoder,
)
from weightnorm.lab.benchmarks.row import Row

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        convnet.STEP,
        vocoder.ROW,
        recurrent.ROW,
        acting.ROW,
        op.ROW,
        centering.ROW,
        convnet.INIT,
        optimizer_step.ROW,
        convnet.MEMORY,
        growth.ROW,
        loop.ROW,
        draw_step.ROW,
        dqn_steps.ROW,
        vae_step.ROW,
        monitor_step.ROW,
    )
}
