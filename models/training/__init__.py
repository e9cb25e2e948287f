"""Training by recipes, and the commands `train` and `linearize`."""
