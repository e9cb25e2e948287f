"""The command line: one module a command.

Further commands come from plugins, through the entry-point group ``nlbench.commands``.
"""
