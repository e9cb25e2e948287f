"""What a network is trained for: batches, the loss, and how good it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.background import overlap_pays, rng_state
from nlbench.introspection.model_state import evaluation_mode
from nlbench.models.datasets.parallel_text import END, PAD, START, ParallelText
from nlbench.models.datasets.synthetic import Curve
from nlbench.subjects.data import Dataset, Items, read_items

if TYPE_CHECKING:
    from .recipes import Recipe

__all__ = [
    "LARGEST_SEED",
    "Classification",
    "Regression",
    "Task",
    "Translation",
    "ahead",
    "augment",
    "batches",
    "bleu",
    "corrupt_labels",
    "relabelled",
    "task_of",
    "translate",
]


LARGEST_SEED = 2**32 - 1
T = TypeVar("T")
Pair = tuple[Tensor, Tensor]
NOTHING = -100
"""Target where nothing is to be predicted, as PyTorch's losses have it."""

TOLERANCE = 0.1
"""How far from its target a value may be that counts as right in a regression."""

_SENTENCES = 256
"""How many are translated at a time."""


class Task(ABC):
    """What a network is trained for: one of `classes` for each target, by the cross entropy.

    A dataset that isn't labelled images has a method ``task(recipe, seed)`` that
    returns one.

    Attributes
    ----------
    classes : int
    """

    classes: int

    @property
    @abstractmethod
    def size(self) -> int:
        """How many training samples there are."""

    @abstractmethod
    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[Pair]:
        """Inputs and targets of the training samples in that order, on the device.

        What is random in them, such as augmentation, is drawn from the generator.
        """

    @abstractmethod
    def evaluated(self, split: str, device: torch.device) -> Iterator[Pair]:
        """Inputs and targets of the split ``train`` or ``test``, as they are, in batches."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of logits of shape (n, ..., classes), a scalar.

        Raises
        ------
        nlbench.RequestError
            If the network doesn't give one logit a class for each target.
        """
        self._check(output, targets)
        return functional.cross_entropy(
            output.flatten(0, -2), targets.flatten(), ignore_index=NOTHING
        )

    def right(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How many targets have the largest logit, and how many there are."""
        asked = targets != NOTHING
        right = (output.argmax(-1) == targets) & asked
        # Together: each number that is fetched by itself makes a GPU's host wait.
        counts = torch.stack([right.sum(), asked.sum()]).tolist()
        return int(counts[0]), int(counts[1])

    def accuracy(self, model: nn.Module, split: str, device: torch.device) -> float:
        """Share of a split's targets predicted right; in training of those trained on.

        Raises
        ------
        nlbench.RequestError
            If the network doesn't give one logit a class for each target.
        nlbench.NotFinite
            If a logit is NaN or infinite.
        """
        right = asked = 0
        with evaluation_mode(model):
            for inputs, targets in self.evaluated(split, device):
                logits = model(inputs)
                self._check(logits, targets)
                if not bool((torch.isfinite(logits).all(-1) | (targets == NOTHING)).all()):
                    raise NotFinite("the network's logits are not finite, so it has no accuracy")
                counts = self.right(logits, targets)
                right, asked = right + counts[0], asked + counts[1]
        return right / asked

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """What is measured once, at the end of training, beside the accuracies."""
        return {}

    def metadata(self) -> dict[str, str]:
        """What a checkpoint has to carry for its outputs to be read."""
        return {}

    def _check(self, output: Tensor, targets: Tensor) -> None:
        expected = (*targets.shape, self.classes)
        if output.shape != expected:
            raise RequestError(
                f"the network's output has shape {tuple(output.shape)}, expected {expected}: one "
                "logit a class"
            )


class Classification(Task):
    """Images, one class each.

    Parameters
    ----------
    dataset : Dataset
    recipe : Recipe
        Its augmentation, and what share of training labels is to be corrupted.
    seed : int
        Decides which.

    Raises
    ------
    nlbench.RequestError
        If the images have no labels, or can't be read.
    """

    def __init__(self, dataset: Dataset, recipe: Recipe, seed: int) -> None:
        if not getattr(dataset, "labelled", True):
            raise RequestError(f"{dataset.name} has no labels, so there is nothing to learn")
        self.dataset, self.recipe, self.classes = dataset, recipe, dataset.classes
        self.items = dataset.train
        # A damaged file is told before the first epoch, not after it.
        for items in (dataset.train, dataset.test):
            items[0]
            if check := getattr(items, "check", None):
                check()
        if recipe.label_noise:
            self.items = relabelled(self.items, recipe.label_noise, dataset.classes, seed)

    @property
    def size(self) -> int:
        """How many training images there are."""
        return _len(self.items)

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[Pair]:
        """Normalised images of shape (b, ...) and labels of shape (b,), in that order."""
        for images, labels in batches(self.items, order, batch_size, device):
            if self.recipe.shift or self.recipe.flip:
                images = augment(images, self.recipe.shift, self.recipe.flip, generator)
            yield self.dataset.normalize(_on(images, device)), _on(labels, device)

    def evaluated(self, split: str, device: torch.device) -> Iterator[Pair]:
        """Normalised images and labels; in training those trained on."""
        items = self.items if split == "train" else self.dataset.split(split)
        for images, labels in batches(items, torch.arange(_len(items)), 512, device):
            yield self.dataset.normalize(_on(images, device)), _on(labels, device)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """Give a tensor of the CPU on a device; to a GPU without waiting for what it is at."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _len(items: Items) -> int:
    return len(items)  # type: ignore[arg-type]  # torch's Dataset declares no __len__


def relabelled(items: Items, fraction: float, classes: int, seed: int) -> Items:
    """The same images, a share of them under another label; see `corrupt_labels`."""
    read_labels = getattr(items, "read_labels", None)
    known = read_labels() if read_labels else [items[i][1] for i in range(_len(items))]
    labels = torch.tensor([int(label) for label in known])
    return _Relabelled(items, corrupt_labels(labels, fraction, classes, seed))


class _Relabelled(TorchDataset[tuple[Tensor, int]]):
    def __init__(self, items: Items, labels: Tensor) -> None:
        self.items = items
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index][0], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        pairs = read_items(self.items, indices)
        return [(image, self.labels[i]) for i, (image, _) in zip(indices, pairs, strict=True)]


