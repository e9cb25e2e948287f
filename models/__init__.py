"""nlbench.models."""
