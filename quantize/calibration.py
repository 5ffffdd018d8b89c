"""The text that calibration runs on, as full windows of token ids: the user's JSONL, or the text shipped with this
package.

Windows are always full, so that no padding can leak into the statistics, and the first ones of the text are taken in
order, so that the same file gives the same calibration everywhere.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from quantize.checkpoint import Checkpoint, one_line
from quantize.errors import QuantizeError
from quantize.recipe import Recipe

LEAST = 0.1
"""What the most frequent token counts, when the rarest counts 1."""

SHIPPED = Path(__file__).parent / "data" / "calibration.jsonl"


@dataclass(frozen=True)
class Calibration:
    """token_ids int64 [windows, tokens per window]; digest is sha256 over them. note says when the text was short."""

    token_ids: torch.Tensor
    digest: str
    source: str
    note: str | None

    def to_mapping(self, chat_template_digest: str | None) -> dict[str, Any]:
        """What a manifest keeps of it."""
        samples, sequence_length = self.token_ids.shape
        return {
            "source": self.source,
            "digest": self.digest,
            "samples": samples,
            "sequence_length": sequence_length,
            "chat_template_digest": chat_template_digest,
        }


def calibrate(checkpoint: Checkpoint, recipe: Recipe, file: Path | None) -> Calibration:
    """The text as the checkpoint's own tokenizer reads it. Raises QuantizeError for a tokenizer that does not load or
    does not fit the model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
    except Exception as failure:
        raise QuantizeError(f"{checkpoint.path}: its tokenizer does not load ({one_line(failure)[:200]})") from None
    text = load_calibration(file, tokenizer, recipe.samples, recipe.sequence_length)
    highest, vocabulary = int(text.token_ids.max()), int(checkpoint.config.get("vocab_size", 1 << 62))
    if highest >= vocabulary:
        raise QuantizeError(f"{checkpoint.path}: its tokenizer gives token {highest}, but config.json has {vocabulary}")
    return text


def load_calibration(path: Path | None, tokenizer: Any, samples: int, sequence_length: int) -> Calibration:
    """Up to `samples` windows of `sequence_length` tokens from the lines {"text": ...} or {"messages": [...]} of a
    JSONL file.

    Documents follow one another without a separator. A tokenizer that puts special tokens in front of a text (BOS) has
    them in front of every window, since the model never sees text without them. Raises QuantizeError naming file and
    line.
    """
    file = SHIPPED if path is None else Path(path)
    source = "shipped: Python 3.11 documentation" if path is None else str(file)
    prefix = leading_special_ids(tokenizer)
    payload = sequence_length - len(prefix)
    if payload < 1:
        raise QuantizeError(
            f"sequence_length: {sequence_length} leaves no room after {len(prefix)} leading special tokens"
        )
    ids: list[int] = []
    for text in read_texts(file, tokenizer):
        ids.extend(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) >= samples * payload:
            break
    windows = min(samples, len(ids) // payload)
    if windows < 1:
        raise QuantizeError(
            f"{file}: holds {len(ids)} tokens, less than one window of {sequence_length}; "
            "add text or lower sequence_length"
        )
    note = None
    if windows < samples:
        note = f"{source}: text for {windows} of {samples} windows of {sequence_length} tokens; all of them are used"
    body = torch.tensor(ids[: windows * payload], dtype=torch.int64).view(windows, payload)
    token_ids = torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(windows, -1), body], dim=1)
    digest = hashlib.sha256(f"{tuple(token_ids.shape)}".encode() + token_ids.numpy().tobytes()).hexdigest()
    return Calibration(token_ids, digest, source, note)


def leading_special_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text by itself."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []


def read_texts(file: Path, tokenizer: Any) -> Iterator[str]:
    if not file.is_file():
        raise QuantizeError(f"{file}: no such calibration file")
    empty = True
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(numbered(lines, file), start=1):
            if line.strip():
                empty = False
                yield text_of(line, f"{file}, line {number}", tokenizer)
    if empty:
        raise QuantizeError(f'{file}: is empty; expected lines such as {{"text": "..."}}')


def numbered(lines: Any, file: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError:
        raise QuantizeError(f'{file}: is not UTF-8 text; expected lines such as {{"text": "..."}}') from None


def text_of(line: str, spot: str, tokenizer: Any) -> str:
    """The text of one line; a conversation goes through the tokenizer's chat template."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as failure:
        reason = failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)
        raise QuantizeError(f"{spot}: not valid JSON ({reason})") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return whole_characters(record["text"], spot)
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise QuantizeError(f'{spot}: expected {{"text": "..."}} or {{"messages": [...]}}')
    if not getattr(tokenizer, "chat_template", None):
        raise QuantizeError(f'{spot}: has "messages", but the checkpoint has no chat template; use "text" lines')
    try:
        text = str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    except Exception as failure:
        reason = " ".join(str(failure).split()).encode(errors="backslashreplace").decode()
        raise QuantizeError(f"{spot}: the chat template refuses these messages ({reason[:300]})") from None
    return whole_characters(text, spot)


def whole_characters(text: str, spot: str) -> str:
    """The text, unless JSON escapes put half a character (\\ud800 without its other half) into it, which no tokenizer
    takes."""
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        half = text[failure.start].encode(errors="backslashreplace").decode()
        raise QuantizeError(f"{spot}: holds {half}, half a character, which is no text; take it out") from None
    return text


def rarity(token_ids: torch.Tensor) -> torch.Tensor:
    """How much each token counts when rare ones count more, float32 [windows, tokens] in [LEAST, 1].

    Linear in how often the token's id occurs in this text, from 1 for the rarest to LEAST for the most frequent: one of
    the importances that Sung et al. weigh GPTQ's Hessian with, "RSQ: Learning from Important Tokens Leads to Better
    Quantized LLMs" (arXiv 2503.01820).
    """
    _, index, counts = token_ids.unique(return_inverse=True, return_counts=True)
    frequency = counts[index].float()
    span = frequency.max() - frequency.min()
    return 1.0 - (1.0 - LEAST) * (frequency - frequency.min()) / span.clamp(min=1.0)
