"""Similarity of places against definitions, closed forms and the recorded run."""

import csv
import math

import numpy as np
import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.representations import cka_matrix
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=GENERATOR, dtype=dtype)


def features(n=60):
    x = draw(n, 5)
    return {"x": x, "relu": x.relu(), "wide": (x @ draw(5, 200)).tanh(), "other": draw(n, 7)}


def hsic_by_definition(k, l):  # noqa: E741
    """Song et al. 2012, equation 5."""
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    ones = np.ones(n)
    total = np.trace(k @ l) + (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * ones @ k @ l @ ones) / (n * (n - 3))


def test_values_are_those_of_the_definition():
    sides = features()
    similarity = cka_matrix(sides)
    grams = [(value @ value.T).numpy() for value in sides.values()]
    for i, k in enumerate(grams):
        for j, l in enumerate(grams):  # noqa: E741
            norms = hsic_by_definition(k, k) * hsic_by_definition(l, l)
            expected = hsic_by_definition(k, l) / math.sqrt(norms)
            assert similarity.values[i, j] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "x",
    [
        draw(5, 4).repeat(4, 1),
        draw(20, 300),
        draw(20, 4).half(),
        draw(20, 4) * 1e30,
        draw(20, 4).float() * 1e-30,
        torch.cat([draw(20, 3), torch.full((20, 1), 1e4, dtype=torch.float64)], 1),
        torch.randint(0, 5, (20, 4), generator=GENERATOR),
        draw(20, 1),
        draw(20, 3, 2, 2),
    ],
    ids=["copies", "wide", "half", "huge", "tiny", "constant", "integers", "column", "images"],
)
def test_odd_features_have_the_value_of_the_definition(x):
    y = draw(20, 4)
    similarity = cka_matrix({"x": x, "y": y})
    rows = x.flatten(1).double()
    rows = rows / rows.abs().max()
    rows = rows - rows.mean(0)
    k, l = (rows @ rows.T).numpy(), (y @ y.T).numpy()  # noqa: E741
    expected = hsic_by_definition(k, l) / math.sqrt(
        hsic_by_definition(k, k) * hsic_by_definition(l, l)
    )
    assert similarity.values[0, 1] == pytest.approx(expected, abs=1e-8)
    assert np.diag(similarity.values) == pytest.approx([1, 1])
    assert (abs(similarity.values) <= 1).all()


def test_diagonal_is_one_and_no_value_exceeds_it():
    similarity = cka_matrix({str(i): draw(12, d) for i, d in enumerate((1, 3, 40, 900))})
    assert np.diag(similarity.values) == pytest.approx(np.ones(4))
    assert (similarity.values <= 1).all()
    np.testing.assert_allclose(similarity.values, similarity.values.T)


def test_rotations_scales_and_offsets_change_nothing():
    x, y = draw(50, 6), draw(50, 3)
    rotation = torch.linalg.qr(draw(6, 6))[0]
    before = cka_matrix({"x": x}, {"y": y}).values
    after = cka_matrix({"x": 1e-150 * x @ rotation}, {"y": 1e120 * y - 1e121}).values
    assert after[0, 0] == pytest.approx(before[0, 0], rel=1e-6)


@pytest.mark.parametrize(
    "constant", [torch.full((30, 4), 0.1), torch.zeros(30, 2), torch.full((30, 1), 1e30)]
)
def test_constant_features_have_no_value(constant):
    similarity = cka_matrix({"x": draw(30, 3), "constant": constant})
    assert np.isnan(similarity.values[1]).all()
    assert np.isnan(similarity.values[:, 1]).all()
    assert similarity.values[0, 0] == pytest.approx(1)


def test_three_samples_are_too_few():
    assert np.isnan(cka_matrix({"x": draw(3, 2)}).values).all()


def test_errors_are_the_deviation_over_draws():
    def one():
        x = draw(128, 4)
        similarity = cka_matrix({"x": x}, {"y": x.relu() + draw(128, 4)})
        return similarity.values[0, 0], similarity.errors[0, 0]

    values, errors = np.array([one() for _ in range(60)]).T
    assert 0.7 < np.sqrt((errors**2).mean()) / values.std(ddof=1) < 1.5


def test_different_numbers_of_samples_are_refused():
    with pytest.raises(RequestError):
        cka_matrix({"x": draw(4, 2), "y": draw(5, 2)})
    with pytest.raises(RequestError):
        cka_matrix({})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("similarity") / "run"
    request = nlbench.Request(
        ("norm",), ("vgg8",), ("digits",), weights=("trained", "init"), samples=48
    )
    return nlbench.run(request, folder)


def test_run_compares_its_networks(run, tmp_path):
    own = run.similarity(subject="trained")
    assert np.diag(own.values) == pytest.approx(np.ones(7))
    assert own.places == own.others
    assert own.n == 48
    both = run.similarity(subject="trained", against="init")
    back = run.similarity(subject="init", against="trained")
    np.testing.assert_allclose(both.values, back.values.T, atol=1e-6)
    assert both.frame().shape == (49, 4)
    page = both.write(tmp_path / "similarity.html").read_text()
    assert page.count("<td class=") == 49
    with both.write(tmp_path / "similarity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 49


def test_values_are_those_of_hooks(run):
    subject = load_subject(SubjectSpec("vgg8", "trained", "digits", 0, 48), torch.device("cpu"))
    outputs = []
    relus = [module for module in subject.model.modules() if isinstance(module, nn.ReLU)]
    for module in relus:
        module.register_forward_hook(lambda module, args, output: outputs.append(output.clone()))
    with torch.no_grad():
        subject.model.eval()(subject.inputs)
    means = [y.double().flatten(2).mean(2) if y.ndim > 2 else y.double() for y in outputs]
    expected = cka_matrix({str(index): value for index, value in enumerate(means)})
    np.testing.assert_allclose(run.similarity(subject="trained").values, expected.values, atol=1e-5)


def test_checkpoints_are_found_by_requested_path(tmp_path):
    paths = [tmp_path / "ck" / f"epoch={epoch}.pt" for epoch in (0, 1)]
    paths[0].parent.mkdir()
    for epoch, path in enumerate(paths):
        torch.manual_seed(epoch)
        model = load_subject(
            SubjectSpec("vgg8", "init", "digits", epoch, 4), torch.device("cpu")
        ).model
        torch.save(model.state_dict(), path)
    request = nlbench.Request(
        ("norm",), ("vgg8",), ("digits",), weights=tuple(map(str, paths)), samples=16
    )
    run = nlbench.run(request, tmp_path / "run")
    similarity = run.similarity(subject="epoch=0.pt", against="epoch=1.pt")
    assert similarity.values.shape == (7, 7)
    assert similarity.values[0, 0] < 1


def test_networks_of_evaluate_are_not_loaded_again():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    run = nlbench.evaluate(model, torch.randn(16, 4), "norm", name="Net")
    with pytest.raises(RequestError, match="Net was passed to"):
        run.similarity()


def test_unknown_networks_are_refused(run):
    with pytest.raises(RequestError):
        run.similarity()
    with pytest.raises(RequestError, match="trianed"):
        run.similarity(subject="trianed")


def test_changed_weights_are_refused(run):
    changed = nlbench.load_run(run.path)
    for record in changed.records:
        object.__setattr__(record.subject, "weights_hash", "0" * 64)
    with pytest.raises(RequestError):
        changed.similarity(subject="trained")
