"""The tree of errors a user can meet.

NoriaError
├── ConfigError            (ValueError)    a key or value of noria.toml
├── InvalidRecord          (ValueError)    a record that breaks its contract
├── NotFound               (LookupError)   a call, trace, version or file that does not exist
├── StationFailed          (RuntimeError)  a station of the wheel cannot hand over what the next one needs
│   ├── AgentUnavailable                   the agent's endpoint is down, slow or answers nonsense
│   ├── PolicyUnavailable                  the policy server or the judge does not answer
│   └── TrainingFailed                     the trainer ended without a healthy checkpoint
├── IntegrityError         (ValueError)    a file or release does not match its recorded hash
├── DirectiveRefused       (PermissionError) a rollout directive that is not signed by the trainer's key
└── ReleaseConflict        (RuntimeError)  two writers tried to change one release at the same time

Every message states the value seen, the rule it broke, and the key or command that mends it.
"""


class NoriaError(Exception):
    """Root of every error that Noria raises on purpose."""


class ConfigError(NoriaError, ValueError):
    """noria.toml, or an environment variable that overrides it, cannot be used as it stands."""


class InvalidRecord(NoriaError, ValueError):
    """A record breaks the contract of its type."""


class NotFound(NoriaError, LookupError):
    """Something that was named does not exist."""


class StationFailed(NoriaError, RuntimeError):
    """A station of the wheel cannot hand over what the next one needs; materializing it again resumes there."""


class AgentUnavailable(StationFailed):
    """The agent's endpoint is down, slow, or answers nonsense."""


class PolicyUnavailable(StationFailed):
    """The policy server or the judge does not answer as it should."""


class TrainingFailed(StationFailed):
    """The trainer ended without a complete and healthy checkpoint."""


class IntegrityError(NoriaError, ValueError):
    """A file, batch or release does not match what was recorded about it."""


class DirectiveRefused(NoriaError, PermissionError):
    """A rollout directive is not signed by the trainer's key, or has expired."""


class ReleaseConflict(NoriaError, RuntimeError):
    """Another writer changed the release between reading and writing."""
