"""Where profiles lie, and reading them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from conf.composition_cache import kept_object
from conf.errors import ConfigError
from conf.reading.own_folders import PROFILES, SUFFIX, is_file, own_folders, path_of
from fasop.costs.profiles.profile import LayerProfile

FOLDER = Path(__file__).parents[2] / "profiles"


def name_of(wanted: str, gpu: str, *, alone: bool) -> str:
    """Return the name of a GPU's profile; of several, the name that is asked for ends with the GPU's."""
    if alone:
        return wanted
    return f"{wanted.removesuffix(SUFFIX)}_{gpu}{SUFFIX}" if is_file(wanted) else f"{wanted}_{gpu}"


def profile_path(name: str) -> Path:
    """Find the file of a profile that has a name: in `profiles` of a folder of your own, or among the shipped ones."""
    return path_of(name, PROFILES, FOLDER)


def read_profile(name: str) -> LayerProfile:
    """The profile `fasop/profiles/<name>.yaml`, or of the file `name`.

    Raises:
        ConfigError: it does not exist, is not one, or holds what cannot be.
    """
    path = profile_path(name)
    return kept_object(LayerProfile, path, partial(_read, path, name))


def _read(path: Path, name: str) -> LayerProfile:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    from conf.reading.yaml_file import fault, load_yaml

    try:
        keys = load_yaml(path, LayerProfile)
        profile = OmegaConf.to_object(OmegaConf.unsafe_merge(OmegaConf.structured(LayerProfile), keys))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{path} is not a profile: {error.full_key} is not set (docs/profile.md)") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} is not a profile: {fault(error)} (docs/profile.md)") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        folders = [FOLDER, *(folder / PROFILES for folder in own_folders())]
        known = ", ".join(sorted({other.stem for folder in folders for other in folder.glob(f"*{SUFFIX}")}))
        others = "" if is_file(name) else f" in {' or '.join(map(str, folders))}; the known ones are {known}"
        raise ConfigError(f"no profile {name!r}{others}; 'tdpp profile' makes one") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    assert isinstance(profile, LayerProfile)
    return profile
