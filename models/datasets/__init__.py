"""Datasets that ship with nlbench, and readers for common file formats.

Each is registered in ``pyproject.toml``, in the group ``nlbench.datasets``.
"""
