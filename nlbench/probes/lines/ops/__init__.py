"""What the tracer knows of operations: one file a family of them."""
