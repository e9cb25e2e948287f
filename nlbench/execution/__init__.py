"""Measure the cells of a plan: in this process, in several, or on a Dask cluster.

`executors` starts `processes` or `dask_cluster`; `supervisor` ends a worker that hangs, crashes or
exceeds its time. Each worker runs `unit_runner`: load a subject, observe it once per probe
(`probe_pass`), record its cells (`subject_passes`).
"""
