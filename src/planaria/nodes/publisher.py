"""Makes saves complete, and removes those that cannot be: the coordinator's hand on the disk."""

from collections.abc import Callable, Mapping
from typing import Any

from planaria.checkpoint.tiers import UNPUBLISHED, Manifest, Tier
from planaria.coordinator.saves import Kept
from planaria.coordinator.state import Discard, Pruned, Publish, Published
from planaria.core.messages import BY_PUBLISHER, SaveFailed
from planaria.core.records import Saved, ToLauncher, Unsaved, Warned
from planaria.errors import CheckpointError


class Publisher:
    """Publishes and discards versions of the disk tier.

    Args:
        fingerprint: what a checkpoint says of the job that wrote it.
        keep: newest checkpoints kept, 0 for all.
        say: what the coordinator is to know.
        notify: what the launcher is to know.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        fingerprint: Mapping[str, Any],
        keep: int,
        say: Callable[[Kept | SaveFailed], None],
        notify: Callable[[ToLauncher], None],
    ) -> None:
        self._tier = tier
        self._fingerprint = fingerprint
        self._keep = keep
        self._say = say
        self._notify = notify

    def tell_saves(self, *, source: str) -> None:
        """Says which saves there are, of this run and of those before it.

        Args:
            source: the one from which this run started, of which the coordinator knows.
        """
        for version in self._tier.versions():
            if version.manifest and version.manifest.layers and version.name != source:
                self._say(Published(version.iteration, version.epoch))

    def publish(self, command: Publish) -> None:
        """Creates the manifest of a save, and removes what is too old."""
        manifest = Manifest(
            iteration=command.iteration,
            epoch=command.epoch,
            job=self._fingerprint,
            layers=command.files,
        )
        try:
            if not self._is_published(manifest):
                self._tier.publish(manifest)
        except CheckpointError as error:
            failed = SaveFailed(
                rank=BY_PUBLISHER,
                epoch=command.epoch,
                iteration=command.iteration,
                reason=str(error),
            )
            self._say(failed)
            return
        self._say(Published(command.iteration, command.epoch))
        self._notify(Saved(iteration=command.iteration, epoch=command.epoch))
        try:
            for source in self._tier.prune(self._keep):  # What nobody completed, even if all stay.
                self._say(Pruned(source))
        except CheckpointError as error:
            self._notify(Warned(text=f"old checkpoints stay: {error}"))

    def _is_published(self, manifest: Manifest) -> bool:
        """Whether the coordinator before this one published it, just before its end.

        Raises:
            CheckpointError: what is published by these numbers is another job's.
        """
        numbers = (manifest.iteration, manifest.epoch)
        there = (v.manifest for v in self._tier.versions() if (v.iteration, v.epoch) == numbers)
        published = next(there, None)
        if published is not None and set(published.layers) != set(manifest.layers):
            where = self._tier.where(*numbers)
            raise CheckpointError(
                f"{where} is another job's: set checkpoint.directory of one to another place"
            )
        return published is not None

    def discard(self, command: Discard) -> None:
        """Removes what there is of a failed save."""
        try:
            self._tier.discard(command.iteration, command.epoch)
        except CheckpointError as error:
            self._notify(Warned(text=str(error)))
        unsaved = Unsaved(iteration=command.iteration, epoch=command.epoch, reason=command.reason)
        self._notify(unsaved)

    def set_aside(self, source: str) -> None:
        """Takes a damaged version out of use; it stays on disk, for a person to look at."""
        text = f"{self._tier.storage.where(source)} is damaged, and not used any more"
        try:
            self._tier.set_aside(source)
        except CheckpointError as error:
            text = f"{text}: {error}"
        self._notify(Warned(text=text))

    def publish_start(self, epoch: int) -> None:
        """A job that has saved nothing can still be resumed: from its seed or given weights."""
        manifest = Manifest(iteration=0, epoch=epoch, job=self._fingerprint, layers=())
        try:
            # What was saved and cannot be read now is no reason to begin anew without a word.
            if all(version.reason == UNPUBLISHED for version in self._tier.versions()):
                self._tier.publish(manifest)
        except CheckpointError as error:
            self._notify(Warned(text=str(error)))
