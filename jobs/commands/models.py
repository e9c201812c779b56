"""`hotcold pull`, `list`, `show` and `rm`: models, most of them in Hugging Face's cache."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from hotcold.jobs.support.console import json_option, plain, tell
from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import UsageError, shown


@click.command()
@click.argument("model")
@json_option
def pull(model: str) -> dict[str, Any]:
    """Fetch MODEL, org/repo or org/repo:FILE, from Hugging Face, or a known name such as qwen3:8b.

    FILE is a GGUF file, or what only its name holds, such as Q4_K_M. Only what is needed is
    fetched, and a download that was stopped goes on. HF_TOKEN opens what is not public, HF_ENDPOINT
    names a mirror, and HF_HOME where models are kept.
    """
    from hotcold.model.files import hub
    from hotcold.model.files.known_models import did_you_mean, repository_of

    repository = repository_of(model)
    match = hub.REPOSITORY.fullmatch(repository)
    if match is None:
        nearest = did_you_mean(model)
        raise UsageError(
            f"{shown(model)} is no model of Hugging Face; give org/repo[:FILE]{nearest}"
        )
    found = hub.find(match["repo"], match["name"])
    download = hub.size_of(found)
    hub.require_space(download)
    count = download.num_files
    what = f"{size_text(download.num_bytes)} in {count} file{'' if count == 1 else 's'}"
    told = model if repository == model else f"{model} is {repository}"
    click.echo(f"{told}: {what}, {size_text(download.missing_bytes)} to be fetched", err=True)
    path = hub.fetch(found)
    click.echo(f"{model}: {what}, in {path}")
    return {"model": model, "path": str(path), **asdict(download)}


@click.command("list")
@click.option("--known", is_flag=True, help="The names that stand for a model, instead.")
@json_option
def list_models(known: bool) -> dict[str, Any]:
    """List the models in Hugging Face's cache, or all known names."""
    if known:
        return _list_known()
    from rich.console import Console
    from rich.table import Table

    from hotcold.model.files import hub

    models = hub.cached_models()
    if models:
        table = Table(box=None, pad_edge=False)
        for name in ("model", "form", "size", "last used"):
            table.add_column(name, justify="right" if name == "size" else "left")
        for model in models:
            used = time.strftime("%Y-%m-%d", time.localtime(model.used_s))
            table.add_row(plain(model.name), model.form, size_text(model.num_bytes), used)
        Console(highlight=False).print(table)
    else:
        click.echo("no models yet; `hotcold pull org/repo` fetches one, or `hotcold run qwen3:8b`")
    kept = [
        {"model": m.name, "form": m.form, "bytes": m.num_bytes, "path": str(m.path)} for m in models
    ]
    return {"models": kept}


def _list_known() -> dict[str, Any]:
    from hotcold.model.files.known_models import known_models, sparse_models

    names = known_models()
    width, widest = max(map(len, names)), max(map(len, names.values()))
    those = sparse_models()
    sparse = [name for name, model in names.items() if model in those]
    for name, model in sorted(names.items()):
        mark = f"{model:{widest}}  sparse" if name in sparse else model
        click.echo(f"{name:{width}}  {mark}")
    click.echo("sparse: most neurons of the model are zero, and leaving them out pays", err=True)
    return {"known": names, "sparse": sparse}


@click.command()
@click.argument("model", required=False)
@json_option
def show(model: str | None) -> dict[str, Any]:
    """Say what MODEL is: family, sizes, formats, context, sparsity, and the mode it would run in.

    Nothing is loaded, and nothing is fetched that `generate` would not fetch.
    """
    from hotcold.jobs.support.model_facts import facts_of, lines_of
    from hotcold.model.files.locate import locate_model

    path = locate_model(model)
    facts: dict[str, Any] = facts_of(path)
    width = max(len(name) for name, _ in lines_of(facts))
    for name, text in lines_of(facts):
        tell(f"{name:{width}}  {text}")
    return facts


@click.command()
@click.argument("model")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Remove MODEL, as `hotcold list` names it, from Hugging Face's cache.

    org/repo stands for all that is there of a repository, profiles and predictors included, and
    org/repo:FILE for that file in all revisions that are there, FILE also what only its name holds.
    """
    from hotcold.model.files import hub
    from hotcold.model.files.known_models import repository_of

    removal = hub.removal_of(repository_of(model))
    size, number = size_text(removal.num_bytes), removal.num_revisions
    revisions = f" in {number} revisions" if number > 1 else ""
    if not yes:
        click.confirm(f"remove {removal.name}{revisions}, {size}?", abort=True, err=True)
    hub.remove(removal)
    click.echo(f"{removal.name}: {size} freed{revisions}")
