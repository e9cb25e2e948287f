"""Estimates of boundaries and deviation on nested grids, without finding breakpoints.

`estimator` decides when to halve a grid and when to stop. `grids` counts the crossings between
nodes from the activation patterns (`patterns`, `piecewise`) that `evaluator` computes; `copies` and
`coincidences` find crossings that would be counted twice. `extrapolation` contains the mathematics.
"""
