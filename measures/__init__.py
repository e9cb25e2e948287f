"""The measures: each module has a pure function and a plugin class that accumulates it."""
