"""What is kept: the record of a cell, the folder of a run, its manifest and its table."""
