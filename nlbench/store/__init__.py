"""Records of cells, and run folders.

`record` has the record of a cell and the decisions that determined it, `run_folder` determines
where records are stored and builds their tidy table, and `run` is the user interface.
"""
