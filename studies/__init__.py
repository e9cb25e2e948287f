"""Studies: one file per study, each a published question with the run that answers it.

`framework` defines studies, verdicts and figures; `shared` holds code used by several studies,
`networks` the networks used only by studies. Each study is registered in ``pyproject.toml``, in
the group ``nlbench.studies``.
"""
