"""Linear algebra in double precision, optimised for a single core."""
