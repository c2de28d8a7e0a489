"""Build-time README: a package index shows it without the repository around it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
IMAGE = re.compile(r'<img src="(?!https?:)([^"]+)"([^>]*)>(<br>)?')


def published_readme(text: str, repository: str | None) -> str:
    """Return the README with absolute links and images.

    Without an address of the repository the text of each link stays, and images are left out.
    """
    if repository is None:
        text = LINK.sub(r"\1", text)
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
