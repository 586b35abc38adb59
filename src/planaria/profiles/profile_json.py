"""Conversion of `ModelProfile` to and from JSON, version 1."""

import msgspec

from planaria.core.plan import LayerProfile, ModelProfile
from planaria.errors import ConfigError

VERSION = 1


def encode_profile(profile: ModelProfile) -> bytes:
    """The profile as indented JSON, without values that nobody has measured."""
    fields = msgspec.to_builtins(profile, str_keys=True)
    for layer in fields["layers"]:
        for key in ("update_s", "recomputed", "backward_bytes", "frozen_bytes", "working_bytes"):
            if not layer[key]:
                del layer[key]
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def decode_profile(data: bytes, *, source: str) -> ModelProfile:
    """The profile in `data`; `source` names it in errors.

    Raises:
        ConfigError: it is not a profile of this version, or its numbers contradict each other.
    """
    try:
        profile = msgspec.json.decode(data, type=ModelProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("profile", source, f"it is not a profile: {error}") from error
    if profile.version != VERSION:
        raise ConfigError(
            "profile",
            source,
            f"it has format version {profile.version}; write it again with planaria profile",
        )
    if not profile.layers:
        raise ConfigError("profile", source, "it has no layers")
    for kind in ("intra_node", "inter_node"):
        if kind not in profile.links:
            raise ConfigError("profile", source, f"links.{kind} is missing")
    for kind, link in profile.links.items():
        if link.latency_s < 0 or link.bandwidth_bytes_per_s <= 0:
            remedy = f"links.{kind}: a latency is 0 s or more, a bandwidth above 0 bytes/s"
            raise ConfigError("profile", source, remedy)
    for layer in profile.layers:
        contradiction = _contradiction(layer)
        if contradiction:
            raise ConfigError("profile", source, f"layer {layer.name}: {contradiction}")
    for tied in profile.tied:
        is_known = set(tied.layers) <= set(range(len(profile.layers)))
        if tied.parameter_bytes < 0 or not tied.layers or not is_known:
            remedy = (
                f"tied names layers {tied.layers}, and the profile has {len(profile.layers)} "
                "layers, numbered from 0"
            )
            raise ConfigError("profile", source, remedy)
    return profile


def _contradiction(layer: LayerProfile) -> str:
    """What is wrong with the layer's numbers, "" if nothing."""
    seconds = (layer.forward_s, layer.backward_input_s, layer.backward_weight_s)
    counts = set(layer.forward_s)
    if not counts or any(counts != set(by_count) for by_count in seconds):
        return "forward_s and backward_*_s need the same device counts"
    if layer.update_s and counts != set(layer.update_s):
        return "update_s needs the device counts of forward_s, or none"
    costs = layer.recomputed.values()
    if any(counts != set(cost.additional_s) for cost in costs):
        return "additional_s needs the device counts of forward_s"
    if min(counts) < 1:
        return "a device count is 1 or more"
    all_seconds = (*seconds, layer.update_s, *(cost.additional_s for cost in costs))
    if any(value < 0 for by_count in all_seconds for value in by_count.values()):
        return "seconds are 0 or more"
    num_bytes = (
        *(layer.parameter_bytes, layer.optimizer_bytes),
        *(layer.frozen_bytes, layer.working_bytes),
        *(layer.activation_bytes, layer.output_bytes, layer.backward_bytes),
        *(cost.activation_bytes for cost in costs),
    )
    return "bytes are 0 or more" if min(num_bytes) < 0 else ""
