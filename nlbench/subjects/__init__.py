"""Subjects (a model, its weights, a dataset and a seed), and how they are loaded.

`spec` specifies a subject. `load` opens its dataset, chooses the weights (`weights_choice`),
builds the model from the seed (`build`) and draws the samples (`samples`). `model` and `data`
declare models and datasets.
"""
