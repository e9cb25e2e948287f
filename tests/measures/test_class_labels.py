"""Labels are validated in one way for every measure that uses them."""

import pytest
import torch
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.measures.accuracy import accuracy_score, class_labels
from nlbench.measures.substitution import loss_change

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
GOOD = torch.tensor([0, 1, 2, 0, -100, 2])
BAD = {
    "-1": torch.tensor([0, 1, -1, -1, 1, 2]),
    "255": torch.tensor([0, 1, 255, 255, 1, 2]),
    "one-hot": nn.functional.one_hot(torch.tensor([0, 1, 2, 0, 1, 2]), 3),
    "bool": torch.tensor([True, False, True, False, True, True]),
    "shape": torch.zeros(6, 4, dtype=torch.long),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "use", [accuracy_score, class_labels, lambda logits, t: loss_change(logits, 2 * logits, t)]
)
def test_non_class_labels_raise(name, use):
    with pytest.raises(nlbench.Undefined, match=name):
        use(LOGITS, BAD[name])


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("measure", ["accuracy", "substitution"])
def test_measures_are_undefined_and_name_the_label(name, measure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    labels = before_drawing(BAD[name])
    result = nlbench.evaluate(model, torch.randn(6, 4), [measure], labels=labels)[measure]
    assert result.status == "undefined"
    assert name in result.reason


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_a_column_of_labels_counts_as_its_entries(dtype):
    labels = GOOD.to(dtype)
    assert accuracy_score(LOGITS, labels) == accuracy_score(LOGITS, labels[:, None])
    flat, column = (loss_change(LOGITS, 2 * LOGITS, t)[0] for t in (labels, labels[:, None]))
    assert torch.equal(flat, column)


@pytest.mark.parametrize("labels", [torch.arange(12) % 3, torch.linspace(0, 2, 12)])
def test_float_labels_are_classes_if_they_are_indices(labels):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = nlbench.evaluate(model, torch.randn(12, 4), ["substitution"], labels=labels.float())
    is_index = bool((labels == labels.round()).all())
    assert run["substitution"].status == ("undefined" if is_index else "ok")


class Positions(nn.Module):
    """A network with as many classes as positions."""

    def forward(self, x):
        return x.relu()[:, None] + torch.eye(x.shape[1])


@pytest.mark.parametrize("measure", ["accuracy", "substitution", "effective-depth"])
def test_an_unclear_axis_of_classes_is_undefined(measure):
    x, labels = torch.randn(12, 4), torch.arange(48).reshape(12, 4) % 4
    model = nn.Sequential(nn.Linear(4, 4), Positions())
    result = nlbench.evaluate(model, x, [measure], labels=labels)[measure]
    assert result.status == "undefined"
    assert "may be along axis 1 or the last" in result.reason
    result = nlbench.evaluate(model, x, [measure], labels=labels[..., None])[measure]
    assert result.status == "ok", result.reason
