"""Small networks and their checkpoints."""

import torch
from safetensors.torch import save
from torch import nn

SAFETENSORS = save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, {"seed": "4"})


def network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))


def linear():
    return nn.Linear(3, 2)


def save_with_torch(path, content, **options):
    torch.save(content, path, **options)
    return path
