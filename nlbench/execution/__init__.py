"""Measure what a plan asks for: one subject after the other, here, on processes or on a cluster."""
