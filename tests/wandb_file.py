"""Reads what an offline W&B run wrote: a LevelDB log of protobuf records (wandb ships no reader)."""

import struct
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7
_CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Record]:
    """All records of a `run-*.wandb` file, in order."""
    content = path.read_bytes()
    records, parts, position = [], b"", _FILE_HEADER_BYTES
    while position + _CHUNK_HEADER.size <= len(content):
        left_in_block = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left_in_block < _CHUNK_HEADER.size:  # too short for another chunk: padded with zeros
            position += left_in_block
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(content, position)
        position += _CHUNK_HEADER.size
        data = content[position : position + length]
        position += length
        if kind in (_FULL, _FIRST):
            parts = b""
        parts += data
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            records.append(record)
    return records


def history(records: list[Record]) -> list[dict[str, str]]:
    """What was logged, line by line: names and JSON values."""
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
