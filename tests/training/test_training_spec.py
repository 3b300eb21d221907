import subprocess
import sys
from dataclasses import replace

import pytest

from noria.contracts.errors import ConfigError
from training.launch import command, environment, trainer_command
from training.spec import ColdStartSpec, LoraSpec, TrainSpec

SPEC = TrainSpec(round="a.b.r00001", batch="b", parent="p", output="o", lora=LoraSpec(r=4), seed=3)


def test_a_spec_survives_its_file(tmp_path):
    assert TrainSpec.read(SPEC.write(tmp_path / "deep" / "spec.json")) == SPEC
    cold = ColdStartSpec(output="o", examples="e", lora=LoraSpec())
    assert ColdStartSpec.read(cold.write(tmp_path / "cold.json")) == cold


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"round": "r", "batch": "b", "parent": "p", "output": "o", "ephocs": 2}', "ephocs"),
        ('{"round": "r"}', "batch"),
        ("{", "cannot read"),
    ],
)
def test_a_spec_that_cannot_be_used_says_what_is_wrong(tmp_path, text, said):
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        TrainSpec.read(tmp_path / "spec.json")


def test_launching_loads_no_torch():
    code = "import sys, training.launch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_rank_needs_no_launcher_and_several_go_through_deepspeeds():
    assert command("spec.json")[1:3] == ["-m", "training.launch"]
    assert "training.train" in trainer_command(SPEC, "s", port=1)
    assert "deepspeed.launcher.runner" not in trainer_command(SPEC, "s", port=1)
    several = trainer_command(replace(SPEC, ranks=2), "s", port=29512)
    assert several[several.index("--num_accelerators") + 1] == "2"
    assert several[several.index("--master_port") + 1] == "29512"
    assert environment(replace(SPEC, threads=3))["OMP_NUM_THREADS"] == "3"
    assert environment(SPEC)["DS_ACCELERATOR"] == "cpu"


def test_a_spec_without_weights_ends_with_one_line(tmp_path):
    path = SPEC.write(tmp_path / "spec.json")
    done = subprocess.run(command(path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "materialize its checkpoint" in done.stderr
