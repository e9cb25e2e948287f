"""Networks whose activation calls are replaced by affine maps, one at a time."""
