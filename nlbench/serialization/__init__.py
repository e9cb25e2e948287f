"""Serialization: atomic files, dataclasses as JSON, content hashes."""
