"""Serialization: atomic files, dataclasses as JSON, and hashes.

`hashing` computes the hashes of requests, checkpoints, weights and samples.
"""
