"""Batches of one site, as a measure gets them."""

from types import SimpleNamespace


def batches_of(x, y, size):
    """Cut samples into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


def read(measure, batches):
    """Show a measure the batches of one site and take its reading.

    What it asks of the unreduced tensors is taken of the same ones, flattened.
    """
    measure.reset()
    for index, (x, y) in enumerate(batches):
        numbers = {name: (take(x), take(y)) for name, take in measure.unreduced.items()}
        x, y = x.flatten(1), y.flatten(1)
        measure.update(
            SimpleNamespace(place="act", x=x, y=y, site=None, batch=index, unreduced=numbers)
        )
    return measure.compute()
