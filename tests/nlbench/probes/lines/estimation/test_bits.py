import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.probes.lines.estimation.bits import pack, popcount, set_bits


@given(st.integers(1, 5), st.integers(0, 300), st.integers(0, 10**6), st.floats(0, 1))
def test_packing_round_trips(rows, units, seed, share):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(rows, units, generator=generator) < share
    words = pack(flags)
    assert words.shape == (rows, -(-units // 64))
    assert popcount(words).tolist() == flags.sum(1).tolist()
    row, unit = set_bits(words)
    expected = flags.nonzero().unbind(1)
    assert row.tolist() == expected[0].tolist()
    assert unit.tolist() == expected[1].tolist()


@given(st.integers(0, 10**6))
def test_packing_leaves_its_input_unchanged(seed):
    flags = torch.rand(2, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
    before = flags.clone()
    pack(flags)
    assert flags.equal(before)
