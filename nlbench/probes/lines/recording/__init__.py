"""A forward pass as a program: a list of steps that can be run again at other points."""
