"""A resumable training loop that follows a recipe."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.precision import exact_by_default
from nlbench.introspection.random_state import preserve_rng_state, torch_generators
from nlbench.parsers import MAX_TRAINING_SEED
from nlbench.serialization.files import check_is_file, write_atomically
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.data import Data

from .label_noise import check_seed
from .recipes import Recipe, vanilla
from .tasks import Task, get_task

FORMAT = 1


def write_state(path: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a training run, and all that determines its result, atomically."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "identity": dict(identity), **state}, buffer)
    write_atomically(path, buffer.getvalue())


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of a training run, unpickling only tensors and plain values.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state"
    >>> write_state(path, {"seed": 0}, {"epoch": 3})
    >>> read_state(path, {"seed": 0})["epoch"]
    3
    """
    check_is_file(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Unpickling damaged bytes can raise any exception.
        raise _damaged(path) from error
    is_state = isinstance(state, dict) and state.get("format") == FORMAT
    if not is_state or not isinstance(state.get("identity"), dict):
        raise _damaged(path)
    if difference := difference_text(state["identity"], identity):
        raise RequestError(
            f"{path} belongs to another training run: {difference}; remove it to train again"
        )
    return state


def _damaged(path: Path) -> RequestError:
    return RequestError(f"{path} is not a training state, or is damaged; remove it to train again")


def difference_text(before: Mapping[str, Any], now: Mapping[str, Any], *ignored: str) -> str:
    """Describe the first three entries that differ. Empty if none does.

    Examples
    --------
    >>> difference_text({"seed": 0, "device": "cpu"}, {"seed": 1, "device": "cuda"}, "device")
    'seed was 0 and is 1'
    """
    names = [n for n in {**before, **now} if before.get(n) != now.get(n) and n not in ignored]
    return ", ".join(f"{n} was {before.get(n)} and is {now.get(n)}" for n in names[:3])


@dataclass(frozen=True)
class Epoch:
    """Result of one pass through the training split.

    Parameters
    ----------
    number : int
        Number of the epoch, counted from 1.
    learning_rate : float
        At the epoch's last step.
    loss : float
        Mean loss over the samples, each before the step that used it, without the recipe's penalty.
    train_accuracy, test_accuracy : float
        Fraction of images, or tokens of a translation, predicted correctly at the end of the epoch.
        Training labels include the corrupted ones. `train_accuracy` requires an additional pass and
        is None unless this epoch may be the last (`Recipe.needs_train_accuracy`).
    scores : mapping of str to float
        Scores of the recipe, such as ``linear_share``.
    running_accuracy : float or None
        Fraction of training samples predicted correctly during the epoch, augmented and in training
        mode, before the step that used them.
    """

    number: int
    learning_rate: float
    loss: float
    train_accuracy: float | None
    test_accuracy: float
    scores: Mapping[str, float] = field(default_factory=dict)
    running_accuracy: float | None = None


@dataclass(frozen=True)
class TrainingResult:
    """A trained network and its history.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode, on the training device.
    thresholds_reached : bool
        True if the recipe's thresholds were reached or it has none.
    scores : mapping of str to float
        Scores computed once at the end, such as ``bleu``.
    """

    model: nn.Module
    history: tuple[Epoch, ...]
    thresholds_reached: bool = True
    scores: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def train_accuracy(self) -> float:
        """Fraction of training samples predicted correctly, including those with wrong labels."""
        accuracy = self.history[-1].train_accuracy
        assert accuracy is not None
        return accuracy

    @property
    def test_accuracy(self) -> float:
        """Fraction of test samples predicted correctly."""
        return self.history[-1].test_accuracy


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
    on_checkpoint: Callable[[Epoch, nn.Module, Mapping[str, str]], object] | None = None,
) -> TrainingResult:
    """Build a network and train it with a recipe.

    The seed determines the initial weights, the order of the samples, the augmentation and the
    corrupted labels. On a CPU, the same seed and number of threads give bitwise identical weights,
    even if training is interrupted and resumed. The global random state is preserved.

    Parameters
    ----------
    build : callable
        Returns the network to train.
    dataset : Dataset
        Labelled images, or an object with a method ``task``; see
        `nlbench.models.training.tasks.Task`.
    progress : callable, optional
        Called with each `Epoch` as it ends; when training is resumed, first with the earlier ones.
    state : Path, optional
        State file, written after every epoch. If it exists, training resumes from it. It is not
        removed at the end, so that the result can be saved first.
    on_checkpoint : callable, optional
        Called at the end of each epoch with the `Epoch`, the network in evaluation mode and the
        metadata for a checkpoint.

    Raises
    ------
    nlbench.RequestError
        If the network doesn't return one logit per class, or the state belongs to another run.
    nlbench.NotFinite
        If the loss or a logit is NaN or infinite.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from nlbench.models.datasets.digits import digits
    >>> from nlbench.models.networks.vgg import vgg8
    >>> result = train(vgg8, digits(), replace(vanilla, epochs=1))
    >>> [epoch.number for epoch in result.history]
    [1]
    """
    check_seed(seed)
    device = torch.device(device)
    task = get_task(dataset, recipe, seed)
    with preserve_rng_state(device):
        torch.manual_seed(seed)
        model = recipe.prepare(build(), lambda: draw_example(dataset), seed).to(device)
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
            content = read_state(state, identity)
            try:
                training.load_state_dict(content)
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
                raise _damaged(state) from error
            for epoch in training.history:
                if progress is not None:
                    progress(epoch)
        while not training.is_over:
            epoch = training.run_epoch()
            model.eval()
            if on_checkpoint is not None:
                on_checkpoint(epoch, model, training.metadata)
            if state is not None:
                write_state(state, identity, training.state_dict())
            if progress is not None:
                progress(epoch)
        scores = task.final_scores(model.eval(), device) | recipe.scores(model)
    return TrainingResult(
        model,
        tuple(training.history),
        thresholds_reached=not recipe.stops_early or training.thresholds_reached,
        scores=scores,
        metadata=training.metadata,
    )


