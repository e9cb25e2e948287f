"""Training with recipes, and the commands `train` and `linearize`.

`recipes` contains the settings, `loop` the training loop, `tasks` the loss and accuracy for each
type of dataset, `train` the files of a training run. The recipes in `linearisation_recipes` use
the penalty of `nlbench.models.sparsified`; `linearise` trains networks with them and measures them.
"""
