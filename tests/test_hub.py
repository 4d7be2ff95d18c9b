"""Names of the Hugging Face hub, against a stand-in of its cache; downloads are replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from typer.testing import CliRunner

from octavo.cli import app
from octavo.hub import DownloadError, HubName
from octavo.model_store import ModelStoreError, ensure_model, hub_name, pull, resolve_model

COMMIT = "5" * 40
MODEL = ("config.json", "tokenizer.json", "model.safetensors")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
WEIGHT_MAP = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a machine that is offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def put(
    cache: Path, *files: str, revision: str = "main", commit: str = COMMIT, repo: str = "org/tiny"
) -> Path:
    """What huggingface_hub leaves: blobs, links to them in a snapshot, a ref."""
    repository = cache / f"models--{repo.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        blob = repository / "blobs" / f"{commit[:8]}{number}"
        blob.write_text("{}")
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    ref = repository / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return snapshot


def replace_download(
    monkeypatch: pytest.MonkeyPatch, *, gives: Path | None = None, fails: Exception | None = None
) -> list[dict[str, Any]]:
    """Nothing is in the cache; a download gives a folder or fails. Returns the calls."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not here")
        calls.append({"repo_id": repo_id, **options})
        if fails is not None:
            raise fails
        return str(gives)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def http_error(kind: type[Exception], status: int | None = None) -> Exception:
    """Without the response of whichever HTTP library made it, but for its status."""
    error = kind.__new__(kind)
    error.args = ("404 Client Error.\nmore",)
    if status is not None:
        error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:a.gguf", HubName("org/name", None, "a.gguf")),
        ("org/name@main:sub/a.gguf", HubName("org/name", "main", "sub/a.gguf")),
        ("org/name:a.bin", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("../name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("org/name@../../x", None),
        ("org/name:../a.gguf", None),
        ("org/na me", None),
        ("org/a--b", None),
        ("", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
    assert name is None or str(name) == text


def test_a_cached_model_is_used(cache: Path) -> None:
    snapshot = put(cache, *MODEL)
    assert resolve_model("org/tiny") == ensure_model("org/tiny") == snapshot


def test_revisions(cache: Path) -> None:
    main, other = put(cache, *MODEL), put(cache, *MODEL, revision="v2", commit="6" * 40)
    assert resolve_model("org/tiny@main") == main
    assert resolve_model("org/tiny@v2") == resolve_model(f"org/tiny@{'6' * 40}") == other
    with pytest.raises(ModelStoreError, match="run: octavo pull org/tiny@v3"):
        resolve_model("org/tiny@v3")


def test_a_gguf_file_in_a_repository(cache: Path) -> None:
    snapshot = put(cache, "a.gguf", "sub/b.gguf")
    assert resolve_model("org/tiny:a.gguf") == snapshot / "a.gguf"
    assert ensure_model("org/tiny@main:sub/b.gguf") == snapshot / "sub" / "b.gguf"
    with pytest.raises(ModelStoreError, match=r"octavo pull org/tiny:c\.gguf"):
        resolve_model("org/tiny:c.gguf")


def test_a_path_that_exists_wins(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, *MODEL)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/tiny") == HubName("org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve_model("org/tiny") == ensure_model("org/tiny") == Path("org/tiny")
    assert hub_name("org/tiny") is None
    assert hub_name("smollm2-135m") is None


@pytest.mark.parametrize(
    "files",
    [
        ("config.json", "tokenizer.json"),
        ("tokenizer.json", "model.safetensors"),
        ("config.json", "pytorch_model.bin"),
        ("config.json", SHARDS[0]),
        ("config.json", INDEX, SHARDS[0]),
    ],
    ids=str,
)
def test_half_a_download_is_no_model(cache: Path, files: tuple[str, ...]) -> None:
    snapshot = put(cache, *files)
    if INDEX in files:
        (snapshot / INDEX).write_text(json.dumps(WEIGHT_MAP))
    with pytest.raises(ModelStoreError, match="nor whole in the Hugging Face cache"):
        resolve_model("org/tiny")
    with pytest.raises(ModelStoreError, match=r"org/tiny has no"):
        ensure_model("org/tiny")


def test_all_shards_are_a_model(cache: Path) -> None:
    snapshot = put(cache, "config.json", INDEX, *SHARDS)
    (snapshot / INDEX).write_text(json.dumps(WEIGHT_MAP))
    assert resolve_model("org/tiny") == snapshot


def test_offline_says_what_to_do(cache: Path) -> None:
    for find in (ensure_model, pull):
        with pytest.raises(DownloadError, match=r"hub cannot be reached .*hf download org/tiny"):
            find("org/tiny")
    assert list(cache.iterdir()) == []


def test_a_download_asks_for_no_pickles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_download(monkeypatch, gives=put(cache, *MODEL))
    assert ensure_model("org/tiny@v1").name == COMMIT
    (call,) = calls
    assert (call["repo_id"], call["revision"]) == ("org/tiny", "v1")
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
            *("model.safetensors", INDEX, *SHARDS),
            *("generation_config.json", "additional_chat_templates/tools.jinja"),
            *("pytorch_model.bin", "x.pth", "model.pt", "flax_model.msgpack", "a.gguf", "code.py"),
            *("consolidated.safetensors", "original/model.safetensors", "README.md"),
        ],
        allow_patterns=call["allow_patterns"],
        ignore_patterns=call["ignore_patterns"],
    )
    assert set(wanted) == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", INDEX, *SHARDS),
        *("generation_config.json", "additional_chat_templates/tools.jinja"),
    }


