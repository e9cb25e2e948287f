"""What is kept: files read and written with care, fields as JSON has them, hashes of content."""
