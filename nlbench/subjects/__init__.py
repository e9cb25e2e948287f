"""What is measured: a model, its weights, a dataset and the samples taken from it."""
