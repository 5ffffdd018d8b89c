"""External quantizers: what is asked of them, what comes back, and every way in which one can fail.

A stand-in takes the library's place for most of this; the libraries themselves run where they are installed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantize import Manifest, QuantizeError, Recipe, load_model, quantize_checkpoint
from quantize.external import environments, run
from quantize.external.environments import INSTALLED, LIBRARIES, install, is_installed

COPIES = """
    import json, shutil, sys
    job = json.load(open(sys.argv[1]))
    shutil.copytree({made!r}, job["out"], dirs_exist_ok=True)
    json.dump(job, open({seen!r}, "w"))
    json.dump({{"versions": {{"llmcompressor": "9.9"}}}}, open(job["report"], "w"))
"""
RECIPE = {"method": "external:llmcompressor:rtn", "group_size": 32}
CALIBRATED = RECIPE | {"method": "external:llmcompressor", "samples": 3, "sequence_length": 40}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(source)`: from now on that is what runs in place of the driver, in an installed environment."""
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path / "home"))
    library = LIBRARIES["llmcompressor"]
    library.python.parent.mkdir(parents=True)
    library.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    library.python.chmod(0o755)
    (library.folder / INSTALLED).write_text(json.dumps({"pins": library.pins}))

    def put(source: str) -> None:
        driver = tmp_path / "driver.py"
        driver.write_text(textwrap.dedent(source))
        monkeypatch.setattr(run, "DRIVER", driver)

    return put


@pytest.fixture
def made(spelling_llama, tmp_path) -> Path:
    """A checkpoint such as a library would leave: ours, without our manifest."""
    folder = tmp_path / "made"
    quantize_checkpoint(spelling_llama, Recipe("int4", group_size=32), folder)
    (folder / "quantgate.json").unlink()
    return folder


def test_the_library_gets_our_recipe_and_tokens_and_its_checkpoint_comes_back_with_our_manifest(
    stand_in, made, spelling_llama, tmp_path
):
    seen, out = tmp_path / "seen.json", tmp_path / "out"
    stand_in(COPIES.format(made=str(made), seen=str(seen)))
    manifest = quantize_checkpoint(spelling_llama, Recipe.from_mapping(CALIBRATED), out)
    job = json.loads(seen.read_text())
    assert (job["algorithm"], job["bits"], job["group_size"], job["symmetric"]) == ("gptq", 4, 32, True)
    assert torch.tensor(job["token_ids"]).shape == (3, 40)
    assert manifest == Manifest.read(out)
    assert manifest.versions["external.llmcompressor"] == "9.9"
    assert manifest.coverage == {"expected": 21, "packed": 21}
    assert all(0 < module.relative_error < 0.05 and module.error_of == "weights" for module in manifest.modules)
    assert manifest.calibration is not None
    assert manifest.calibration["samples"] == 3
    assert load_model(out, dtype=torch.float32)(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_the_same_work_again_does_nothing(stand_in, made, spelling_llama, tmp_path):
    seen, out = tmp_path / "seen.json", tmp_path / "out"
    stand_in(COPIES.format(made=str(made), seen=str(seen)))
    first = quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), out)
    seen.unlink()
    assert quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), out) == first
    assert not seen.exists()


def test_a_module_that_the_library_left_out_is_an_error(stand_in, made, spelling_llama, tmp_path):
    skipping = tmp_path / "skipping"
    override = {"overrides": {"*.2.mlp.up_proj": {"skip": True}}}
    quantize_checkpoint(spelling_llama, Recipe.from_mapping({"method": "int4", "group_size": 32} | override), skipping)
    stand_in(COPIES.format(made=str(skipping), seen=str(tmp_path / "seen.json")))
    with pytest.raises(QuantizeError, match=r"left 1 of 21 modules unquantized, model\.layers\.2\.mlp\.up_proj first"):
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_failing_library_gives_its_last_line_and_a_log_and_nothing_half_written(stand_in, spelling_llama, tmp_path):
    stand_in(
        """
        import json, pathlib, sys
        pathlib.Path(json.load(open(sys.argv[1]))["out"], "model.safetensors").write_bytes(b"half")
        print("working")
        raise ValueError("no kernel for this shape")
        """
    )
    with pytest.raises(QuantizeError, match="ValueError: no kernel for this shape") as caught:
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")
    log = Path(str(caught.value).rpartition("see ")[2])
    assert "working" in log.read_text()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_an_assertion_without_words_is_shown_as_code(stand_in, spelling_llama, tmp_path):
    stand_in("outputs = 32\nassert outputs % 64 == 0")
    with pytest.raises(QuantizeError, match=r"\(AssertionError: assert outputs % 64 == 0\)"):
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")


