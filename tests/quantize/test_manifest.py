"""The manifest is read back as it was written; a damaged one is one line that names the field."""

import json
from dataclasses import asdict

import gguf
import pytest

from quantize.errors import QuantizeError
from quantize.manifest import GGUF_KEY, MANIFEST, Manifest, ModuleRecord

MODULE = ModuleRecord("a", 4, 32, True, 0.01, "weights", None, 0, 0, 64, 40, 0.1)
WHOLE = Manifest("d", "f", {"method": "int4"}, None, {}, (MODULE,), 100, 40, 4.5, {"expected": 1, "packed": 1}, (), 1)


def test_what_was_written_is_read(tmp_path):
    WHOLE.write(tmp_path)
    assert Manifest.read(tmp_path) == WHOLE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules", "abc"),
        ("modules", []),
        ("modules", None),
        ("modules", [{"a": 1}]),
        ("recipe", None),
        ("calibration", [1]),
        ("bytes_before", "x"),
        ("bits_per_weight", None),
        ("notes", 5),
        ("coverage", None),
        ("relative_error", "x"),
        ("relative_error", 10**400),
        ("bits_per_weight", 10**400),
        ("bytes_before", 10**400),
    ],
)
def test_a_damaged_manifest_is_one_line(tmp_path, field, value):
    content = asdict(WHOLE)
    (content if field in content else content["modules"][0])[field] = value
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(QuantizeError, match=rf"{MANIFEST}: (\w+) is damaged; quantize again"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": ' + "1" * 5000 + "}", '{"schema": "\\ud800"}', "\udcff"])
def test_what_is_no_json_is_one_line(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text, errors="surrogateescape")
    with pytest.raises(QuantizeError, match=f"{MANIFEST}: not a checkpoint of ours, not valid JSON") as caught:
        Manifest.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["{", "[1]", "[" * 100_000, '{"schema": 2}', '{"schema": 1}'])
def test_a_damaged_manifest_in_a_gguf_is_one_line(tmp_path, written):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string(GGUF_KEY, written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(QuantizeError, match=r"m\.gguf: "):
        Manifest.read(tmp_path / "m.gguf")
