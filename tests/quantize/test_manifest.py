"""The manifest is read back as it was written; a damaged one is one line that names the field."""

import json
from dataclasses import asdict

import pytest

from quantize.errors import QuantizeError
from quantize.manifest import MANIFEST, Manifest, ModuleRecord

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
    ],
)
def test_a_damaged_manifest_is_one_line(tmp_path, field, value):
    content = asdict(WHOLE)
    (content if field in content else content["modules"][0])[field] = value
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(QuantizeError, match=rf"{MANIFEST}: (\w+) is damaged; quantize again"):
        Manifest.read(tmp_path)
