"""The site: `make docs`. Built and read without a network; a warning is an error."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

import hvd_gradcomp
from docs import figures
from hvd_gradcomp import cli
from tests.chaos import outcomes

project = "hvd_gradcomp"
author = "the hvd_gradcomp authors"
copyright = author
version = release = hvd_gradcomp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # commands are copied, not what they print
copybutton_prompt_is_regexp = True
copybutton_here_doc_delimiter = "EOF"
exclude_patterns = ["_build", "generated"]
nitpicky = False  # types of other projects cannot be looked up without a network
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Args say it in words
autodoc_default_options = {"show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"hvd_gradcomp {version}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
pygments_style = "tango"


def generate(app):
    """Generate figures, the help of the command line, and tables of measurements."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    for name in ("hvd-gradcomp", *cli.COMMANDS):
        words = ["--help"] if name == "hvd-gradcomp" else [name, "--help"]
        help_of = CliRunner().invoke(cli.main, words, prog_name="hvd-gradcomp", terminal_width=88)
        (folder / f"{name}.txt").write_text(help_of.output)
    measured = json.loads(Path(app.srcdir, "measured", "chaos.json").read_text())
    (folder / "attacks.txt").write_text(outcomes.table(measured["parts"]))
    figures.draw(folder)


def inline_math(writer, node):
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise SkipNode


def block_math(writer, node):
    formula = tex2mathml(node.astext(), as_block=True)
    writer.body.append(f'<div class="formula">{formula}</div>\n')
    raise SkipNode


def setup(app):
    # MathML, which browsers draw by themselves: MathJax would be a script from elsewhere.
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("builder-inited", generate)


html_math_renderer = "mathml"
