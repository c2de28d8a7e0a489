"""Build-time README: a package index shows it without the repository around it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
ASIDE = re.compile(rf"\s+\({LINK.pattern}\)")
IMAGE = re.compile(r'<img src="(?!https?:)([^"]+)"([^>]*)>(<br>)?')
FIGURE = re.compile(r'^<img src="(?!https?:)[^>]* alt="([^"]+)">$', re.MULTILINE)
INSTALL = re.compile(r"pip install ('?)\.")


def published_readme(text: str, repository: str | None) -> str:
    """Return the README with absolute links and images, and the name of the package to install.

    Without an address of the repository nothing can be linked: the text of a link stays unless it
    is only a reference in parentheses, a figure is named, and the images of a table are left out.
    """
    text = INSTALL.sub(r"pip install \1weightnorm", text)
    if repository is None:
        text = ASIDE.sub("", text)
        text = LINK.sub(r"\1", text)
        text = FIGURE.sub(r"*Figure, in the repository: \1.*", text)
        return IMAGE.sub("", text)
    files, raw = f"{repository}/blob/HEAD/", f"{repository}/raw/HEAD/"
    text = LINK.sub(rf"[\1]({files}\2)", text)
    return IMAGE.sub(rf'<img src="{raw}\1"\2>\3', text)


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata.get("urls", {}).get("Repository")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": published_readme(text, repository and repository.rstrip("/")),
        }
