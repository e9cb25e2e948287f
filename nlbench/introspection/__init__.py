"""PyTorch as all probes see it: operations, calls, modules, axes, model state, precision, memory.

The only folder that uses private parts of PyTorch.
"""
