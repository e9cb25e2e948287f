"""Records of cells, and the folders of runs.

`run_folder` determines where a record lies, `table` makes the tidy table of all records, `run` is
what users get, `consistency` refuses records that were made in different ways.
"""
