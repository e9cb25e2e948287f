r"""
Figures for a paper
===================

Every run has five figures in the size that a paper needs: one column (3.25 inches) or the whole
text (6.75 inches) wide, with text of 8 points, in colours and marks that are distinct for
colour-blind readers and in print without colour.
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
# Networks by measures, with 95 % intervals; the most nonlinear network is on top.

run.figure("board", width="text")

# %%
# Two networks, activation by activation. Differences in grey are within their errors.

run.figure("compare", measure="affinity", subject=["vgg8 · init", "vgg8 · trained"])

# %%
# ``signature`` draws the values of a network at each activation; ``path`` draws its outputs along
# one path, with the chords from which the absolute deviation is measured.

run.figure("path", subject="vgg8 · trained")

# %%
# Save as PDF, SVG or PNG; fonts are embedded as TrueType, which publishers ask for:

run.figure("strip", measure="affinity").savefig("runs/strip.pdf")

# %%
# In LaTeX, include the figure without scaling:
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
# ``run.plot("affinity", ax=axes)`` and ``run.fingerprint(ax=axes)`` draw into axes of your own.
# The charts of a page are saved as they are drawn there, by *SVG* below each.
# ``nlbench cite runs/paper`` prints the BibTeX of nlbench and of the measures.
