"""Code shared by several studies: networks, datasets, requests and tables."""
