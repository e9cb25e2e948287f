"""Papers that define several measures.

Others are cited in the file of their measure.
"""

from __future__ import annotations

from nlbench.citation import Source


def traced_regions(equation: str) -> Source:
    """Cite the paper on linear regions and the one on exact tracing."""
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


def affinity_paper(equation: str) -> Source:
    """Cite the affinity score's paper."""
    return Source(
        "Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, M. Heinonen, "
        "V. Kyrki and S. Kaski, From Alexnet to Transformers: Measuring the Non-linearity of "
        "Deep Neural Networks with Affine Optimal Transport, CVPR 2025, pages 25250-25260",
        equation,
        """@InProceedings{Bouniot_2025_CVPR,
    author    = {Bouniot, Quentin and Redko, Ievgen and Mallasto, Anton and Laclau, Charlotte
                 and Struckmeier, Oliver and Arndt, Karol and Heinonen, Markus
                 and Kyrki, Ville and Kaski, Samuel},
    title     = {From Alexnet to Transformers: Measuring the Non-linearity of Deep Neural
                 Networks with Affine Optimal Transport},
    booktitle = {Proceedings of the Computer Vision and Pattern Recognition Conference (CVPR)},
    month     = {June},
    year      = {2025},
    pages     = {25250-25260}
}""",
    )
