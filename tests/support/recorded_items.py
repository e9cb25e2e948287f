"""Dataset items that record the threads that read them."""

import threading

import torch
from torch.utils.data import Dataset

from nlbench.errors import RequestError


class RecordedItems(Dataset):
    """Images whose index is their label, with the threads that read them."""

    def __init__(self, size=12, broken=None, chance=False):
        self.size, self.broken, self.chance = size, broken, chance
        self.threads = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.threads.append(threading.current_thread().name)
        if index == self.broken:
            raise RequestError(f"can't read image {index}")
        image = torch.full((1, 2, 2), float(index))
        return image + (torch.rand(1) if self.chance else 0), index
