"""``oomdoctor env``: the versions and limits that a report of a failure should carry.

Importing torch is the point here: it says which devices torch sees.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from oomdoctor import __version__
from oomdoctor.language import say
from oomdoctor.model.sizes import format_size

_PACKAGES: Final = ("torch", "ipython", "ipykernel", "ipywidgets", "numpy", "nvidia-ml-py")
_COUNTS: Final = (
    *("cgroup_version", "cgroup_oom_kills", "cgroup_ooms", "overcommit"),
    *("files_open", "files_limit", "maps", "maps_limit"),
)
_SETTINGS: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what this machine has."""
    import torch

    from oomdoctor.evidence.host import read
    from oomdoctor.model import jsonable

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = enumerate(map(torch.cuda.get_device_properties, range(count)))
    facts = {
        "oomdoctor": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "devices": [{"name": f"cuda:{at}", "model": one.name, "total": one.total_memory} for at, one in properties],
        "host": jsonable.plain(read()),
    }
    if args.json:
        print(json.dumps({"schema": 1, **facts}, indent=2))
    else:
        _print(facts)
    return 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(facts: dict[str, Any]) -> None:
    rows = [(name, facts[name]) for name in ("oomdoctor", "python", "platform")]
    rows += [(name, number or say("not installed")) for name, number in facts["packages"].items()]
    lines = [f"{name:<14}{told}" for name, told in rows]
    lines += [f"{name}={value}" for name, value in facts["settings"].items()]
    devices = [(one["name"], f"{one['model']}, {format_size(one['total'])}") for one in facts["devices"]]
    lines += [f"{name:<14}{told}" for name, told in devices or [("devices", say("torch sees no CUDA device"))]]
    for name, value in facts["host"].items():
        if isinstance(value, int):
            lines.append(f"{'host ' + name:<26}{value if name in _COUNTS else format_size(value)}")
        elif name.endswith("_why"):
            lines.append(f"{'host ' + name.removesuffix('_why'):<26}{say(f'not known: {value}')}")
    print("\n".join(lines))
