"""Accuracy of a network on a split, computed as in training."""

import torch

from nlbench.models.training.recipes import vanilla
from nlbench.models.training.tasks import get_task


def accuracy(model, split, dataset):
    return get_task(dataset, vanilla, 0).accuracy(model, split, torch.device("cpu"))
