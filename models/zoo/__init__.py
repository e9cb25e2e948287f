"""Trained networks that other packages carry, with the inputs that suit them."""
