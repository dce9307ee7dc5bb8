"""IIDP's quickstart: its profiles of ResNet-50 on a V100 and a P100, as numbers, and a folder made of them.

The figures are those of github.com/unist-ssl/IIDP, examples/imagenet/resnet50_quickstart, to a nanosecond.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPUS = {"V100": "Tesla V100-PCIE-16GB", "P100": "Tesla P100-PCIE-16GB"}
STEPS = {
    ("V100", 32, 1): (4.079697794, 32.213719262, 66.322501119, 6.971458165, 0.016389689),
    ("V100", 32, 2): (8.286382940, 60.017728763, 119.045884366, 4.673141686, 2.203658321),
    ("V100", 32, 4): (16.539114380, 114.510586039, 228.913243951, 4.754203728, 6.149016905),
    ("V100", 64, 1): (7.887861681, 62.452815162, 124.010167440, 4.586609406, 0.012914134),
    ("V100", 64, 2): (16.901636293, 117.132661692, 231.262367588, 4.851036411, 2.197014401),
    ("V100", 96, 1): (6.449679300, 90.725406901, 180.084045580, 4.823460266, 0.013035733),
    ("V100", 128, 1): (16.379746162, 119.514598507, 237.463358053, 4.659585423, 0.013107556),
    ("V100", 160, 1): (21.164863417, 150.706482273, 300.306615533, 4.702412473, 0.013357867),
    ("P100", 32, 1): (3.927302032, 50.020845498, 105.959805552, 4.889694585, 0.012563200),
    ("P100", 32, 2): (7.666745615, 92.833543142, 195.855005560, 5.102954282, 2.157055296),
    ("P100", 32, 4): (15.781908978, 180.194557868, 383.876345147, 5.036482848, 5.849565146),
    ("P100", 64, 1): (7.902692254, 95.819773865, 197.786080424, 4.884084611, 0.012409956),
    ("P100", 64, 2): (15.910319318, 184.093776727, 376.966448975, 6.973314487, 2.834144362),
    ("P100", 96, 1): (11.915486929, 143.968364122, 292.152358331, 5.007831489, 0.012712889),
    ("P100", 128, 1): (15.836390379, 187.006471083, 383.636962552, 4.993590763, 0.012702222),
    ("P100", 160, 1): (19.640168932, 235.370706855, 478.933136664, 4.996012455, 0.012626489),
}
"""Milliseconds of data, forward, backward, update and copy, by GPU, local batch size and workers."""
STATISTICS_MS = 6.29
MOST_WORKERS = {32: 4, 64: 2, 96: 1, 128: 1, 160: 1}
BUCKETS_MIB = [7.81, 30.04, 25.04, 25.25, 9.2]
BETWEEN = [
    *((0.524288, 4.421610121), (2.62144, 4.581398560), (5.24288, 7.695863015), (7.86432, 12.344252033)),
    *((10.48576, 11.766938095), (13.1072, 13.415624067), (26.2144, 22.366308319), (52.4288, 37.105096201)),
    (78.6432, 63.046263500),
]
WITHIN = [
    *((0.199728762, 3.086502397), (0.998643810, 3.738314748), (1.997287619, 4.874638653), (2.995931429, 5.796708168)),
    *((3.994575238, 6.219843426), (4.993219048, 9.186675579), (9.986438095, 12.360862788)),
    *((19.972876190, 23.698812611), (29.959314286, 48.340391808)),
]


def write(folder: Path, **config: Any) -> Path:
    """The folder of files; returns the configuration, with these keys instead or besides."""
    for (gpu, size, workers), times in STEPS.items():
        keys = ("data_time", "fwd_time", "bwd_time", "update_time", "copy_time")
        step = {"model": "resnet50", "gpu_type": GPUS[gpu], "lbs": size, "num_models": workers}
        _write(
            folder / "comp" / str(size) / f"server-{gpu}" / f"resnet50_{size}_{workers}_comp_profile.json",
            {**step, **dict(zip(keys, times, strict=True)), "bn_sync_time": STATISTICS_MS},
        )
        limit = {"gpu_type": GPUS[gpu], "total_memory": 1 << 34, "lbs": size, "max_num_models": MOST_WORKERS[size]}
        _write(folder / "mem" / str(size) / f"server-{gpu}" / "max_memory_profile_info.json", limit)
    _write(folder / "bucket" / "resnet50_bucket_size_profile.json", {"bucket_size_distribution": BUCKETS_MIB})
    for name, points in (("inter", BETWEEN), ("intra", WITHIN)):
        file = folder / "comm" / f"{name}_comm_profile_data.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{ideal},{taken}\n" for ideal, taken in points))
    servers = {
        name: {"type": GPUS[gpu], "tfplos": 1, "number": 4}
        | {"intra_network_bandwidth": 15_750_000_000, "inter_network_bandwidth": 12_500_000_000}
        for name, gpu in (("node0", "V100"), ("node1", "P100"), ("node2", "V100"))
    }
    _write(folder / "cluster.json", servers)
    paths = {f"{kind}_profile_dir": name for kind, name in (("memory", "mem"), ("comp", "comp"), ("comm", "comm"))}
    named = {**paths, "bucket_profile_dir": "bucket", "gpu_cluster_info": "cluster.json"}
    return _write(folder / "config.json", {**named, "available_servers": ["node0", "node1"], **config})


def _write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file
