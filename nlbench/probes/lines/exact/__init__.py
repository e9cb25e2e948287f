"""Exact traces of segments: every breakpoint, layer by layer."""
