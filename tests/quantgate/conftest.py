"""A checkpoint small enough to go the whole way in seconds, and the command line as a user meets it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantgate import cli


@dataclass(frozen=True)
class Outcome:
    """What a command left on the screen."""

    code: int
    out: str
    err: str


@pytest.fixture
def quantgate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """Runs a command in an empty working directory with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "QUANTGATE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr("sys.argv", ["quantgate", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
        screen = capsys.readouterr()
        assert isinstance(code, int)
        return Outcome(code, screen.out, screen.err)

    return run


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers, bf16, one token per byte."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate([*alphabet, "<end>"])}, merges=[])
    )
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
