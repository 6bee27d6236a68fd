"""The memory as it stood: of devices and the host, and who held it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from oomdoctor.model.unavailable import Unavailable

Measured: TypeAlias = int | Unavailable
"""Bytes (or a count) that a collector read, or why it could not."""


class Role(StrEnum):
    """What a storage is there for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFER = "buffer"
    ACTIVATION = "activation"
    BATCH = "batch"
    GRAPH_KEPT_ALIVE = "graph_kept_alive"
    TRACEBACK = "traceback"
    OUTPUT_CACHE = "output_cache"
    KV_CACHE = "kv_cache"
    PINNED_HOST = "pinned_host"
    USER_TENSOR = "user_tensor"
    WORKSPACE = "workspace"
    UNEXPLAINED = "unexplained"


LASTING: Final = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
"""What is there beside whatever batch, and together at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Storages that one path of the user's program keeps alive.

    Attributes:
        bytes: size of the storages, each counted once over the whole census.
        device: the device by the name that the census goes by (``cuda:0`` also when simulated).
        path: who holds them, in the user's terms: an expression, ``losses[0:128] → graph``, or
            ``local `x` of forward at In[5] line 3``.
        expression: what evaluates to an object that holds them: in the namespace, or in the frame that ``path``
            names. None where no name leads there.
        count: how many storages it stands for.
        dtype: of the largest of them, ``float32``; likewise ``shape``.
        frees: the line that would let go of it, None where nothing of the user's could.
        saved_in: modules that an autograd graph saved them in, ``model.encoder.layers[0].linear1``, and the bytes of
            those saved in each itself, the largest first; told from the graph, for activations and graphs kept alive.
            What it does not tell is in none of them: what follows the last layer (a loss), and hidden layers.
    """

    bytes: int
    device: str
    role: Role
    path: str
    expression: str | None = None
    count: int = 1
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    frees: str | None = None
    saved_in: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Every storage found on one device, by role and by holder, largest first.

    Attributes:
        found: bytes that the census saw.
        allocated: bytes that the allocator says are allocated; their ratio is ``accounted_ratio``.
        notes: what holds no memory here but stands for some, a sentence each: tensors packed by hooks, fake tensors.
    """

    device: str
    found: int
    allocated: Measured
    roles: tuple[tuple[Role, int], ...] = ()
    holdings: tuple[Holding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def accounted_ratio(self) -> float | None:
        """Share of the allocated bytes that has a holder; None where the allocator has no count."""
        if isinstance(self.allocated, Unavailable):
            return None
        return min(self.found / self.allocated, 1.0) if self.allocated else 1.0

    def bytes_of(self, role: Role) -> int:
        """Bytes held in ``role``."""
        return dict(self.roles).get(role, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that uses a device, as the driver tells it.

    Attributes:
        pid: in the driver's numbering, which in a container is not the one that this process sees.
        name: of the program, None where it cannot be read.
        is_own: whether it is this process, as far as can be told; ``basis``: how that was told, in words.
    """

    pid: int
    bytes: Measured
    name: str | None = None
    is_own: bool = False
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatePool:
    """Segments that the caching allocator keeps apart, for a CUDA graph or a ``torch.cuda.MemPool``, in bytes."""

    name: str
    reserved: int
    allocated: int


_UNCOUNTED: Final = Unavailable("the allocator keeps no such count")

