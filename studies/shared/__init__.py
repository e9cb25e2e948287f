"""Parts that several studies share: networks, datasets, requests and tables."""
