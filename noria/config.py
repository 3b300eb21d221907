"""`noria.toml`, read into one pydantic tree; `NORIA_…` environment variables override it.

`NORIA_PROXY__PORT=9000` sets `port` in `[proxy]`: sections are joined by two underscores. `NORIA_CONFIG` names another
file than `./noria.toml`. An unknown key is an error that names the key and the nearest valid one. Relative paths are
taken from the folder that holds the file.
"""

import difflib
import os
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from noria.config_services import (
    JudgeConfig,
    PolicyConfig,
    ProxyConfig,
    RetentionConfig,
    Section,
    StoreConfig,
    TelemetryConfig,
    UiConfig,
)
from noria.contracts.errors import ConfigError, InvalidRecord
from noria.contracts.round import Target

ENV_PREFIX = "NORIA_"
_NOT_CONFIG = {"NORIA_CONFIG", "NORIA_TRAINER_KEY", "NORIA_SERVICES_OF", "NORIA_LAUNCH_HEAD"}


class AgentConfig(Section):
    """The black box: where it takes its users' requests, and where it takes rollouts."""

    url: str = "http://127.0.0.1:8710"
    rollout_path: str = "/rollout"
    timeout_seconds: float = Field(60.0, gt=0)


class ColdStartConfig(Section):
    """How the first weights are made from logs of imperfect answers."""

    examples: str | None = None
    """`path.py:function` that yields {"prompt": messages, "completion": messages}; None takes the model as it is."""
    steps: int = Field(200, ge=1)
    batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(1e-3, gt=0)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021); merged into the weights at the end of each round."""

    r: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelConfig(Section):
    """The model behind the targets."""

    source: Literal["tiny", "pretrained", "gguf"] = "tiny"
    """`tiny` builds a Qwen3-shaped model and its tokenizer; `pretrained` loads a folder that transformers can load;
    `gguf` dequantizes a GGUF file."""
    path: str | None = None
    """Folder (`pretrained`) or file (`gguf`); `package:file` finds a file inside an installed Python package."""
    hidden_size: int = Field(192, ge=16)
    layers: int = Field(4, ge=1)
    vocabulary: int = Field(2048, ge=300)
    lora: LoraConfig | None = None
    cold_start: ColdStartConfig = ColdStartConfig()


class TrainingConfig(Section):
    """The update that a round makes of its batch. Defaults: GSPO (Zheng et al. 2025), constant learning rate, no KL."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    importance_sampling_level: Literal["token", "sequence"] = "sequence"
    learning_rate: float = Field(3e-4, gt=0)
    batch_size: int = Field(64, ge=1)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = Field(64, ge=1)
    """Sequences per forward pass on one rank."""
    epochs: int = Field(1, ge=1)
    """How many times a round's batch is gone through."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL term."""
    epsilon: float = Field(0.2, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_sequence_tokens: int = Field(1024, ge=8)
    keep_optimizer: bool = True
    """Whether a round continues with its parent's optimizer state (full fine-tuning only)."""
    save_steps: int = Field(8, ge=1)
    """A killed trainer resumes from the last multiple of this."""
    ranks: int = Field(1, ge=1)
    zero_stage: Literal[0, 1, 2, 3] = 1
    accelerator: Literal["cpu", "cuda"] = "cpu"


class GateConfig(Section):
    """What is good enough to ship."""

    margin: float = Field(0.0, ge=0)
    """The interval of the paired difference must lie above this."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    resamples: int = Field(4000, ge=100)
    validation_tolerance: float = Field(0.05, ge=0)
    """How much worse the candidate may be on the round's validation set; broken when the whole interval lies below."""
    failures_before_restart: int = Field(3, ge=1)
    """After this many failed gates in a row the training chain starts again from the live version."""


class TargetConfig(Section):
    """One thing being trained: a node of an app."""

    enabled: bool = True
    selection: str
    """SQL file that returns `id` and `input`."""
    reward: str
    """`path.py:function`: from an attempt to its reward and components."""
    suite: str
    """`path.py:function` that yields the held-out items."""
    samples_per_round: int = Field(64, ge=1)
    validation_samples: int = Field(48, ge=0)
    validation_fraction: float = Field(0.15, ge=0, lt=1)
    """Share of distinct inputs that is never trained on, by a hash of the input."""
    group_size: int = Field(8, ge=2)
    min_group_size: int = Field(4, ge=2)
    """A group that lost members to errors is dropped below this."""
    temperature: float = Field(1.0, gt=0)
    concurrency: int = Field(16, ge=1)
    """Rollouts in flight."""
    min_whole_share: float = Field(0.8, ge=0, le=1)
    """A round needs this share of its rollouts to end without error."""
    gate: GateConfig = GateConfig()


class SensorConfig(Section):
    """When the wheel turns by itself."""

    min_new_calls: int = Field(100, ge=1)
    """`traffic_landed` ingests when this many calls have landed, or after `max_ingest_seconds` with fewer."""
    max_ingest_seconds: float = Field(60.0, gt=0)
    min_new_trajectories: int = Field(200, ge=1)
    """`enough_trajectories` turns a target when this many live traces of it have landed since its last round."""
    min_pause_seconds: float = Field(30.0, ge=0)
    max_attempts: int = Field(3, ge=1)
    """How many times a failed round is taken up again before the next one begins."""


class TrafficConfig(Section):
    """The program that stands for the users of the example."""

    rate: float = Field(8.0, gt=0)
    """Requests per second."""
    feedback_delay_seconds: float = Field(1.0, ge=0)
    concurrency: int = Field(16, ge=1)


class Config(Section):
    """The whole of noria.toml."""

    home: Path = Path(".noria")
    """Everything that Noria writes stands below this folder."""
    seed: int = Field(0, ge=0)
    proxy: ProxyConfig = ProxyConfig()
    store: StoreConfig = StoreConfig()
    retention: RetentionConfig = RetentionConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    policy: PolicyConfig = PolicyConfig()
    judge: JudgeConfig = JudgeConfig()
    ui: UiConfig = UiConfig()
    agent: AgentConfig = AgentConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    targets: dict[str, TargetConfig] = Field(default_factory=dict[str, TargetConfig])
    sensors: SensorConfig = SensorConfig()
    traffic: TrafficConfig = TrafficConfig()
    root: Path = Field(default=Path(), exclude=True)
    """The folder that holds noria.toml; set by `load`."""

    @field_validator("targets")
    @classmethod
    def _targets_are_names(cls, targets: dict[str, TargetConfig]) -> dict[str, TargetConfig]:
        for name in targets:
            try:
                Target.parse(name)
            except InvalidRecord as error:
                raise ValueError(str(error)) from error
        return targets

    @model_validator(mode="after")
    def _upstreams_exist(self) -> "Config":
        for key in ("default_upstream", "policy_upstream"):
            name = getattr(self.proxy, key)
            if self.proxy.upstreams and name not in self.proxy.upstreams:
                known = ", ".join(sorted(self.proxy.upstreams))
                raise ValueError(f"proxy.{key} is {name!r}, but [proxy.upstreams] has only: {known}")
        for name, upstream in self.proxy.upstreams.items():
            for fallback in upstream.fallbacks:
                if fallback not in self.proxy.upstreams or fallback == name:
                    known = ", ".join(sorted(self.proxy.upstreams.keys() - {name})) or "none"
                    raise ValueError(f"proxy.upstreams.{name}.fallbacks has {fallback!r}; other upstreams: {known}")
        return self

    @property
    def enabled_targets(self) -> tuple[str, ...]:
        """Names of the targets that turn."""
        return tuple(name for name, target in self.targets.items() if target.enabled)

    def target(self, name: str) -> TargetConfig:
        """The settings of one target. Raises `ConfigError` if noria.toml has none of that name."""
        if name not in self.targets:
            known = ", ".join(sorted(self.targets)) or "none"
            raise ConfigError(f'no target {name!r} in noria.toml (known: {known}); add [targets."{name}"]')
        return self.targets[name]

    def path(self, relative: str | Path) -> Path:
        """A path of the configuration, taken from the folder of noria.toml."""
        return (self.root / relative).resolve()

    @property
    def home_dir(self) -> Path:
        """Absolute path of `home`."""
        return self.path(self.home)

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the online store."""
        return self.store.url or f"sqlite:///{self.home_dir / 'online.db'}"

    @property
    def artifacts_dir(self) -> Path:
        """Sets, trajectories, batches, checkpoints and reports."""
        return self.home_dir / "artifacts"

    @property
    def bodies_dir(self) -> Path:
        """Large content of calls, one file for each distinct piece: a part of the online store."""
        return self.artifacts_dir / "bodies"

    @property
    def warehouse_dir(self) -> Path:
        """The Delta tables."""
        return self.home_dir / "warehouse"

    @property
    def dagster_home(self) -> Path:
        """Dagster's own folder: runs, schedules, event log."""
        return self.home_dir / "dagster"

    @property
    def spool_dir(self) -> Path:
        """The proxy's append-only spool."""
        return self.home_dir / "spool"

    def trainer_key(self) -> str:
        """The key that signs rollout directives: `NORIA_TRAINER_KEY`, else a file made once in the home (mode 0600)."""
        from_env = os.environ.get("NORIA_TRAINER_KEY")
        if from_env:
            return from_env
        path = self.home_dir / "trainer.key"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".trainer.key.{os.getpid()}.{secrets.token_hex(4)}")
        if not path.exists():
            with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(48))
            try:
                os.link(temporary, path)  # fails if another process was first: then its key counts
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        return path.read_text().strip()


