"""Papers that several measures come from."""

from __future__ import annotations

from nlbench.measure import Source

__all__ = ["traced_regions"]


def traced_regions(equation: str) -> Source:
    """Give the linear-regions paper as a source; the tracing is after another."""
    return Source(
        "M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman, "
        '"Are All Linear Regions Created Equal?", AISTATS 2022; traced exactly after '
        'M. Sotoudeh, A. V. Thakur, "Computing Linear Restrictions of Neural Networks", '
        "NeurIPS 2019",
        equation,
        """@inproceedings{gamba2022regions,
  title = {Are All Linear Regions Created Equal?},
  author = {Gamba, Matteo and Chmielewski-Anders, Adrian and Sullivan, Josephine
            and Azizpour, Hossein and Bj{\\"o}rkman, M{\\aa}rten},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2022}
}""",
    )
