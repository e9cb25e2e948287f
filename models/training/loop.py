"""Training: the loop that follows a recipe, and takes up again where it was interrupted."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.background import rng_restored
from nlbench.introspection.precision import exact_by_default
from nlbench.serialization.files import write_atomically
from nlbench.serialization.hashing import state_hash

from .recipes import Recipe, vanilla
from .tasks import LARGEST_SEED, Task, task_of

if TYPE_CHECKING:
    from nlbench.subjects.data import Data

__all__ = ["Epoch", "Keep", "TrainingResult", "example_of", "read_state", "train", "write_state"]


@dataclass(frozen=True)
class Epoch:
    """Where one pass through the training split led.

    Parameters
    ----------
    number : int
        From 1.
    learning_rate : float
        At the epoch's last step.
    loss : float
        Mean loss over the epoch, of each sample before the step that used it; without the
        recipe's penalty.
    train_accuracy : float or None
    test_accuracy : float
        Share of what the network predicts right at the epoch's end, in [0, 1]: images, or
        tokens of a translation; in training by the labels trained on, corrupted ones
        included. In training it takes a pass of its own, which is made where training may
        end (`Recipe.wants_train_accuracy`); None after other epochs.
    scores : mapping of str to float
        What the recipe counts, such as ``linear_share``.
    running_accuracy : float or None
        The same share of the training samples as they came in the epoch: each augmented, in
        training mode, before the step that used it, as the loss is.
    """

    number: int
    learning_rate: float
    loss: float
    train_accuracy: float | None
    test_accuracy: float
    scores: Mapping[str, float] = field(default_factory=dict)
    running_accuracy: float | None = None


Keep = Callable[[Epoch, nn.Module, Mapping[str, str]], object]
"""Told of an epoch, the network, and what a checkpoint of it has to carry."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained network and how it got there.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode, on the device that it was trained on.
    history : tuple of Epoch
        At least one.
    is_reached : bool
        Whether the thresholds of the recipe were reached; True where it has none.
    scores : mapping of str to float
        What was measured once at the end, such as ``bleu``.
    metadata : mapping of str to str
        What a checkpoint of this network has to carry beside its weights.
    """

    model: nn.Module
    history: tuple[Epoch, ...]
    is_reached: bool = True
    scores: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def train_accuracy(self) -> float:
        """Share of training samples predicted right, by the labels trained on."""
        accuracy = self.history[-1].train_accuracy
        assert accuracy is not None
        return accuracy

    @property
    def test_accuracy(self) -> float:
        """Share of test samples predicted right."""
        return self.history[-1].test_accuracy


FORMAT = 1


def write_state(path: Path, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a training's state, whole or not at all.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    identity : mapping
        What decides the training; `read_state` compares it.
    content : mapping
        Tensors, numbers, texts, lists and dicts of them.

    Raises
    ------
    nlbench.RequestError
        If it can't be written.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "identity": dict(identity), **content}, buffer)
    write_atomically(path, buffer.getvalue())


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read a training's state; only tensors and plain values are ever unpickled.

    Raises
    ------
    nlbench.RequestError
        If the file is damaged, or another training wrote it; the message says what differs.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state"
    >>> write_state(path, {"seed": 0}, {"epoch": 3})
    >>> read_state(path, {"seed": 0})["epoch"]
    3
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged bytes make the unpickler fail in any way.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"{path} is no state of a training, or damaged ({reason[:80]}); remove it to train anew"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RequestError(f"{path} is no state of a training; remove it to train anew")
    old = found["identity"]
    changed = [key for key in {**old, **identity} if old.get(key) != identity.get(key)]
    if changed:
        said = ", ".join(f"{k} was {old.get(k)} and is {identity.get(k)}" for k in changed[:3])
        raise RequestError(f"{path} is of another training: {said}; remove it to train anew")
    content: dict[str, Any] = found
    return content


@exact_by_default()
def train(
    build: Callable[[], nn.Module],
    dataset: Data,
    recipe: Recipe = vanilla,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[Epoch], object] | None = None,
    state: Path | None = None,
    keep: Keep | None = None,
) -> TrainingResult:
    """Build a network and train it as a recipe says.

    The seed decides the initial weights, the order of the samples, the augmentation and
    which labels are corrupted. On a CPU, the same seed and number of threads give the same
    weights, bit for bit, interrupted and resumed or not. PyTorch's global random state is
    left as it was.

    Parameters
    ----------
    build : callable
        Without arguments; returns the network to train.
    dataset : Dataset
        Labelled images; or any object with a method ``task``, see
        `nlbench.models.training.tasks.Task`.
    recipe : Recipe
    seed : int
        From 0 to 2³² - 1.
    device : torch.device or str
    progress : callable, optional
        Called with each `Epoch` as it ends; on resuming, with the earlier ones first.
    state : Path, optional
        Where the training's state is written after every epoch. If the file exists, training
        goes on from it. It stays when training is over, so that whoever writes the result
        down can do that before removing it.
    keep : callable, optional
        Called with each `Epoch` as it ends, the network, in evaluation mode, and the
        metadata that a checkpoint of it has to carry.

    Returns
    -------
    TrainingResult

    Raises
    ------
    nlbench.RequestError
        If the seed is out of bounds, the network doesn't give one logit a
        class, or the state belongs to another training.
    nlbench.NotFinite
        If the loss or a logit ceases to be a finite number.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from nlbench.models.datasets.digits import digits
    >>> from nlbench.models.networks.vgg import vgg8
    >>> result = train(vgg8, digits(), replace(vanilla, epochs=1))
    >>> [epoch.number for epoch in result.history]
    [1]
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise RequestError(f"the seed is {seed}, expected 0 to {LARGEST_SEED}")
    device = torch.device(device)
    task = task_of(dataset, recipe, seed)
    with rng_restored(device):
        torch.manual_seed(seed)
        model = recipe.prepared(build(), lambda: example_of(dataset), seed).to(device)
        training = _Training(model, task, recipe, seed, device)
        identity = {
            "seed": seed,
            "label_noise": recipe.label_noise,
            "data": getattr(dataset, "name", ""),
            "samples": task.size,
            "start": state_hash(model),
            **{f"recipe.{k}": v for k, v in asdict(recipe).items() if k != "source"},
        }
        if state is not None and state.exists():
            training.restore(read_state(state, identity))
            for epoch in training.history:
                if progress is not None:
                    progress(epoch)
        while not training.is_over:
            epoch = training.run_epoch()
            model.eval()
            if keep is not None:
                keep(epoch, model, training.metadata)
            if state is not None:
                write_state(state, identity, training.content())
            if progress is not None:
                progress(epoch)
        scores = task.final_scores(model.eval(), device) | recipe.scores(model)
    return TrainingResult(
        model,
        tuple(training.history),
        is_reached=not recipe.stops_early or training.is_reached,
        scores=scores,
        metadata=training.metadata,
    )


