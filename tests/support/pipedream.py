"""PipeDream's own files as its public repository lays them out, written anew from facts: by module of a package, the
convolutions (the side of their kernels, in hexadecimal digits) and linear layers (L), LSTMs (R), those in both
directions (B) and with attention (A), embeddings (E) and classifiers (K)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MADE = {
    "L": "torch.nn.Linear(in_features=8, out_features=8, bias=True)",
    "R": "torch.nn.LSTM(2048, 1024)",
    "B": "EmuBidirLSTM(1024, 1024)",
    "A": "RecurrentAttention(1024, 1024, 1024)",
    "E": "torch.nn.Embedding(32320, 1024, padding_idx=0)",
    "K": "Classifier(1024, 32320)",
    "-": "torch.nn.ReLU(inplace=True)",
}


def convolution(side: int) -> str:
    return f"torch.nn.Conv2d(3, 64, kernel_size=({side}, {side}), stride=(1, 1))"


def write_package(folder: Path, modules: Sequence[str]) -> None:
    """A package of stage modules: `modules` has a letter for each layer of each."""
    folder.mkdir(parents=True, exist_ok=True)
    imports, entries = [], []
    for number, letters in enumerate(modules):
        layers = [MADE[one] if one in MADE else convolution(int(one, 16)) for one in letters]
        made = "".join(f"        self.layer{place} = {layer}\n" for place, layer in enumerate(layers))
        (folder / f"stage{number}.py").write_text(
            f"import torch\n\n\nclass Stage{number}(torch.nn.Module):\n    def __init__(self):\n"
            f"        super(Stage{number}, self).__init__()\n{made}        self._initialize_weights()\n"
        )
        imports.append(f"from .stage{number} import Stage{number}\n")
        entries.append(f'        (Stage{number}(), ["in{number}"], ["in{number + 1}"]),\n')
    (folder / "__init__.py").write_text(
        f'{"".join(imports)}\ndef arch():\n    return "any"\n\ndef model(criterion):\n    return [\n'
        f'{"".join(entries)}        (criterion, ["in{len(modules)}"], ["loss"])\n    ]\n'
    )


def write_driver(file: Path, **values: object) -> Path:
    """A configuration as the public ones are written: keys and texts in quotes; None leaves a key out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {
        "log_directory": str(file.parent / "runs"),
        "module": "models.vgg16.gpus=4",
        "data_dir": "/mnt/data/imagenet/",
        "container": "nvcr.io/nvidia/pytorch:19.05-py3",
        "machines": ["localhost:0", "localhost:1", "localhost:2", "localhost:3"],
        "batch_size": 64,
        "learning_rate": 0.01,
        "weight_decay": 0.0005,
        "epochs": 60,
        "print_frequency": 100,
        "verbose_frequency": 100,
        "compress_activations": False,
        "compress_in_gpu": False,
        "learning_rate_policy": "polynomial",
        "model_type": "image_classification",
        "distributed_backend": "gloo",
        **values,
    }
    file.write_text("".join(f"{key!r}: {value!r}\n" for key, value in known.items() if value is not None))
    return file