def corrupt_labels(labels: Tensor, fraction: float, classes: int, seed: int) -> Tensor:
    """Replace a share of labels, each by another class drawn uniformly.

    Parameters
    ----------
    labels : integer tensor of shape (n,)
        In 0 … classes - 1.
    fraction : float
        In [0, 1]; exactly ``round(fraction * n)`` labels change.
    classes : int
        At least 2 if a label is to change.
    seed : int
        From 0 to 2³² - 1; decides which labels change and into what.

    Returns
    -------
    tensor of shape (n,)
        A copy.

    Raises
    ------
    nlbench.RequestError
        If an argument is out of bounds.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> labels = torch.zeros(10, dtype=torch.long)
    >>> int((corrupt_labels(labels, 0.3, classes=10, seed=0) != labels).sum())
    3
    """
    if not 0 <= fraction <= 1:
        raise RequestError(f"label noise is {fraction}, expected a share from 0 to 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise RequestError(f"the seed is {seed}, expected 0 to {LARGEST_SEED}")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise RequestError(f"labels reach outside 0 to {classes - 1}, the {classes} classes stated")
    count = round(fraction * len(labels))
    if count and classes < 2:
        raise RequestError("label noise needs a second class to change a label to")
    # NumPy's legacy generator, since its stream is frozen. A list seeds another stream
    # than a bare seed does, so that noise and order of images are unrelated.
    random = np.random.RandomState([seed, classes])
    chosen = torch.from_numpy(random.permutation(len(labels))[:count]).to(labels.device)
    steps = torch.from_numpy(random.randint(1, max(classes, 2), count)).to(labels)
    corrupted = labels.clone()
    corrupted[chosen] = (labels[chosen] + steps) % classes
    return corrupted


def augment(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Move and mirror each image on its own.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
        Before normalisation; what moves in from outside is 0, black.
    shift : int
        Most pixels along either axis; each whole number of -shift … shift is equally likely.
    flip : bool
        Mirror left to right with probability one half.
    generator : torch.Generator
        Of the CPU; decides everything.

    Returns
    -------
    tensor of the same shape
        A copy.

    Raises
    ------
    nlbench.RequestError
        If these are not images.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 2, 2] = 1
    >>> moved = augment(image, 2, True, torch.Generator().manual_seed(0))
    >>> moved.shape, moved.sum().item()
    (torch.Size([1, 1, 5, 5]), 1.0)
    """
    if images.ndim != 4:
        raise RequestError(
            f"augmentation needs images of shape (n, channels, height, width), "
            f"got {tuple(images.shape)}"
        )
    n, _, height, width = images.shape
    if shift:
        moves = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
        rows, columns = (moves + torch.arange(size) for size in (height, width))
        padded = functional.pad(images, (shift,) * 4)
        which = torch.arange(n)[:, None, None]
        images = padded[which, :, rows[0, :, :, None], columns[1, :, None, :]].permute(0, 3, 1, 2)
    if flip:
        mirrored = torch.rand(n, generator=generator) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images.contiguous()


def batches(items: Items, order: Tensor, batch_size: int, device: torch.device) -> Iterator[Pair]:
    """Images of shape (b, *shape) and labels of shape (b,), in that order, on the CPU.

    Each batch is read while `device` is busy with the one before.

    Examples
    --------
    >>> from nlbench.models.datasets.digits import digits
    >>> cpu = torch.device("cpu")
    >>> [len(labels) for _, labels in batches(digits().test, torch.arange(300), 128, cpu)]
    [128, 128, 44]
    """
    starts = range(0, len(order), batch_size)
    chosen = (order[start : start + batch_size].tolist() for start in starts)
    return ahead((_stacked(items, indices) for indices in chosen), device)


def _stacked(items: Items, indices: list[int]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*read_items(items, indices), strict=True)
    return torch.stack(images), torch.tensor([int(label) for label in labels])


def ahead(made: Iterator[T], device: torch.device) -> Iterator[T]:
    """Give what an iterator gives, in its order; make each while the caller uses the one before.

    One that draws from a global random generator for the first, as a dataset with augmentation
    of its own does, is left to the caller's thread: beside a network with dropout, which draws
    from it too, the numbers would otherwise depend on timing.

    Examples
    --------
    >>> list(ahead(iter("abc"), torch.device("cpu")))
    ['a', 'b', 'c']
    """
    before = rng_state(device)
    end = object()
    first = next(made, end)
    if first is end:
        return
    if not overlap_pays(device) or rng_state(device) != before:
        yield first  # type: ignore[misc]
        yield from made
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
            # Two sets of PyTorch's threads would wait for each other.
            reader.submit(torch.set_num_threads, 1).result()
            found: T | object = first
            while found is not end:
                following = reader.submit(next, made, end)
                yield found  # type: ignore[misc]
                found = following.result()
    finally:
        # What the reader set is also the default of threads to come.
        torch.set_num_threads(threads)


class _Held(Task):
    """Samples of which inputs and targets are two tensors in memory.

    Parameters
    ----------
    train, test : pair of tensors
        Inputs of shape (n, ...) and targets of shape (n,) or (n, length).
    at_once : int
        How many samples are evaluated at a time.
    """

    def __init__(self, train: Pair, test: Pair, at_once: int) -> None:
        self._splits, self._at_once = {"train": train, "test": test}, at_once

    @property
    def size(self) -> int:
        """How many training samples there are."""
        return len(self._splits["train"][0])

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[Pair]:
        """Inputs and targets in that order."""
        return self._read("train", order, batch_size, device)

    def evaluated(self, split: str, device: torch.device) -> Iterator[Pair]:
        """Inputs and targets of a split."""
        order = torch.arange(len(self._splits[split][0]))
        return self._read(split, order, self._at_once, device)

    def _read(self, split: str, order: Tensor, size: int, device: torch.device) -> Iterator[Pair]:
        inputs, targets = self._splits[split]
        for chosen in torch.split(order, size):
            yield _on(inputs[chosen], device), _on(targets[chosen], device)


class Regression(_Held):
    """Learn the value of each point of a function, by the mean squared error.

    Accuracy is the share of points within `TOLERANCE` of their target.

    Parameters
    ----------
    curve : Curve
    recipe : Recipe

    Raises
    ------
    nlbench.RequestError
        If the recipe augments images or corrupts labels.
    """

    classes = 1

    def __init__(self, curve: Curve, recipe: Recipe) -> None:
        if recipe.shift or recipe.flip or recipe.label_noise:
            raise RequestError(f"{curve.name} has neither images to move nor labels to corrupt")
        train, test = curve.points("train"), curve.points("test")
        super().__init__(train, test, at_once=len(test[0]))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, a scalar."""
        self._check(output, targets)
        return functional.mse_loss(output[..., 0], targets)

    def right(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How many values are within the tolerance, and how many there are."""
        return int(((output[..., 0] - targets).abs() <= TOLERANCE).sum()), targets.numel()

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Share of the test targets' variance that the network explains."""
        with evaluation_mode(model):
            ((inputs, targets),) = self.evaluated("test", device)
            error = (model(inputs)[..., 0] - targets).double().square().mean()
        return {"explained": float(1 - error / targets.double().var(correction=0))}


class Translation(_Held):
    """Learn the next token of the target from the source and the tokens before.

    Parameters
    ----------
    text : ParallelText
    recipe : Recipe

    Raises
    ------
    nlbench.RequestError
        If the recipe augments images or corrupts labels, or what BLEU needs isn't there.
    """

    def __init__(self, text: ParallelText, recipe: Recipe) -> None:
        bleu([""], [""], text.bleu_tokens)  # What is missing is told before training.
        if recipe.shift or recipe.flip:
            raise RequestError(f"{text.name} is text; recipe '{recipe.name}' moves images")
        if recipe.label_noise:
            raise RequestError(f"{text.name} is text; it has no labels to corrupt")
        self.text, self.classes = text, text.classes
        train, test = ((split.inputs, split.wanted) for split in (text.train, text.test))
        super().__init__(train, test, at_once=_SENTENCES)

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """BLEU of the greedy translations of the test split, and the share that is exact."""
        pairs = self.text.test
        found = self.text.vocabulary.decode(translate(model, pairs.inputs[:, 0], device).tolist())
        exact = sum(a == b for a, b in zip(found, pairs.targets, strict=True))
        return {
            "bleu": bleu(found, pairs.targets, self.text.bleu_tokens),
            "exact": exact / len(pairs.targets),
        }

    def metadata(self) -> dict[str, str]:
        """The vocabulary, without which the tokens can't be read."""
        return {"vocabulary": self.text.vocabulary.text}


def translate(model: nn.Module, sources: Tensor, device: torch.device) -> Tensor:
    """Translate greedily: at each place the token with the largest logit.

    Parameters
    ----------
    model : torch.nn.Module
        On `device`; from (n, 2, length) to (n, length, classes).
    sources : integer tensor of shape (n, length)
    device : torch.device

    Returns
    -------
    integer tensor of shape (n, length)
        Filled with padding after the end mark; without one where the sentence has no end
        within the length.
    """
    made = []
    with evaluation_mode(model):
        for source in torch.split(sources, _SENTENCES):
            given = torch.stack([source, torch.full_like(source, PAD)], dim=1).to(device)
            given[:, 1, 0] = START
            found = torch.full_like(source, PAD).to(device)
            open_ones = torch.ones(len(source), dtype=torch.bool, device=device)
            for place in range(source.shape[1]):
                token = model(given)[:, place].argmax(dim=1)
                found[:, place] = torch.where(open_ones, token, PAD)
                open_ones &= token != END
                if not bool(open_ones.any()):
                    break
                if place + 1 < source.shape[1]:
                    given[:, 1, place + 1] = found[:, place]
            made.append(found.cpu())
    return torch.cat(made)


def bleu(found: Sequence[str], wanted: Sequence[str], tokens: str = "13a") -> float:
    """Corpus BLEU of translations, 0 to 100, as sacrebleu counts it.

    Parameters
    ----------
    found, wanted : sequence of str
        Translations and references, one each.
    tokens : str
        How sacrebleu cuts a sentence.

    Raises
    ------
    nlbench.RequestError
        If sacrebleu is missing, or doesn't know `tokens`.

    References
    ----------
    M. Post. A Call for Clarity in Reporting BLEU Scores. WMT, 2018.

    Examples
    --------
    >>> bleu(["the cat sat on the mat"], ["the cat sat on the mat"])
    100.0
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise RequestError(
            "BLEU needs the sacrebleu library: pip install 'nlbench[translation]'"
        ) from error
    if tokens not in BLEU.TOKENIZERS:
        known = ", ".join(sorted(BLEU.TOKENIZERS))
        raise RequestError(f"BLEU: unknown tokens '{tokens}'; there are: {known}")
    # `force` only keeps a warning away, about references that end in a spaced full stop.
    score = BLEU(tokenize=tokens, force=True).corpus_score(list(found), [list(wanted)])
    return round(float(score.score), 6)


def task_of(dataset: Any, recipe: Recipe, seed: int) -> Task:
    """What a dataset is for: a task of its own, translation, regression, else classification."""
    own = getattr(dataset, "task", None)
    if own is not None:
        task: Task = own(recipe, seed)
        return task
    if isinstance(dataset, ParallelText):
        return Translation(dataset, recipe)
    if isinstance(dataset, Curve):
        return Regression(dataset, recipe)
    return Classification(dataset, recipe, seed)
