"""Pictures as SVG files of their own, in the colours of the pages, light and dark as the reader's system is.

A file brings its ground with it, so that it can be read on any page, whatever that page's colours are.
"""

import re
from html import escape
from pathlib import Path

_THEME = Path(__file__).with_name("theme.css")
_COLOR = re.compile(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);")
_FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", sans-serif'


def svg_file(content: str, *, width: float, height: float, title: str, style: str = "") -> str:
    """Returns the text of a file: the content on a ground of `width` x `height` with round corners.

    Colours in the content and in `style` are the variables of theme.css, such as var(--ink).
    """
    colors = _COLOR.findall(_THEME.read_text())
    light = "".join(f"--{name}:{color};" for name, color, _ in colors)
    dark = "".join(f"--{name}:{color};" for name, _, color in colors)
    size = f'width="{width:g}" height="{height:g}"'
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    ground = f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10"'
    lines = (
        f'<svg {namespaces} {size} viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>svg{{{light}font-family:{_FONT}}}",
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}",
        f"{style}</style>",
        f'{ground} fill="var(--raised)" stroke="var(--line)"/>',
        content,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def inner(svg: str) -> tuple[str, float, float]:
    """Returns what is in an SVG for inside of a page (`charts`), and its width and height."""
    begin, end = svg.index(">") + 1, svg.rindex("</svg>")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    return svg[begin:end].strip(), width, height