_NO_DRIVER: Final = Unavailable("the driver was not asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device's memory as its allocator and its driver tell it, in bytes.

    Attributes:
        name: ``cuda:0``; the virtual accelerator calls itself so as well.
        tensor_device: what ``tensor.device`` prints for a tensor there: ``cpu`` on the virtual accelerator.
        total: capacity. On ``cpu`` the strictest limit in force.
        free: what the driver could still give.
        allocated: live blocks; ``reserved``: segments held by the caching allocator, live blocks included.
        inactive_split: free parts of segments that are partly in use, which cannot be given back.
        peak_allocated: high-water mark since it was last reset.
        retries: how often the allocator flushed its cache to serve a request; ``ooms``: how often it failed to.
        cap: what this process may reserve at most (``set_per_process_memory_fraction``).
        context: what this process uses beside its segments: the CUDA context, libraries, other allocators.
        elsewhere: what other processes use.
        processes: who uses the device, the largest first.
        workspaces: sizes of the live blocks that are as large as a workspace of cuBLAS; tensors may be among them.
        card: what the device calls itself, with the version of its driver.
        basis: which limit ``total`` is, in words.
        switched_on: of a simulated device: the number of the one that it is among those of this process, from 1.
    """

    name: str
    tensor_device: str
    simulated: bool = False
    switched_on: int = 0
    total: Measured
    free: Measured
    allocated: Measured
    reserved: Measured
    inactive_split: Measured = _UNCOUNTED
    largest_free_block: Measured = _UNCOUNTED
    peak_allocated: Measured = _UNCOUNTED
    peak_reserved: Measured = _UNCOUNTED
    retries: Measured = _UNCOUNTED
    ooms: Measured = _UNCOUNTED
    cap: Measured = Unavailable("no cap is set for this process")
    context: Measured = _NO_DRIVER
    elsewhere: Measured = _NO_DRIVER
    processes: tuple[DeviceProcess, ...] | Unavailable = _NO_DRIVER
    private_pools: tuple[PrivatePool, ...] = ()
    workspaces: tuple[int, ...] = ()
    card: str | Unavailable = _NO_DRIVER
    basis: str = ""


class Usage(NamedTuple):
    """The counters of one memory, in bytes: cheap to read, and from any thread.

    Attributes:
        name: ``cuda:0``, ``cuda:0 (simulated)``, ``host``.
        used: allocated on a device; on the host the resident set of this process.
        reserved: segments held by the caching allocator; ``limit``: what this process may reserve.
        switched_on: see ``DeviceMemory``.
    """

    name: str
    used: Measured
    reserved: Measured = _UNCOUNTED
    limit: Measured = _UNCOUNTED
    switched_on: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What tells this memory from others of this process."""
        return self.name, self.switched_on


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGrowth:
    """What each memory has more of after a cell than before it, or less (below zero).

    Attributes:
        number: of the cell, as in `In[7]`.
        grown: bytes by the name of the memory: `cuda:0`, `cuda:0 (simulated)`, `host`.
    """

    number: int
    grown: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """This process or one that it started, in bytes.

    Attributes:
        label: what it is, in the user's terms: ``this kernel``, ``DataLoader worker 3``, ``python train.py``.
        rss: resident set, shared pages included; ``uss``: what would be freed if it ended; ``pss``: shared pages
            divided among those who share them.
    """

    pid: int
    label: str
    rss: Measured
    uss: Measured
    pss: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Share of the last 10 s in which tasks waited for memory, 0 to 1. Source: Documentation/accounting/psi.rst.

    Attributes:
        some: at least one task waited; ``full``: all did.
    """

    some: float
    full: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHolding:
    """What one name leads to of this process's memory that is no tensor's, in bytes.

    Attributes:
        path: the name.
        bytes: of arrays and of Python objects; ``array_bytes``: of arrays alone.
        arrays: how many arrays; ``objects``: how many Python objects of builtin types.
        kind: the class of what the name leads to, such as ``list`` or ``DataFrame``; empty where it is not told.
        grown_by: the line of the failing cell that makes it hold more with each round, such as ``In[3] line 4``.
    """

    path: str
    bytes: int
    array_bytes: int
    arrays: int
    objects: int
    kind: str = ""
    grown_by: str | None = None


_UNREAD: Final = Unavailable("it was not read")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host's memory as this process sees it, in bytes.

    Attributes:
        rss: resident set of this process; ``uss``: what is its alone; ``pss``: shared pages shared out.
        children: processes that this one started, the largest first.
        page_cache: pages of files; ``reclaimable``: what of it the kernel can drop at once; ``dirty``: what must be
            written to disk first; ``tmpfs``: what lives in memory only (``/dev/shm``, shared memory).
        pressure: how long tasks waited for memory.
        cgroup_version: 1 or 2; ``cgroup_file``: page cache charged to the group, ``cgroup_reclaimable`` what of it
            can be dropped, ``cgroup_anon`` memory that cannot.
        cgroup_oom_kills: how often the kernel killed a process of the group; ``cgroup_ooms``: how often it ran out.
        files_open: descriptors of this process; ``maps``: memory mappings.
        overcommit: ``vm.overcommit_memory``: 0 heuristic, 1 always, 2 strict; ``committed`` of ``commit_limit``
            matters with 2 alone.
        process_limit: limit on this process that leaves it the least, by what ``process_limit_name`` counts: private
            writable memory (``RLIMIT_DATA``) or address space (``RLIMIT_AS``).
        malloc_free: what the C library holds free of ``process_used``, which serves further requests.
        bare: what of ``process_used`` the interpreter and its modules take.
        kept_back: what was kept from the program until it failed, for the diagnosis; no part of ``process_used``.
        unfilled: what the host guard took for used when the cell was refused memory, though nothing was in it.
    """

    total: Measured
    available: Measured
    rss: Measured
    page_cache: Measured
    swap_used: Measured
    cgroup_limit: Measured
    cgroup_used: Measured
    process_limit: Measured
    process_used: Measured
    shm_total: Measured
    shm_free: Measured
    uss: Measured = _UNREAD
    pss: Measured = _UNREAD
    children: tuple[HostProcess, ...] | Unavailable = ()
    reclaimable: Measured = _UNREAD
    dirty: Measured = _UNREAD
    tmpfs: Measured = _UNREAD
    swap_total: Measured = _UNREAD
    pressure: Pressure | Unavailable = _UNREAD
    cgroup_version: Measured = _UNREAD
    cgroup_file: Measured = _UNREAD
    cgroup_reclaimable: Measured = _UNREAD
    cgroup_anon: Measured = _UNREAD
    cgroup_tmpfs: Measured = _UNREAD
    cgroup_oom_kills: Measured = _UNREAD
    cgroup_ooms: Measured = _UNREAD
    files_open: Measured = _UNREAD
    files_limit: Measured = _UNREAD
    maps: Measured = _UNREAD
    maps_limit: Measured = _UNREAD
    overcommit: Measured = _UNREAD
    committed: Measured = _UNREAD
    commit_limit: Measured = _UNREAD
    process_limit_name: str | Unavailable = _UNREAD
    malloc_free: Measured = _UNREAD
    bare: Measured = _UNREAD
    kept_back: Measured = 0
    unfilled: Measured = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JittorMemory:
    """What Jittor holds: its variables, its graph of operators, and its caching allocators, in bytes.

    Attributes:
        held: variables that Python holds; ``alive``: all that are, those of the graph among them.
        operators: of the graph: not computed yet, or kept for a gradient.
        pool_used: of what its allocators hold, what is in use; ``pool_unused``: what they keep for later.
        total: of the memory that it computes in, as it takes it; ``host_total``: of the host, whatever a container may
            use of it.
        limit: ``device_mem_limit`` or ``cpu_mem_limit``, None where none is set.
        on_device: it computes on a GPU; ``swaps``: what is not in use may go to the host, and to disk.
        holders: the names that lead to most of its variables, the largest first.
    """

    held: int
    alive: int
    operators: int
    pool_used: int | None = None
    pool_unused: int | None = None
    total: int | None = None
    host_total: int | None = None
    limit: int | None = None
    on_device: bool = False
    swaps: bool = False
    holders: tuple[HostHolding, ...] = ()

    @property
    def graph_bytes(self) -> int:
        """An estimate of what variables of the graph take: the share of the pool that they are of all."""
        return (self.pool_used or 0) * max(self.alive - self.held, 0) // max(self.alive, 1)


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """What the forward of one module keeps until the backward pass, as a dry run saw it.

    Attributes:
        model: the model that it is a part of, ``(type name, bytes of parameters)``; ``path``: its path there.
        own: bytes that its own forward made and that are kept, those of the modules below it apart.
        output: bytes of what it gives out.
        cost: the share of its forwards in the time of the run, those of the modules below it included.
        runs_in_turn: whether it is a plain ``Sequential``; ``in_place``: it writes into its input.
    """

    model: tuple[str, int]
    path: str
    own: int
    output: int
    cost: float
    runs_in_turn: bool
    in_place: bool
