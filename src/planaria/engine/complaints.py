"""What a rank says of an epoch that it has left."""

from planaria.core.messages import CopySpoilt, Corrupted, Message, PeerUnreachable
from planaria.errors import CheckpointError, CorruptedError, PeerLostError, SpoiltError


def complaint(error: Exception, *, rank: int, epoch: int) -> Message | None:
    """What is said of an epoch that this rank has left; nothing where it was told to."""
    match error:
        case CorruptedError():
            return Corrupted(rank=rank, epoch=epoch, age=error.age, hashes=error.hashes)
        case SpoiltError():
            return CopySpoilt(
                rank=rank,
                epoch=epoch,
                reason=str(error),
                source=error.source,
                is_damaged=error.is_damaged,
            )
        case CheckpointError():
            return CopySpoilt(rank=rank, epoch=epoch, reason=str(error))
        case PeerLostError():
            return PeerUnreachable(rank=rank, epoch=epoch, peer=error.rank, reason=str(error))
    return None
