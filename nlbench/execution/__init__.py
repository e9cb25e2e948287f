"""Measure the cells of a plan: in this process, in several, or on a Dask cluster."""
