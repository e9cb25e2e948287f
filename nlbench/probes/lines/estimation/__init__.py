"""Estimates of boundaries and deviation on nested grids, without breakpoints."""
