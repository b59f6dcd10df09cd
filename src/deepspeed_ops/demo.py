"""``make demo``: the report, then a real classifier on real data, trained by torch's AdamW and by ours side by side.

Equal seeds, equal batches, equal hyperparameters; every contestant's ``step()`` is timed in turn, so that what disturbs
the machine disturbs all of them. Two sizes are timed and say different things: the classifier's small tensors measure
the cost of a call, 25 million elements measure the arithmetic and the memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCHS, BATCH, SEED = 30, 64, 0
LR, WEIGHT_DECAY = 2e-3, 1e-2
# A slice of a transformer: one embedding, six layers of four 1024-wide matrices' worth, and their small vectors.
LARGE_SHAPES: tuple[tuple[int, ...], ...] = ((4096, 1024), *((1024, 1024),) * 20, *((1024,),) * 100)
LARGE_ROUNDS, LARGE_WARMUP = 15, 3


@dataclass
class Contestant:
    """One optimizer with its own copy of the model.

    Attributes:
        name: as the plots have it.
        device: where its tensors lie.
        make: makes the optimizer for a list of parameters.
        colour: of its line and bars.
        losses: mean training loss per epoch.
        step_us: seconds x 1e6 of every ``step()`` on the classifier.
        large_ms: milliseconds of every ``step()`` on 25 million elements.
        accuracy: on the test set, 0 to 1.
    """

    name: str
    device: str
    make: Callable[[Any], Any]
    colour: str
    losses: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    large_ms: list[float] = field(default_factory=list)
    accuracy: float = 0.0


def contestants(gpu: bool) -> list[Contestant]:
    """torch's AdamW first, then ours; the GPU pair only where there is a GPU."""
    import torch

    from deepspeed_ops.adam import DeepSpeedCPUAdam, FusedAdam

    common: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    found = [
        Contestant("torch AdamW", "cpu", lambda p: torch.optim.AdamW(p, **common), "#8c96a3"),
        Contestant("torch AdamW fused", "cpu", lambda p: torch.optim.AdamW(p, fused=True, **common), "#c2a14d"),
        Contestant("DeepSpeedCPUAdam", "cpu", lambda p: DeepSpeedCPUAdam(p, **common), "#1f6feb"),
    ]
    if gpu:
        fused = Contestant("torch AdamW fused", "cuda", lambda p: torch.optim.AdamW(p, fused=True, **common), "#c2a14d")
        found += [fused, Contestant("FusedAdam", "cuda", lambda p: FusedAdam(p, **common), "#2da44e")]
        for one in found:
            one.name += f" ({one.device})"
    return found


def data() -> tuple[Any, Any, Any, Any]:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8, a quarter of them for the test."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.25, random_state=SEED, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    return x.float(), y.long(), x_test.float(), y_test.long()


def model(device: str) -> Any:
    """A multilayer perceptron, the same for every contestant."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(device)


def timed_step(optimizer: Any, device: str) -> float:
    """Seconds of one ``step()``, until the device has finished it."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def train(racing: Sequence[Contestant], epochs: int, advance: Callable[[], None]) -> None:
    """Train all contestants on the same batches in the same order.

    Args:
        racing: gets ``losses``, ``step_us`` and ``accuracy``.
        epochs: passes over the training set.
        advance: called after every batch.
    """
    import torch
    from torch.nn.functional import cross_entropy

    x, y, x_test, y_test = data()
    models = [model(one.device) for one in racing]
    optimizers = [one.make(list(m.parameters())) for one, m in zip(racing, models, strict=True)]
    generator = torch.Generator().manual_seed(SEED)
    turn = 0
    for _ in range(epochs):
        sums = [0.0] * len(racing)
        order: Any = torch.randperm(len(x), generator=generator)
        batches = order.split(BATCH)
        for batch in batches:
            turn += 1
            for k in range(len(racing)):
                i = (turn + k) % len(racing)  # nobody is always first
                one = racing[i]
                loss: Any = cross_entropy(models[i](x[batch].to(one.device)), y[batch].to(one.device))
                optimizers[i].zero_grad()
                loss.backward()
                one.step_us.append(timed_step(optimizers[i], one.device) * 1e6)
                sums[i] += float(loss.detach())
            advance()
        for one, total in zip(racing, sums, strict=True):
            one.losses.append(total / len(batches))
    for one, m in zip(racing, models, strict=True):
        with torch.no_grad():
            guess = m(x_test.to(one.device)).argmax(1).cpu()
        one.accuracy = float((guess == y_test).double().mean())


