"""What the nodes of runs are made of, and in what runs differ."""

from __future__ import annotations

from typing import Any

from reports.facts.side_by_side import differing, made_of


def machine(driver: str = "550.1", numpy: str = "1.26", uuid: str = "GPU-1") -> dict[str, Any]:
    gpu = {"name": "A10", "uuid": uuid, "driver_version": driver}
    return {"kernel": "6.1", "nccl": None, "gpus": [gpu, {**gpu, "uuid": uuid + "b"}], "packages": {"numpy": numpy}}


def test_a_run_has_the_values_of_all_its_nodes_each_once() -> None:
    found = made_of({"a": machine(), "b": machine(driver="535.2", uuid="GPU-2")}, ["sha256:1", "sha256:1"])
    assert found == {
        "kernel": "6.1",
        "gpus.name": "A10",
        "gpus.driver_version": "535.2, 550.1",
        "packages.numpy": "1.26",
        "image": "sha256:1",
    }


def test_only_what_differs_is_named_and_a_run_that_noted_nothing_differs_in_nothing() -> None:
    one, same = made_of({"a": machine()}), made_of({"b": machine(uuid="GPU-9")})
    assert differing([one, same, {}]) == []
    assert differing([one, made_of({"a": machine(numpy="2.0")})]) == ["packages.numpy"]
    assert differing([one, made_of({"a": machine()}, ["sha256:1"])]) == ["image"]
