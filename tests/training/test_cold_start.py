import json
import subprocess
import sys
from pathlib import Path

import pytest

from noria.contracts.errors import ConfigError
from noria.loading import locate_model
from training.cold_start import read_examples
from training.spec import ColdStartSpec

ROWS = [
    {
        "prompt": [{"role": "system", "content": "route"}, {"role": "user", "content": f"a {word} in Zürich, please"}],
        "completion": [{"role": "assistant", "content": json.dumps({"name": word})}],
    }
    for word in ("film", "song", "flat")
]

LOOK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
talk = [{"role": "system", "content": "route"}, {"role": "user", "content": text}]
begun = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
whole = tokenizer.apply_chat_template([*talk, {"role": "assistant", "content": "x"}], tokenize=False)
ids = tokenizer.encode(text)
print(json.dumps({
    "begun": begun, "whole": whole, "back": tokenizer.decode(ids), "end": tokenizer.eos_token,
    "pad": tokenizer.pad_token,
    "stop": model.generation_config.eos_token_id == tokenizer.eos_token_id, "dtype": str(model.dtype),
    "vocabulary": len(tokenizer) == model.config.vocab_size,
}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[ColdStartSpec, Path]:
    folder = tmp_path_factory.mktemp("cold")
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = ColdStartSpec(
        output=str(folder / "base"),
        examples=str(folder / "examples.jsonl"),
        steps=3,
        batch_size=2,
        hidden_size=32,
        layers=1,
        vocabulary=300,
        threads=1,
    )
    path = spec.write(folder / "cold.json")
    done = subprocess.run(
        [sys.executable, "-m", "training.cold_start", "--spec", str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return spec, path


@pytest.mark.slow
def test_the_first_weights_are_a_folder_that_transformers_loads(made):
    spec, _ = made
    marker = json.loads((Path(spec.output) / "COMPLETE.json").read_text())
    assert marker["healthy"] is True
    assert marker["steps"] == 3
    steps = [json.loads(line) for line in (Path(spec.output) / "train_log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["loss"] > steps[2]["loss"]

    text = "héllo \x00\n 漢字 🙂 'quoted'  twice"
    looked = subprocess.run(
        [sys.executable, "-c", LOOK, str(Path(spec.output) / "model"), text.replace("\x00", "")],
        check=True,
        capture_output=True,
        timeout=120,
    )
    seen = json.loads(looked.stdout)
    assert seen["back"] == text.replace("\x00", "")
    assert seen["whole"] == seen["begun"] + "x<|end|>"
    assert seen["begun"].startswith("<|system|>route<|end|><|user|>")
    assert seen["begun"].endswith("<|end|><|assistant|>")
    assert (seen["end"], seen["pad"], seen["dtype"]) == ("<|end|>", "<|pad|>", "torch.float32")
    assert seen["stop"] is True
    assert seen["vocabulary"] is True


@pytest.mark.slow
def test_a_cold_start_that_is_complete_is_left_as_it_is(made):
    spec, path = made
    before = (Path(spec.output) / "model" / "model.safetensors").stat().st_mtime_ns
    subprocess.run([sys.executable, "-m", "training.cold_start", "--spec", str(path)], check=True, timeout=120)
    assert (Path(spec.output) / "model" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(("text", "said"), [("", "no examples"), ('{"prompt": []}\n', "examples.jsonl:1")])
def test_examples_that_cannot_be_used_say_where(tmp_path, text, said):
    (tmp_path / "examples.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_examples(tmp_path / "examples.jsonl")


def test_a_model_is_found_in_a_package_or_refused(tmp_path):
    assert locate_model(str(tmp_path)) == tmp_path
    assert locate_model("json:decoder.py").name == "decoder.py"
    with pytest.raises(ConfigError, match="not installed"):
        locate_model("no_such_package:model.gguf")
    with pytest.raises(ConfigError, match="nothing at"):
        locate_model("json:model.gguf")


def test_a_missing_source_is_one_line_and_code_2(tmp_path):
    spec = ColdStartSpec(output=str(tmp_path / "base"), source="pretrained", path=str(tmp_path / "none"))
    path = spec.write(tmp_path / "cold.json")
    done = subprocess.run(
        [sys.executable, "-m", "training.cold_start", "--spec", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "nothing at" in done.stderr
