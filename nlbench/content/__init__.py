"""What is kept: files read and written with care, and the hashes that content goes by."""
