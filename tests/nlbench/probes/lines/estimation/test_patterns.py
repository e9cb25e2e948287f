import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.probes.lines.estimation.patterns import bits_of, ones, packed


@given(st.integers(1, 5), st.integers(0, 300), st.integers(0, 10**6), st.floats(0, 1))
def test_packed_flags_are_those_that_were_packed(rows, units, seed, share):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(rows, units, generator=generator) < share
    words = packed(flags)
    assert words.shape == (rows, -(-units // 64))
    assert ones(words).tolist() == flags.sum(1).tolist()
    row, unit = bits_of(words)
    expected = flags.nonzero().unbind(1)
    assert row.tolist() == expected[0].tolist()
    assert unit.tolist() == expected[1].tolist()


@given(st.integers(0, 10**6))
def test_what_is_packed_is_left_as_it_was(seed):
    flags = torch.rand(2, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
    before = flags.clone()
    packed(flags)
    assert flags.equal(before)
