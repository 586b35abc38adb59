"""The commands `planaria checkpoint`: list, verify, prune, keep, export and import saves."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from planaria.checkpoint.disk.claim import claim
from planaria.checkpoint.disk.outgoing import (
    TOKENIZER_FILE,
    export_parameters,
    kept_saves,
    kept_versions,
    learned_tokenizer,
    model_facts,
    newest_of,
    save_as,
)
from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import (
    SET_ASIDE,
    UNPUBLISHED,
    Manifest,
    SavedVersion,
    Tier,
    tier_of,
)
from planaria.cli.asking import HeadTokenFile, ask_job
from planaria.cli.command_line import (
    JobFile,
    Settings,
    exit_codes,
    plain_table,
    table_console,
    text_console,
)
from planaria.core.copies import version_name
from planaria.data.model_tokenizer import NUM_BYTE_TOKENS, own_tokenizer_files
from planaria.errors import CheckpointError, ConfigError, UnreadableError
from planaria.job.checks import check_inputs
from planaria.job.planning import cache_directory
from planaria.job.save_facts import HAS_OWN_TOKENS, save_facts
from planaria.job.scripts import named_job
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


class Format(StrEnum):
    """The formats of an export."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"


_KEEP_TIMEOUT_S: Final = 3600.0  # A large version is read and written.
_HERE: Final = "checkpoints"
_REMOVED: Final = "was removed meanwhile"

checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Lists, verifies, removes, exports and imports the saves of jobs.",
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
        complete = "complete, kept" if version.is_kept else "complete"
        state = complete if manifest is not None else f"not complete: {version.reason}"
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

    Those under a name are read, too: what `save` has kept, and what a job has saved beside that.
    For an incomplete version it says why. The exit code is 1 if a version that was once complete is
    damaged, or if no version is complete. One that a running job removes meanwhile does not count.
    """
    tier, named = tier_of(str(directory)), {saved.name: saved for saved in _versions(directory)}
    tiers = dict.fromkeys(named, tier)
    for kept_as, kept, saved in kept_versions(directory):
        name = f"{kept_as}/{saved.name}"
        tiers[name], named[name] = kept, saved
    chosen = {
        name: saved
        for name, saved in named.items()
        if version in ("", name, name.partition("/")[0])
    }
    if not chosen:
        raise ConfigError(
            "--version",
            version,
            f"there is no such version in {directory}; planaria checkpoint ls lists them",
        )
    damage = {name: _damage(tiers[name], saved) for name, saved in chosen.items()}
    if as_json:
        sys.stdout.write(json.dumps(damage, indent=2) + "\n")
    else:
        console = text_console(soft_wrap=True)
        for name, reasons in damage.items():
            for line in reasons or ["undamaged"]:
                console.print(f"{name}: {line}")
    if version not in chosen and not any(saved.manifest for saved in chosen.values()):
        raise CheckpointError(f"{directory} holds no complete version")
    judged = [
        name
        for name, saved in chosen.items()
        if version == name
        or (saved.reason not in (UNPUBLISHED, SET_ASIDE) and damage[name] != [_REMOVED])
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
    """Removes old versions, and incomplete versions that are older than a complete one.

    Newer incomplete ones are named: a job may be writing them. A version that was kept under a name
    stays, and does not count. Nor does a damaged one: before complete versions are removed, those
    that stay are read.
    """
    versions, tier = _versions(directory), tier_of(directory)
    console = text_console(soft_wrap=True)
    damaged = _damaged_newest(tier, versions, keep)
    for name, reason in damaged.items():
        console.print(f"{tier.storage.where(name)} does not count, and stays: {reason}")
    removed = []
    for name in tier.each_pruned(keep, unused=damaged):
        console.print(f"removed {tier.storage.where(name)}")
        removed.append(name)
    left = tier.versions()
    has_complete = any(version.manifest for version in left)
    for version in left:
        if has_complete and version.reason == UNPUBLISHED:
            where = tier.where(version.iteration, version.epoch)
            text = "it is not complete, and a job may be writing it; if none is, remove it"
            console.print(f"{where} stays: {text}")
    if not removed:
        why = f"{directory} has no more versions than it should keep"
        if tier.newest() is None:
            why = (
                f"{directory} holds no complete version, and a job may be writing what is there; "
                "if none is, remove the directory"
            )
        console.print(f"nothing to remove: {why}")


def _damaged_newest(tier: Tier, versions: Sequence[SavedVersion], num_sound: int) -> dict[str, str]:
    """The damaged ones of the newest complete versions, with their first errors.

    Empty if there are no more complete versions than the sound ones that are needed.

    Args:
        versions: all versions, the newest first.
        num_sound: number of sound versions after which no more are read.
    """
    complete = [version for version in versions if version.manifest and not version.is_kept]
    damaged: dict[str, str] = {}
    if len(complete) <= num_sound:
        return damaged
    for number, version in enumerate(complete):
        if number - len(damaged) == num_sound:
            break
        if errors := _damage(tier, version):
            damaged[version.name] = errors[0]
    return damaged


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
        where = save_as(directory, name, field="--name")
    text_console(soft_wrap=True).print(where)


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
    file_format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="safetensors: for transformers; dcp: for torch.distributed.checkpoint.",
        ),
    ] = Format.SAFETENSORS,
    merges: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the whole model: with what was frozen, and LoRA merged into the weights.",
        ),
    ] = False,
    with_optimizer: Annotated[
        bool, typer.Option("--optimizer", help="dcp: write the optimizer's state, too.")
    ] = False,
    model_path: ModelPath = "",
) -> None:
    """Writes the parameters of a version for other tools.

    Hugging Face transformers can read the directory with from_pretrained; adapters alone are
    written for peft. With --format dcp, torch.distributed.checkpoint.load can read it.
    """
    tier, manifest = tier_of(directory), _chosen_manifest(directory, version)
    if with_optimizer and file_format is not Format.DCP:
        raise ConfigError("--optimizer", True, "only --format dcp has the optimizer's state")
    if file_format is Format.SAFETENSORS and not merges:
        names = export_parameters(tier, manifest, output, origin=model_path)
    else:
        # torch takes seconds to import, and no other command needs it.
        from planaria.engine.formats.whole_model import Adapters, export_whole, whole_model

        sys.path.insert(0, os.getcwd())  # Modules that the job names.
        adapters = Adapters.MERGED if merges else Adapters.KEPT
        model = whole_model(tier, manifest, adapters=adapters, model_path=model_path)
        if file_format is Format.DCP:
            from planaria.engine.formats.dcp_export import export_dcp

            names = export_dcp(model, output, with_optimizer=with_optimizer)
        else:
            names = export_whole(model, output)
    own = _write_tokenizer(tier, manifest, output, names)
    note = _tokenizer_note(manifest, model_path, names, is_written=bool(own))
    console = text_console(soft_wrap=True)
    for name in names + own:
        console.print(str(output / name))
    if note:
        text_console(stderr=True, soft_wrap=True).print(note)


def _write_tokenizer(
    tier: Tier, manifest: Manifest, output: Path, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Writes the tokenizer of a job with tokens of its own; returns the names of its files."""
    facts = model_facts(manifest)
    if facts is None or not _lacks_tokenizer(manifest, names) or not find_spec("tokenizers"):
        return ()
    try:
        learned = learned_tokenizer(tier, manifest).decode()
    except UnreadableError:
        learned = ""  # The export is whole without it, and a note says that it lacks it.
    if _data(manifest).get("tokenizer") == "bpe" and not learned:
        return ()
    num_tokens = _data(manifest)["vocabulary_size"] if learned else NUM_BYTE_TOKENS
    files = own_tokenizer_files(learned, num_tokens=num_tokens, num_ids=facts.vocabulary_size)
    target = Directory(output, setting="--output")
    for name, content in files.items():
        target.write(name, content, may_write=lambda: True)
    return tuple(files)


def _lacks_tokenizer(manifest: Manifest, names: tuple[str, ...]) -> bool:
    """Whether a model for transformers is exported without the tokenizer of the job's text."""
    has_model = "config.json" in names
    return has_model and _has_own_tokens(manifest) and not _has_tokenizer(names)


def _has_own_tokens(manifest: Manifest) -> bool:
    # Older saves do not say it.
    return bool(manifest.job.get(HAS_OWN_TOKENS, _data(manifest).get("kind") == "text"))


def _has_tokenizer(names: tuple[str, ...]) -> bool:
    return any(name.startswith("tokenizer") for name in names)


def _data(manifest: Manifest) -> Mapping[str, Any]:
    return manifest.job.get("data") or {}


