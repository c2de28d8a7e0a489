"""A tour of the library on scikit-learn's 8×8 digits. Run it with `make tour`.

1. Train with the paper's five parameterizations, from one data-dependent initialization.
2. Follow ‖v‖ and the effective step g/‖v‖ during training.
3. Fold the result into plain weights for inference.

Saves a figure with the training curves and the two quantities of 2.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from weightnorm import (
    Parameterization,
    data_dependent_init,
    folded,
    init_,
    normalized_weights,
    parameterize,
)
from weightnorm.diagnostics import effective_step, v_norms

LEARNING_RATE, EPOCHS, BATCH = 0.003, 16, 100
Curves = dict[str, list[float]]


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 standardized images of 8×8 pixels, and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)  # (N, 1, 8, 8)
    return (images - images.mean()) / images.std(), torch.tensor(data.target)


def network(how: Parameterization, width: int = 16, seed: int = 0) -> nn.Sequential:
    """Build a small version of the paper's CIFAR-10 network with one parameterization."""
    torch.manual_seed(seed)
    draw: Callable[[Tensor], Tensor] = partial(nn.init.normal_, std=0.05)  # section 3

    def layer(plain: nn.Module) -> nn.Module:
        return parameterize(init_(plain, draw), how)

    return nn.Sequential(
        layer(nn.Conv2d(1, width, 3, padding=1)),
        nn.LeakyReLU(0.1),
        layer(nn.Conv2d(width, width, 3, padding=1)),
        nn.LeakyReLU(0.1),
        nn.MaxPool2d(2),
        layer(nn.Conv2d(width, 2 * width, 3, padding=1)),
        nn.LeakyReLU(0.1),
        layer(nn.Conv2d(2 * width, 2 * width, 1)),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        layer(nn.Linear(2 * width, 10)),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor) -> Curves:
    """Train with Adam and the paper's schedule; return loss, ‖v‖ and g/‖v‖ of every epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: min(2 - 2 * epoch / EPOCHS, 1)
    )
    generator = torch.Generator().manual_seed(1)
    curves: Curves = {"loss": [], "‖v‖": [], "g/‖v‖": []}
    for _ in range(EPOCHS):
        losses = []
        for rows in torch.randperm(len(images), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
        curves["loss"].append(sum(losses) / len(losses))
        if normalized_weights(model):
            curves["‖v‖"].append(torch.cat([*v_norms(model).values()]).mean().item())
            curves["g/‖v‖"].append(torch.cat([*effective_step(model).values()]).mean().item())
    return curves


def error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of misclassified images."""
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) != labels).float().mean().item()


def save_figure(curves: dict[Parameterization, Curves], path: Path) -> None:
    """Plot the training curves of all parameterizations, and ‖v‖ and g/‖v‖ of weight norm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    epochs = range(1, EPOCHS + 1)
    for how, curve in curves.items():
        left.semilogy(epochs, curve["loss"], label=str(how), lw=2)
    left.set(title="Same initialization for all five", xlabel="epoch", ylabel="training loss")
    left.legend(frameon=False)
    curve = curves[Parameterization.WEIGHT_NORM]
    (grown,) = right.plot(epochs, curve["‖v‖"], "C2", lw=2, label="‖v‖ (left axis)")
    right.set(title="Weight norm: ‖v‖ grows, g/‖v‖ shrinks", xlabel="epoch", ylabel="mean ‖v‖")
    steps = right.twinx()
    (shrunk,) = steps.plot(epochs, curve["g/‖v‖"], "C1--", lw=2, label="g/‖v‖ (right axis)")
    steps.set_ylabel("mean g/‖v‖")
    right.legend(handles=[grown, shrunk], frameon=False, loc="center right")
    for axes in (left, right):
        axes.spines["top"].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # for a network this small, synchronization costs more than it gains
    images, labels = digits()
    train_set, test_set = slice(0, 1400), slice(1400, None)

    print("1. Five parameterizations from one data-dependent initialization\n")
    curves: dict[Parameterization, Curves] = {}
    models: dict[Parameterization, nn.Module] = {}
    for how in Parameterization:
        model = models[how] = network(how)
        report = data_dependent_init(model, images[:500])
        if how is Parameterization.WEIGHT_NORM:
            print(f"{report}\n")
        curves[how] = train(model, images[train_set], labels[train_set])
        wrong = error(model, images[test_set], labels[test_set])
        print(f"   {how:<24} loss {curves[how]['loss'][-1]:.4f}   test error {wrong:6.2%}")

    curve = curves[Parameterization.WEIGHT_NORM]
    print("\n2. ‖v‖ and g/‖v‖ during training (means over units)\n")
    for name in ("‖v‖", "g/‖v‖"):
        print(f"   {name:<6} {curve[name][0]:.3f} after epoch 1, {curve[name][-1]:.3f} at the end")

    print("\n3. Folded into plain weights for inference\n")
    model = models[Parameterization.WEIGHT_NORM].eval()
    with torch.no_grad():
        before = model(images[test_set])
        with folded(model):
            names = [name for name in model.state_dict() if name.endswith("weight")]
            difference = (model(images[test_set]) - before).abs().max().item()
    print(f"   {len(names)} plain weights, largest difference in the logits {difference:.1e}")

    figure = out / "tour.png"
    save_figure(curves, figure)
    print(f"\nFigure: {figure.resolve()}")


if __name__ == "__main__":
    main()
