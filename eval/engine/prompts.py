"""Prompts become token ids.

The one idea: a context and its continuation are tokenized together and then cut, because the tokens at their border
depend on both; spaces that end the context belong to the continuation (lm-eval's convention).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eval.errors import EvalError

Prompt = str | Sequence[int]


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's tokenizer; code that comes with a checkpoint is never run."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as failure:
        # Whatever a damaged file makes the libraries raise, the user can do one thing.
        reason = " ".join(str(failure).split())[:200]
        raise EvalError(f"{checkpoint}: its tokenizer does not load ({reason}); fetch it again") from None


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt; text gets the special tokens that the tokenizer adds. Raises EvalError for an id outside
    the vocabulary, which would end the whole batch."""
    if isinstance(prompt, str) and tokenizer is None:
        raise EvalError("this engine has no tokenizer: give token ids instead of text")
    token_ids: list[int] = list(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise EvalError(
            f"the prompt has token ids from {min(token_ids)} to {max(token_ids)}: "
            f"this model's vocabulary is 0 to {vocab_size - 1}"
        )
    return token_ids


def encode_pair(context: Prompt, continuation: Prompt, tokenizer: Any, vocab_size: int) -> tuple[list[int], list[int]]:
    """(context ids, continuation ids). Raises EvalError when the context has no token: nothing conditions a text's
    first token."""
    if isinstance(context, str) != isinstance(continuation, str):
        raise EvalError("a pair to score is two texts or two lists of token ids, not one of each")
    if isinstance(context, str):
        stripped = context.rstrip()
        moved = context[len(stripped) :] + str(continuation)
        context_ids = encode(stripped, tokenizer, vocab_size)
        continuation_ids = encode(stripped + moved, tokenizer, vocab_size)[len(context_ids) :]
    else:
        context_ids = encode(context, tokenizer, vocab_size)
        continuation_ids = encode(continuation, tokenizer, vocab_size)
    if not context_ids:
        raise EvalError("a pair to score has an empty context: give a BOS token, or move the first token into it")
    return context_ids, continuation_ids
