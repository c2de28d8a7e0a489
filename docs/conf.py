"""Sphinx configuration of the documentation site: `make docs` writes it to build/site.

The source directory is the root of the repository, so that relative links and images mean the same
on the site as in the repository. README.md is the start page.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.ext import autosummary
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode
from sphinx.writers.html5 import HTML5Translator

import weightnorm

project = "weightnorm"
version = release = weightnorm.__version__
html_title = f"{project} {version}"

root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = ["build", "docs/results", "node_modules", "out", "report", "runs", ".*"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",  # `Args:` and `Returns:` in docstrings
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 3  # the links to headings that a forge has, such as training.md#weight-decay
myst_enable_extensions = ["dollarmath", "html_image"]  # <img src=… width=…>
myst_fence_as_directive = ["math"]  # as forges write formulas: ```math
html_math_renderer = "mathml"
autosummary_generate = False
autosummary.WELL_KNOWN_ABBREVIATIONS += ("eq.", "eqs.")  # not the end of a sentence

# Docstrings are written for `help()`: `argument` and ``expression`` are both code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
# Types in signatures are not linked: those of torch would need the network.
nitpick_ignore_regex = [("py:class", ".*")]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

CONTENTS = """
```{toctree}
:hidden:
:caption: Guide
:glob:

docs/training
docs/vocoder
docs/migration
docs/deployment
docs/frameworks
docs/descendants
docs/performance
docs/conformance
docs/*
```

```{toctree}
:hidden:
:caption: API
:glob:

docs/api/weightnorm
docs/api/*
```

```{toctree}
:hidden:
:caption: Experiments
:glob:

docs/experiments/classify
docs/experiments/vae
docs/experiments/draw
docs/experiments/dqn
docs/experiments/language
docs/experiments/claims
```

```{toctree}
:hidden:
:caption: Project

CHANGELOG
CONTRIBUTING
```
"""


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents to the start page, which a forge shows without it."""
    if page == root_doc:
        source[0] += CONTENTS


class LinkNames(SphinxPostTransform):
    """Link names of the library in inline code, such as `weight_norm(layer)`, to their entries."""

    default_priority = 5
    name_or_call = re.compile(r"(?:weightnorm\.)?([A-Za-z_][\w.]*)(\(.*\)[\w.]*)?", re.DOTALL)
    modules = ("weightnorm", "weightnorm.diagnostics", "weightnorm.functional")

    def run(self, **_: object) -> None:
        domain = self.env.domains.python_domain
        for code in list(self.document.findall(nodes.literal)):
            match = self.name_or_call.fullmatch(code.astext())
            if match is None or isinstance(code.parent, nodes.reference | nodes.title):
                continue
            name, call = match.groups()
            # A single plain word is more often an argument or an option than a function.
            if name.islower() and name.isalpha() and not call:
                continue
            entries = (domain.objects.get(f"{module}.{name}") for module in self.modules)
            entry = next(filter(None, entries), None)
            if entry is not None:
                here, there = self.env.docname, entry.docname
                link = make_refnode(self.app.builder, here, there, entry.node_id, code.deepcopy())
                code.replace_self(link)


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Make the start page the one that servers show for the folder."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def add_mathml(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (add_mathml, None), (add_mathml, None))
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
    app.add_post_transform(LinkNames)