def _tokenizer_note(
    manifest: Manifest, model_path: str, names: tuple[str, ...], *, is_written: bool
) -> str:
    """What a user should know of the tokenizer of an export; empty: nothing.

    Args:
        names: names of the files of the model and of what stood beside it.
        is_written: whether the job's own tokenizer was written, too.
    """
    facts = model_facts(manifest)
    path = model_path or (facts.model.path if facts else "")
    if path and not os.path.isdir(path):
        return (
            f"{path}, the job's model.path, is not here, so its tokenizer is not in the export; "
            "say where it is now by --model-path"
        )
    if _has_own_tokens(manifest) and _has_tokenizer(names):
        return (
            "the tokenizer of model.path is in the export, but the job was trained on tokens of "
            f"its own (data.tokenizer = {_data(manifest).get('tokenizer')!r})"
        )
    if _lacks_tokenizer(manifest, names) and not is_written:
        why = "the save does not name it: it was imported, or an older planaria wrote it"
        if name := manifest.job.get(TOKENIZER_FILE):
            why = (
                "it is not beside the saves: it is in the cache of the machine that prepared the "
                f"job ({name})"
            )
        return f"the tokenizer that learned from the job's text is not in the export, for {why}"
    return ""


@checkpoint.command("import")
@exit_codes()
def import_checkpoint(
    job: JobFile,
    source: Annotated[
        Path,
        typer.Argument(
            help="A directory of torch.distributed.checkpoint, or one with safetensors files.",
        ),
    ],
    iteration: Annotated[
        int,
        typer.Option(
            min=-1,
            help="Number of iterations that made the state. Default: what it says itself, else 0.",
        ),
    ] = -1,
    settings: Settings = None,
) -> None:
    """Makes a state of another tool the first save of a job, from which it goes on with --resume.

    It has parameters "model.NAME" or "NAME", and may have the optimizer's state,
    "optim.state.NAME.KEY". --format dcp of planaria checkpoint export writes such a directory.
    """
    named = named_job(job, settings or [])
    config = named.config
    check_inputs(config)
    place = config.checkpoint.directory
    tier = tier_of(place)
    console = text_console(stderr=True, soft_wrap=True)
    with claim(place, config.name, note=console.print):
        if versions := tier.versions():
            remedy = f"it holds version {versions[0].name} already; name another directory"
            raise ConfigError("checkpoint.directory", place, remedy)
        # torch takes seconds to import, and most commands do not need it.
        from planaria.engine.formats.state_import import import_state

        sys.path[:0] = [*named.search_path, os.getcwd()]
        manifest = import_state(
            config,
            source,
            iteration=iteration,
            tier=tier,
            cache_directory=Path(cache_directory()),
            facts=partial(save_facts, config),
        )
    where = tier.where(manifest.iteration, manifest.epoch)
    text_console(soft_wrap=True).print(where)


def _chosen_manifest(directory: str, version: str) -> Manifest:
    """The manifest of a complete version; version "": of the newest one."""
    manifests = {saved.name: saved.manifest for saved in _versions(directory)}
    manifest = manifests.get(version) if version else newest_of(tier_of(directory), directory)
    if manifest is None:
        remedy = (
            f"there is no complete version of this name in {directory}; planaria checkpoint ls "
            "lists them"
        )
        raise ConfigError("--version", version, remedy)
    return manifest


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
        if subdirectories := list(filter(_has_versions, _subdirectories(directory))):
            remedy = f"there is no version of a job in it, but in {', '.join(subdirectories)}"
        raise ConfigError("DIRECTORY", directory, remedy)
    return versions


def _has_versions(directory: str) -> bool:
    """Whether there are versions in a directory; False if it cannot be read."""
    try:
        return bool(tier_of(directory).versions())
    except CheckpointError:
        return False


def _subdirectories(directory: str) -> list[str]:
    """The directories in a directory; none if it does not exist, or is an object store."""
    return sorted(str(path) for path in Path(directory).glob("*") if path.is_dir())


def _damage(tier: Tier, version: SavedVersion) -> list[str]:
    """The errors of all layers that cannot be read, or the reason why the version is incomplete.

    A job may have removed a version since it was listed: then that is the only one.
    """
    errors = [f"not complete: {version.reason}"]
    if version.manifest is not None:
        errors = _layer_errors(tier, version.manifest)
    return [_REMOVED] if errors and _is_removed(tier, version) else errors


def _layer_errors(tier: Tier, manifest: Manifest) -> list[str]:
    errors = []
    for entry in manifest.layers:
        try:
            tier.read_layer(manifest, entry.layer)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def _is_removed(tier: Tier, version: SavedVersion) -> bool:
    """Whether a version that had a manifest when it was listed has none now."""
    if version.reason in (UNPUBLISHED, SET_ASIDE):
        return False
    now = next((each for each in tier.each_version() if each.name == version.name), None)
    return now is None or now.reason == UNPUBLISHED


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
