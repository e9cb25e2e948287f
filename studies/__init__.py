"""Studies: one file per study, each with a question and the runs that answer it.

`framework` defines studies, verdicts and figures; `shared` holds code used by several studies;
`networks` holds networks used only by studies. Each study is registered in ``pyproject.toml``, in
the group ``nlbench.studies``.
"""
