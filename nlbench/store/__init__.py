"""Records of cells, and run folders.

`run_folder` determines where records are stored, `table` builds the tidy table of all records,
`run` is the user interface, and `consistency` rejects records made with different settings.
"""
