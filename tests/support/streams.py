"""Batches of a site, in the form that measures receive."""

from nlbench.probes.sites.site import Site, SiteBatch


def batches_of(x, y, size):
    """Cut samples into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


def site_batch(place, x, y, batch=0, unreduced=()):
    """Build a batch of a site."""
    return SiteBatch(Site(place, "relu", 0, x.shape[1:], 1), batch, x, y, dict(unreduced))


def read(measure, batches):
    """Feed the batches of a site to a measure, and return its result."""
    measure.reset()
    for index, (x, y) in enumerate(batches):
        unreduced = {name: (reduce(x), reduce(y)) for name, reduce in measure.unreduced.items()}
        x, y = x.flatten(1), y.flatten(1)
        measure.update(site_batch("act", x, y, index, unreduced))
    return measure.compute()
