"""Networks whose activation calls are replaced by affine maps, one after another."""
