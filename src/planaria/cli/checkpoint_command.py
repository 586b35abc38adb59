"""The commands `planaria checkpoint`: list, verify, prune, keep and export what a job has saved."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from planaria.checkpoint.disk.outgoing import export_parameters, kept_saves, newest_of, save_as
from planaria.checkpoint.disk.tiers import (
    SET_ASIDE,
    UNPUBLISHED,
    Manifest,
    SavedVersion,
    Tier,
    tier_of,
)
from planaria.cli.asking import HeadTokenFile, ask_job
from planaria.cli.command_line import exit_codes, plain_table, table_console
from planaria.core.copies import version_name
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.head.requests import KeepSave
from planaria.show.words import bytes_text, count_text

Place = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY", help="Directory of the saves: checkpoint.directory of the job."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WhichVersion = Annotated[
    str,
    typer.Option("--version", metavar="VERSION", help="Look at this version only, such as 100-3."),
]
ModelPath = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Where model.path of the job is now. Default: where it was when the job saved.",
    ),
]
_KEEP_TIMEOUT_S: Final = 3600.0  # A large version is read and written.
_HERE: Final = "checkpoints"

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Lists, verifies, removes and exports the saves of jobs.",
)


@checkpoint.command()
@exit_codes()
def ls(directory: Place = _HERE, as_json: AsJson = False) -> None:
    """Lists all versions, the newest first; for an incomplete version it says why.

    After them come those that `save` has kept under a name.
    """
    versions = _versions(directory)
    kept = kept_saves(directory)
    if as_json:
        facts = [_facts(version) for version in versions]
        facts += [{"kept_as": name, **_manifest_facts(kept[name])} for name in kept]
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    table = plain_table("version", "iterations", "layers", "size", "written (UTC)", "state")
    for version in versions:
        manifest = version.manifest
        row = ["", "", ""]
        if manifest is not None:
            row = [
                str(len(manifest.layers)),
                bytes_text(_num_bytes(manifest)),
                _written_text(version),
            ]
        state = "complete" if manifest is not None else f"not complete: {version.reason}"
        table.add_row(version.name, str(version.iteration), *row, state)
    for name, manifest in kept.items():
        row = [str(manifest.iteration), str(len(manifest.layers)), bytes_text(_num_bytes(manifest))]
        table.add_row(name, *row, "", "kept")
    table_console().print(table)


@checkpoint.command()
@exit_codes()
def verify(
    directory: Place = _HERE,
    version: WhichVersion = "",
    as_json: AsJson = False,
) -> None:
    """Reads every byte of the complete versions and compares hashes with those of the save.

    For an incomplete version it says why. The exit code is 1 if a version that was once complete is
    damaged, or if no version is complete.
    """
    chosen = [saved for saved in _versions(directory) if version in ("", saved.name)]
    if not chosen:
        raise ConfigError(
            "--version",
            version,
            f"there is no such version in {directory}; planaria checkpoint ls lists them",
        )
    tier = tier_of(str(directory))
    damage = {saved.name: _damage(tier, saved) for saved in chosen}
    if as_json:
        sys.stdout.write(json.dumps(damage, indent=2) + "\n")
    else:
        console = Console(soft_wrap=True, highlight=False)
        for name, reasons in damage.items():
            for line in reasons or ["undamaged"]:
                console.print(f"{name}: {line}", markup=False)
    if not version and not any(saved.manifest for saved in chosen):
        raise CheckpointError(f"{directory} holds no complete version")
    judged = [
        saved.name for saved in chosen if version or saved.reason not in (UNPUBLISHED, SET_ASIDE)
    ]
    if num_damaged := sum(bool(damage[name]) for name in judged):
        text = f"a job cannot go on from {num_damaged} of {count_text(len(judged), 'version')}"
        raise CheckpointError(text)


@checkpoint.command()
@exit_codes()
def prune(
    directory: Place = _HERE,
    keep: Annotated[
        int, typer.Option(min=1, help="Number of newest complete versions that stay.")
    ] = 2,
) -> None:
    """Removes old versions, and incomplete versions that are older than a complete one."""
    _versions(directory)
    tier = tier_of(directory)
    removed = tier.prune(keep)
    console = Console(soft_wrap=True, highlight=False)
    for name in removed:
        console.print(f"removed {tier.storage.where(name)}", markup=False)
    if not removed:
        why = f"{directory} has no more versions than it should keep"
        if tier.newest() is None:
            why = (
                f"{directory} holds no complete version, and a job may be writing what is there; "
                "if none is, remove the directory"
            )
        console.print(f"nothing to remove: {why}", markup=False)


@checkpoint.command()
@exit_codes()
def save(
    name: Annotated[str, typer.Option(help="Name under which the newest version is kept.")],
    directory: Place = _HERE,
    head: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Have the head there keep it, from the saves of its job."
        ),
    ] = "",
    token_file: HeadTokenFile = "",
) -> None:
    """Keeps the newest complete version under a name; planaria never removes it.

    The version gets its own directory, DIRECTORY/NAME. A job goes on from it with
    --set checkpoint.directory=DIRECTORY/NAME --resume.
    """
    if head and directory != _HERE:
        raise ConfigError("DIRECTORY", directory, "leave it out with --head, which knows its own")
    if head or token_file:
        where = _keep_at(head, name, token_file=token_file)
    else:
        _versions(directory)
        where = save_as(directory, name)
    Console(soft_wrap=True, highlight=False).print(where, markup=False)


def _keep_at(head: str, name: str, *, token_file: str) -> str:
    """Has a head keep the newest version of its job; returns the place."""
    answer = ask_job(
        KeepSave(name), head=head, token_file=token_file, job="", timeout_s=_KEEP_TIMEOUT_S
    )
    if not answer.is_done:
        raise ConfigError("", "", answer.text)
    return answer.text


@checkpoint.command()
@exit_codes()
def export(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIRECTORY", help="New directory to write to.")
    ],
    directory: Place = _HERE,
    version: Annotated[
        str, typer.Option(metavar="VERSION", help="Export this version, not the newest.")
    ] = "",
    model_path: ModelPath = "",
) -> None:
    """Writes the parameters of a version as safetensors, with config.json if the model has one.

    Hugging Face transformers can read the directory with from_pretrained.
    """
    tier = tier_of(directory)
    manifests = {saved.name: saved.manifest for saved in _versions(directory)}
    manifest = manifests.get(version) if version else newest_of(tier, directory)
    if manifest is None:
        raise ConfigError(
            "--version",
            version,
            f"there is no complete version of this name in {directory}; planaria "
            "checkpoint ls lists them",
        )
    console = Console(soft_wrap=True, highlight=False)
    for name in export_parameters(tier, manifest, output, origin=model_path):
        console.print(str(output / name), markup=False)


def _versions(directory: str) -> tuple[SavedVersion, ...]:
    """The versions in a directory, at least one.

    Raises:
        ConfigError: the directory has no version, or cannot be read.
    """
    try:
        versions = tier_of(directory).versions()
    except CheckpointError as error:
        raise ConfigError("DIRECTORY", directory, str(error)) from error
    if not versions:
        remedy = "there is no version of a job in it; name the checkpoint.directory of a job"
        if subdirectories := [
            path for path in _subdirectories(directory) if tier_of(path).versions()
        ]:
            remedy = f"there is no version of a job in it, but in {', '.join(subdirectories)}"
        raise ConfigError("DIRECTORY", directory, remedy)
    return versions


def _subdirectories(directory: str) -> list[str]:
    """The directories in a directory; none if it does not exist, or is an object store."""
    return sorted(str(path) for path in Path(directory).glob("*") if path.is_dir())


def _damage(tier: Tier, version: SavedVersion) -> list[str]:
    """The errors of all layers that cannot be read, or the reason why the version is incomplete."""
    if version.manifest is None:
        return [f"not complete: {version.reason}"]
    errors = []
    for entry in version.manifest.layers:
        try:
            tier.read_layer(version.manifest, entry.layer)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def _facts(version: SavedVersion) -> dict[str, Any]:
    manifest = version.manifest
    return {
        "version": version.name,
        "iteration": version.iteration,
        "epoch": version.epoch,
        "is_complete": manifest is not None,
        "reason": version.reason,
        "num_layers": len(manifest.layers) if manifest else 0,
        "num_bytes": _num_bytes(manifest) if manifest else 0,
    }


def _manifest_facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": version_name(manifest.iteration, manifest.epoch),
        "iteration": manifest.iteration,
        "epoch": manifest.epoch,
        "is_complete": True,
        "reason": "",
        "num_layers": len(manifest.layers),
        "num_bytes": _num_bytes(manifest),
    }


def _num_bytes(manifest: Manifest) -> int:
    return sum(entry.num_bytes for entry in manifest.layers)


def _written_text(version: SavedVersion) -> str:
    return f"{datetime.fromtimestamp(version.modified_s, tz=UTC):%Y-%m-%d %H:%M:%S}"
