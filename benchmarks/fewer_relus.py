"""Compare the ReLUs that `substitution` keeps with those that learned masks keep.

ResNet18 of base width 16 learns the digits, and keeps at most half of its ReLUs (`--keep`), counted
by position: whole calls in the order of `substitution`, or as many positions or channels by masks
learned under an L1 penalty that grows until enough of them are zero (Cho et al., Selective Network
Linearization, ICML 2022). All are finetuned for as many steps, those of the masks included. The
scale is small: few steps, no distillation. Prints a table, and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlbench.models.datasets.digits import digits
from nlbench.models.networks.resnet import ResNet18
from nlbench.models.removal.curve import removal_order
from nlbench.probes.replacement import find_calls

WIDTH, BATCH, RATE = 16, 64, 1e-3
MASK_RATE, PENALTY, GROWTH, CLOSED = 0.03, 1e-7, 1.15, 0.01


class MaskedReLU(nn.Module):
    """m ReLU(x) + (1 - m) (a x + b), with a mask m and a map per channel."""

    def __init__(self, size: torch.Size) -> None:
        super().__init__()
        self.size = size
        self.mask = nn.Parameter(torch.ones(size), requires_grad=False)
        self.slope = nn.Parameter(torch.ones(size[0], 1, 1))
        self.intercept = nn.Parameter(torch.zeros(size[0], 1, 1))
        self.fits = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to the same shape; fit the map by least squares if asked to."""
        y = x.relu()
        if self.fits:
            axes = (0, 2, 3)
            mean_x = x.mean(axes, keepdim=True)[0]
            mean_y = y.mean(axes, keepdim=True)[0]
            covariance = ((x - mean_x) * y).mean(axes, keepdim=True)[0]
            variance = x.var(axes, correction=0, keepdim=True)[0].clamp(min=1e-12)
            self.slope.data = covariance / variance
            self.intercept.data = mean_y - self.slope * mean_x
        return self.mask * y + (1 - self.mask) * (self.slope * x + self.intercept)

    @property
    def kept(self) -> float:
        """Number of positions whose mask isn't closed."""
        return (self.mask > CLOSED).double().mean().item() * self.size.numel()


def masked_copy(model: nn.Module, images: Tensor) -> tuple[nn.Module, dict[str, MaskedReLU]]:
    """Return a copy of a network with masked ReLUs, and these by path."""
    model = copy.deepcopy(model)
    masked: dict[str, MaskedReLU] = {}
    names = {module: name for name, module in model.named_modules() if type(module) is nn.ReLU}

    def record(module: nn.Module, args: object, y: Tensor) -> None:
        masked[names[module]] = MaskedReLU(y.shape[1:])

    for module in names:
        module.register_forward_hook(record)
    model(images[:1])
    for name, module in masked.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    return model, masked


def batches(count: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(BATCH)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int, done: int = 0) -> None:
    """Train for the steps of some epochs, except the first ones, which are done."""
    steps = list(batches(len(x), epochs, seed))[done:]
    weights = [p for name, p in model.named_parameters() if not name.endswith("mask")]
    optimizer = torch.optim.Adam(weights, RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
    for index in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        schedule.step()


def learn_masks(
    model: nn.Module, relus: list[MaskedReLU], x: Tensor, y: Tensor, budget: int, epochs: int
) -> int:
    """Learn masks until at most `budget` positions are open, and return the number of steps."""
    masks = [relu.mask.requires_grad_() for relu in relus]
    weights = [p for name, p in model.named_parameters() if not name.endswith("mask")]
    groups = [{"params": weights}, {"params": masks, "lr": MASK_RATE}]
    optimizer = torch.optim.Adam(groups, RATE)
    # The last epoch is for finetuning alone.
    steps = list(batches(len(x), epochs - 1, seed=0))
    for done, index in enumerate(steps):
        if sum(relu.kept for relu in relus) <= budget:
            return done
        optimizer.zero_grad()
        total = sum(relu.mask.mean() * relu.size.numel() for relu in relus)
        penalty = PENALTY * GROWTH**done * total
        (F.cross_entropy(model(x[index]), y[index]) + penalty).backward()
        optimizer.step()
        for mask in masks:
            mask.data.clamp_(0, 1)
    return len(steps)


def close_smallest(relus: list[MaskedReLU], budget: int) -> None:
    """Make masks binary: the largest ones stay open, as many as the budget allows."""
    values = torch.cat([r.mask.detach().expand(r.size).flatten() for r in relus])
    limit = values.sort(descending=True).values[budget]
    for relu in relus:
        relu.mask.requires_grad_(False)
        relu.mask.data = (relu.mask > limit).float()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).double().mean().item()


def compare(seed: int, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return the fraction of ReLUs that remain, and the test accuracy, of each network."""
    torch.manual_seed(seed)
    x, y = tensors(digits().train, options.side)
    test = tensors(digits().test, options.side)
    base = ResNet18(WIDTH)
    train(base, x, y, options.epochs, seed)
    rows = {"all ReLUs": (1.0, accuracy(base, *test))}

    def add(name: str, model: nn.Module, relus: Mapping[str, MaskedReLU]) -> None:
        total = sum(relu.size.numel() for relu in relus.values())
        kept = sum(relu.kept for relu in relus.values())
        rows[name] = kept / total, accuracy(model, *test)
        print(seed, name, *rows[name], flush=True)

    model, relus = masked_copy(base, x)
    budget = total = sum(relu.size.numel() for relu in relus.values())
    calls = find_calls(base, x[:2])
    for name in removal_order("substitution", base, calls, x[:512], y[:512]):
        if budget > options.keep * total:
            relus[name].mask.data.zero_()
            relus[name].fits = True
            budget -= relus[name].size.numel()
    with torch.no_grad():
        model(x[:512])
    for relu in relus.values():
        relu.fits = False
    add("substitution, not finetuned", model, relus)
    train(model, x, y, options.tuning, seed)
    add("substitution", model, relus)
    for name in ("masks of positions", "masks of channels", "random positions"):
        model, relus = masked_copy(base, x)
        done = 0
        for relu in relus.values():
            if name == "random positions":
                relu.mask.data = torch.rand(relu.size)
            elif name == "masks of channels":
                relu.mask.data = torch.ones(relu.size[0], 1, 1)
        if name != "random positions":
            done = learn_masks(model, list(relus.values()), x, y, budget, options.tuning)
        close_smallest(list(relus.values()), budget)
        train(model, x, y, options.tuning, seed, done)
        add(name, model, relus)
    return rows


def tensors(split: torch.utils.data.Dataset, side: int) -> tuple[Tensor, Tensor]:
    images, labels = zip(*split, strict=True)
    return F.adaptive_avg_pool2d(torch.stack(images), side), torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seeds", 1), ("side", 16), ("epochs", 15), ("tuning", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [compare(seed, options) for seed in range(options.seeds)]
    networks = {}
    for name, (kept, _) in runs[0].items():
        accuracies = [round(run[name][1], 4) for run in runs]
        networks[name] = {"kept": round(kept, 4), "accuracies": accuracies}
        print(f"{name:30}{kept:8.1%}{statistics.fmean(accuracies):8.1%}")
    result = {**vars(options), "networks": networks}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
