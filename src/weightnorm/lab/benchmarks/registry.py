"""Every row, in the order in which they are measured. A new one is a line here."""

from __future__ import annotations

from weightnorm.lab.benchmarks.benchmark import Row
from weightnorm.lab.benchmarks.cases import (
    acting,
    convnet,
    dqn_steps,
    draw_step,
    loop,
    low_rank_norm,
    mean_only,
    monitor_step,
    op,
    optimizer_step,
    recurrent,
    scaling,
    vae_step,
    vocoder,
)

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        convnet.STEP,
        vocoder.ROW,
        recurrent.ROW,
        acting.ROW,
        op.ROW,
        mean_only.ROW,
        convnet.INIT,
        optimizer_step.ROW,
        convnet.MEMORY,
        scaling.ROW,
        loop.ROW,
        draw_step.ROW,
        dqn_steps.ROW,
        vae_step.ROW,
        monitor_step.ROW,
        low_rank_norm.ROW,
    )
}
