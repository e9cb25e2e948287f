"""Training tasks: the batches, loss and accuracy for each type of dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import NotFinite, RequestError
from nlbench.introspection.model_state import evaluation_mode
from nlbench.measures.accuracy import IGNORED_LABEL
from nlbench.models.datasets.parallel_text import END, PAD, START, ParallelText
from nlbench.models.datasets.regression import RegressionDataset
from nlbench.models.datasets.text import TextWindows
from nlbench.subjects.data import Dataset

from .batches import augment, batches, to_device
from .label_noise import add_label_noise
from .recipes import Recipe

SENTENCES_PER_BATCH = 256


def translate(model: nn.Module, sources: Tensor, device: torch.device) -> Tensor:
    """Translate greedily, choosing the token with the largest logit at each position.

    The model maps (n, 2, length) to (n, length, classes). Sources (n, length) become translations
    of the same shape, padded after the end token, which is missing if a sentence doesn't end within
    the length.
    """
    translations = []
    with evaluation_mode(model):
        for source in torch.split(sources, SENTENCES_PER_BATCH):
            inputs = torch.stack([source, torch.full_like(source, PAD)], dim=1).to(device)
            inputs[:, 1, 0] = START
            tokens = torch.full_like(source, PAD).to(device)
            is_open = torch.ones(len(source), dtype=torch.bool, device=device)
            for position in range(source.shape[1]):
                token = model(inputs)[:, position].argmax(dim=1)
                tokens[:, position] = torch.where(is_open, token, PAD)
                is_open &= token != END
                if not bool(is_open.any()):
                    break
                if position + 1 < source.shape[1]:
                    inputs[:, 1, position + 1] = tokens[:, position]
            translations.append(tokens.cpu())
    return torch.cat(translations)


def bleu(translations: Sequence[str], references: Sequence[str], tokens: str = "13a") -> float:
    """Compute the corpus BLEU of translations, 0 to 100, with sacrebleu and one of its tokenizers.

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
        raise RequestError(f"BLEU: unknown tokenizer '{tokens}', expected one of: {known}")
    # `force` suppresses a warning about references that end with a space and a full stop.
    metric = BLEU(tokenize=tokens, force=True)
    score = metric.corpus_score(list(translations), [list(references)])
    return round(float(score.score), 6)


Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""

REGRESSION_TOLERANCE = 0.1
"""Maximum distance from its target at which a predicted value counts as correct."""

LOGITS_PER_BATCH = 2**22
"""Number of logits in an evaluation batch of text."""


