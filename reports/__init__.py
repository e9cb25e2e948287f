"""Leaderboards, figures and HTML pages of runs."""
