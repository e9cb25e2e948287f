"""Points in the plane from their distances."""

import numpy as np
from scipy.spatial.distance import pdist, squareform

from nlbench.studies.shared.classical_scaling import scale_to_plane


def test_points_of_the_plane_keep_their_distances():
    points = np.random.default_rng(1).normal(size=(9, 2))
    distances = squareform(pdist(points))
    found = squareform(pdist(scale_to_plane(distances)))
    np.testing.assert_allclose(found, distances, atol=1e-9)
