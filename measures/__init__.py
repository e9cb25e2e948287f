"""The measures: one module each, a pure function and a plugin class that accumulates it."""