def test_a_killed_library_is_said_to_be_killed(stand_in, spelling_llama, tmp_path):
    stand_in("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(QuantizeError, match="ended by signal 9"):
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")


def test_a_library_that_hangs_is_ended(stand_in, spelling_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SILENCE_SECONDS", 0.5)
    stand_in("import time; time.sleep(600)")
    begin = time.monotonic()
    with pytest.raises(QuantizeError, match="has said nothing"):
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")
    assert time.monotonic() - begin < 60
    assert not (tmp_path / "out.partial").exists()


def test_the_driver_ends_with_the_process_that_gave_the_job():
    program = f"""
        import runpy, threading, time
        module = runpy.run_path({str(run.DRIVER)!r})
        threading.Thread(target=module["end_with_parent"], daemon=True).start()
        print("started", flush=True)
        time.sleep(600)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"started\n"
    child.stdin.close()
    assert child.wait(timeout=60) == 1
    child.stdout.close()


def test_a_library_that_is_not_installed_names_the_command(spelling_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path / "empty"))
    with pytest.raises(QuantizeError, match="run first: quantgate external install gptqmodel"):
        quantize_checkpoint(spelling_llama, Recipe("external:gptqmodel"), tmp_path / "out")


def test_an_environment_of_other_pins_is_not_taken_for_ours(stand_in):
    library = LIBRARIES["llmcompressor"]
    assert is_installed(library)
    (library.folder / INSTALLED).write_text(json.dumps({"pins": ["torch==1.0"]}))
    assert not is_installed(library)
    (library.folder / INSTALLED).write_text("{")
    assert not is_installed(library)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "external:"}, "method: 'external:' is unknown; did you mean external:"),
        ({"method": "external:llmcompressor:int4"}, "is unknown"),
        ({"bits": 3}, "bits: external:llmcompressor:rtn takes 4 or 8, not 3"),
        ({"overrides": {"*.0.*": {"bits": 8}}}, "overrides: external:llmcompressor:rtn takes none"),
        ({"activations": "int8", "bits": 8, "group_size": -1}, "quantizes weights only"),
        ({"ignore": []}, "ignore: external:llmcompressor:rtn leaves lm_head"),
        ({"damp": 0.1}, "damp: external:llmcompressor:rtn has its own"),
        ({"format": "gptq"}, "format: external:llmcompressor:rtn has its own"),
        ({"method": "external:autoawq"}, "add symmetric: false"),
    ],
)
def test_a_recipe_that_a_library_cannot_take(fields, message):
    with pytest.raises(QuantizeError, match=f"^recipe: .*{message}"):
        Recipe.from_mapping(RECIPE | fields)


def pip_that(tmp_path, monkeypatch, does: str) -> None:
    """Replaces the interpreter that makes environments by a script: `-m venv … FOLDER` puts the same script there as
    its python, `-m pip …` does as told."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        'for last; do :; done\nif [ "$2" = venv ]; then mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; exit; fi\n'
        f'echo "$@" >> {tmp_path}/asked\n{does}\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(environments.sys, "executable", str(script))
    monkeypatch.setenv("QUANTGATE_HOME", str(tmp_path / "home"))


def test_torch_is_installed_first_and_alone_and_a_finished_environment_is_recognised(tmp_path, monkeypatch):
    pip_that(tmp_path, monkeypatch, "echo Collecting something")
    folder = install("gptqmodel")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].endswith(" off torch==2.13.0")
    assert asked[1].endswith("gptqmodel==7.6.0 optimum==2.3.0 transformers==5.17.0")
    assert f"-c {folder}/constraint.txt" in asked[1]
    install("gptqmodel")
    assert (tmp_path / "asked").read_text().splitlines() == asked


def test_a_failed_installation_gives_pip_s_last_line_and_is_made_anew(tmp_path, monkeypatch):
    pip_that(tmp_path, monkeypatch, 'echo "ERROR: No matching distribution"; exit 1')
    with pytest.raises(QuantizeError, match=r"gptqmodel-install\.log: .*\(ERROR: No matching distribution\)"):
        install("gptqmodel")
    assert not is_installed(LIBRARIES["gptqmodel"])
    pip_that(tmp_path, monkeypatch, "true")
    install("gptqmodel")
    assert is_installed(LIBRARIES["gptqmodel"])


def test_a_killed_installation_is_made_anew(tmp_path, monkeypatch):
    interpreter = sys.executable
    pip_that(tmp_path, monkeypatch, "sleep 600")
    program = "from quantize.external.environments import install; import sys; sys.executable = sys.argv[1]; "
    child = subprocess.Popen(
        [interpreter, "-c", program + "install('gptqmodel')", str(tmp_path / "python")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(QuantizeError, match="another process installs it now"):
        install("gptqmodel")
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not is_installed(LIBRARIES["gptqmodel"])
    pip_that(tmp_path, monkeypatch, "true")
    assert install("gptqmodel") == LIBRARIES["gptqmodel"].folder
    assert is_installed(LIBRARIES["gptqmodel"])


def test_an_unknown_library_is_named():
    with pytest.raises(QuantizeError, match="'autoround' is unknown; one of autoawq, autogptq, gptqmodel"):
        install("autoround")


def test_a_layout_that_is_not_read_here_is_said_so(stand_in, made, spelling_llama, tmp_path):
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "fp8"
    (made / "config.json").write_text(json.dumps(config))
    stand_in(COPIES.format(made=str(made), seen=str(tmp_path / "seen.json")))
    with pytest.raises(QuantizeError, match=r"a layout that quantgate does not read \(fp8\)"):
        quantize_checkpoint(spelling_llama, Recipe.from_mapping(RECIPE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def roomy_llama(spelling_llama, tmp_path_factory) -> Path:
    """Large enough for AutoAWQ, which wants 64 outputs in every linear."""
    folder = Path(shutil.copytree(spelling_llama, tmp_path_factory.mktemp("roomy") / "llama"))
    config = LlamaConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    torch.manual_seed(2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("method", "symmetric"),
    [
        ("external:llmcompressor:gptq", True),
        ("external:llmcompressor:awq", False),
        ("external:llmcompressor:rtn", True),
        ("external:gptqmodel:gptq", True),
        ("external:gptqmodel:awq", False),
        ("external:autoawq", False),
    ],
)
def test_an_installed_library_quantizes(roomy_llama, tmp_path, method, symmetric):
    library = LIBRARIES[method.split(":")[1]]
    if not is_installed(library):
        pytest.skip(f"{library.name} is not installed")
    fields = {"method": method, "group_size": 32, "symmetric": symmetric, "samples": 8, "sequence_length": 64}
    manifest = quantize_checkpoint(roomy_llama, Recipe.from_mapping(fields), tmp_path / "out")
    assert manifest.coverage == {"expected": 21, "packed": 21}
    assert f"external.{library.requirements[0].partition('==')[0]}" in manifest.versions
    errors = [module.relative_error for module in manifest.modules]
    assert errors == [None] * 21 if "awq" in method else all(0 < error < 0.1 for error in errors)
    assert {(module.bits, module.group_size, module.symmetric) for module in manifest.modules} == {(4, 32, symmetric)}
    model = load_model(tmp_path / "out", dtype=torch.float32)
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
