"""Layer costs in the layout of the public FASOP artifact: `known_cost/<model>_<gpu>_<tensor size>.npy`.

A file holds seconds of a forward pass: of the embedding, of each layer, of the head.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from pathlib import Path
from tokenize import TokenError

import numpy as np

from conf.schema.experiment import Model
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from launch.errors import LaunchError
from launch.profile.arguments import Import
from launch.profile.link_fit import rounded
from megatron_ext.contract.files import read_regular, why


def imported(arguments: Import, model: Model) -> LayerProfile:
    """The profile of all files `<asked.files>_<tensor size>.npy`. Of the layers' times it has the median.

    Raises:
        LaunchError: there are none, or one is not of the model.
        ConfigError: the times cannot be.
    """
    folder, prefix = arguments.files.parent, arguments.files.name
    pattern = re.compile(re.escape(prefix) + r"_(\d+)\.npy")
    names = sorted(path.name for path in folder.glob("*.npy")) if folder.is_dir() else []
    files = {int(match[1]): folder / name for name in names if (match := pattern.fullmatch(name))}
    if not files:
        known = sorted({name.rpartition("_")[0] for name in names})
        raise LaunchError(
            f"import={arguments.files}: {folder} has no files {prefix}_<tensor size>.npy; "
            + (f"it has {', '.join(f'import={folder / name}' for name in known)}" if known else "it has no .npy files")
        )
    return LayerProfile(
        gpu=arguments.gpu,
        source=f"imported from {prefix}_{'|'.join(map(str, sorted(files)))}.npy, forward only; backward = "
        f"{arguments.backward_ratio:g} x forward, as given to the import",
        models={model.name: Shape.of(model)},
        costs=[_costs(path, tensor, arguments, model) for tensor, path in sorted(files.items())],
    )


def _costs(path: Path, tensor: int, arguments: Import, model: Model) -> ModelCosts:
    try:
        content = read_regular(path)
        seconds = np.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError, OverflowError, TypeError, SyntaxError, TokenError) as error:
        # a damaged header may ask for any type and size
        raise LaunchError(f"{path}: cannot be read as a numpy array: {why(error)}") from error
    if seconds.dtype.kind not in "fiu" or seconds.shape != (model.layers + 2,):
        raise LaunchError(
            f"{path} has {seconds.dtype} of shape {seconds.shape}, but model={model.name} of {model.layers} layers "
            f"needs {model.layers + 2} numbers (embedding, layers, head); choose the model of the file with model=… "
            f"or model.layers=…"
        )
    # The median would hide a bad layer among good ones.
    for number, value in enumerate(map(float, seconds)):
        if not 0 < value < math.inf:
            raise LaunchError(
                f"{path}: value {number} (counted from 0, the embedding) is {value:g} s; times must be above 0"
            )
    embedding, *layers, head = (float(value) * 1e3 for value in seconds)
    ratio = arguments.backward_ratio
    return ModelCosts(
        model=model.name,
        tensor=tensor,
        micro_batch_size=arguments.micro_batch_size,
        precision=arguments.precision,
        embedding=_cost(embedding, ratio),
        layer=_cost(statistics.median(layers), ratio),
        head=_cost(head, ratio),
    )


def _cost(forward_ms: float, ratio: float) -> Cost:
    return Cost(forward=rounded(forward_ms), backward=rounded(forward_ms * ratio))
