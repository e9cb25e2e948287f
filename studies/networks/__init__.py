"""Networks used only by studies: single functions, random perceptrons, planted nonlinearity."""
