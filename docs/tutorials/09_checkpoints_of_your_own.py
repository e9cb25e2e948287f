"""
Checkpoints of your own network
===============================

A file with a network, checkpoints of its training and a folder of images are enough for a
leaderboard over the checkpoints. This tutorial makes all three.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import nlbench
from nlbench.subjects.load import build_model, load_dataset

folder = Path("runs/own")
folder.mkdir(parents=True, exist_ok=True)
(folder / "my_net.py").write_text('''
from torch import nn


class Net(nn.Module):
    """A small CNN."""

    def __init__(self, in_channels=3, num_classes=10, width: int = 8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))
''')

# %%
# Images in a folder per class:

generator = np.random.default_rng(0)
for name, brightness in (("dark", 100), ("light", 250)):
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    for index in range(24):
        pixels = generator.integers(0, brightness, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / name / f"{index}.png")

# %%
# Six checkpoints as Lightning writes them. The training is short; any other would do.

data = load_dataset("runs/own/images", {"size": 32})
sample = data.sample(None)
torch.manual_seed(0)
model = build_model("runs/own/my_net.py:Net", data, seed=0)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
(folder / "checkpoints").mkdir(exist_ok=True)
for epoch in range(6):
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2", "state_dict": state, "epoch": epoch}
    torch.save(content, folder / "checkpoints" / f"epoch={epoch}.ckpt")
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(sample.inputs), sample.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %%
# On the command line this is
#
# .. code-block:: sh
#
#    nlbench run --measures affinity,r2 --model my_net.py --data ./images --set images.size=32 \
#        --weights 'checkpoints/*.ckpt' --out runs/mine
#
# The same command resumes a run that was stopped. From Python:

checkpoints = [str(path) for path in sorted((folder / "checkpoints").iterdir())]
subject = {"models": "runs/own/my_net.py:Net", "data": "runs/own/images"}
settings = {"images.size": 32}
request = nlbench.Request("affinity,r2", **subject, weights=checkpoints, settings=settings)
run = nlbench.run(request, "runs/own/all")
run.leaderboard()

# %%
# In continuous integration, compare two checkpoints: the exit status is 1 if a measure changed by
# more than a limit.
#
# .. code-block:: sh
#
#    nlbench compare runs/yesterday runs/today --fail-if 'affinity > 5%'

first, last = (
    nlbench.run(
        nlbench.Request("affinity", **subject, weights=file, settings=settings),
        f"runs/own/{name}",
    )
    for name, file in (("yesterday", checkpoints[0]), ("today", checkpoints[-1]))
)
nlbench.compare(first, last).frame()
