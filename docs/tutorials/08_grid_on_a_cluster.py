"""
A grid on a cluster
===================

A grid is a request of several models, datasets, weights and seeds. Each measure of each network
is recorded as soon as it is finished, so that the same command resumes an interrupted run.
"""

import nlbench
from nlbench.request import ExecutionOptions

request = nlbench.Request(
    measures=("affinity", "cka"),
    models=("vgg8", "plain20"),
    data=("digits",),
    weights="init",
    seeds=(0, 1),
    samples=32,
)
run = nlbench.run(request, "runs/grid")
run.leaderboard()

# %%
# Each network from its input to its output, darker where it is more nonlinear:

run.fingerprint()

# %%
# The second time nothing is measured, and a larger grid measures only what is new:

larger = nlbench.Request(**{**vars(request), "measures": ("affinity", "cka", "r2")})
nlbench.run(larger, "runs/grid").leaderboard(["r2"])

# %%
# Worker processes measure in parallel, on the CPU or one for each GPU. Numbers don't depend on the
# number of workers, and the numbers above are not measured again:

options = ExecutionOptions(executor="processes", workers=2)
nlbench.run(larger, "runs/grid", execution=options)

# %%
# On a cluster the workers are Dask's: start a scheduler, and pass its address.
#
# .. code-block:: text
#
#    nlbench run --config grid.toml --executor dask --address tcp://10.0.0.5:8786
#
# :doc:`/running` shows job arrays and a scheduler for Slurm, what the machines share, limits of
# time and memory, and how to merge runs.
