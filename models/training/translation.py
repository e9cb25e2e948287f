"""Greedy translation and BLEU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.introspection.model_state import evaluation_mode
from nlbench.models.datasets.parallel_text import END, PAD, START

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
