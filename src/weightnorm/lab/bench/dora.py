"""DoRA in peft: its own norm of W + s·B·A against `row_norm_low_rank` (docs/descendants.md)."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.functional import row_norm_low_rank
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, at_most
from weightnorm.lab.bench.memory import peak_bytes
from weightnorm.lab.interleaved import Call

PEFT, OURS = "peft", "row_norm_low_rank"
TOKENS = 64


def forward(
    self: Any,
    x: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Compute what DoRA adds to the output of a linear layer, without building W + s·B·A."""
    W, A, B = (layer.weight.detach() for layer in (base_layer, lora_A, lora_B))
    scale = (self.weight / row_norm_low_rank(W, A, B, scaling)[:, 0]).to(x.dtype)
    bias = 0 if base_layer.bias is None else base_layer.bias
    plain = x @ W.to(x.dtype).T if base_result is None else base_result - bias
    added: Tensor = (scale - 1) * plain + scale * scaling * lora_B(lora_A(x))
    return added


def adapted(size: int, rank: int, device: torch.device, *, ours: bool) -> nn.Module:
    """Return a linear layer with peft's DoRA of a rank, or with the forward pass above."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.dora import DoraLinearLayer

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(size, size)).to(device)
    config = LoraConfig(target_modules=["0"], r=rank, use_dora=True, init_lora_weights=False)
    model: nn.Module = get_peft_model(layers, config)
    for module in model.modules():
        if ours and isinstance(module, DoraLinearLayer):
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return model


def cases(settings: Settings) -> Iterator[Case]:
    size, rank = settings.size(4096, 32), settings.size(16, 2)
    x = torch.randn(settings.size(TOKENS, 2), size, device=settings.device)
    models = {
        PEFT: adapted(size, rank, settings.device, ours=False),
        OURS: adapted(size, rank, settings.device, ours=True),
    }
    torch.testing.assert_close(models[OURS](x), models[PEFT](x), rtol=1e-3, atol=1e-3)

    def passes(model: nn.Module) -> Call:
        def run() -> None:
            model.zero_grad()
            model(x).square().sum().backward()

        return run

    name, calls = f"{size}×{size}, rank {rank}", {n: passes(m) for n, m in models.items()}
    yield Case(f"{name}: forward and backward", calls, PEFT, (at_most(OURS, 1.0, PEFT),))
    peaks: dict[str, Call] = {
        n: lambda call=call: float(peak_bytes(call, settings.device))  # type: ignore[misc]
        for n, call in calls.items()
    }
    yield Case(f"{name}: peak memory", peaks, PEFT, (at_most(OURS, 1.0, PEFT),), unit="B", rounds=1)


BENCHMARK = Benchmark("dora", "DoRA in peft, a linear layer on 64 tokens", cases)