def draw_example(dataset: Data) -> Tensor:
    """Return two samples from the training split."""
    return dataset.sample(2, split="train", seed=0).inputs


class _Training:
    """A training run and all state that changes from epoch to epoch."""

    def __init__(
        self, model: nn.Module, task: Task, recipe: Recipe, seed: int, device: torch.device
    ) -> None:
        self.model = model
        self.task = task
        self.recipe = recipe
        self.device = device
        self.optimizer = recipe.make_optimizer(model)
        self.shuffle = torch.Generator().manual_seed(seed)
        # A separate stream, so that augmentation doesn't change the order of the images.
        self.augment = torch.Generator().manual_seed(seed + MAX_TRAINING_SEED + 1)
        self.history: list[Epoch] = []

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata for a checkpoint."""
        return {**self.task.metadata(), **self.recipe.metadata()}

    @property
    def is_over(self) -> bool:
        """True after the last epoch, or once every threshold is reached."""
        if not self.history:
            return False
        return len(self.history) >= self.recipe.epochs or self.thresholds_reached

    @property
    def thresholds_reached(self) -> bool:
        """True if the last epoch met all thresholds."""
        last = self.history[-1]
        return self.recipe.thresholds_reached(last.loss, last.train_accuracy)

    def run_epoch(self) -> Epoch:
        """Train for one epoch and evaluate the network."""
        index = len(self.history)
        order = torch.randperm(self.task.size, generator=self.shuffle)
        loss, running_accuracy = self._train_epoch(order, index)
        try:
            train_accuracy = None
            if self.recipe.needs_train_accuracy(index + 1, loss):
                train_accuracy = self.task.accuracy(self.model, "train", self.device)
            test_accuracy = self.task.accuracy(self.model, "test", self.device)
        except NotFinite as error:
            raise NotFinite(
                f"after epoch {index + 1}: {error}; a learning rate below "
                f"{self.recipe.learning_rate:g} may help"
            ) from error
        last_step = self._steps(len(order)) * (index + 1) - 1
        epoch = Epoch(
            number=index + 1,
            learning_rate=self.recipe.learning_rate_at(index, last_step),
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

    def _train_epoch(self, order: torch.Tensor, index: int) -> tuple[float, float]:
        """Train for one epoch and return its mean loss and running accuracy."""
        self.model.train()
        loss_sum = 0.0
        samples = 0
        step = index * self._steps(len(order))
        correct = predictions = 0
        recipe = self.recipe
        for inputs, targets in self.task.read(
            "train", order, recipe.batch_size, self.device, self.augment
        ):
            rate = recipe.learning_rate_at(index, step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("rate_factor", 1.0)
            output = self.model(inputs)
            loss = self.task.loss(output, targets)
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(
                    f"the training loss became {value} in epoch {index + 1}; "
                    f"a learning rate below {recipe.learning_rate:g} may help"
                )
            penalty = recipe.penalty(self.model)
            self.optimizer.zero_grad()
            (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            recipe.after_step(self.model)
            loss_sum += value * len(targets)
            samples += len(targets)
            counts = self.task.count_correct(output, targets)
            correct = correct + counts[0]
            predictions = predictions + counts[1]
            step += 1
        return loss_sum / samples, correct / predictions

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next epoch depends on."""
        states = [generator.get_state() for generator in torch_generators(self.device)]
        return {
            "history": [asdict(epoch) for epoch in self.history],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shuffle": self.shuffle.get_state(),
            "augment": self.augment.get_state(),
            "random": states[0],
            "random_gpu": states[1] if len(states) > 1 else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.shuffle.set_state(state["shuffle"])
        self.augment.set_state(state["augment"])
        states = state["random"], state["random_gpu"]
        for generator, saved in zip(torch_generators(self.device), states, strict=False):
            if saved is not None:
                generator.set_state(saved)
