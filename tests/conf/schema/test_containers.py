"""Images, mounts and environments of a configuration: what they mean, and what a runtime could not express."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.containers import IMAGE_SUFFIX, ImageReference, Mount
from conf.schema.experiment import Container
from tests.support import ROOT

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "name"),
    [
        ("nvcr.io/nvidia/pytorch:23.04-py3", "nvcr.io", "nvidia/pytorch:23.04-py3"),
        ("localhost:5000/mine", "localhost:5000", "mine"),
        ("localhost/mine", "localhost", "mine"),
        ("registry:5000/a/b:v1", "registry:5000", "a/b:v1"),
        ("pytorch/pytorch:2.1.0", None, "pytorch/pytorch:2.1.0"),
        ("ubuntu", None, "ubuntu"),
        (f"nvcr.io/nvidia/pytorch@{DIGEST}", "nvcr.io", f"nvidia/pytorch@{DIGEST}"),
    ],
)
def test_an_image_reference_has_a_registry_and_a_name(text: str, registry: str | None, name: str) -> None:
    reference = ImageReference.parse(text)
    assert (reference.registry, reference.name, str(reference)) == (registry, name, text)


def test_an_image_reference_is_written_for_enroot_and_as_a_file_name() -> None:
    ngc, hub = ImageReference.parse("nvcr.io/nvidia/pytorch:23.04-py3"), ImageReference.parse("a/b:1")
    assert (ngc.enroot, ngc.file_stem) == ("nvcr.io#nvidia/pytorch:23.04-py3", "nvcr.io+nvidia+pytorch+23.04-py3")
    assert (hub.enroot, hub.file_stem) == ("a/b:1", "a+b+1")


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/data", Mount(Path("/data"), Path("/data"))),
        ("/raid/data:/data", Mount(Path("/raid/data"), Path("/data"))),
        ("/raid/data:/data:ro", Mount(Path("/raid/data"), Path("/data"), read_only=True)),
        ("/with,comma/größe", Mount(Path("/with,comma/größe"), Path("/with,comma/größe"))),
    ],
)
def test_a_mount_is_a_source_and_perhaps_a_target(text: str, mount: Mount) -> None:
    assert Mount.parse(text) == mount


@pytest.mark.parametrize(
    "text", ["", "data", "./data", "~/data:/data", "/a:b", "/a:/b:rw", "/a:/b:ro:x", "/a:", "/a:/", ":/a", "/"]
)
def test_what_is_no_mount_is_told(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Mount.parse(text)
    assert f"container.mounts: {text!r} is not a mount; write SOURCE, SOURCE:TARGET" in str(error.value)


ENROOT, PYXIS, APPTAINER = "container=enroot", "container=pyxis", "container=apptainer"

BROKEN = {
    "a container has an image": (["container.kind=enroot"], "container.kind=enroot needs container.image, such as"),
    "a container has an interpreter": ([ENROOT, "container.python=''"], "container.python is empty"),
    "an image is a file or a reference": (
        [ENROOT, "container.image=/images/it.img"],
        "container.image='/images/it.img' is neither a file (.sqsh for enroot and pyxis, .sif for apptainer) nor an",
    ),
    "a reference has no scheme": (
        [ENROOT, "container.image='docker://nvcr.io/nvidia/pytorch'"],
        "container.image='docker://nvcr.io/nvidia/pytorch' is neither",
    ),
    "a reference is not an option": ([ENROOT, "container.image=-x"], "container.image='-x' is neither"),
    "enroot takes no SIF": (
        [ENROOT, "container.image=/images/it.sif"],
        "container.image=/images/it.sif is not an image file of enroot; those end in .sqsh",
    ),
    "apptainer takes no squashfs": (
        [APPTAINER, "container.image=/images/it.sqsh"],
        "container.image=/images/it.sqsh is not an image file of apptainer; those end in .sif",
    ),
    "a mount is one": ([ENROOT, "container.mounts=[data]"], "container.mounts: 'data' is not a mount"),
    "enroot mounts no path with a space": (
        [ENROOT, "container.mounts=['/my data:/data']"],
        "container.mounts: enroot cannot mount '/my data', because it accepts no path with spaces, ':' and '\\'; use "
        "another",
    ),
    "pyxis mounts no path with a comma": (
        [PYXIS, "container.mounts=['/a,b']"],
        "container.mounts: pyxis cannot mount '/a,b'",
    ),
    "pyxis mounts no path that a shell would change": (
        [PYXIS, "container.mounts=['/a:/$b']"],
        "container.mounts: pyxis cannot mount '/$b'",
    ),
    "a variable has a name": (
        [ENROOT, "+cluster.environment.A-B=x"],
        "cluster.environment.A-B: 'A-B' is not a variable name",
    ),
    "enroot's own variables stay": (
        [ENROOT, "+cluster.environment.ENROOT_X=1"],
        "cluster.environment.ENROOT_X: enroot sets ENROOT_… itself",
    ),
    "apptainer's own variables stay": (
        [APPTAINER, "+cluster.environment.HOME=/x"],
        "cluster.environment.HOME: apptainer sets HOME, UID and GID itself",
    ),
    "a value has one line": (
        [ENROOT, '+cluster.environment.A="x\ny"'],
        r"cluster.environment.A='x\ny': enroot accepts no value with a line break",
    ),
    "a value has no quotes around it": (
        [PYXIS, "+cluster.groups.local.environment.A='\"x\"'"],
        "cluster.groups.local.environment.A='\"x\"': pyxis accepts no value with",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_a_runtime_could_not_express_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        [APPTAINER, "container.mounts=['/my data:/a,b:ro']", '+cluster.environment.A="x\ny"'],
        [ENROOT, "container.mounts=['/a,b:/größe']", "+cluster.environment.A='$x, \"y\" z'"],
        ["container=none", "+cluster.environment.HOME=/x"],
        [PYXIS, "container.image=/images/it.sqsh"],
        [APPTAINER, "container.image=it.sif"],
    ],
    ids=["apptainer", "enroot", "none", "pyxis with a file", "apptainer with a file"],
)
def test_what_it_can_express_is_taken(overrides: list[str]) -> None:
    compose(overrides)


def test_images_lie_beside_the_runs() -> None:
    assert compose(["runs_dir=/home/me/runs"]).container.image_dir == "/home/me/runs/../images"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["container=enroot", "container.digest=abc"], r"container\.digest='abc' is not the SHA-256 of an image file"),
        (["container=enroot", f"container.digest={'0' * 64}"], r"give sha256: and the 64 hexadecimal digits"),
        (["container=pyxis", f"container.digest={DIGEST}"], r"pyxis fetches the image from the registry"),
    ],
)
def test_a_digest_that_could_not_be_compared_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        compose(["executor=slurm", *overrides])


@pytest.mark.parametrize("container", ["enroot", "apptainer", "pyxis"])
def test_a_file_can_have_a_digest(container: str) -> None:
    image = f"/images/it{IMAGE_SUFFIX[container]}"
    compose(["executor=slurm", f"container={container}", f"container.image={image}", f"container.digest={DIGEST}"])


def test_the_page_names_every_key_and_no_other() -> None:
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    keys = {field.name for field in fields(Container)} - {"kind"}
    assert set(re.findall(r"container\.([a-z_]+)", page)) == keys
