"""Studies: a fixed run each, and the figures that answer one question.

`study` says what a study is, `commands` carries one out; every other file is one study.
"""