class Task(ABC):
    """Base class for tasks.

    The default is classification with the cross-entropy loss. Datasets other than labelled images
    can return their own from ``task(recipe, seed)``. The sizes are the numbers of samples of the
    splits ``train`` and ``test``.
    """

    classes: int
    sizes: Mapping[str, int]
    evaluation_batch_size = 512

    @property
    def size(self) -> int:
        """Number of training samples."""
        return self.sizes["train"]

    @abstractmethod
    def read(
        self,
        split: str,
        order: Tensor,
        batch_size: int,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> Iterator[Batch]:
        """Yield the samples of a split in the given order, on the device.

        The generator is the only source of randomness, such as augmentation. Without it, there is
        none.
        """

    def evaluation_batches(self, split: str, device: torch.device) -> Iterator[Batch]:
        """Yield all samples of a split, not augmented."""
        if split not in self.sizes:
            raise RequestError(f"there is no split '{split}'; expected test or train")
        return self.read(split, torch.arange(self.sizes[split]), self.evaluation_batch_size, device)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross entropy of logits of shape (n, ..., classes), a scalar."""
        self._check(output, targets)
        return functional.cross_entropy(
            output.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_LABEL
        )

    def count_correct(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count the correctly predicted targets and all targets."""
        is_counted = targets != IGNORED_LABEL
        is_correct = (output.argmax(-1) == targets) & is_counted
        # Both are transferred together because each transfer synchronises with the GPU.
        counts = torch.stack([is_correct.sum(), is_counted.sum()]).tolist()
        return int(counts[0]), int(counts[1])

    def accuracy(self, model: nn.Module, split: str, device: torch.device) -> float:
        """Compute the fraction of targets predicted correctly. Corrupted labels are included.

        Raises
        ------
        nlbench.RequestError
            If the network doesn't return one logit per class for each target.
        nlbench.NotFinite
            If a logit is NaN or infinite.
        """
        correct = total = 0
        with evaluation_mode(model):
            for inputs, targets in self.evaluation_batches(split, device):
                logits = model(inputs)
                self._check(logits, targets)
                is_valid = torch.isfinite(logits).all(-1) | (targets == IGNORED_LABEL)
                if not bool(is_valid.all()):
                    raise NotFinite("the network's logits are not finite, so it has no accuracy")
                counts = self.count_correct(logits, targets)
                correct = correct + counts[0]
                total = total + counts[1]
        return correct / total

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Compute further scores, once at the end of training."""
        return {}

    def metadata(self) -> dict[str, str]:
        """Return the checkpoint metadata needed to interpret the outputs."""
        return {}

    def _check(self, output: Tensor, targets: Tensor) -> None:
        expected = (*targets.shape, self.classes)
        if output.shape != expected:
            raise RequestError(
                f"the network's output has shape {tuple(output.shape)}, expected {expected}: one "
                "logit per class"
            )


class Classification(Task):
    """Classification of images."""

    def __init__(self, dataset: Dataset, recipe: Recipe, seed: int) -> None:
        if not getattr(dataset, "labelled", True):
            raise RequestError(f"{dataset.name} has no labels, so there is nothing to learn")
        self.dataset = dataset
        self.recipe = recipe
        self.classes = dataset.classes
        self._items = {"train": dataset.train, "test": dataset.test}
        # Report damaged files before the first epoch, not after it.
        for items in self._items.values():
            items[0]
            if check := getattr(items, "check", None):
                check()
        if recipe.label_noise:
            noisy = add_label_noise(dataset.train, recipe.label_noise, dataset.classes, seed)
            self._items["train"] = noisy
        # PyTorch's Dataset declares no __len__.
        self.sizes = {split: len(items) for split, items in self._items.items()}  # type: ignore[arg-type]

    def read(
        self,
        split: str,
        order: Tensor,
        batch_size: int,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> Iterator[Batch]:
        """Yield normalised images of shape (b, ...) and labels of shape (b,), some corrupted."""
        for images, labels in batches(self._items[split], order, batch_size, device):
            if generator is not None and (self.recipe.shift or self.recipe.flip):
                images = augment(images, self.recipe.shift, self.recipe.flip, generator)
            yield self.dataset.normalize(to_device(images, device)), to_device(labels, device)


class InMemoryTask(Task):
    """A task with inputs (n, ...) and targets (n,) or (n, length) in memory."""

    def __init__(
        self, name: str, recipe: Recipe, train: Batch, test: Batch, evaluation_batch_size: int
    ) -> None:
        if recipe.shift or recipe.flip or recipe.label_noise:
            raise RequestError(f"{name} has neither images to augment nor labels to corrupt")
        self._splits = {"train": train, "test": test}
        self.sizes = {split: len(inputs) for split, (inputs, _) in self._splits.items()}
        self.evaluation_batch_size = evaluation_batch_size

    def read(
        self,
        split: str,
        order: Tensor,
        batch_size: int,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> Iterator[Batch]:
        """Yield inputs and targets."""
        inputs, targets = self._splits[split]
        for indices in torch.split(order, batch_size):
            yield to_device(inputs[indices], device), to_device(targets[indices], device)


class Regression(InMemoryTask):
    """Regression of a function's values with the mean squared error.

    The accuracy is the fraction of predictions within `REGRESSION_TOLERANCE` of their target.
    """

    classes = 1

    def __init__(self, dataset: RegressionDataset, recipe: Recipe) -> None:
        train = dataset.points("train")
        test = dataset.points("test")
        super().__init__(dataset.name, recipe, train, test, len(test[0]))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean squared error, a scalar."""
        self._check(output, targets)
        return functional.mse_loss(output[..., 0], targets)

    def count_correct(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count the values within the tolerance and all values."""
        errors = (output[..., 0] - targets).abs()
        return int((errors <= REGRESSION_TOLERANCE).sum()), targets.numel()

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Compute the fraction of the test targets' variance that the network explains."""
        with evaluation_mode(model):
            ((inputs, targets),) = self.evaluation_batches("test", device)
            error = (model(inputs)[..., 0] - targets).double().square().mean()
        return {"explained": float(1 - error / targets.double().var(correction=0))}


class Translation(InMemoryTask):
    """Prediction of the target's next token from the source and the preceding tokens.

    It requires sacrebleu.
    """

    def __init__(self, text: ParallelText, recipe: Recipe) -> None:
        bleu([""], [""], text.bleu_tokens)  # Raises before training if sacrebleu is missing.
        self.text, self.classes = text, text.classes
        train, test = ((split.inputs, split.target_tokens) for split in (text.train, text.test))
        super().__init__(text.name, recipe, train, test, SENTENCES_PER_BATCH)

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Compute BLEU and the fraction of exact matches for greedy test-split translations."""
        pairs = self.text.test
        tokens = translate(model, pairs.inputs[:, 0], device).tolist()
        translations = self.text.vocabulary.decode(tokens)
        exact = sum(a == b for a, b in zip(translations, pairs.targets, strict=True))
        return {
            "bleu": bleu(translations, pairs.targets, self.text.bleu_tokens),
            "exact": exact / len(pairs.targets),
        }

    def metadata(self) -> dict[str, str]:
        """Return the vocabulary, which is needed to decode the tokens."""
        return {"vocabulary": self.text.vocabulary.text}


class NextToken(InMemoryTask):
    """Prediction of the next token in a text, by a model that predicts tokens."""

    def __init__(self, text: TextWindows, recipe: Recipe) -> None:
        train, test = (text.sample(None, split=split) for split in ("train", "test"))
        if train.labels is None or test.labels is None:
            raise RequestError(f"{text.name} has no labels for this model's tokens")
        self.classes = text.classes
        size = max(1, LOGITS_PER_BATCH // (text.length * text.classes))
        super().__init__(
            text.name, recipe, (train.inputs, train.labels), (test.inputs, test.labels), size
        )


def get_task(dataset: Any, recipe: Recipe, seed: int) -> Task:
    """Return a dataset's own task, or the default for its type."""
    make_task = getattr(dataset, "task", None)
    if make_task is not None:
        return make_task(recipe, seed)
    if isinstance(dataset, ParallelText):
        return Translation(dataset, recipe)
    if isinstance(dataset, RegressionDataset):
        return Regression(dataset, recipe)
    if isinstance(dataset, TextWindows):
        return NextToken(dataset, recipe)
    return Classification(dataset, recipe, seed)
