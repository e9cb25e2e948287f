r"""
Figures for a paper
===================

Every run has five figures in the size that a paper needs: text of 8 points, one column (3.25
inches) or the whole text (6.75 inches) wide, in colours and marks that are distinct for
colour-blind readers and in print without colour. None needs editing or scaling.
"""

import nlbench

request = nlbench.Request(
    measures=("affinity", "r2", "absdev"),
    models=("vgg8",),
    data=("digits",),
    weights=("trained", "init"),
    samples=128,
    settings={"lines.number": 2, "lines.anchors": 2},
)
run = nlbench.run(request, "runs/paper")

# %%
# Each network as a strip from input to output. On the command line this is
# ``nlbench figure runs/paper strip -o strip.pdf``.

run.figure("strip", measure="affinity")

# %%
# Networks by measures: the most nonlinear one on top, with 95 % intervals.

run.figure("board", width="text")

# %%
# Two networks, activation by activation. Differences in grey are within their errors.

run.figure("compare", measure="affinity", subject=["vgg8 · init", "vgg8 · trained"])

# %%
# The values of one network at each activation (``signature``), and its outputs along one path with
# the chords that the absolute deviation is measured from (``path``).

run.figure("path", subject="vgg8 · trained")

# %%
# Save as PDF, SVG or PNG; fonts are embedded as TrueType, which publishers ask for:

run.figure("strip", measure="affinity").savefig("runs/strip.pdf")

# %%
# In LaTeX the figure has its size already:
#
# .. code-block:: latex
#
#     \begin{figure}
#       \centering
#       \includegraphics{strip.pdf}
#       \caption{Affinity of each activation of \textsc{vgg8}, before and after training.}
#     \end{figure}
#
# For another column width give the inches, ``width=3.5`` or ``--width 3.5``. The leaderboard is a
# table with ``booktabs`` rules:

print(run.to_latex(error=True))

# %%
# ``run.plot("affinity", ax=axes)`` and ``run.fingerprint(ax=axes)`` draw into axes of your own. The
# page exports the same figures: *Download* above a leaderboard, *SVG* below a curve. ``nlbench cite
# runs/paper`` prints the BibTeX of nlbench and of the measures.
