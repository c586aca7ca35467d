"""Hub ids: told from paths, fetched without pickles, and one clear line when the hub cannot help. No test asks a network."""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from golden import goldens

import hal_core
from hal_core.cli.main import app_main
from hal_core.errors import FormatError, HalError, MissingDependencyError
from hal_core.hub import HubName, resolve_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
GOLDEN = "gptq_v2_asym_int4_g32"


class FakeHub:
    """A hub of one repository: ``files`` are what it holds, ``calls`` what was asked."""

    def __init__(self, cache: Path, files: dict[str, Path | bytes]) -> None:
        self.cache, self.files, self.calls = cache, files, []

    def snapshot_download(self, repo_id, *, revision=None, allow_patterns=None, ignore_patterns=None, **_):
        self.calls.append((repo_id, revision))
        self.cache.mkdir(exist_ok=True)
        for name, content in self.files.items():
            wanted = any(fnmatch(name, pattern) for pattern in allow_patterns)
            if not wanted or any(fnmatch(name, pattern) for pattern in ignore_patterns or ()):
                continue
            target = self.cache / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                shutil.copyfile(content, target)
        return str(self.cache)

    def list_repo_files(self, repo_id, revision=None):
        return list(self.files)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def install(files):
        fake = FakeHub(tmp_path / "cache", files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _api, *args, **named: fake.list_repo_files(*args, **named))
        return fake

    monkeypatch.chdir(tmp_path)
    return install


def golden_files():
    return {path.name: path for path in goldens.folder(GOLDEN).iterdir()}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("Org-1/Qwen3-0.6B.int4", ("Org-1/Qwen3-0.6B.int4", None, None)),
        ("org/name@main", ("org/name", "main", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("org/name:a-Q4_0.gguf", ("org/name", None, "a-Q4_0.gguf")),
        ("org/name@v1:sub/a.gguf", ("org/name", "v1", "sub/a.gguf")),
    ],
)
def test_hub_ids_are_read(text, parts):
    name = HubName.parse(text)
    assert (name.repo, name.revision, name.file) == parts
    assert str(name) == text


@pytest.mark.parametrize("text", [
    "name", "./org/name", "/org/name", "../name", "org/", "org/sub/name", "org/model.gguf", "org/x.safetensors", "~/name", "",
    "org/na me", "org//name", "a/b:", "org/name@", "org\\name", ".hidden/name",
])  # fmt: skip
def test_what_is_no_hub_id_is_a_missing_path(hub, text):
    assert HubName.parse(text) is None
    fake = hub({})
    if text:  # the empty text is the current folder
        with pytest.raises(FormatError, match="no such file or folder"):
            resolve_checkpoint(text)
    assert fake.calls == []


def test_a_path_that_exists_is_never_asked_of_the_hub(hub, tmp_path):
    fake = hub({})
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_checkpoint("org/name") == Path("org/name")
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert fake.calls == []


def test_a_path_object_is_never_a_hub_id(hub):
    fake = hub({})
    with pytest.raises(FormatError, match="no such file or folder"):
        resolve_checkpoint(Path("org/name"))
    assert fake.calls == []


def test_safetensors_config_and_tokenizer_are_fetched_and_pickles_are_not(hub):
    extra = {
        "pytorch_model.bin": b"pickle", "x.pth": b"", "tokenizer.json": b"{}", "tokenizer.model": b"", "merges.txt": b"",
        "chat_template.jinja": b"", "consolidated.safetensors": b"", "onnx/model.json": b"", "original/a.safetensors": b"",
        "model-Q8_0.gguf": b"", "README.md": b"",
    }  # fmt: skip
    fake = hub({**golden_files(), **extra})
    folder = resolve_checkpoint("org/name@v2")
    assert fake.calls == [("org/name", "v2")]
    fetched = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"} <= fetched
    unwanted = {"pytorch_model.bin", "x.pth", "consolidated.safetensors", "model.json", "a.safetensors", "model-Q8_0.gguf", "README.md"}
    assert not fetched & unwanted


