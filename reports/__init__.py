"""Boards, figures and the page that set measured subjects side by side."""
