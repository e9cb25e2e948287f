"""nlbench.measures."""
