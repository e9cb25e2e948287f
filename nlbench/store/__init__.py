"""Records of cells, and the folders of runs.

`run_folder` determines where a record is stored, `table` builds the tidy table of all records,
`run` is the interface for users, and `consistency` rejects records made with other settings.
"""
