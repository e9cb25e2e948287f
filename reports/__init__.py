"""Leaderboards, figures and HTML pages for runs.

The exports are the functions that `nlbench.reporting` provides to the core. `leaderboard` computes
values, ranks and intervals; `terminal` prints them. `page` collects the content of the HTML page,
`views` builds its tables (including the leaderboard), and `templates` contains its HTML, CSS and
JavaScript.
"""

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

if TYPE_CHECKING:
    from .command_pages import removal_table as removal_table
    from .command_pages import write_removal as write_removal
    from .command_pages import write_similarity as write_similarity
    from .compare import check_comparison_file as check_comparison_file
    from .compare import compare_runs as compare_runs
    from .exports import to_latex as to_latex
    from .exports import to_markdown as to_markdown
    from .exports import to_parquet as to_parquet
    from .figures import fingerprint_of as fingerprint_of
    from .figures import paper_figure as paper_figure
    from .figures import plot_of as plot_of
    from .manifest import manifest_text as manifest_text
    from .notebook import agreement_of as agreement_of
    from .notebook import html_of as html_of
    from .notebook import leaderboard_of as leaderboard_of
    from .notebook import signature_of as signature_of
    from .page import check_page as check_page
    from .page import is_page_of as is_page_of
    from .page import write_page as write_page
    from .page import write_site as write_site
    from .planes import draw_plane as draw_plane
    from .terminal import print_leaderboard as print_leaderboard

__getattr__, __dir__, __all__ = lazy_imports(__name__)
