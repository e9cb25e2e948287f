"""Subjects: a model, its weights, a dataset and a seed, and how they are loaded."""
