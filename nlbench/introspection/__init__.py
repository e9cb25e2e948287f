"""What nlbench knows of PyTorch: operations, modules and calls, axes, state, precision, memory.

The only folder that touches private parts of PyTorch.
"""
