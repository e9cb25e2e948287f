"""Networks and datasets to measure, and training.

`networks` and `datasets` ship with nlbench; `zoo` loads trained networks from other packages.
`training` has recipes and the training loop; `sparsified` and `removal` linearise networks.
"""
