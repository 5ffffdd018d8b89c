"""An evaluation end to end: what it writes, when it is reused, what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from eval.engine.engine import Engine
from eval.errors import EvalError
from eval.quality.paired import compare_tasks, flips
from eval.quality.result import QualityResult
from eval.quality.run import evaluate
from tasks.suites import load_suite

BATCH_FIELDS = (
    "batch_id batch_size max_seq_len padding_side padding_ratio sample_ids segment_ids document_boundary eos_policy "
    "packing_version attention_mask_hash causal_mask_mode loss_mask_hash ignore_index position_ids_strategy "
    "truncation_side chat_template_version leakage_test_result"
)


@pytest.fixture(scope="session")
def smoke(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> QualityResult:
    return evaluate(tiny_checkpoint, suite=load_suite("smoke"), out=tmp_path_factory.mktemp("smoke") / "quality")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The benchmarks' layout, with few and short documents."""
    documents = {
        "piqa/valid.jsonl": [{"goal": "sit", "sol1": "on a chair", "sol2": "on a lamp"}] * 3,
        "lambada/test.jsonl": [{"text": "the cat sat on the mat"}, {"text": "we looked at the sea"}],
        "gsm8k/test.jsonl": [{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}],
    }
    for name, lines in documents.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "data" / "piqa" / "valid-labels.lst").write_text("0\n0\n1\n")
    (tmp_path / "data" / "wikitext2").mkdir()
    (tmp_path / "data" / "wikitext2" / "test.txt").write_text(" = Title = \n" + "Some plain text of a page .\n" * 1500)
    return tmp_path / "data"


def test_every_task_of_the_suite_is_reported_with_its_chance_and_error(smoke: QualityResult) -> None:
    assert [task.name for task in smoke.tasks] == [
        *load_suite("smoke").tasks,
        "perplexity.held_out_docs.w128.s128.nobos",
    ]
    assert all(task.samples == 8 for task in smoke.tasks[:-1])
    assert all(task.chance is not None and task.stderr is not None for task in smoke.tasks[:-1])
    assert smoke.metrics["quality.quantgate_grammar.acc"] == smoke.tasks[0].value
    assert set(smoke.integrity.values()) == {"pass"}


def test_the_folder_reads_back_as_it_was(smoke: QualityResult) -> None:
    again = QualityResult.read(smoke.directory)
    assert again.to_mapping() == smoke.to_mapping()
    assert {path.name for path in smoke.directory.iterdir()} == {"quality.json", "samples.parquet", "batches.parquet"}
    assert pq.read_table(smoke.directory / "batches.parquet").column_names == BATCH_FIELDS.split()


def test_every_sample_says_what_was_asked_and_answered(smoke: QualityResult) -> None:
    samples = smoke.samples()
    assert len(samples) == 8 * 5 + 2
    chosen = [sample for sample in samples if sample.task == "quantgate_facts"]
    for sample in chosen:
        assert len(sample.logprobs) == 4
        assert sample.score == float(sample.answer == sample.target)
        assert sample.tokens > 0
    (task,) = [task for task in smoke.tasks if task.name == "quantgate_facts"]
    assert task.value == sum(sample.score for sample in chosen) / len(chosen)