def example_of(dataset: Data) -> Tensor:
    """Give two samples of the training split, for a recipe that has to see some."""
    return dataset.sample(2, split="train", seed=0).inputs


class _Training:
    """What changes from epoch to epoch."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.task = task
        self.recipe = recipe
        self.device = device
        self.optimizer = recipe.make_optimizer(model)
        self.shuffle = torch.Generator().manual_seed(seed)
        # A stream of its own: augmented or not, the images come in the same order.
        self.augment = torch.Generator().manual_seed(seed + LARGEST_SEED + 1)
        self.history: list[Epoch] = []

    @property
    def metadata(self) -> dict[str, str]:
        """What a checkpoint has to carry."""
        return {**self.task.metadata(), **self.recipe.metadata()}

    @property
    def is_over(self) -> bool:
        """Whether the last epoch has been, or every threshold been reached."""
        if not self.history:
            return False
        return len(self.history) >= self.recipe.epochs or self.is_reached

    @property
    def is_reached(self) -> bool:
        """Whether the last epoch reached every threshold."""
        last = self.history[-1]
        return self.recipe.is_reached(last.loss, last.train_accuracy)

    def run_epoch(self) -> Epoch:
        """Pass once through the training split and look where it led."""
        number = len(self.history)
        order = torch.randperm(self.task.size, generator=self.shuffle)
        loss, running_accuracy = self._pass(order, number)
        try:
            train_accuracy = None
            if self.recipe.wants_train_accuracy(number + 1, loss):
                train_accuracy = self.task.accuracy(self.model, "train", self.device)
            test_accuracy = self.task.accuracy(self.model, "test", self.device)
        except NotFinite as error:
            raise NotFinite(
                f"after epoch {number + 1}: {error}; a learning rate below "
                f"{self.recipe.learning_rate:g} may help"
            ) from error
        epoch = Epoch(
            number=number + 1,
            learning_rate=self.recipe.rate(number, self._steps(len(order)) * (number + 1) - 1),
            loss=loss,
            train_accuracy=train_accuracy,
            test_accuracy=test_accuracy,
            scores=self.recipe.scores(self.model),
            running_accuracy=running_accuracy,
        )
        self.history.append(epoch)
        return epoch

    def _steps(self, samples: int) -> int:
        return math.ceil(samples / self.recipe.batch_size)

    def _pass(self, order: torch.Tensor, number: int) -> tuple[float, float]:
        """One epoch, counted from 0; gives its mean loss, and the share predicted right."""
        self.model.train()
        total, seen, step = 0.0, 0, number * self._steps(len(order))
        right = asked = 0
        recipe = self.recipe
        for inputs, targets in self.task.batches(
            order, recipe.batch_size, self.device, self.augment
        ):
            rate = recipe.rate(number, step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("rate_factor", 1.0)
            output = self.model(inputs)
            loss = self.task.loss(output, targets)
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(
                    f"the training loss became {value} in epoch {number + 1}; "
                    f"a learning rate below {recipe.learning_rate:g} may help"
                )
            penalty = recipe.penalty(self.model)
            self.optimizer.zero_grad()
            (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            recipe.settle(self.model)
            total += value * len(targets)
            seen += len(targets)
            counts = self.task.right(output, targets)
            right, asked = right + counts[0], asked + counts[1]
            step += 1
        return total / seen, right / asked

    def content(self) -> dict[str, Any]:
        """All that the next epoch depends on."""
        return {
            "history": [asdict(epoch) for epoch in self.history],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shuffle": self.shuffle.get_state(),
            "augment": self.augment.get_state(),
            "random": torch.get_rng_state(),
            "random_gpu": self._random_of_gpu(),
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Put everything back as `content` found it."""
        self.history = [Epoch(**epoch) for epoch in content["history"]]
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.shuffle.set_state(content["shuffle"])
        self.augment.set_state(content["augment"])
        torch.set_rng_state(content["random"])
        if content["random_gpu"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(content["random_gpu"], self.device)
        if content["random_gpu"] is not None and self.device.type == "mps":
            torch.mps.set_rng_state(content["random_gpu"])

    def _random_of_gpu(self) -> Tensor | None:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.mps.get_rng_state() if self.device.type == "mps" else None
