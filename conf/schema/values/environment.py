"""The variables that a cluster gives to its ranks: names that hold, and no secrets in files that others can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from conf.errors import ConfigError
from megatron_ext.contract.worker import NODE_RANK, START, TOKEN

Variables = Mapping[str, str]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASS|PASSWD|PASSWORD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY)(?:_|$)",
    re.IGNORECASE,
)
"""Names of variables whose values nobody else may see: WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY."""

OWN = (TOKEN, START, NODE_RANK)
"""What tdpp itself gives to a worker."""


def check(of_all: Variables, of_groups: Mapping[str, Variables], names_of_shell: Sequence[str]) -> None:
    """Raises ConfigError for a variable that cannot be given, or not like that."""
    for key, name, value in _given(of_all, of_groups):
        _require_name(key, name)
        if "\0" in value:
            raise ConfigError(f"{key}={value!r} contains a zero byte, which no variable can hold; remove it")
        if _SECRET.search(name):
            raise ConfigError(
                f"{key}: its value would be written to the run's files, pages and job, where others can read it, and "
                f"{name} looks like a secret; export {name} in your shell and give cluster.environment_from=[{name}], "
                f"which passes it on by name"
            )
    for name in names_of_shell:
        _require_name("cluster.environment_from", name)
        if name in of_all:
            raise ConfigError(
                f"cluster.environment_from names {name}, which cluster.environment also sets; keep one of them"
            )


def _given(of_all: Variables, of_groups: Mapping[str, Variables]) -> Iterator[tuple[str, str, str]]:
    """Of every variable its key, name and value."""
    owners = {"cluster": of_all, **{f"cluster.groups.{name}": given for name, given in of_groups.items()}}
    for owner, variables in owners.items():
        for name, value in variables.items():
            yield f"{owner}.environment.{name}", name, value


def _require_name(key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} is not a variable name; use letters, digits and '_'")
    if name in OWN:
        raise ConfigError(f"{key}: tdpp sets {name} itself; leave it out")
