"""Translation as a task: the loss of the next token, token accuracy, greedy decoding, BLEU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.models.datasets.parallel_text import END, PAD, START
from nlbench.probes.model_state import evaluation_mode

from .tasks import Task, on_device

if TYPE_CHECKING:
    from nlbench.models.datasets.parallel_text import ParallelText

    from .recipes import Recipe

__all__ = ["Translation", "bleu", "translate", "translation_of"]


_BATCH = 256


class Translation(Task):
    """Learn the next token of the target from the source and the tokens before.

    Parameters
    ----------
    text : ParallelText
    """

    def __init__(self, text: ParallelText) -> None:
        self.text, self.classes = text, text.classes

    @property
    def size(self) -> int:
        """How many training pairs there are."""
        return len(self.text.train.inputs)

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs of shape (b, 2, length) and wanted tokens of shape (b, length)."""
        pairs = self.text.train
        for chosen in torch.split(order, batch_size):
            yield on_device(pairs.inputs[chosen], device), on_device(pairs.wanted[chosen], device)

    def evaluated(self, split: str, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and wanted tokens, each to be predicted from the right ones before."""
        pairs = self.text.split(split)
        for inputs, wanted in zip(
            torch.split(pairs.inputs, _BATCH), torch.split(pairs.wanted, _BATCH), strict=True
        ):
            yield on_device(inputs, device), on_device(wanted, device)

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


def translation_of(text: ParallelText, recipe: Recipe, label_noise: float) -> Translation:
    """Make the task of pairs of texts.

    Raises
    ------
    nlbench.RequestError
        If the recipe augments images or corrupts labels, or what BLEU needs isn't there.
    """
    bleu([""], [""], text.bleu_tokens)  # What is missing is told before training.
    if recipe.shift or recipe.flip:
        raise RequestError(f"{text.name} is text; recipe '{recipe.name}' moves images")
    if label_noise:
        raise RequestError(f"{text.name} is text; it has no labels to corrupt")
    return Translation(text)


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
        for source in torch.split(sources, _BATCH):
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
