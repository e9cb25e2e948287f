"""Networks, datasets and training: everything that is measured.

`networks` and `datasets` ship with nlbench, `zoo` has trained networks of other packages.
`training` has recipes and their loop, `sparsified` and `removal` make parts of a network linear.
"""
