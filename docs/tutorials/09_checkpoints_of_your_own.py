"""
Checkpoints of your own network
===============================

A file with a network, checkpoints of its training and a folder of images are enough for a
leaderboard over the checkpoints. This tutorial makes all three in a folder of its own.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import nlbench

folder = Path(tempfile.mkdtemp())
os.chdir(folder)
Path("my_net.py").write_text('''
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
    Path("images", name).mkdir(parents=True)
    for index in range(24):
        pixels = generator.integers(0, brightness, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"images/{name}/{index}.png")

# %%
# Six checkpoints as Lightning writes them. The training is short; any other would do.

data = nlbench.load_dataset("./images", {"size": 32})
sample = data.sample(None)
torch.manual_seed(0)
model = nlbench.build_model("my_net.py", data, seed=0)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
Path("checkpoints").mkdir()
for epoch in range(6):
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2", "state_dict": state, "epoch": epoch}
    torch.save(content, f"checkpoints/epoch={epoch}.ckpt")
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

checkpoints = [str(path) for path in sorted(Path("checkpoints").iterdir())]
request = nlbench.Request(
    "affinity,r2", "my_net.py", "./images", checkpoints, settings={"images.size": 32}
)
run = nlbench.run(request, "runs/mine")
run.leaderboard()

# %%
# In continuous integration, two checkpoints are compared, and the exit status is 1 if a measure
# changed by more than a limit:
#
# .. code-block:: sh
#
#    nlbench compare runs/yesterday runs/today --fail-if 'affinity > 5%'

first, last = (
    nlbench.run(
        nlbench.Request("affinity", "my_net.py", "./images", file, settings={"images.size": 32}),
        f"runs/{name}",
    )
    for name, file in (("yesterday", checkpoints[0]), ("today", checkpoints[-1]))
)
nlbench.compare(first, last).frame()