def test_only_the_named_gguf_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replace_download(monkeypatch, gives=put(cache, "a.gguf"))
    assert ensure_model("org/tiny:a.gguf").name == "a.gguf"
    assert calls == [{"repo_id": "org/tiny", "revision": None, "allow_patterns": ["a.gguf"]}]
    with pytest.raises(ModelStoreError, match=r"org/tiny has no file b\.gguf"):
        ensure_model("org/tiny:b.gguf")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "org/tiny is gated: accept its terms on https://hugg"),
        (http_error(errors.RepositoryNotFoundError), "nor a repository of the Hugging Face hub"),
        (http_error(errors.RevisionNotFoundError), "org/tiny has no revision 'v1'"),
        (errors.HFValidationError("bad id"), "could not be downloaded: HFValidationError: bad id"),
        (http_error(errors.HfHubHTTPError, 401), "could not be downloaded: HfHubHTTPError: 404"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_readable(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    replace_download(monkeypatch, fails=error)
    with pytest.raises(ModelStoreError, match=message) as raised:
        ensure_model("org/tiny@v1")
    assert "\n" not in str(raised.value)
    assert CliRunner().invoke(app, ["pull", "org/tiny@v1"]).exit_code == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("no route\nmore"), r"cannot be reached \(no route\)"),
        (errors.OfflineModeIsEnabled("offline"), r"cannot be reached \(offline\)"),
        (http_error(errors.HfHubHTTPError, 503), "could not be downloaded: HfHubHTTPError: 404"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TimeoutError("timed out"), "could not be downloaded: TimeoutError: timed out"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_trouble_on_the_way_is_nobodys_request(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    replace_download(monkeypatch, fails=error)
    with pytest.raises(DownloadError, match=message) as raised:
        ensure_model("org/tiny@v1")
    assert not isinstance(raised.value, ValueError)
    assert "\n" not in str(raised.value)
    for command in (["pull", "org/tiny"], ["serve", "org/tiny", "--port", "0"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert result.stderr.startswith("octavo: org/tiny")
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("config.json", "x.txt"), r"pickled weights .* never fetched or read"),
        (("README.md",), r"has no config\.json; a GGUF file .* org/tiny:file\.gguf"),
    ],
)
def test_repositories_without_a_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], message: str
) -> None:
    replace_download(monkeypatch, gives=put(cache, *files))
    with pytest.raises(ModelStoreError, match=message):
        ensure_model("org/tiny")


def test_the_environment_names_the_cache(tmp_path: Path) -> None:
    """huggingface_hub reads it; octavo does not even import it for a path."""
    snapshot = put(tmp_path / "hub", *MODEL)
    code = (
        "import sys; from octavo.model_store import ensure_model\n"
        f"ensure_model({str(snapshot)!r}); assert 'huggingface_hub' not in sys.modules\n"
        "print(ensure_model('org/tiny'))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(snapshot)
