"""Configuration of the site."""

import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import thalweg

project = "thalweg"
author = "The thalweg developers"
copyright = "The thalweg developers"  # noqa: A001
version = release = thalweg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "catalog_pages",
]
exclude_patterns = ["_build", "evidence"]
templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_title = "thalweg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
}
html_sidebars = {"index": [], "changelog": []}
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("thalweg",),
    "show_memory": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "copyfile_regex": r".*\.gml",
}
# The examples run at build time: what they warn about is their readers' business, not the build's.
warnings.filterwarnings("ignore", category=UserWarning, module="matplotlib")
suppress_warnings = ["config.cache"]


def skip_metadata_routing(app, what, name, obj, skip, options):
    """Leave out what scikit-learn adds to every estimator; its text refers to its own site."""
    return skip or name == "get_metadata_routing" or bool(re.fullmatch(r"set_\w+_request", name))


def setup(app):
    """Register what this site changes."""
    app.connect("autodoc-skip-member", skip_metadata_routing)
