"""Studies: one file per study, each a published question with the run that answers it.

`framework` defines studies, verdicts and figures; `shared` holds what several studies have in
common; `networks` holds networks that only studies use. Each study is registered in
``pyproject.toml``, in the group ``nlbench.studies``.
"""
