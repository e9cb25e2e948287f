"""A forward pass as a program: a list of steps that run again at other points."""
