"""Networks that only studies use: single functions, random perceptrons, planted nonlinearity."""
