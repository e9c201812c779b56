"""Models of Hugging Face's hub, and its library's cache of them.

The library's variables apply: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT. Offline, or where the
hub does not answer, the cache is used.
"""

from __future__ import annotations

import errno
import glob
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import HotcoldError, UsageError, shown
from hotcold.model.gguf.file_names import SUFFIX, is_later_part, models_among, quantization_of

REPOSITORY = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<name>[\w.-]+))?")
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", "merges.txt", "vocab.txt")
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_FORMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))  # of weights, the preferred first
_INDEX = ".index.json"
_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
)  # a disk refuses
_MAX_LISTED = 12
_CACHED = re.compile(r"/models--([^/]+)/snapshots/")
_PATIENCE_S = 5.0  # for a word of advice


@dataclass(frozen=True)
class HubModel:
    """The files of a repository that make one model."""

    repo_id: str
    files: tuple[str, ...]  # a GGUF model's first part first
    folder: Path | None = None  # in the cache, where the hub did not answer

    @property
    def gguf(self) -> str:
        """The GGUF file that names the model, or "" where it is a directory."""
        return self.files[0] if self.files[0].endswith(SUFFIX) else ""


@dataclass(frozen=True)
class Download:
    """The size of a model before it is fetched."""

    num_files: int
    num_bytes: int
    missing_bytes: int


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache."""

    name: str  # as commands take it: org/repo or org/repo:FILE
    form: str  # "safetensors", "gguf", "torch", or "unfinished"
    num_bytes: int
    used_s: float  # last read, seconds since 1970
    path: Path
    files: tuple[Path, ...]  # by their names in one revision


@dataclass(frozen=True)
class Removal:
    """A model to be removed: its name in the cache, files, the bytes they free, its revisions."""

    name: str
    paths: tuple[Path, ...]
    num_bytes: int
    num_revisions: int


def choose_files(repo_id: str, names: Sequence[str], part: str | None) -> HubModel:
    """Choose the files of one model: one form of its weights, and the small files beside them.

    safetensors come before one GGUF file before PyTorch's files. With `part` the model is the GGUF
    file of that name, else the only one of that quantization, else the only one with `part` in its
    name.
    Errors:  UsageError for no model, or several
    """
    top = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    beside = [name for name in top if name.endswith(_BESIDE_WEIGHTS)]
    ggufs = sorted(name for name in names if name.endswith(SUFFIX))
    firsts = [name for name in ggufs if not is_later_part(Path(name))]
    if part is None and "config.json" in top:
        for stem, suffix in _FORMS:
            weights = [name for name in top if name.startswith(stem) and name.endswith(suffix)]
            if weights:
                unused = [f"{other}{end}{_INDEX}" for other, end in _FORMS if other != stem]
                files = [name for name in beside if name not in unused]
                return HubModel(repo_id, (*files, *weights))
    chosen, models = _fitting(firsts, part), models_among(firsts)
    if not models and part is None:
        raise UsageError(f"{repo_id} holds no model in safetensors, GGUF or PyTorch's format")
    if len(chosen) != 1:
        named = f" with {shown(part)} in the name" if part else ""
        raise UsageError(
            f"{repo_id} holds {len(chosen) or 'no'} GGUF models{named}; choose one by "
            f"{repo_id}:NAME: {listed([_base(name) for name in models])}"
        )
    whole = _PART.sub("", chosen[0])
    parts = [name for name in ggufs if _PART.sub("", name) == whole and name != chosen[0]]
    return HubModel(repo_id, (chosen[0], *parts))


def _fitting(names: Sequence[str], part: str | None) -> list[str]:
    """The GGUF files that `part` of a name may mean; of first parts."""
    named = [name for name in names if part in (_base(name), _base(name).removesuffix(SUFFIX))]
    if len(named) == 1:
        return named
    found = models_among([name for name in names if (part or "").lower() in _base(name).lower()])
    return [name for name in found if quantization_of(name) == (part or "").upper()] or found


def find(repo_id: str, part: str | None) -> HubModel:
    """Choose the files of a model of the hub, or of the cache where the hub does not answer.

    Errors:  UsageError where neither has it
    """
    from huggingface_hub import model_info

    try:
        names = [file.rfilename for file in model_info(repo_id).siblings or ()]
        return choose_files(repo_id, names, part)
    except HotcoldError:
        raise
    except Exception as problem:  # of any of the libraries below it
        newest = None if _status(problem) else _newest_snapshot(repo_id)
        if newest is None:
            raise _refusal(repo_id, problem) from None
    model = choose_files(repo_id, [file.file_name for file in newest.files], part)
    return replace(model, folder=newest.snapshot_path)


def find_here(repo_id: str, part: str | None) -> HubModel:
    """Choose the files of a model of the cache. Errors: UsageError where it is not there."""
    newest = _newest_snapshot(repo_id)
    if newest is None:
        name = repo_id if part is None else f"{repo_id}:{part}"
        raise UsageError(f"{name} is not on this machine; `hotcold pull {name}` fetches it")
    model = choose_files(repo_id, [file.file_name for file in newest.files], part)
    return replace(model, folder=newest.snapshot_path)


def ggufs_beside(file: Path) -> list[str]:
    """The GGUF models in the repository of a file of the cache, as commands take them.

    Empty for other files, and where the hub does not answer.
    """
    from huggingface_hub import model_info

    found = _CACHED.search(str(file.absolute()))
    if found is None:
        return []
    repo_id = found[1].replace("--", "/", 1)
    try:
        siblings = model_info(repo_id, timeout=_PATIENCE_S).siblings or ()
    except Exception:  # of any of the libraries below it
        return []
    names = [each.rfilename for each in siblings if each.rfilename.endswith(SUFFIX)]
    firsts = sorted(name for name in names if not is_later_part(Path(name)))
    return [f"{repo_id}:{_base(name)}" for name in models_among(firsts)]


def size_of(model: HubModel) -> Download:
    """Return the size of a download. Errors: UsageError."""
    if model.folder is not None:
        sizes = [(model.folder / name).stat().st_size for name in model.files]
        return Download(len(sizes), sum(sizes), 0)
    files = _snapshot(model, dry_run=True)
    missing = sum(file.file_size for file in files if file.will_download)
    return Download(len(files), sum(file.file_size for file in files), missing)


def fetch(model: HubModel) -> Path:
    """Fetch what is missing, and return the model's directory or GGUF file. Errors: UsageError."""
    folder = model.folder or Path(_snapshot(model))
    return folder / model.gguf if model.gguf else folder


