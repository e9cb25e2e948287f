"""Optimal transport: the affine map between normal distributions, and the exact assignment."""
