"""Leaderboards, figures and HTML pages for runs.

The core imports the exports with `nlbench.lazy.load_reports`. `leaderboard` computes values, ranks
and intervals; `terminal` prints them. `page` collects the content of the HTML page, `views` builds
its tables (including the leaderboard), and `templates` contains its HTML, CSS and JavaScript.
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
    from .figures import paper_figure as paper_figure
    from .figures import plot_fingerprint as plot_fingerprint
    from .figures import plot_places as plot_places
    from .manifest import manifest_text as manifest_text
    from .notebook import correlate_pairs as correlate_pairs
    from .notebook import make_signature as make_signature
    from .notebook import rank_subjects as rank_subjects
    from .notebook import render_html as render_html
    from .page import check_page as check_page
    from .page import is_current_page as is_current_page
    from .page import write_page as write_page
    from .page import write_site as write_site
    from .planes import draw_plane as draw_plane
    from .terminal import print_leaderboard as print_leaderboard

__getattr__, __dir__, __all__ = lazy_imports(__name__)
