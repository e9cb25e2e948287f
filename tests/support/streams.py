"""Batches of one site, as measures receive them."""

from nlbench.probes.sites.site import Site, SiteBatch


def batches_of(x, y, size):
    """Cut samples into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


def shown(place, x, y, batch=0, unreduced=()):
    """Observe a batch of a site."""
    return SiteBatch(Site(place, "relu", 0, x.shape[1:], 1), batch, x, y, dict(unreduced))


def read(measure, batches):
    """Feed the batches of one site to a measure, and return its result.

    What it asks of the unreduced tensors is taken of the same ones, flattened.
    """
    measure.reset()
    for index, (x, y) in enumerate(batches):
        numbers = {name: (take(x), take(y)) for name, take in measure.unreduced.items()}
        x, y = x.flatten(1), y.flatten(1)
        measure.update(shown("act", x, y, index, numbers))
    return measure.compute()
