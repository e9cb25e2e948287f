"""Conversion of matplotlib figures to SVG elements, for pages with several figures."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import matplotlib.style
from matplotlib.figure import Figure

from nlbench.errors import one_line

from .notebook_figure import STYLE

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")

# CSS variable for each colour in figures; page.css defines its light and dark values.
_VARIABLES = {
    "#000000": "ink",
    "#ffffff": "paper",
    "#444444": "quiet",
    "#777777": "quiet",
    "#7f7f7f": "quiet",
    "#808080": "quiet",
    "#999999": "quiet",
    "#bfbfbf": "none",
    "#cccccc": "none",
    "#dddddd": "rule",
    "#e4e4e4": "rule",
    "#e6e6e6": "rule",
    "#eeeeee": "track",
    "#0072b2": "c0",
    "#d55e00": "c1",
    "#009e73": "c2",
    "#cc79a7": "c3",
    "#e69f00": "c5",
    "#56b4e9": "c6",
    "#1f77b4": "c0",
    "#ff7f0e": "c1",
    "#2ca02c": "c2",
    "#7b3294": "kind3",
}
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})\b")


def in_page_colours(svg: str) -> str:
    """Replace the colours of a figure with the page's CSS variables, for light and dark themes.

    Parameters
    ----------
    svg : str
        Output of `to_svg`.

    Returns
    -------
    str
        SVG with variables for black, white, greys and series colours; colours that encode values
        are unchanged.

    Examples
    --------
    >>> in_page_colours('<path style="fill: #ffffff; stroke: #123456"/>')
    '<path style="fill: var(--paper, #ffffff); stroke: #123456"/>'
    """

    def variable(match: re.Match[str]) -> str:
        attribute, colour = match.groups()
        name = _VARIABLES.get(colour)
        return f"{attribute}: var(--{name}, {colour})" if name else match.group()

    # Black text and markers have no explicit colour.
    caps = "stroke-linecap: butt"
    svg = svg.replace(caps, f"{caps}; fill: var(--ink, #000000)", 1)
    return _COLOUR.sub(variable, svg)


def to_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Convert a figure to an SVG element, deterministically.

    Parameters
    ----------
    prefix : str
        Prefix for every id, unique on the page: letters, digits and hyphens.
    title : str
        Text for screen readers.

    Returns
    -------
    str
        One ``<svg>`` element without an XML declaration, dates or links.

    Examples
    --------
    >>> to_svg(Figure(figsize=(1, 1)), prefix="f1", title="Nothing").count('id="f1-figure_1"')
    1
    """
    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return as_element(buffer.getvalue(), prefix=prefix, title=title)


def as_element(svg: bytes, *, prefix: str, title: str) -> str:
    """Convert a file that matplotlib wrote to an SVG element of a page.

    See `to_svg`.
    """
    root = ET.fromstring(svg)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        _prefix_ids(element, prefix)
    _move_style_to_root(root)
    heading = ET.Element(f"{{{_SVG}}}title", {"id": f"{prefix}-title"})
    heading.text = one_line(title)
    root.insert(0, heading)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title")
    _drop_namespaces(root)
    root.set("xmlns", _SVG)
    return ET.tostring(root, encoding="unicode", short_empty_elements=True)


def _prefix_ids(element: ET.Element, prefix: str) -> None:
    link = element.attrib.pop(f"{{{_XLINK}}}href", None)
    if link is not None:
        element.set("href", link)
    for name, value in element.attrib.items():
        if name == "id":
            element.set(name, f"{prefix}-{value}")
        elif name == "href" and value.startswith("#"):
            element.set(name, f"#{prefix}-{value[1:]}")
        elif "url(#" in value:
            element.set(name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value))


def _move_style_to_root(root: ET.Element) -> None:
    """Move the rules of matplotlib's style sheet to the root, so they don't affect the page."""
    for parent in list(root.iter()):
        for sheet in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(sheet)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")


def _drop_namespaces(root: ET.Element) -> None:
    """Drop the namespace prefix of every element, as HTML requires."""
    for element in root.iter():
        element.tag = str(element.tag).removeprefix(f"{{{_SVG}}}")
