"""Papers that define several measures; one that defines a single measure is cited in its file."""

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


def easier_paper(equation: str) -> Source:
    """Cite EASIER, which removes the layers whose units rarely change their state."""
    return Source(
        'V. Quétu, Z. Liao, E. Tartaglione, "The Simpler The Better: An Entropy-Based Importance '
        "Metric To Reduce Neural Networks' Depth\", ECML PKDD 2024",
        equation,
        """@inproceedings{quetu2024simpler,
  title = {The Simpler The Better: An Entropy-Based Importance Metric To Reduce Neural
           Networks' Depth},
  author = {Qu{\\'e}tu, Victor and Liao, Zhu and Tartaglione, Enzo},
  booktitle = {European Conference on Machine Learning and Principles and Practice of
               Knowledge Discovery in Databases},
  year = {2024}
}""",
    )


def effective_rank_paper() -> Source:
    """Cite the definition of the effective rank."""
    return Source(
        'O. Roy, M. Vetterli, "The Effective Rank: A Measure of Effective Dimensionality", '
        "EUSIPCO 2007",
        "definition 1, of the centred samples",
        """@inproceedings{roy2007effective,
  title = {The Effective Rank: A Measure of Effective Dimensionality},
  author = {Roy, Olivier and Vetterli, Martin},
  booktitle = {European Signal Processing Conference},
  pages = {606--610},
  year = {2007}
}""",
    )


def geometric_complexity_paper() -> Source:
    """Cite the definition of the geometric complexity."""
    return Source(
        'B. Dherin, M. Munn, M. Rosca, D. Barrett, "Why neural networks find simple solutions: '
        'the many regularizers of geometric complexity", NeurIPS 2022',
        "definition of the geometric complexity, on the outputs",
        """@inproceedings{dherin2022geometric,
  title = {Why neural networks find simple solutions: the many regularizers of geometric
           complexity},
  author = {Dherin, Benoit and Munn, Michael and Rosca, Mihaela and Barrett, David},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2022}
}""",
    )


def boundary_pieces_paper() -> Source:
    """Cite the paper that counts pieces of the decision boundary."""
    return Source(
        'P. Piwek, A. Klukowski, T. Hu, "Exact Count of Boundary Pieces of ReLU Classifiers: '
        'Towards the Proper Complexity Measure for Classification", UAI 2023',
        "boundary pieces, along paths",
        """@inproceedings{piwek2023exact,
  title = {Exact Count of Boundary Pieces of {ReLU} Classifiers: Towards the Proper Complexity
           Measure for Classification},
  author = {Piwek, Pawe{\\l} and Klukowski, Adam and Hu, Tianyang},
  booktitle = {Conference on Uncertainty in Artificial Intelligence},
  year = {2023}
}""",
    )


def naswot_paper() -> Source:
    """Cite NASWOT, which scores a network by its kernel of activation patterns."""
    return Source(
        'J. Mellor, J. Turner, A. Storkey, E. J. Crowley, "Neural Architecture Search without '
        'Training", ICML 2021',
        "equation 2, and the logarithm of the kernel's determinant",
        """@inproceedings{mellor2021neural,
  title = {Neural Architecture Search without Training},
  author = {Mellor, Joe and Turner, Jack and Storkey, Amos and Crowley, Elliot J.},
  booktitle = {International Conference on Machine Learning},
  year = {2021}
}""",
    )


def region_definitions_paper() -> Source:
    """Cite the paper that compares definitions of a linear region."""
    return Source(
        'M. Stargalla, C. Hertrich, D. Reichman, "The Computational Complexity of Counting Linear '
        'Regions in ReLU Neural Networks", NeurIPS 2025',
        "definitions of activation regions, connected regions and affine regions, along paths",
        """@inproceedings{stargalla2025computational,
  title = {The Computational Complexity of Counting Linear Regions in {ReLU} Neural Networks},
  author = {Stargalla, Moritz and Hertrich, Christoph and Reichman, Daniel},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2025}
}""",
    )


def length_distortion_paper() -> Source:
    """Cite the paper on length distortion in random networks."""
    return Source(
        'B. Hanin, R. Jeong, D. Rolnick, "Deep ReLU Networks Preserve Expected Length", ICLR 2022',
        "length distortion; of trajectories first in Raghu et al., ICML 2017",
        """@inproceedings{hanin2022deep,
  title = {Deep {ReLU} Networks Preserve Expected Length},
  author = {Hanin, Boris and Jeong, Ryan and Rolnick, David},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}""",
    )


def local_complexity_paper() -> Source:
    """Cite the paper that defines local complexity."""
    return Source(
        'A. I. Humayun, R. Balestriero, R. Baraniuk, "Deep Networks Always Grok and Here is Why", '
        "ICML 2024",
        "section 3, local complexity; exact boundaries as in Patel & Montúfar 2025",
        """@inproceedings{humayun2024deep,
  title = {Deep Networks Always Grok and Here is Why},
  author = {Humayun, Ahmed Imtiaz and Balestriero, Randall and Baraniuk, Richard},
  booktitle = {International Conference on Machine Learning},
  year = {2024}
}""",
    )
