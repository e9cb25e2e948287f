"""Training by recipes, and the commands `train` and `linearize`.

`recipes` has the settings, `loop` the training loop, `tasks` the loss and accuracy of a dataset,
`train` the files of a training run. `linearisation_recipes` train with the penalty of
`nlbench.models.sparsified`; `linearise` trains networks by them and measures what is left.
"""
