"""Records of cells, and the folders of runs."""
