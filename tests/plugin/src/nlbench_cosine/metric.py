"""A metric of torchmetrics as a measure: a function that makes it is all there is to it."""

import torchmetrics


def correlation():
    """Pearson correlation of a site's input and output, channel by channel."""
    return torchmetrics.PearsonCorrCoef()
