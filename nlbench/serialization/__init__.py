"""Serialization: atomic files, dataclasses as JSON, and hashes.

`hashing` has the hashes of requests, which name cells, and of checkpoints, weights and samples.
"""
