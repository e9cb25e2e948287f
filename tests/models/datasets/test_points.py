"""Points of a named distribution are ordinary datasets, with options for one or all of them."""

import pytest
import torch

from nlbench.cli.show import details
from nlbench.errors import RequestError
from nlbench.request import Request
from nlbench.runner import run
from nlbench.subjects.load import load_dataset


def points(name, **options):
    return load_dataset(name, options).sample(None).inputs


def test_even_points_are_at_equal_steps():
    assert points("interval/-1:3", count=5).flatten().sort().values.tolist() == [-1, 0, 1, 2, 3]
    quantiles = points("normal/2:0.5", count=9).flatten().double().sort().values
    expected = (torch.arange(9) + 0.5) / 9
    reached = torch.special.ndtr((quantiles - 2) / 0.5)
    torch.testing.assert_close(reached, expected.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("interval/2:8", 5, 3**0.5), ("normal/-1:2", -1, 2)]
)
def test_drawn_points_have_the_distributions_mean_and_spread(name, mean, std):
    drawn = points(name, count=20_000, spacing="random", shape="2x3")
    assert drawn.shape == (20_000, 2, 3)
    assert drawn.mean().item() == pytest.approx(mean, abs=6 * std / 120_000**0.5)
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    same, other = (points(name, count=50, spacing="random", seed=s) for s in (0, 1))
    assert not torch.equal(same, other)
    assert torch.equal(same, points(name, count=50, spacing="random", seed=0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("interval/2:1", {}, r"expected interval/LOW:HIGH, numbers with LOW < HIGH"),
        ("interval/a", {}, "expected interval/LOW:HIGH"),
        ("normal/0:nan", {}, "expected normal/MEAN:STD, numbers with STD > 0"),
        ("normal/0:1", {"shape": "3"}, "set normal.spacing=random"),
        ("normal/0:1", {"shape": "3y"}, r"normal/0:1\.shape: expected lengths"),
        ("normal/0:1", {"shape": "999999", "count": 9999}, "expected at most 268,435,456"),
    ],
)
def test_what_is_no_distribution_is_refused_in_one_line(name, options, message):
    with pytest.raises(RequestError, match=message):
        points(name, **options)


def test_an_option_is_set_for_one_member_or_for_all(tmp_path):
    data = ("interval/0:1", "interval/0:2")
    settings = {"interval.count": 7, "interval/0:2.count": 9}
    request = Request("r2", "functions/relu", data, "init", samples=0, settings=settings)
    table = run(request, tmp_path / "run").scores
    assert dict(zip(table.data, table.n, strict=False)) == {"interval/0:1": 7, "interval/0:2": 9}


def test_a_member_is_shown_with_its_options():
    shown = details("datasets", "normal/0:2")
    assert "Make points from N(0, 2²)." in shown
    assert "normal/0:2.spacing = even" in shown
