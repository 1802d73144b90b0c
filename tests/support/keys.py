"""Models whose files say more than the file that they are a copy of."""

from pathlib import Path

import gguf


def with_keys(source: Path, target: Path, keys: dict[str, int | float | str]) -> Path:
    """Copy a model with further keys. `{arch}` in a name is the architecture."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for name, value in keys.items():
        whole = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
        add = {int: whole, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name.replace("{arch}", architecture), value)  # type: ignore[arg-type]
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
