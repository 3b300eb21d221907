"""noria.toml: every mistake is one line that says what to mend."""

from pathlib import Path

import pytest

from noria.config import Config, load
from noria.contracts.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "noria.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[proxi]\nport = 1", "unknown key 'proxi'; did you mean 'proxy'?"),
        ("[proxy]\nprot = 1", "unknown key 'proxy.prot'; did you mean 'port'?"),
        ("[proxy.upstreams.policy]\nurll = 'x'", "unknown key 'proxy.upstreams.policy.urll'; did you mean 'url'?"),
        ("[model.lora]\nrr = 1", "unknown key 'model.lora.rr'; did you mean 'r'?"),
        ("[proxy]\nport = 'x'", "proxy.port: Input should be a valid integer"),
        ("[proxy]\nport = 70000", "proxy.port: Input should be less than or equal to 65535"),
        ("root = '/'", "unknown key 'root'"),
        ("[proxy", "is not valid TOML"),
        ("[targets.router]\nselection='a'\nreward='b'\nsuite='c'", "target 'router' is not of the form 'app.node'"),
        (
            "[proxy]\ndefault_upstream='x'\n[proxy.upstreams.policy]\nurl='http://h'",
            "proxy.default_upstream is 'x', but [proxy.upstreams] has only: policy",
        ),
    ],
)
def test_a_mistake_is_named_with_its_mend(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration at"):
        load(tmp_path / "noria.toml", {})


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[proxy]\nport = 1000\n[targets.'a.b']\nselection='s'\nreward='r'\nsuite='u'")
    environment = {"NORIA_PROXY__PORT": "2000", "NORIA_TARGETS__A_B__GROUP_SIZE": "4", "NORIA_SEED": "7"}
    config = load(path, environment)
    assert (config.proxy.port, config.targets["a.b"].group_size, config.seed) == (2000, 4, 7)


def test_a_misspelt_environment_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'proxy.prot'"):
        load(write(tmp_path, ""), {"NORIA_PROXY__PROT": "1"})


def test_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, "home = 'here'"), {})
    assert config.home_dir == tmp_path / "here"
    assert config.store_url == f"sqlite:///{tmp_path / 'here' / 'online.db'}"


def test_the_trainer_key_is_made_once_and_kept_secret(tmp_path: Path) -> None:
    config = load(write(tmp_path, ""), {})
    key = config.trainer_key()
    assert len(key) >= 32
    assert config.trainer_key() == key
    assert (config.home_dir / "trainer.key").stat().st_mode & 0o777 == 0o600


def test_the_project_s_own_file_is_sound() -> None:
    config = load(ROOT / "noria.toml", {})
    assert isinstance(config, Config)
    assert "dispatch.router" in config.enabled_targets
    assert "dispatch.reply" in config.targets
