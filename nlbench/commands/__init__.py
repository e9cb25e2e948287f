"""The commands of the command line, one module a topic; what they share is in `common`.

Nothing here imports torch at the top: a command imports what it needs when it runs.
"""
