"""A user's own file: `my.py:Name` leads to what is trained, with the loss and the data beside it, and what may be wrong
with them."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.files import digest_of_file, why
from megatron_ext.tasks.stage import backward
from megatron_ext.tasks.task import LOGGED, Tensors


class UserCode(NamedTuple):
    """What a user's file defines, for as long as it is imported."""

    path: Path
    name: str
    """The name, in the file, of what is trained."""
    module: ModuleType

    @property
    def spec(self) -> str:
        return f"{self.path}:{self.name}"

    def error(self, text: str) -> EngineError:
        """What is wrong with what it leads to."""
        return EngineError(f"model.code={self.spec}: {text}")

    def fault(self, text: str) -> Fault:
        """The same, whatever it is looked at with."""
        return Fault(f"model.code={self.spec}: {text}")

    def function(self, name: str) -> Optional[Callable[..., Any]]:
        """The function beside the model that has this name; None if the file has none. Raises EngineError: it is not a
        function."""
        found = getattr(self.module, name, None)
        if found is not None and not callable(found):
            raise self.error(f"{name} must be a function, not a {type(found).__name__}")
        return found

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Names the line of the user's code by which what runs in this block fails. Raises EngineError: it fails."""
        try:
            yield
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            raise self.error(f"{what} fails: {described(error, self.path)}") from error


def digest(path: Path) -> str:
    """Return the digest of the file's content. Raises EngineError: it cannot be read."""
    try:
        return digest_of_file(path)
    except OSError as error:
        raise EngineError(f"model.code={path}: cannot be read: {why(error)}; give FILE.py:NAME") from error


def load(spec: str, expected_digest: Optional[str] = None) -> UserCode:
    """Imports the file of `FILE.py:NAME`; what lies beside it can be imported by it. Raises EngineError: the file or
    the name does not exist, the file is another one than when the run was launched, or raises."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    found = digest(path)
    if expected_digest is not None and found != expected_digest:
        raise EngineError(
            f"model.code={spec}: {path} has changed since the run was launched; put it back as it was, or start a new "
            "run, with train.load=FOLDER of this one to go on with its weights"
        )
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    called = path.stem if path.stem not in sys.modules else f"users_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(called, path)
    if module_spec is None or module_spec.loader is None:
        raise EngineError(f"model.code={spec}: {path} must be a Python file, whose name ends with .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[called] = module  # for pickle, dataclasses and what imports it in turn
    code = UserCode(path, name, module)
    with code.running("importing the file"):
        module_spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise EngineError(f"model.code={spec}: {path} has no {name}; {_names(module, name)}")
    return code


def make(code: UserCode, *arguments: Any) -> Any:
    """What is trained: itself, or what the class or function returns.

    It is called with as many of the `arguments` as it takes without a default.

    Raises:
        EngineError: it raises.
    """
    found = getattr(code.module, code.name)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    with code.running(f"{code.name}()"):
        return found(*arguments[: _required(found)])


def _required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)


def described(error: BaseException, path: Path) -> str:
    """An error with the line of the user's code that raised it."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    message = text[0] if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    own = [frame for frame in frames if Path(frame.filename) == path] or frames
    if not own:
        return message
    return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}: {message}"


def line_here(path: Path) -> Optional[str]:
    """The line of the user's code that is being run, as `FILE, line N`."""
    frame = sys._getframe(1)
    found: List[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users(name):
            found.append(f"{name}, line {frame.f_lineno}")
            if Path(name) == path:
                return found[-1]
        frame = frame.f_back  # type: ignore[assignment]
    return found[0] if found else None


def _is_users(file: str) -> bool:
    """Whether a file is not torch's, nor Python's, nor this project's."""
    return not (file.startswith("<") or file.startswith(_OTHERS) or "/site-packages/" in file)


_OTHERS = tuple(
    str(folder)
    for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parents[2], Path(inspect.__file__).parent)
)


def _names(module: ModuleType, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", "") == module.__name__))
    ]
    near = get_close_matches(name, own, 1)
    return f"did you mean {near[0]}?" if near else f"it defines {', '.join(own) or 'no class and no function'}"


META, CPU = "meta", "cpu"
_METRIC = re.compile(r"\w[\w /.@-]*")


class Fault(EngineError):
    """A fault of the model, whatever it is looked at with."""


def require_gradients(code: UserCode, without: Sequence[str]) -> None:
    """Raises EngineError for parameters that the loss does not depend on."""
    if without:
        shown = ", ".join(without[:5]) + (f" and {len(without) - 5} more" if len(without) > 5 else "")
        raise code.fault(
            f"the loss does not depend on the parameter{'s' * (len(without) > 1)} {shown}, so "
            "there is no gradient; use what has parameters, remove it, or freeze it with requires_grad_(False)"
        )


def require_loss(code: UserCode, what: str, loss: Any) -> None:
    """Raises EngineError unless it is one number with a gradient."""
    if not (is_number(loss) and loss.is_floating_point()):
        raise code.fault(f"{what} returns {_named(loss)}, but must return one number")
    if not loss.requires_grad:
        raise code.fault(
            "the loss depends on no parameter: nothing could be trained; loss must compute "
            "with the tensors that it is given, and parameters must have requires_grad"
        )


def require_metrics(code: UserCode, what: str, metrics: Any) -> None:
    """Raises EngineError unless they are numbers with names that a log line has not."""
    if not isinstance(metrics, dict):
        raise code.fault(f"{what} returns {_named(metrics)}, but must return a dict of numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or name in LOGGED or not _METRIC.fullmatch(name):
            raise code.fault(
                f"{what} names a metric {name!r}; its name must be words of letters and "
                "digits, and none that a log line has already"
            )
        if not is_number(value):
            raise code.fault(f"{what} gives {name} as {_named(value)}, but it must be one number")


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _named(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def pass_back(given: Tensors, held: Tensors) -> None:
    """The backward pass of what a block gives, from the gradients of the same tensors, `held` cut off from it."""
    wanted = {name: one for name, one in given.items() if held[name].grad is not None}
    backward(wanted, {name: held[name].grad for name in wanted})


class Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.any = True
        return func(*args, **(kwargs or {}))
