"""The records of a journal's file (journal.py).

A record is a marker, the length of its body, the xxh3_64 of its body, and the body: JSON, which in
UTF-8 never contains the marker's first byte.
"""

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from planaria.errors import StoreError
from planaria.store.store import Change, Entry, StoreState

_FORMAT: Final = 2
_MARKER: Final = b"\xffPLJ"
_HEADER: Final = struct.Struct("!4sIQ")


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    state: StoreState


def record_of(content: Sequence[Change] | _Snapshot) -> bytes:
    """A record of changes, or of a snapshot."""
    body = msgspec.json.encode(content)
    return _HEADER.pack(_MARKER, len(body), xxhash.xxh3_64_intdigest(body)) + body


def snapshot_record(state: StoreState) -> bytes:
    """The record with which a journal begins."""
    return record_of(_Snapshot(version=_FORMAT, state=state))


def _record_body(content: bytes, start: int) -> bytes | None:
    """The body of the complete record that starts at byte `start`; None if none starts there."""
    first = start + _HEADER.size
    if first > len(content):
        return None
    marker, num_bytes, digest = _HEADER.unpack_from(content, start)
    body = content[first : first + num_bytes]
    is_complete = marker == _MARKER and len(body) == num_bytes
    return body if is_complete and xxhash.xxh3_64_intdigest(body) == digest else None


def record_bodies(content: bytes) -> tuple[list[bytes], int]:
    """The bodies of the records before the first bad one, and the byte at which they end."""
    bodies, end = [], 0
    while (body := _record_body(content, end)) is not None:
        bodies.append(body)
        end += _HEADER.size + len(body)
    return bodies, end


def _marker_places(content: bytes) -> list[int]:
    """The bytes at which a record may begin, ascending."""
    return [match.start() for match in re.finditer(re.escape(_MARKER), content)]


def has_record(content: bytes, *, after: int) -> bool:
    """Whether a complete record begins behind a byte."""
    places = [place for place in _marker_places(content) if place > after]
    return any(_record_body(content, place) is not None for place in places)


def decode_bodies(path: Path, bodies: Sequence[bytes]) -> tuple[StoreState, list[Change]]:
    """The state of the snapshot, and the changes in the records after it.

    Raises:
        StoreError: the bodies are not those of a journal in this format.
    """
    try:
        snapshot = msgspec.json.decode(bodies[0], type=_Snapshot)
        decoder = msgspec.json.Decoder(tuple[Change, ...])
        changes = [change for body in bodies[1:] for change in decoder.decode(body)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{path} is not a journal that this version of planaria can read: {error}"
        ) from error
    if snapshot.version != _FORMAT:
        raise StoreError(f"{path} has format {snapshot.version}, this planaria reads {_FORMAT}")
    return snapshot.state, changes


def archived_entries(content: bytes) -> list[Entry]:
    """The entries in an archive; a record that a crash has torn may have good ones after it."""
    decoder = msgspec.json.Decoder(tuple[Entry, ...])
    bodies = (_record_body(content, place) for place in _marker_places(content))
    return [entry for body in bodies if body is not None for entry in decoder.decode(body)]
