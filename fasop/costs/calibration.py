"""What runs took, as a part of what was predicted: factors by node group, which a search can take into account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from conf.errors import ConfigError
from conf.schema.values.ranges import MISSING, config
from fasop.costs.hardware import Factors, NodeKind
from fasop.errors import SearchError

HEAD = """\
# Measured times, as a part of the predicted ones, by node group. Made by 'tdpp search validate=RUN calibrate=FILE';
# 'tdpp search calibration=FILE' multiplies its own times with them. Factors that a run does not show are 1.
"""


@config
class Calibration:
    runs: list[str] = MISSING
    """Names of the runs that it was made from."""
    groups: dict[str, Factors] = MISSING
    """Factors of each node group."""

    def text(self) -> str:
        """A file that `read_calibration` reads."""
        from omegaconf import OmegaConf

        groups = {
            name: {term: round(value, 4) for term, value in asdict(factors).items()}
            for name, factors in self.groups.items()
        }
        return HEAD + OmegaConf.to_yaml(OmegaConf.create({"runs": self.runs, "groups": groups}))

    def applied(self, kinds: Sequence[NodeKind]) -> list[NodeKind]:
        """The same nodes with these factors; those that were not measured stay as they are. Raises SearchError: none of
        the nodes was measured."""
        if not any(kind.name in self.groups for kind in kinds):
            raise SearchError(
                f"calibration: it is for the node groups {', '.join(self.groups)}, but cluster.groups has "
                f"{', '.join(kind.name for kind in kinds)}; make one from a run on these with 'tdpp search "
                "validate=RUN calibrate=FILE'"
            )
        return [replace(kind, factors=self.groups.get(kind.name, kind.factors)) for kind in kinds]

    def __str__(self) -> str:
        return f"calibrated: node groups {', '.join(self.groups)}, by {', '.join(self.runs)}"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file. Raises SearchError: it cannot be read, or is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    from conf.reading.yaml_file import fault, load_yaml

    way_out = "'tdpp search validate=RUN calibrate=FILE' makes one"
    try:
        calibration = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(Calibration), load_yaml(path, Calibration))
        )
    except OSError as error:
        raise SearchError(f"calibration={path}: {error.strerror}; {way_out}") from error
    except MissingMandatoryValue as error:
        raise SearchError(f"calibration={path} is not a calibration: {error.full_key} is not set; {way_out}") from error
    except OmegaConfBaseException as error:
        raise SearchError(f"calibration={path} is not a calibration: {fault(error)}; {way_out}") from error
    except (ConfigError, SearchError) as error:
        raise SearchError(f"calibration={path} is not a calibration: {error}; {way_out}") from error
    assert isinstance(calibration, Calibration)
    return calibration