def load(path: str | Path | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Read noria.toml and the environment.

    `path` defaults to `$NORIA_CONFIG`, else `./noria.toml`. `overrides` stands for the environment in tests. Raises
    `ConfigError` with one line for the first thing that is wrong.
    """
    file = Path(path or os.environ.get("NORIA_CONFIG") or "noria.toml").resolve()
    if not file.is_file():
        raise ConfigError(f"no configuration at {file}; run from the project's folder or set NORIA_CONFIG")
    try:
        tree = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file.name} is not valid TOML: {error}") from error
    if "root" in tree:
        raise ConfigError("unknown key 'root' in noria.toml")
    _merge_environment(tree, os.environ if overrides is None else overrides)
    try:
        return Config.model_validate({**tree, "root": file.parent})
    except ValidationError as error:
        raise ConfigError(_explain(error, file.name)) from error


def _merge_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name in sorted(environment):
        if not name.startswith(ENV_PREFIX) or name in _NOT_CONFIG:
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        table = tree
        for key in keys[:-1]:
            table = table.setdefault(_existing(table, key), {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: {key!r} is a value of noria.toml, not a table")
        table[_existing(table, keys[-1])] = environment[name]


def _existing(table: Mapping[str, Any], key: str) -> str:
    """The key as it is spelt in the file: `NORIA_TARGETS__DISPATCH_ROUTER__…` means `[targets."dispatch.router"]`."""
    for candidate in table:
        if candidate.lower().replace(".", "_").replace("-", "_") == key:
            return candidate
    return key


def _explain(error: ValidationError, file: str) -> str:
    errors = error.errors()
    # A misspelt key leaves the right one missing: the misspelling is the news.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        message = first["msg"].removeprefix("Value error, ")
        return f"{file}: {where}: {message}" if where else f"{file}: {message}"
    *parents, key = [str(part) for part in first["loc"]]
    valid = _valid_keys(parents)
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys here: {', '.join(valid)}"
    return f"{file}: unknown key {where!r}; {hint}"


def _valid_keys(parents: list[str]) -> list[str]:
    """The keys that the table at `parents` may have."""
    model: Any = Config
    for part in parents:
        if isinstance(model, type) and issubclass(model, BaseModel):
            annotation = model.model_fields[part].annotation
        else:
            annotation = get_args(model)[1]  # dict[str, Section]: any key leads to the value type
        options = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, Section)]
        model = options[0] if options and getattr(annotation, "__origin__", None) is not dict else annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return sorted(name for name in model.model_fields if name != "root")
