"""Datasets that ship with nlbench, and readers of the usual files.

Each is registered in ``pyproject.toml``, in the group ``nlbench.datasets``.
"""
