"""Linear algebra in double precision, quick on one core."""
