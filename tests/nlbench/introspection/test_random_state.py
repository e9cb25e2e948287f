"""Global random generators: compared, restored, and drawn from in named streams."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.introspection.random_state import RandomStream, preserve_rng_state, rng_state


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_a_draw_changes_the_state(draw):
    before = rng_state(torch.device("cpu"))
    assert rng_state(torch.device("cpu")) == before
    draw()
    assert rng_state(torch.device("cpu")) != before


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002


def seed_all():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_streams_are_independent(order):
    straight = {}
    for name in "abc":
        with RandomStream(name).active():
            straight[name] = [draw() for _ in range(12)]
    streams = {name: RandomStream(name) for name in "abc"}
    mixed = {name: [] for name in "abc"}
    for name in order:
        with streams[name].active():
            mixed[name].append(draw())
        draw()
    for name, drawn in mixed.items():
        assert drawn == straight[name][: len(drawn)]


def test_global_generators_continue_after_a_stream():
    seed_all()
    expected = [draw(), draw()]
    seed_all()
    first = draw()
    with RandomStream("x").active():
        draw()
        seed_all()
    assert [first, draw()] == expected


def test_seeds_differ_between_names():
    drawn = set()
    for number in range(50):
        with RandomStream(f"cell {number}").active():
            drawn.add(draw()[2])
    assert len(drawn) == 50


def test_a_stream_without_a_name_leaves_everything_alone():
    torch.manual_seed(1)
    before = torch.rand(3)
    torch.manual_seed(1)
    with RandomStream("").active():
        assert torch.equal(torch.rand(3), before)


def test_numpys_cached_normal_deviate_is_preserved():
    seed_all()
    expected = np.random.randn(4).tolist()  # noqa: NPY002
    seed_all()
    first = np.random.randn()  # noqa: NPY002
    with preserve_rng_state(torch.device("cpu")), RandomStream("x").active():
        draw()
    assert [first, *np.random.randn(3).tolist()] == expected  # noqa: NPY002