def test_a_model_against_itself_differs_in_nothing(smoke: QualityResult, tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = evaluate(tiny_checkpoint, suite=load_suite("smoke"), out=tmp_path / "q", engine_options={"max_num_seqs": 3})
    assert flips(smoke.samples(), again.samples()) == []
    assert all(abs(found.delta) < 1e-4 for found in compare_tasks(smoke.samples(), again.samples()))


def test_the_same_question_is_answered_from_the_folder(
    smoke: QualityResult, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_checkpoint", _must_not_load)
    again = evaluate(tiny_checkpoint, suite=load_suite("smoke"), out=smoke.directory)
    assert again == QualityResult.read(smoke.directory)


@pytest.mark.parametrize(
    "change", ["limit", "engine", "weights", "tokenizer", "chat", "config", "stop", "native", "source"]
)
def test_another_question_is_not_answered_from_the_folder(
    smoke: QualityResult, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    out = Path(shutil.copytree(smoke.directory, tmp_path / "quality"))
    options: dict = {}
    if change == "limit":
        options["limit"] = 4
    elif change == "engine":
        options["engine_options"] = {"dtype": "bfloat16"}
    elif change == "chat":
        options["chat_template"] = True
    elif change == "config":
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    elif change == "stop":
        (checkpoint / "generation_config.json").write_text('{"eos_token_id": 7}')
    elif change == "native":
        monkeypatch.setenv("CXX", "/bin/true")
    elif change == "source":
        monkeypatch.setattr("eval.quality.run.engine_fingerprint", lambda: "another")
    elif change == "weights":
        _flip_a_byte(checkpoint / "model.safetensors")
    else:
        text = (checkpoint / "tokenizer_config.json").read_text()
        (checkpoint / "tokenizer_config.json").write_text(text.replace("{", '{"note": 1,', 1))
    monkeypatch.setattr(Engine, "from_checkpoint", _must_not_load)
    with pytest.raises(AssertionError, match="loaded"):
        evaluate(checkpoint, suite=load_suite("smoke"), out=out, **options)
    assert QualityResult.read(out).key == smoke.key, "a run that fails leaves the earlier result"


def test_a_run_that_dies_leaves_nothing_behind(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "score", _must_not_load)
    with pytest.raises(AssertionError):
        evaluate(tiny_checkpoint, suite=load_suite("smoke"), out=tmp_path / "quality")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_no_result_is_never_replaced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(EvalError, match="exists already"):
        evaluate(tiny_checkpoint, tasks=["quantgate_facts"], limit=2, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_benchmarks_come_from_a_folder(tiny_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    result = evaluate(
        tiny_checkpoint,
        tasks=["piqa", "lambada", "gsm8k"],
        data_dir=folder,
        out=tmp_path / "quality",
        engine_options={"max_model_len": 512},
    )
    found = {f"{task.name}.{task.metric}": task.samples for task in result.tasks}
    assert found == {
        "piqa.acc": 3,
        "piqa.acc_norm": 3,
        "lambada_openai.perplexity": 2,
        "lambada_openai.acc": 2,
        "gsm8k.exact_match_strict_match": 1,
        "gsm8k.exact_match_flexible_extract": 1,
    }
    prompts = {sample.task: sample.prompt for sample in result.samples()}
    assert prompts["piqa"] == "Question: sit\nAnswer:"
    assert prompts["lambada_openai"] in ("the cat sat on the", "we looked at the")
    assert prompts["gsm8k"].count("Question:") == 6
    assert prompts["gsm8k"].endswith("Question: What is 1 + 1?\nAnswer:")
    # The tiny tokenizer makes five examples longer than 256 tokens: that the prompt was cut must be said.
    assert result.integrity["truncation"].startswith("fail: 1 requests")


def test_the_text_of_a_folder_is_a_perplexity_task(tiny_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    suite = load_suite("standard")
    suite = replace(suite, tasks=(), perplexity=(replace(suite.perplexity[0], window=128),))
    result = evaluate(tiny_checkpoint, suite=suite, data_dir=folder, limit=3, out=tmp_path / "quality")
    assert next(iter(result.metrics)) == "quality.perplexity.wikitext2.w128.s128.nobos.perplexity"
    assert result.tasks[0].samples == 3


def test_changed_data_is_another_key(tiny_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "quality"
    first = evaluate(tiny_checkpoint, tasks=["lambada"], data_dir=folder, out=out)
    (folder / "lambada" / "test.jsonl").write_text(json.dumps({"text": "quite another text"}) + "\n")
    second = evaluate(tiny_checkpoint, tasks=["lambada"], data_dir=folder, out=out)
    assert first.key != second.key
    assert second.samples()[0].prompt == "quite another"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"tasks": ["quantgate_gramar"]}, "unknown task 'quantgate_gramar'; did you mean quantgate_grammar"),
        ({"tasks": ["gramar"]}, "unknown task 'gramar'; did you mean quantgate_grammar"),
        ({"tasks": []}, "nothing to evaluate"),
        ({"tasks": ["wikitext2"]}, "give --data-dir"),
        ({"tasks": ["quantgate_facts"], "limit": 0}, "limit must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(tiny_checkpoint: Path, tmp_path: Path, arguments: dict, complaint: str) -> None:
    with pytest.raises(EvalError, match=complaint) as raised:
        evaluate(tiny_checkpoint, out=tmp_path / "quality", **arguments)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_task_of_the_hub_that_does_not_answer_is_one_line(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa'\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", no_answer)
    with pytest.raises(EvalError, match=r"task piqa: .*cannot be loaded.*give --data-dir") as raised:
        evaluate(tiny_checkpoint, tasks=["piqa"], out=tmp_path / "quality")
    assert "\n" not in str(raised.value)


def test_a_task_of_the_hub_is_measured_as_lm_eval_defines_it(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [{"text": "the cat sat on the mat"}, {"text": "we looked at the sea"}]
    answer = {"test": datasets.Dataset.from_list(documents)}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: answer)
    result = evaluate(tiny_checkpoint, tasks=["lambada_openai"], out=tmp_path / "quality")
    assert [(task.name, task.metric, task.samples) for task in result.tasks] == [
        ("lambada_openai", "perplexity", 2),
        ("lambada_openai", "acc", 2),
    ]


def test_an_empty_data_file_is_named(tiny_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "piqa" / "valid.jsonl").write_text("")
    with pytest.raises(EvalError, match=r"valid.jsonl: is empty"):
        evaluate(tiny_checkpoint, tasks=["piqa"], data_dir=folder, out=tmp_path / "quality")


def test_a_chat_template_is_applied_when_asked(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = evaluate(tiny_checkpoint, tasks=["quantgate_facts"], limit=2, out=tmp_path / "quality", chat_template=True)
    assert result.samples()[0].prompt.startswith("<s>user: ")
    assert result.protocol["chat_template_applied"] is True


def test_progress_counts_every_request(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    evaluate(
        tiny_checkpoint,
        tasks=["quantgate_facts"],
        limit=3,
        out=tmp_path / "quality",
        progress=lambda *each: seen.append(each),
    )
    assert ("score tasks", 12, 12) in seen


def test_nothing_is_printed(tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluate(tiny_checkpoint, tasks=["quantgate_facts"], limit=2, out=tmp_path / "quality")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def _must_not_load(*_: object, **__: object) -> None:
    raise AssertionError("loaded")


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
