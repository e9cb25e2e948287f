"""Trained networks that other packages ship, with suitable inputs."""
