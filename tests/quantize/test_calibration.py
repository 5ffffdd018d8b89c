"""Calibration text: full windows in order, and each bad file named with its line."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from quantize.calibration import SHIPPED, load_calibration, rarity
from quantize.errors import QuantizeError


@pytest.fixture
def tokenizer(spelling_llama):
    return AutoTokenizer.from_pretrained(spelling_llama)


def write(folder, *records):
    file = folder / "text.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return file


def test_documents_are_packed_into_full_windows_in_order(tmp_path, tokenizer):
    file = write(tmp_path, {"text": "abcde"}, "", {"text": "fghijklm"})
    calibration = load_calibration(file, tokenizer, samples=3, sequence_length=4)
    assert tokenizer.decode(calibration.token_ids.flatten()).replace(" ", "") == "abcdefghijkl"
    assert calibration.token_ids.shape == (3, 4)
    assert calibration.note is None


def test_short_text_gives_all_whole_windows_and_says_so(tmp_path, tokenizer):
    calibration = load_calibration(write(tmp_path, {"text": "abcdefghij"}), tokenizer, samples=9, sequence_length=4)
    assert calibration.token_ids.shape == (2, 4)
    assert "2 of 9 windows" in calibration.note


def test_the_digest_is_of_the_tokens(tmp_path, tokenizer):
    one = load_calibration(write(tmp_path, {"text": "abcdefgh"}), tokenizer, 2, 4)
    two = load_calibration(write(tmp_path, {"text": "abcd"}, {"text": "efgh"}), tokenizer, 2, 4)
    other = load_calibration(write(tmp_path, {"text": "abcdefgh"}), tokenizer, 1, 8)
    assert one.digest == two.digest != other.digest
    assert torch.equal(one.token_ids, two.token_ids)


def test_conversations_go_through_the_chat_template(tmp_path, tokenizer):
    file = write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    calibration = load_calibration(file, tokenizer, samples=1, sequence_length=9)
    assert "".join(tokenizer.convert_ids_to_tokens(calibration.token_ids[0])) == "[user] hi"


def test_what_the_tokenizer_puts_in_front_is_in_front_of_every_window(tmp_path, tokenizer):
    class WithBos:
        chat_template = None

        def __call__(self, text, add_special_tokens=True, **_):
            encoded = tokenizer(text, add_special_tokens=False)
            encoded["input_ids"] = [0, *encoded.input_ids] if add_special_tokens else encoded.input_ids
            return encoded

    calibration = load_calibration(write(tmp_path, {"text": "abcdefgh"}), WithBos(), 2, 4)
    assert calibration.token_ids[:, 0].tolist() == [0, 0]
    assert calibration.token_ids[1, 1] == calibration.token_ids[0, 3] + 1


def test_the_shipped_text_is_used_when_none_is_given(tokenizer):
    calibration = load_calibration(None, tokenizer, samples=4, sequence_length=64)
    assert calibration.token_ids.shape == (4, 64)
    assert calibration.source.startswith("shipped")


def test_the_shipped_text_leaves_out_the_topics_kept_for_measuring():
    from pydoc_data.topics import topics

    names = sorted(topics)
    shipped = {json.loads(line)["topic"] for line in SHIPPED.read_text().splitlines()}
    held_out = {name for position, name in enumerate(names) if position % 10 >= 7}
    assert len(shipped) == 55
    if len(names) == 79:  # the Python release that the text was taken from
        assert not shipped & held_out


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{"], "line 1: not valid JSON"),
        (["[" * 100_000], "line 1: not valid JSON"),
        (["1" * 5000], "line 1: not valid JSON"),
        (['{"text": "ab\\ud800c"}'], r"line 1: holds \\ud800, half a character"),
        (['{"messages": [{"role": "user", "content": "\\udfff"}]}'], r"line 1: holds \\udfff, half a character"),
        ([{"text": "abcd"}, {"txt": "x"}], "line 2: expected"),
        ([{"text": 5}], "line 1: expected"),
        (["[1]"], "line 1: expected"),
        (["", ""], "is empty"),
        ([{"text": "ab"}], "holds 2 tokens"),
        ([{"messages": [{"rol": 1}, 5]}], "line 1: the chat template refuses"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, tokenizer, lines, named):
    with pytest.raises(QuantizeError, match=named) as caught:
        load_calibration(write(tmp_path, *lines), tokenizer, samples=4, sequence_length=8)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_binary_file(tmp_path, tokenizer):
    with pytest.raises(QuantizeError, match="no such calibration file"):
        load_calibration(tmp_path / "no.jsonl", tokenizer, 1, 8)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuantizeError, match="not UTF-8"):
        load_calibration(tmp_path / "b.jsonl", tokenizer, 1, 8)


def test_messages_need_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = None
    file = write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(QuantizeError, match="no chat template"):
        load_calibration(file, tokenizer, 1, 8)


def test_rare_tokens_count_more_between_a_tenth_and_one():
    weights = rarity(torch.tensor([[5, 5, 5, 7], [5, 9, 9, 5]]))
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.1, 0.1, 1.0], [0.1, 0.775, 0.775, 0.1]]))
    assert (rarity(torch.arange(6).view(2, 3)) == 1).all()
