"""Sphinx: the pages of docs/, the READMEs and the notebooks as one manual.

    python -m sphinx -W -c docs . build/docs/html

The source folder is the repository, so that links between the pages are the same files on GitHub
and here, and nothing is copied. Nothing is fetched from the network, and no notebook is executed:
their outputs are those that are kept in the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from torch_rpc_ext._base.version import __version__  # noqa: E402  the path comes first

project = "torch-rpc-ext"
author = "the authors of torch-rpc-ext"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "csrc/README.md",
    "torch_rpc_ext/README.md",
    "tests/README.md",
    "docs/*.md",
    "docs/**/*.md",
    # However many there are.
    "tutorials/*.ipynb",
]
# Folders that must not even be walked through.
exclude_patterns = ["build", ".*", "*.egg-info", "shared", "third_party", "**/__pycache__"]

# As GitHub makes the anchors of headings.
myst_heading_anchors = 4
nb_execution_mode = "off"
# Progress bars and the like are in both streams.
nb_merge_streams = True

autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Types as the source writes them.
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# A name in single backticks, in docstrings.
default_role = "literal"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"torch-rpc-ext {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
templates_path = ["_templates"]
# The root of the site leads to the start page.
html_additional_pages = {"index": "redirect.html"}
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

# `make docs-links`; needs a network.
linkcheck_timeout = 20
linkcheck_retries = 2
# Example addresses.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1|host\d)\b"]
