"""Small files beside a model's weights, which come from whoever made the model."""

from __future__ import annotations

import re
from pathlib import Path

from hotcold.model.errors import ConfigError, shown

_BLOB = re.compile(r"/models--[^/]+/blobs/[^/]+")  # of Hugging Face's cache, which links to these


def require_own(file: Path) -> Path:
    """Return a file of a model's folder whose content may be shown or passed on.

    Errors:  ConfigError for a link out of the folder, which may lead to any file of this user; one
             to a blob of Hugging Face's cache may stay
    """
    target = file.resolve()
    is_own = target.is_relative_to(file.parent.resolve())
    if not is_own and not _BLOB.search(str(target)):
        raise ConfigError(
            f"{file}: is a link out of the model's folder, to {shown(str(target))}; put the file "
            "itself there, or remove the link"
        )
    return file
