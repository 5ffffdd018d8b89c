"""Bodies refused or obeyed, and the shapes of answers, without a server."""

import pytest

from eval.engine import TokenLogprobs
from eval.server.protocol import BadRequestError, Envelope, Piece, Usage, read_chat, read_completion

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [("add_special_tokens", False), ("return_tokens_as_token_ids", True), ("max_completion_tokens", 5)],
)
def test_a_completion_refuses_what_it_would_not_obey(field, value):
    with pytest.raises(BadRequestError, match=f"{field} is not supported"):
        read_completion({"prompt": "a", field: value}, "tiny")


@pytest.mark.parametrize(("field", "value"), [("add_special_tokens", True), ("return_tokens_as_token_ids", True)])
def test_a_chat_refuses_what_it_would_not_obey(field, value):
    with pytest.raises(BadRequestError, match=f"{field} is not supported"):
        read_chat({"messages": MESSAGES, field: value}, "tiny")


def test_fields_that_ask_for_what_is_done_anyway_are_taken():
    read_completion({"prompt": "a", "add_special_tokens": True, "return_tokens_as_token_ids": False}, "tiny")
    asked = read_chat({"messages": MESSAGES, "add_special_tokens": False, "max_completion_tokens": 5}, "tiny")
    assert asked.params.max_tokens == 5


def test_a_part_of_a_character_has_no_bytes_in_a_chats_logprobs():
    envelope = Envelope.of("id", "tiny", True, {1: "ü", 2: "\ufffd"}.__getitem__)
    logprobs = tuple(TokenLogprobs(token_id, -1.0, ()) for token_id in (1, 2))
    answer = envelope.whole([Piece(0, "ü", logprobs, "stop")], Usage(1, 2, 0))
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in tokens] == [[0xC3, 0xBC], None]
