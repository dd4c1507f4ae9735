"""Configuration of Sphinx, which `docs/build.sh` runs. `generated.py` writes the pages of the reference first."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

project = "mpitrain"
author = "the authors of mpitrain"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # `x` in docstrings

html_theme = "furo"
html_title = "mpitrain"
html_show_copyright = False
html_static_path = ["static"]
html_extra_path = ["../mpitrain/config/schema.json"]
html_css_files = ["pages.css"]
html_theme_options = {"light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"}}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_ivar = True
# what stands in signatures without a page of its own: types of other packages, and of rooms that nobody imports from
nitpick_ignore_regex = [
    ("py:.*", r"(?!mpitrain\.).*"),
    ("py:.*", r"mpitrain\.comm\.(collectives|job|memory|runtime|selection|mailbox\.PostWork).*"),
    ("py:.*", r"mpitrain\.(comm\.communicator\.(Alternating|NodeCopy)|monitor\.json_lines\.\w+)"),
    ("py:.*", r"mpitrain\.(checkpoint\.\w+|config\.\w+|data\.(dataset|format|in_place)|tensor\.(linear|styles))\.\w+"),
    ("py:.*", r"mpitrain\.trainer\.(engine\.\w+|options\.\w+|user_loop\.checks\.UserModel)"),
    ("py:.*", r"mpitrain\.trainer\.(data|folder|held_out\.measuring|optimizing|run)\.\w+"),
    (
        "py:.*",
        r"mpitrain\.(data\.(on_device\.T|prepare\.MakeSource|sources(\.\w+)+)|layers\.\w+\.\w+)",
    ),
]


def setup(app: Sphinx) -> None:
    """Write the pages of the reference before Sphinx reads the pages."""
    import generated

    app.connect("builder-inited", lambda app: generated.write(DOCS / "reference"))
