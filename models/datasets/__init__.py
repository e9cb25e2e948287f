"""Datasets that ship with nlbench, and readers of the usual files."""
