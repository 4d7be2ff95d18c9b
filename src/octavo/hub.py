"""Models of the Hugging Face hub: their names, their cache, their download.

The cache and its place are huggingface_hub's own (``HF_HOME``, ``HF_HUB_OFFLINE``, a token), so
what other programs have fetched is used. Pickled weights are never fetched. Knows file names;
knows nothing of what is inside a model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./-]*))?"
    r"(?::(?P<file>[^:]+\.gguf))?"
)
_INDEX = "model.safetensors.index.json"
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    _INDEX,
)
# Weights in other layouts beside the ones that are read: folders, and Mistral's own.
_OTHER_LAYOUTS = ("*/*.safetensors", "consolidated*")


class HubError(ValueError):
    """There is no such model for this user; the message says what to do."""


class DownloadError(RuntimeError):
    """A model could not be fetched although nothing is wrong with its name: the network, the hub or
    the disk failed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class HubName:
    """``org/name``, ``org/name@revision``, and ``:file.gguf`` after either."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None where ``text`` is no such name."""
        match = _NAME.fullmatch(text)
        if match is None or "--" in match["repo"] or ".." in text:
            return None
        return cls(match["repo"], match["revision"], match["file"])

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")

    def patterns(self) -> dict[str, Any]:
        """What to fetch, in `snapshot_download`'s words."""
        if self.file is not None:
            return {"allow_patterns": [self.file]}
        return {"allow_patterns": list(_FILES), "ignore_patterns": list(_OTHER_LAYOUTS)}


def cached(name: HubName) -> Path | None:
    """The model in huggingface_hub's cache, whole; None where any of it is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, **name.patterns()
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return _model_in(Path(folder), name)


def download(name: HubName) -> Path:
    """Fetch what is missing of a model into huggingface_hub's cache.

    Raises:
        HubError: there is no such repository, revision or file, or it asks for rights that this
            user does not have.
        DownloadError: the hub cannot be reached, or the download failed.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, **name.patterns()))
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name.repo} is gated: accept its terms on https://huggingface.co/{name.repo}, then "
            "log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name.repo} is neither a directory or file here nor a repository of the Hugging "
            "Face hub; check the spelling, and log in with `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name.repo} has no revision {name.revision!r}; name a branch, a tag or a commit of "
            f"https://huggingface.co/{name.repo}"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _unreachable(name, error) from error
    # A name that the hub does not allow; errors of whichever HTTP library this version of
    # huggingface_hub is built on, and of the disk.
    except Exception as error:
        is_asked = isinstance(error, errors.HFValidationError) or _is_refused(error)
        raise (HubError if is_asked else DownloadError)(
            f"{name} could not be downloaded: {type(error).__name__}: {_first_line(error)}"
        ) from error
    found = _model_in(folder, name)
    if found is None:
        raise HubError(_what_is_missing(folder, name))
    return found


def _model_in(folder: Path, name: HubName) -> Path | None:
    """The file or folder to load, unless a part of it is missing."""
    if name.file is not None:
        return folder / name.file if (folder / name.file).is_file() else None
    if not (folder / "config.json").is_file():
        return None
    weights = {path.name for path in folder.glob("*.safetensors")}
    if (folder / _INDEX).is_file():
        return folder if _shards(folder / _INDEX) <= weights else None
    is_sharded = any(re.search(r"-of-\d+\.safetensors$", weight) for weight in weights)
    return folder if weights and not is_sharded else None


def _shards(index: Path) -> set[str]:
    """The files that an index names; none where it is broken, which loading reports."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _is_refused(error: Exception) -> bool:
    """Whether the hub answered that this user may not."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None) in (401, 403)


def _unreachable(name: HubName, error: Exception) -> DownloadError:
    return DownloadError(
        f"{name} is neither a directory or file here nor whole in the Hugging Face cache, and the "
        f"hub cannot be reached ({_first_line(error)}). Go online (HF_HUB_OFFLINE must not be 1), "
        f"fetch it elsewhere with `hf download {name.repo}` and copy the cache, or give the path "
        "of a directory"
    )


def _what_is_missing(folder: Path, name: HubName) -> str:
    if name.file is not None:
        return f"{name.repo} has no file {name.file}"
    if (folder / "config.json").is_file():
        return (
            f"{name.repo} has no complete safetensors weights; if a download was cut short, try "
            "again with the hub in reach; pickled weights (.bin, .pth) are never fetched or read, "
            f"and a GGUF file is asked for as {name.repo}:file.gguf"
        )
    return (
        f"{name.repo} has no config.json; a GGUF file in it is asked for as {name.repo}:file.gguf"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