def fetch_config(repo_id: str) -> Path:
    """Fetch a repository's config.json alone, and return its path. Errors: UsageError."""
    from huggingface_hub import hf_hub_download, model_info

    try:
        model_info(repo_id)  # ends at once where nothing answers; a download tries for 25 s
        return Path(hf_hub_download(repo_id, "config.json"))
    except Exception as problem:  # of any of the libraries below it
        newest = None if _status(problem) else _newest_snapshot(repo_id)
        if newest is not None and (cached := newest.snapshot_path / "config.json").exists():
            return Path(cached)
        raise _refusal(repo_id, problem) from None


def require_space(download: Download) -> None:
    """Raise UsageError where the cache's disk is too full for what is missing."""
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if download.missing_bytes > free:
        raise UsageError(
            f"the download takes {size_text(download.missing_bytes)}, and {place} has "
            f"{size_text(free)} free; remove a model (hotcold rm), or set HF_HOME to another disk"
        )


def snapshots(name: str) -> list[Path]:
    """Return the cached revisions of org/repo[:FILE], without the network."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repo = name.partition(":")[0]
    return sorted(Path(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").glob("snapshots/*"))


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name."""
    found = []
    for repo in _scan():
        for revision in repo.revisions:
            found += _models_of(repo.repo_id, list(revision.files))
    return sorted(found, key=lambda model: model.name)


def removal_of(name: str) -> Removal:
    """Return what to remove for a model of the cache.

    `name` is org/repo, for all of a repository, or org/repo:FILE, for one of its GGUF models in all
    revisions, FILE also what only its name holds. Blobs that other files share stay.
    Errors:  UsageError where the cache has no such model, or several of such names
    """
    parsed = REPOSITORY.fullmatch(name)
    repos = [repo for repo in _scan() if parsed and repo.repo_id == parsed["repo"]]
    models = [model for model in cached_models() if model.name == name]
    if not models and parsed and parsed["name"]:
        beginning = f"{parsed['repo']}:"
        own = [model for model in cached_models() if model.name.startswith(beginning)]
        known = dict.fromkeys(model.name.removeprefix(beginning) for model in own)
        fitting = _fitting(list(known), parsed["name"])
        models = [model for model in own if model.name.removeprefix(beginning) in fitting]
        if len(names := {model.name for model in models}) > 1:
            raise UsageError(
                f"{shown(name)} is in the names of {', '.join(sorted(names))}; name one"
            )
    if not repos or (parsed and parsed["name"] and not models):
        raise UsageError(f"the cache holds no {shown(name)}; `hotcold list` shows what it holds")
    repo = repos[0]
    if not (parsed and parsed["name"]):
        return Removal(name, (repo.repo_path,), int(repo.size_on_disk), len(repo.revisions))
    whole_name = models[0].name
    links = {path for model in models for path in model.files}
    files = [file for revision in repo.revisions for file in revision.files]
    others = {file.blob_path for file in files if file.file_path not in links}
    if not others:
        return Removal(whole_name, (repo.repo_path,), int(repo.size_on_disk), len(models))
    blobs = {
        file.blob_path: file.size_on_disk
        for file in files
        if file.file_path in links and file.blob_path not in others
    }
    return Removal(whole_name, (*links, *blobs), sum(blobs.values()), len(models))


