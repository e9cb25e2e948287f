"""The probe `outputs`, and accuracy, which it is for."""

import pytest
import torch
from accuracies import accuracy
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score as by_scikit_learn
from torch import nn

import nlbench
from nlbench.errors import NotFinite
from nlbench.measures.accuracy import accuracy_score
from nlbench.models.datasets.digits import digits
from nlbench.models.networks.vgg import vgg8
from nlbench.subjects.samples import draw


def result(model, inputs, labels, **settings):
    run = nlbench.evaluate(model, inputs, ["accuracy"], labels=labels, settings=settings)
    return run.records[0].result


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 16), st.integers(0, 2**16))
def test_accuracy_equals_scikit_learns(n, classes, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    found = result(nn.Identity(), logits, labels, **{"outputs.batch": batch})
    expected = by_scikit_learn(labels, logits.argmax(1))
    assert found.summary["value"] == pytest.approx(expected, abs=1e-12)
    assert accuracy_score(logits, labels).item() == found.summary["value"]
    assert found.n == n


def test_labels_per_position_ignore_padding():
    logits = torch.eye(4)[None].repeat(2, 1, 1)
    labels = torch.tensor([[0, 1, 0, -100], [0, -100, -100, -100]])
    assert accuracy_score(logits, labels).item() == 0.75


def test_accuracy_of_nan_logits_is_not_finite():
    with pytest.raises(NotFinite):
        accuracy_score(torch.full((3, 2), torch.nan), torch.zeros(3).long())


def test_samples_without_labels_have_no_accuracy():
    run = nlbench.evaluate(nn.Linear(3, 2), torch.zeros(4, 3), ["accuracy"])
    assert run.records[0].result.status == "undefined"
    assert "no labels" in run.records[0].result.reason


@pytest.mark.parametrize("held", [0, 2**30])
def test_streamed_samples_have_labels(held):
    data, model = digits(), vgg8()
    sample, stream = draw(data, None, split="test", seed=0, model=model, max_bytes=held)
    assert (stream is None) == bool(held)
    from nlbench.subjects.subject import Subject

    subject = Subject(model, sample.inputs, sample.labels, {}, stream=stream)
    right = sum(
        int((model.eval()(inputs).argmax(1) == labels).sum())
        for inputs, labels in subject.labelled(100)
    )
    assert right / 512 == accuracy(model, "test", data)


def test_accuracy_leaves_out_padded_tokens():
    class Masked(nn.Linear):
        def forward(self, x, attention_mask):
            return super().forward(x)

    torch.manual_seed(0)
    model, x, labels = Masked(4, 3), torch.randn(20, 6, 4), torch.arange(120).reshape(20, 6) % 3
    mask = torch.arange(6) < torch.arange(20)[:, None] % 5 + 2
    expected = accuracy_score(model(x, mask)[mask], labels[mask]).item()
    for label in (0, 1, -100, 7):
        found = result(model, (x, mask), torch.where(mask, labels, label))
        assert found.summary["value"] == pytest.approx(expected, abs=1e-12)


class Translator(nn.Module):
    """An encoder and a decoder of sequences of equal length."""

    def __init__(self):
        super().__init__()
        encoder = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(4, 1, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, source, target, padding):
        memory = self.encoder(source, src_key_padding_mask=padding)
        return self.head(self.decoder(target, memory, memory_key_padding_mask=padding))


def test_padding_of_a_source_leaves_labels_of_targets():
    torch.manual_seed(0)
    model = Translator().eval()
    source, target = torch.randn(2, 20, 6, 4)
    padding = torch.arange(6) >= torch.arange(20)[:, None] % 5 + 2
    labels = torch.arange(120).reshape(20, 6) % 3
    expected = accuracy_score(model(source, target, padding), labels).item()
    found = result(model, (source, target, padding), labels)
    assert found.summary["value"] == pytest.approx(expected, abs=1e-12)