def time_large(racing: Sequence[Contestant], shapes: Sequence[tuple[int, ...]], advance: Callable[[], None]) -> None:
    """Time ``step()`` on parameters of ``shapes``, all contestants in turn; fills ``large_ms``."""
    import torch

    optimizers = []
    for one in racing:
        generator = torch.Generator().manual_seed(SEED)
        parameters = []
        for shape in shapes:
            p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(one.device))
            p.grad = torch.randn(shape, generator=generator).to(one.device)
            parameters.append(p)
        optimizers.append(one.make(parameters))
    for turn in range(LARGE_WARMUP + LARGE_ROUNDS):
        for k in range(len(racing)):
            i = (turn + k) % len(racing)
            seconds = timed_step(optimizers[i], racing[i].device)
            if turn >= LARGE_WARMUP:
                racing[i].large_ms.append(seconds * 1e3)
        advance()


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Number of elements of all shapes."""
    total = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """Median of the paired ratios baseline / ours: above 1, ours is faster."""
    return statistics.median(b / o for b, o in zip(baseline, ours, strict=True))


def draw(racing: Sequence[Contestant], path: Path, n_large: int) -> None:
    """Write the picture: loss curves, and step times as bars for both sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titleweight": "bold"}
    with pyplot.rc_context(style):
        figure, (curves, small, large) = pyplot.subplots(
            1, 3, figsize=(13.5, 4.2), width_ratios=(1.5, 1, 1), layout="constrained"
        )
        # Equal curves lie on each other: the first ones are drawn broad and pale, the last one thin on top.
        for rank, one in enumerate(racing):
            width = 1.6 + 2.2 * (len(racing) - 1 - rank)
            epochs = range(1, len(one.losses) + 1)
            label = f"{one.name}: {one.accuracy:.1%} right"
            curves.plot(epochs, one.losses, color=one.colour, lw=width, label=label, alpha=0.9)
        curves.set(yscale="log", xlabel="epoch", ylabel="training loss (cross entropy)", title="Digits, equal seeds")
        curves.grid(alpha=0.25, which="both", lw=0.5)
        curves.legend(frameon=False)
        _bars(small, racing, [c.step_us for c in racing], "µs", "Step, 85k elements\n(cost of a call)")
        _bars(
            large,
            racing,
            [c.large_ms for c in racing],
            "ms",
            f"Step, {n_large / 1e6:.0f}M elements\n(arithmetic, memory)",
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _bars(axes: Any, racing: Sequence[Contestant], times: Sequence[Sequence[float]], unit: str, title: str) -> None:
    medians = [statistics.median(t) for t in times]
    places = range(len(racing))
    axes.barh(places, medians, color=[c.colour for c in racing], height=0.62)
    for place, value in zip(places, medians, strict=True):
        axes.text(value, place, f" {value:,.4g} {unit}", va="center", fontsize=9)
    axes.set_yticks(places, [c.name.replace(" (", "\n(") for c in racing], fontsize=9)
    axes.set(title=title, xlabel=f"{unit}, median", xlim=(0, max(medians) * 1.35))
    axes.invert_yaxis()


def summary(racing: Sequence[Contestant], n_large: int) -> list[str]:
    """What the run showed, in words."""
    lines = [f"  {c.name:<26} {c.accuracy:.2%} of the test images right, last loss {c.losses[-1]:.5f}" for c in racing]
    for device in dict.fromkeys(c.device for c in racing):
        group = [c for c in racing if c.device == device]
        ours = group[-1]
        for other in group[:-1]:
            lines.append(
                f"  {other.name} / {ours.name}, time of a step: "
                f"{ratio(other.step_us, ours.step_us):.2f} on the classifier (85k elements: the cost of a call), "
                f"{ratio(other.large_ms, ours.large_ms):.2f} on {n_large / 1e6:.0f}M elements"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every contestant learnt the digits."""
    options = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--epochs", type=int, default=EPOCHS)
    options.add_argument("--out", type=Path, default=Path("demo.png"))
    options.add_argument("--small", action="store_true", help="a hundredth of the large set: for a quick look")
    chosen = options.parse_args(arguments)

    from deepspeed_ops import report

    report.main()
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    racing = contestants(torch.cuda.is_available())
    shapes = LARGE_SHAPES[-20:] if chosen.small else LARGE_SHAPES
    n_large, n_batches = elements(shapes), -(-1347 // BATCH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        learning = bars.add_task("training on digits", total=chosen.epochs * n_batches)
        timing = bars.add_task(f"steps on {n_large / 1e6:.0f}M elements", total=LARGE_WARMUP + LARGE_ROUNDS)
        train(racing, chosen.epochs, lambda: bars.advance(learning))
        time_large(racing, shapes, lambda: bars.advance(timing))
    draw(racing, chosen.out, n_large)
    console.print("\n".join(summary(racing, n_large)), highlight=False, soft_wrap=True)
    console.print(f"  wrote {chosen.out}", highlight=False)
    return 0 if all(c.accuracy > 0.9 for c in racing) or chosen.epochs < EPOCHS else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
