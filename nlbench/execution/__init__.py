"""Measure the cells of a plan: in this process, in several, or on a Dask cluster.

`executors` starts `processes` or `dask_cluster`; `supervisor` kills a worker that hangs or exceeds
its time limit, and replaces one that crashes. Each worker runs `unit_runner`, which loads a
subject, observes it once per probe (`probe_pass`) and records its cells.
"""
