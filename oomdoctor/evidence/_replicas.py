"""Models that several processes or devices train, and how many of them there are, as torch's own objects tell it.

Only torch is asked, and only what it knows already: nothing is sent to another process. Limits: wrappers that are
local variables of a function are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

from oomdoctor.evidence._models import parameters
from oomdoctor.model.code import ReplicaFacts
from oomdoctor.objects.kinds import module_of, mro_of, name_of, plain_dict

_WRAPPERS: Final = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "DataParallel",
}


def world_size() -> int | None:
    """Return how many processes the default process group of this process has, None where there is no group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())


def replicas(modules: Iterable[tuple[str, Any]]) -> tuple[ReplicaFacts, ...]:
    """Return the facts of each root module that is such a wrapper."""
    return tuple(_facts(path, module, name) for path, module in modules if (name := _wrapper(module)) is not None)


def _wrapper(module: Any) -> str | None:
    names = [(module_of(base), name_of(base)) for base in mro_of(type(module))]
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def _facts(path: str, module: Any, name: str) -> ReplicaFacts:
    from torch import _C

    own, dtype_of = plain_dict(module) or {}, vars(_C.TensorBase)["dtype"].__get__
    dtypes = {str(dtype_of(one)).removeprefix("torch.") for one in parameters([module])}
    devices = own.get("device_ids")
    is_many = name == "DataParallel"
    return ReplicaFacts(
        path=path,
        type_name=name,
        ranks=(len(devices) if type(devices) is list else None) if is_many else _size(own.get("process_group")),
        dtypes=tuple(sorted(dtypes)),
        bucket_views=own.get("gradient_as_bucket_view") is True,
    )


def _size(group: Any) -> int | None:
    """Return how many processes a process group has."""
    return int(group.size()) if module_of(type(group)).startswith("torch.") else None
