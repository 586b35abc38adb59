"""Profiles as JSON, version 1 (DESIGN 7), to and from `ModelProfile`."""

import msgspec

from planaria.core.plan import ModelProfile
from planaria.errors import ConfigError

VERSION = 1


def encode_profile(profile: ModelProfile) -> bytes:
    """The profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def decode_profile(data: bytes, *, source: str) -> ModelProfile:
    """The profile in `data`; `source` names it in errors.

    Raises:
        ConfigError: it is not a profile of this version, or a layer contradicts itself.
    """
    try:
        profile = msgspec.json.decode(data, type=ModelProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("profile", source, f"not a profile: {error}") from error
    if profile.version != VERSION:
        raise ConfigError("profile", source, f"version {profile.version}: write it anew")
    if not profile.layers:
        raise ConfigError("profile", source, "it has no layers")
    for kind in ("intra_node", "inter_node"):
        if kind not in profile.links:
            raise ConfigError("profile", source, f"links.{kind} is missing")
    for layer in profile.layers:
        counts = set(layer.forward_s)
        same = counts == {*layer.backward_input_s} == {*layer.backward_weight_s}
        if not counts or not same:
            remedy = f"layer {layer.name}: forward_s and backward_*_s need the same device counts"
            raise ConfigError("profile", source, remedy)
    return profile
