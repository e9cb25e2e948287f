"""Batches of one site, as a measure gets them."""

from types import SimpleNamespace


def batches_of(x, y, size):
    """Cut samples into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


def read(measure, batches):
    """Show a measure the batches of one site and take its reading."""
    measure.start()
    for index, (x, y) in enumerate(batches):
        measure.update(SimpleNamespace(place="act", x=x, y=y, site=None, batch=index))
    return measure.finish()