def remove(removal: Removal) -> None:
    """Remove a model from the cache. Errors: OSError."""
    for path in removal.paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _models_of(repo_id: str, files: list[Any]) -> list[CachedModel]:
    """The models of one revision, from the library's facts of its files."""
    by_name = {file.file_name: file for file in files}
    found = []
    others = [name for name in by_name if not name.endswith(SUFFIX)]
    for form, (_, suffix) in zip(("safetensors", "torch"), _FORMS, strict=True):
        if "config.json" in others and any(name.endswith(suffix) for name in others):
            found.append(_cached(repo_id, form, [by_name[name] for name in others]))
            break
    ggufs = sorted(name for name in by_name if name.endswith(SUFFIX))
    for first in models_among([name for name in ggufs if not is_later_part(Path(name))]):
        whole = _PART.sub("", first)
        parts = [by_name[name] for name in ggufs if _PART.sub("", name) == whole]
        found.append(_cached(f"{repo_id}:{_base(first)}", "gguf", parts))
    return found or ([_cached(repo_id, "unfinished", files)] if files else [])


def _cached(name: str, form: str, files: list[Any]) -> CachedModel:
    return CachedModel(
        name,
        form,
        sum(file.size_on_disk for file in files),
        max((file.blob_last_accessed for file in files), default=0.0),
        files[0].file_path if form == "gguf" else files[0].file_path.parent,
        tuple(file.file_path for file in files),
    )


def _scan() -> list[Any]:
    """The library's facts of the cache's models."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _newest_snapshot(repo_id: str) -> Any:
    """The library's facts of a repository's newest cached revision; None without one."""
    snapshots = [each for repo in _scan() if repo.repo_id == repo_id for each in repo.revisions]
    return max(snapshots, key=lambda each: float(each.last_modified), default=None)


def _snapshot(model: HubModel, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(name) for name in model.files]
    try:
        return snapshot_download(model.repo_id, allow_patterns=patterns, **options)
    except Exception as problem:  # of any of the libraries below it
        raise _refusal(model.repo_id, problem) from None


def _refusal(repo_id: str, problem: Exception) -> HotcoldError:
    """The error for the user, from the library's."""
    if isinstance(problem, OSError) and problem.errno in _DISK:
        from huggingface_hub.constants import HF_HUB_CACHE

        return UsageError(
            f"{repo_id} cannot be kept in {HF_HUB_CACHE} ({problem.strerror}); remove a model "
            "(hotcold rm), or set HF_HOME to another disk"
        )
    if _status(problem) in (401, 403, 404):
        why = "has no such model, or needs HF_TOKEN for it"
        if nearest := get_close_matches(repo_id, {repo.repo_id for repo in _scan()}, 1, 0.8):
            why += f" (did you mean {nearest[0]}, which is here?)"
    else:
        lines = str(problem).strip().splitlines()
        why = f"cannot be reached: {shown(lines[0], 120) if lines else type(problem).__name__}"
    return UsageError(
        f"{repo_id} is no directory here, and Hugging Face {why}; check the name and the network, "
        "or give a directory (`hotcold list` shows what is here, `hotcold pull` fetches a model)"
    )


def _status(problem: Exception) -> int | None:
    """The HTTP status of the hub's answer, if it answered."""
    return getattr(getattr(problem, "response", None), "status_code", None)


def _base(name: str) -> str:
    return PurePosixPath(name).name


def listed(names: Sequence[str]) -> str:
    """Return the first names and how many more there are, for an error text."""
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