def test_open_checkpoint_and_every_command_take_a_hub_id(hub, capsys, tmp_path):
    hub(golden_files())
    assert hal_core.open_checkpoint("org/name").format == "gptq_v2"
    assert hal_core.load("org/name", policy="require:reference").hal.format == "gptq_v2"
    out = str(tmp_path / "out.safetensors")
    for command in (["inspect"], ["explain"], ["dequantize", "--out", out], ["logits", "--ids", "1,2", "--out", out]):
        with pytest.raises(SystemExit) as stop:
            app_main([command[0], "org/name", *command[1:], "--json"])
        assert stop.value.code == 0, capsys.readouterr().err
    with pytest.raises(SystemExit):
        app_main(["run", "org/name", "--prompt", "x"])
    assert f"tokenizer of {tmp_path / 'cache'}" in capsys.readouterr().err


def test_the_only_gguf_file_of_a_repository_is_taken(hub):
    hub({"a-Q4_0.gguf": b"GGUF", "README.md": b""})
    assert resolve_checkpoint("org/name").name == "a-Q4_0.gguf"


def test_of_several_gguf_files_one_must_be_named_and_none_is_fetched(hub):
    fake = hub({"a-Q4_0.gguf": b"GGUF", "a-Q8_0.gguf": b"GGUF", "config.json": b"{}"})
    with pytest.raises(FormatError, match=r"2 \.gguf files: a-Q4_0\.gguf, a-Q8_0\.gguf; name one, e\.g\. org/name:a-Q4_0\.gguf"):
        resolve_checkpoint("org/name")
    assert not list(fake.cache.glob("*.gguf"))
    assert resolve_checkpoint("org/name:a-Q8_0.gguf") == fake.cache / "a-Q8_0.gguf"
    assert not (fake.cache / "a-Q4_0.gguf").exists()


def test_a_gguf_file_that_is_not_there_lists_those_that_are(hub):
    hub({"a[1]-Q4_0.gguf": b"GGUF"})
    with pytest.raises(FormatError, match=r"org/name:b\.gguf: the repository has a\[1\]-Q4_0\.gguf"):
        resolve_checkpoint("org/name:b.gguf")
    assert resolve_checkpoint("org/name:a[1]-Q4_0.gguf").name == "a[1]-Q4_0.gguf"


def test_only_gguf_files_are_taken_by_name(hub):
    fake = hub({"pytorch_model.bin": b""})
    with pytest.raises(FormatError, match="'pytorch_model.bin' is not a .gguf file"):
        resolve_checkpoint("org/name:pytorch_model.bin")
    assert fake.calls == []


def test_a_repository_of_pickles_alone_is_refused(hub):
    hub({"pytorch_model.bin": b"", "config.json": b"{}"})
    with pytest.raises(FormatError, match="pickle files are not read"):
        resolve_checkpoint("org/name")


def raised(name: str, *bases: type, cause: Exception | None = None) -> Exception:
    """An exception of a class of that name, as the client's own need a server's answer to be made."""
    error = type(name, bases or (Exception,), {})("said by the client")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (raised("LocalEntryNotFoundError", cause=raised("OfflineModeIsEnabled")), ("HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")),
        (raised("LocalEntryNotFoundError", cause=raised("ConnectError")), ("could not be reached (said by the client)", "connect")),
        (raised("IncompleteSnapshotError", raised("LocalEntryNotFoundError").__class__), ("only partly in the hub's cache",)),
        (raised("RepositoryNotFoundError"), ("no such repository", "no such local path")),
        (raised("GatedRepoError", raised("RepositoryNotFoundError").__class__), ("gated", "accept its terms")),
        (raised("RevisionNotFoundError"), ("no revision 'main'",)),
        (raised("HFValidationError", ValueError), ("not a valid hub id",)),
        (OSError("disk full"), ("OSError: disk full", "try again")),
    ],
)
def test_every_fault_of_the_hub_is_one_line_that_says_what_to_do(monkeypatch, capsys, error, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HalError) as caught:
        resolve_checkpoint("org/name")
    assert all(word in str(caught.value) for word in ("checkpoint org/name", *words)), str(caught.value)
    with pytest.raises(SystemExit) as stop:
        app_main(["inspect", "org/name"])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(shown.splitlines()) == 1


def test_the_real_client_offline_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FormatError, match=r"org/name:x\.gguf: no such local path; not in the hub's cache, and HF_HUB_OFFLINE is set"):
        resolve_checkpoint("org/name:x.gguf")


def test_without_huggingface_hub_a_local_path_still_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve_checkpoint(tmp_path) == tmp_path
    with pytest.raises(MissingDependencyError, match="pip install huggingface_hub"):
        resolve_checkpoint("org/name")
