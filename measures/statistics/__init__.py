"""Samples of an activation, and the statistics that several measures compute from them."""
