"""The documents as a site: ``make docs`` builds it into build/site.

The source is the whole checkout, so that a page's links to files beside docs/ lead somewhere.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import p2p  # noqa: E402

for lazy in p2p.__all__:  # what `p2p` imports when it is asked for, autodoc sees only then
    setattr(p2p, lazy, getattr(p2p, lazy))

project = "Shoal"
copyright = "The Shoal authors, Apache-2.0"
root_doc = "docs/index"
include_patterns = [
    "docs/**", "deploy/*.md", "examples/*.md", "examples/*/*.md", "README.md", "CHANGELOG.md",
    "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
]  # fmt: skip
exclude_patterns = [
    "docs/events.md",
    ".*",
    "build",
    "dist",
    "**/node_modules",
    "**/__pycache__",
]
html_extra_path = ["root"]
html_static_path = ["static"]
html_js_files = ["reach.js"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
pygments_style = "default"

default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch", "safetensors", "vllm", "tokenizers", "jinja2", "gguf"]

html_theme = "furo"
html_title = "Shoal"
html_copy_source = False
html_show_sphinx = False
