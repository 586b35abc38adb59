"""Random values of a message's type, and damage to the JSON that encodes them."""

import functools
from random import Random
from typing import Any, Final

import msgspec
from msgspec import inspect

_DEPTH_MAX: Final = 7
_INTEGERS: Final = (0, 1, -1, 7, 1 << 31, -(1 << 63), (1 << 64) - 1)
_FLOATS: Final = (0.0, -0.5, 1e300, 5e-324, 3)
_PIECES: Final = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"-1", b"1e999", b"NaN"),
    *(b"9" * 25, b"1" * 400, b"0.1", b"\xff", b"\x00", b'"\\ud800"', b"\\u0000", b"\xed\xa0\x80"),
    *(b"[" * 3000, b'{"a":' * 2000, b'"type":"Heartbeat",', b'"epoch":null,', b"\xef\xbb\xbf"),
)


def random_body(decoded_type: Any, rng: Random) -> bytes:
    """JSON that has the form of a type, though its values may contradict each other."""
    return msgspec.json.encode(_value(_type_info(decoded_type), rng, 0))


def damaged_body(body: bytes, rng: Random) -> bytes:
    """The body with a few bytes changed, removed, repeated or replaced by what is odd in JSON."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        first, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0 if data:
                data[min(first, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                data[first:first] = rng.choice(_PIECES)
            case 2:
                del data[first : first + rng.randint(1, 8)]
            case 3:
                data[first:end] = rng.choice(_PIECES)
            case 4:
                data[first:first] = data[first : min(end, first + 200)]
    return bytes(data)


@functools.cache
def _type_info(decoded_type: Any) -> inspect.Type:
    return inspect.type_info(decoded_type)


def _value(info: inspect.Type, rng: Random, depth: int) -> Any:
    num_items = 0 if depth > _DEPTH_MAX else rng.randrange(3)
    match info:
        case inspect.IntType():
            return rng.choice(_INTEGERS)
        case inspect.FloatType():
            return rng.choice(_FLOATS)
        case inspect.StrType():
            return rng.choice(("", "F", "a\n\0\U0001f600", "127.0.0.1"))
        case inspect.BytesType():
            return rng.randbytes(rng.randrange(20))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.EnumType(cls=cls):
            return rng.choice(list(cls)).value
        case inspect.UnionType(types=types):
            return _value(rng.choice(types), rng, depth)
        case inspect.TupleType(item_types=types):
            return [_value(item, rng, depth + 1) for item in types]
        case inspect.FrozenSetType(item_type=item):
            return sorted({_value(item, rng, depth + 1) for _ in range(num_items)})
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_value(item, rng, depth + 1) for _ in range(num_items)]
        case inspect.DictType(key_type=key, value_type=value):
            keys = (_value(key, rng, depth + 1) for _ in range(num_items))
            return {str(name): _value(value, rng, depth + 1) for name in keys}
        case (
            inspect.StructType(fields=fields, array_like=True)
            | inspect.NamedTupleType(fields=fields)
        ):
            return [_value(field.type, rng, depth + 1) for field in fields]
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            record = {field.encode_name: _value(field.type, rng, depth + 1) for field in fields}
            return record if tag_field is None else {tag_field: tag, **record}
        case inspect.DataclassType(fields=fields):
            return {field.encode_name: _value(field.type, rng, depth + 1) for field in fields}
        case inspect.AnyType():
            return rng.choice((None, 1, [], {}, "x"))
    raise AssertionError(f"no random value of {info}")
